"""One session of a commit: begins a batch and publishes it, or takes over a batch that an earlier session has begun.

A session has an id that is never used again, and one connection to each target broker. It ends with the batch, or with
an error: then all its connections are closed, and the next session finds in the ledger what was promised, and at the
brokers what was stored.

The order of steps is the design. Each step promises something, and a crash before it leaves something:

| step | it promises | a crash before it leaves |
| --- | --- | --- |
| register at the target brokers | whoever reads the intent sees whether this session may still send | staged rows |
| mark *begun* | a reader whose ledger rows have expired knows that a batch was begun | staged rows |
| append the intent | the batch has these rows in this order, whoever publishes them | staged rows, which expire |
| mark *from* | rows before the intent need not be read any more | an open intent, which the rows before it prove |
| publish | | an open intent: the next session takes it over |
| append *done* | all rows are stored, and no session sends any more | all rows; the next session finds them |
| mark *done* | a reader whose ledger rows have expired knows the last batch | the next look stores the mark |
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rmq_spark.store.cluster.client import now_ms, process_id
from rmq_spark.store.cluster.exactly_once.ledger import Ledger, LedgerView
from rmq_spark.store.cluster.exactly_once.ledger_rows import Done, Intent, OpenIntent, batch_of, encode_row
from rmq_spark.store.cluster.exactly_once.marks import Mark, marks_group
from rmq_spark.store.cluster.exactly_once.publishing import Publishing
from rmq_spark.store.cluster.exactly_once.registration import Registration
from rmq_spark.store.cluster.exactly_once.sink_place import SinkPlace
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedBatch, StagedRun
from rmq_spark.store.cluster.exactly_once.staged_checks import check_staged, lost_queue
from rmq_spark.store.cluster.exactly_once.taking_over import TakenOver, TakeOver
from rmq_spark.store.cluster.exactly_once.target_bounds import ask_bounds, prove_brokers
from rmq_spark.store.cluster.exactly_once.written_rows import WrittenRows, count_rows
from rmq_spark.store.model import CommitKey, QueueKey


@dataclass(frozen=True, slots=True)
class SkippedRows:
    """The end of a batch that was skipped. `written` and `missing` are the numbers of its rows, and None if not known.

    `reasons` has the queues to which nothing could be sent. `damaged` has the queue offsets of damaged copies of rows.
    `is_lost` says that nothing of the batch was left in the ledger. Otherwise numbers are not known if another session
    has ended the batch, or if the answer to the end of this one was lost.
    """

    key: CommitKey
    written: int | None = None
    missing: int | None = None
    reasons: Mapping[QueueKey, str] = field(default_factory=dict)
    damaged: Mapping[QueueKey, tuple[int, ...]] = field(default_factory=dict)
    is_lost: bool = False


class CommitSession:
    """One attempt to commit a batch of the query of `key`. Use it in `with`. For one thread.

    `refused` has the target queues to which earlier sessions could send nothing, and why. `written` is how many rows of
    the batch are known to be stored: those that the session has found and those that it has published.
    """

    def __init__(
        self, place: SinkPlace, ledger: Ledger, key: CommitKey, refused: Mapping[QueueKey, str] | None = None
    ) -> None:
        self._place, self._ledger, self._refused = place, ledger, refused or {}
        self.id = f"{process_id()}#rmq-spark-sink#{uuid.uuid4().hex}"
        self._calls = Registration(place.address, marks_group(key.query_id), self.id)
        self._is_done = False
        self.written = 0

    def __enter__(self) -> "CommitSession":
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close(unregisters=self._is_done)

    def keep_alive(self) -> None:
        """Send the heartbeats that are due. Raises SessionOverError if a connection was lost."""
        self._calls.beat()
        self._calls.check()

    def write(self, batch: StagedBatch, view: LedgerView, before_intent: Callable[[], None]) -> bool:
        """Begin a batch and publish it. Return False if another session has begun a batch of the query meanwhile.

        `view` is what the ledger said when the batch was found to be the next one. `before_intent` is called when
        nothing can refuse the batch any more.

        Raises NotFoundError if a staged row or a target queue is gone, OptionError if the batch is too large for one
        intent, SessionOverError, IntentStuckError, BackendUnavailableError, and the errors of brokers that refuse. The
        ledger tells whether the batch was promised then.
        """
        key = batch.key
        self._calls.register(check_staged(self._place, batch))
        staging = self._place.find_blob_brokers(batch.runs)
        self._calls.reach(staging)
        prove_brokers(self._calls, self._place, staging.keys() - set(batch.brokers))
        floors = self._floors(batch.queues)
        intent = Intent(key, self.id, now_ms(), batch.rows, batch.digest, tuple(floors.items()), batch.runs)
        encoded = encode_row(intent)
        if key.batch_id is not None:
            if view.has_expired:
                view = self._ledger.restate(view, self.id)
                if view.state().open is not None:
                    return False
            elif view.state().last is None and not (view.marks.start and view.marks.begun):
                # A broker of 4.9 may answer 0 for a mark that does not exist.
                self._ledger.store_mark(key.query_id, Mark.FROM, view.end)
            self._ledger.store_mark(key.query_id, Mark.BEGUN, batch_of(key) + 1)
        before_intent()
        self._calls.register_again()
        self._ledger.append(intent, encoded)
        view = self._ledger.read_through(view, intent)
        state = view.state()
        if not batch.rows:  # its intent is its end
            if state.counted is None or not any(one == (state.counted, intent) for one in view.rows):
                return False
            self._finish(intent)
            return True
        if state.open is None or state.open.intent != intent:
            return False
        assert state.counted is not None, state
        if key.batch_id is not None:
            self._ledger.store_mark(key.query_id, Mark.FROM, state.counted)
        self._publish(intent, WrittenRows({}))
        return True

    def take_over(self, view: LedgerView, opened: OpenIntent) -> None:
        """Finish a batch that other sessions have begun. Return also if one of them finishes it meanwhile.

        Raises IntentStuckError if that is impossible, and the errors of `TakeOver.run`.
        """
        intent = opened.intent
        taken = self._take_over(view, opened)
        if taken is not None:
            taken.found.require(intent.key, intent.runs)
            self._publish(intent, taken.found)

    def skip(self, view: LedgerView, opened: OpenIntent, missing: int | None) -> SkippedRows | None:
        """Finish a batch that other sessions have begun, without the rows that cannot be published any more.

        All other rows are published first. `missing` is the number of rows whose loss was accepted. Return what became
        of the rows, or None if another session has finished the batch or taken it over meanwhile.

        Raises IntentStuckError if another number of rows is missing; the batch stays open then, and what could be
        published is. Raises the errors of `TakeOver.run`.
        """
        intent = opened.intent
        taken = self._take_over(view, opened)
        if taken is None:
            return None
        view, found = taken
        left = [run for run in intent.runs if run.queue not in found.stuck]
        published = self._publish_runs(left, found)
        rows = WrittenRows({**found.rows, **published.rows}, {**found.stuck, **published.stuck}, found.damaged)
        written = sum(rows.rows.values())
        if intent.rows - written not in (0, missing):
            rows.require(intent.key, intent.runs, confirmed=missing)
        done = Done(intent.key, self.id, now_ms(), intent.rows, intent.digest, written, intent.rows - written)
        self._ledger.append(done, encode_row(done))
        ended = self._ledger.read_through(view, done).state_before(done).open
        if ended is None or ended.intent != intent or ended.owners[-1] != self.id:
            return None  # a later owner has published the rows that this session has found missing, or is doing so
        self._finish(intent)
        return SkippedRows(intent.key, written, intent.rows - written, rows.stuck, rows.damaged)

    def fence(self, view: LedgerView, opened: OpenIntent) -> bool:
        """Become the only owner of a batch that other sessions have begun, so that no row of it appears later.

        Return False if one of them finishes it meanwhile. Raises the errors of `TakeOver.fence`.
        """
        return TakeOver(self._place, self._ledger, self._calls, self.id).fence(view, opened) is not None

    def _take_over(self, view: LedgerView, opened: OpenIntent) -> TakenOver | None:
        taken = TakeOver(self._place, self._ledger, self._calls, self.id).run(view, opened)
        if taken is None:
            return None
        self.written = sum(taken.found.rows.values())
        counts = count_rows(opened.intent.runs)
        stuck = {queue: why for queue, why in self._refused.items() if taken.found.rows.get(queue, 0) < counts[queue]}
        return taken._replace(found=replace(taken.found, stuck={**stuck, **taken.found.stuck}))

    def _floors(self, queues: Sequence[QueueKey]) -> dict[QueueKey, int]:
        """Return the end of each target queue, as its broker tells on the registered connection.

        An answer may be older than the last message that was acknowledged. Then the floor is too low, which is safe.
        """
        bounds = ask_bounds(self._calls, self._place, sorted({(queue.topic, queue.broker) for queue in queues}))
        for queue in queues:
            if queue not in bounds:
                raise lost_queue(queue)
        return {queue: bounds[queue].max_offset for queue in queues}

    def _publish(self, intent: Intent, found: WrittenRows) -> None:
        """Publish the rows of an intent that are missing, and record that all are stored."""
        self._publish_runs(intent.runs, found).require(intent.key, intent.runs)
        done = Done(intent.key, self.id, now_ms(), intent.rows, intent.digest)
        self._ledger.append(done, encode_row(done))
        self._finish(intent)

    def _publish_runs(self, runs: Sequence[StagedRun], found: WrittenRows) -> WrittenRows:
        address, place = self._place.address, self._place
        publishing = Publishing(
            self._calls,
            place.pull_terms,
            request_timeout_ms=address.request_timeout_ms,
            busy_timeout_ms=address.write_wait_ms,
            monotonic_ms=place.monotonic_ms,
            now_ms=now_ms,
        )
        try:
            return publishing.run(runs, found.rows)
        finally:
            self.written = max(self.written, publishing.stored_rows)

    def _finish(self, intent: Intent) -> None:
        """Note that the row *done* of an intent is in the ledger."""
        self._is_done = True
        if intent.key.batch_id is not None:
            self._ledger.store_mark(intent.key.query_id, Mark.DONE, batch_of(intent.key) + 1)
