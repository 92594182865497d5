"""The sink of a live cluster that stores each row once: tasks stage their rows, and the commit publishes them.

Tasks and zombie tasks store rows in the stage topic only, where no consumer looks. The commit gets the places of the
rows of those attempts that Spark accepts (`staged_batch`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rmq_spark.store.backend import CommitTerms, CommitTotals, Guarantee, Receipt, SinkTerms
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.exactly_once.batch_commit import BatchCommit
from rmq_spark.store.cluster.exactly_once.preparation import add_stage, check_prepared
from rmq_spark.store.cluster.exactly_once.sink_place import open_place
from rmq_spark.store.cluster.exactly_once.stage_task import StageTask
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedBatch, StagedRows
from rmq_spark.store.cluster.exactly_once.target_topics import OwnTopics, check_write, prepare_targets
from rmq_spark.store.cluster.sink import ClusterSink, brokers_of
from rmq_spark.store.model import CommitKey


@dataclass(frozen=True, slots=True)
class ExactSink:
    """Writes new messages to a cluster, each batch exactly once."""

    address: ClusterAddress
    terms: SinkTerms
    commit_terms: CommitTerms

    @property
    def guarantee(self) -> Guarantee:
        """Exactly once: the ledger has the last batch of every query."""
        return Guarantee.EXACTLY_ONCE

    def prepare(self) -> str | None:
        """Return the queues of the option topic for this batch, as JSON. Without that option return None.

        Raises the errors of `check_write`, `check_prepared`, `prepare_targets` and `extend_stage`. In this order: what
        is refused creates no topic.
        """
        own = self._own_topics
        check_write(self.terms, own, self.address.namespace)
        staging = check_prepared(self.address, own.stage, own.ledger)
        token = prepare_targets(self._sender, own)
        lacking = set() if token is None else brokers_of(token) - staging
        if lacking:
            add_stage(self.address, own.stage, lacking)
        return token

    def open_task(self, token: str | None, key: CommitKey, task: str, partition: int) -> StageTask:
        """Return the writer of an attempt of a task, which stages its rows when it finishes."""
        return StageTask(self._sender, self._own_topics, key, token)

    def commit(
        self, key: CommitKey, receipts: Sequence[Receipt], before_commit: Callable[[], None] | None = None
    ) -> CommitTotals:
        """Publish the rows of all receipts, once. Raises the errors of `StagedBatch.of` and `BatchCommit.run`."""
        staged = [receipt for receipt in receipts if isinstance(receipt, StagedRows)]
        assert len(staged) == len(receipts), receipts
        batch = StagedBatch.of(key, staged)
        with open_place(self.address, self.commit_terms) as place:
            return BatchCommit(place, batch, before_commit).run()

    def abort(self, key: CommitKey, receipts: Sequence[Receipt]) -> None:
        """Do nothing: staged rows that no commit refers to expire with the log of their broker."""

    @property
    def _own_topics(self) -> OwnTopics:
        return OwnTopics(self.commit_terms.stage_topic, self.commit_terms.ledger_topic)

    @property
    def _sender(self) -> ClusterSink:
        """The other sink, with which tasks share routes and the encoding of rows."""
        return ClusterSink(self.address, self.terms, self.commit_terms)
