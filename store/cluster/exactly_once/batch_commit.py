"""The commit of a batch: sessions, until the batch is stored, an error is final, or nothing moves any more.

Each session looks at the ledger first. A batch that is not finished is finished before any other one, by whoever comes
first, because rows of it may be on their way to the brokers. Only then the batch of this commit is judged, by the rules
of a store directory.
"""

import logging
from collections.abc import Callable

from rmq_spark.store.backend import CommitTotals
from rmq_spark.store.batch_order import BatchRules, Verdict, judge_batch
from rmq_spark.store.cluster.exactly_once.ledger import Ledger
from rmq_spark.store.cluster.exactly_once.ledger_rows import LedgerState
from rmq_spark.store.cluster.exactly_once.marks import Marks, check_first_batch
from rmq_spark.store.cluster.exactly_once.session_attempts import SessionAttempts
from rmq_spark.store.cluster.exactly_once.sink_place import SinkPlace
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedBatch
from rmq_spark.store.model import CommitKey

_LOG = logging.getLogger("rmq_spark")
_GAP_CAUSES = (
    "the ledger was lost or replaced, or the query's checkpoint was used with another cluster. Compare the target "
    "topics with the checkpoint"
)


class BatchCommit:
    """The commit of one batch. For one thread. `before_commit` is called at most once, before anything is promised."""

    def __init__(self, place: SinkPlace, batch: StagedBatch, before_commit: Callable[[], None] | None = None) -> None:
        self._place, self._batch = place, batch
        self._before_commit = before_commit
        self._attempts = SessionAttempts(place, str(batch.key))
        self._ledger = Ledger(place.client, place.terms.ledger_topic, self._attempts.keep_alive)
        self._begin: int | None = None  # of a plain batch write: where its rows of the ledger begin at the earliest
        self._has_promised = False  # whether a session of this commit has come as far as its intent

    def run(self) -> CommitTotals:
        """Store the batch, or find that it is stored. Return its totals.

        Raises BatchConflictError if the batch does not follow the earlier ones of its query, IntentStuckError if a
        batch of the query cannot be finished, BackendUnavailableError if nothing moved for brokerDownTimeout or an
        earlier session did not end within fenceTimeout, and the errors of brokers that refuse.
        """
        try:
            return self._attempts.run(self._run_session)
        except Exception as error:
            if self._batch.key.batch_id is None and self._has_promised:
                error.add_note(_how_to_finish(self._batch.key))
            raise

    def _run_session(self) -> CommitTotals | None:
        """Run one session. Return the totals if the batch is done, None if another session must look again."""
        key, ledger = self._batch.key, self._ledger
        if key.batch_id is None and self._begin is None:
            self._begin = ledger.end()
        view = ledger.read(key, self._begin)
        state = view.state()
        self._attempts.note_state(state)
        ledger.repair_marks(view, state)
        if state.open is not None:
            with self._attempts.open_session(ledger, key) as session:
                session.take_over(view, state.open)
            return None
        verdict = self._judge(state, view.marks)
        if verdict is Verdict.REPEATED and self._has_promised:
            return self._totals()
        if verdict is not Verdict.APPEND:
            level = logging.INFO if verdict is Verdict.REPEATED else logging.WARNING
            _LOG.log(level, "rmq: %s is skipped: %s", key, verdict.value)
            return CommitTotals(skipped=True)
        with self._attempts.open_session(ledger, key) as session:
            return self._totals() if session.write(self._batch, view, self._promise) else None

    def _judge(self, state: LedgerState, marks: Marks) -> Verdict:
        """Decide what becomes of the batch after the last one. Raises BatchConflictError."""
        key, terms = self._batch.key, self._place.terms
        if key.batch_id is None:  # nobody repeats a plain batch write, so a batch that is done is that of this call
            return Verdict.APPEND if state.last is None else Verdict.REPEATED
        accepts_gap = terms.is_transaction or terms.on_gap == "continue"
        check_first_batch(state, marks, key, accepts_gap=accepts_gap)
        rules = BatchRules(terms.on_conflict, terms.on_gap, terms.is_transaction, _GAP_CAUSES)
        return judge_batch(state.last, key, self._batch.rows, self._batch.digest, rules)

    def _promise(self) -> None:
        """Note that the batch is about to be promised. Called again by a later session."""
        before_commit, self._before_commit = self._before_commit, None
        if before_commit is not None:
            before_commit()
        self._has_promised = True

    def _totals(self) -> CommitTotals:
        return CommitTotals(self._batch.rows, self._batch.bytes, len(self._batch.queues))


def _how_to_finish(key: CommitKey) -> str:
    """Return the note on an error of a plain batch write, which nobody repeats with the same id."""
    return (
        f"rmq: a part of the rows of {key} may be stored, and to write them again would be another write. Finish this "
        f"one: rmq intents finish {key.query_id}"
    )
