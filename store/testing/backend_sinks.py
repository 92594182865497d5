"""Tests of the writing half of the contract (`store.backend`): sinks under task retries, zombie tasks and conflicts.

A zombie task is an attempt that Spark has given up and that still writes. Tests of what only a sink with the guarantee
exactly once promises are skipped for others, and the reverse. Two messages with one id (msgId) are *twins*.
"""

import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pytest

from rmq_spark.store.backend import (
    Backend,
    BatchSink,
    Capability,
    CommitTerms,
    Guarantee,
    Location,
    Receipt,
    SendBackSink,
    SendBackTerms,
    SinkTerms,
)
from rmq_spark.store.errors import BatchConflictError, NotFoundError, OptionError, StoreChangedError
from rmq_spark.store.model import CommitKey, QueueKey, QueueRange, Suspension
from rmq_spark.store.testing.backend_fixtures import (
    Append,
    BackendFixtures,
    GrowTopic,
    Message,
    read_batches,
    require,
    stored_bodies,
    stored_rows,
)

GROUP = "billing"
FIRST, SECOND, THIRD = (CommitKey("query", number) for number in range(3))
Failed: TypeAlias = Callable[..., pa.RecordBatch]
_PLACE = ["brokerName", "queueId", "body"]
_attempts = itertools.count()


def _rows(*bodies: bytes, topic: str = "out") -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"topic": pa.array([topic] * len(bodies), pa.string()), "body": pa.array(bodies, pa.binary())}
    )


def _stage(sink: BatchSink, key: CommitKey, rows: pa.RecordBatch, partition: int = 0) -> Receipt:
    """Run one attempt of a task in a copy of the sink, as Spark does. Return its receipt, which was pickled too."""
    copy: BatchSink = pickle.loads(pickle.dumps(sink))
    token = pickle.loads(pickle.dumps(sink.prepare()))
    task = copy.open_task(token, key, f"{next(_attempts):05d}", partition)
    try:
        if rows.num_rows:
            task.write(rows)
        return pickle.loads(pickle.dumps(task.finish()))
    except BaseException:
        task.discard()
        raise


def _run_attempt(sink: BatchSink, rows: pa.RecordBatch, key: CommitKey = FIRST, partition: int = 0) -> None:
    """Run one attempt of a task of the only partition of a batch, and commit it."""
    sink.commit(key, [_stage(sink, key, rows, partition)])


def _ids(location: Location) -> list[tuple[str, bytes]]:
    """Return the sorted ids and bodies of all messages of the topic out."""
    return sorted((row["msgId"], row["body"]) for row in stored_rows(location, "out", ["msgId", "body"]))


def _require_exactly_once(sink: BatchSink) -> None:
    if sink.guarantee is not Guarantee.EXACTLY_ONCE:
        pytest.skip("the sink stores a repeated batch again")


def _require_at_least_once(sink: BatchSink) -> None:
    if sink.guarantee is not Guarantee.AT_LEAST_ONCE:
        pytest.skip("the sink stores each batch once")


class BackendSinkTests(BackendFixtures):
    """The tests of the sink for new messages. See `BackendFixtures` for the fixtures that a subclass gives."""

    @pytest.fixture
    def sink(self, location: Location) -> BatchSink:
        """A sink for the topic out."""
        return self.make_sink(location, CommitTerms(lock_timeout_ms=5_000), queue_count=self.QUEUES)

    def make_sink(self, location: Location, commit: CommitTerms, topic: str | None = "out", **terms: Any) -> BatchSink:
        """Return a sink with the guarantee of the tests. Skip the test if the place cannot be written."""
        require(location, Capability.WRITES)
        return location.sink(SinkTerms(topic, guarantee=self.GUARANTEE, **terms), commit)

    def test_sink_is_the_same_after_pickling(self, location: Location, sink: BatchSink) -> None:
        copy = pickle.loads(pickle.dumps(sink))
        assert copy.guarantee is sink.guarantee is self.GUARANTEE
        capability = Capability.EXACTLY_ONCE if self.GUARANTEE is Guarantee.EXACTLY_ONCE else Capability.AT_LEAST_ONCE
        assert capability in location.capabilities

    def test_prepare_stores_nothing_and_returns_the_same_token(self, location: Location, sink: BatchSink) -> None:
        sink.commit(FIRST, [_stage(sink, FIRST, _rows(b"a"))])
        token = sink.prepare()
        assert token is None or isinstance(token, str)
        assert sink.prepare() == token
        assert stored_bodies(location, "out") == [b"a"]

    def test_commit_makes_the_rows_of_all_tasks_visible(self, location: Location, sink: BatchSink) -> None:
        receipts = [_stage(sink, FIRST, rows) for rows in (_rows(b"a", b"b"), _rows(), _rows(b"c"))]
        if sink.guarantee is Guarantee.EXACTLY_ONCE:
            assert stored_bodies(location, "out") == [], "staged rows are invisible"
        totals = sink.commit(FIRST, receipts)
        assert (totals.rows, totals.skipped) == (3, False)
        assert totals.bytes > 0
        assert 1 <= totals.queues <= 3
        assert stored_bodies(location, "out") == [b"a", b"b", b"c"]

    def test_commit_of_rows_for_several_topics(self, location: Location, sink: BatchSink) -> None:
        receipts = [_stage(sink, FIRST, _rows(topic.encode(), topic=topic)) for topic in ("a", "b")]
        sink.commit(FIRST, receipts)
        assert [stored_bodies(location, topic) for topic in ("a", "b")] == [[b"a"], [b"b"]]

    def test_commit_without_rows(self, location: Location, sink: BatchSink) -> None:
        assert sink.commit(FIRST, [_stage(sink, FIRST, _rows())]).rows == 0
        sink.commit(SECOND, [_stage(sink, SECOND, _rows(b"a"))])
        assert stored_bodies(location, "out") == [b"a"]

    def test_commit_twice_stores_the_rows_once(self, location: Location, sink: BatchSink) -> None:
        _require_exactly_once(sink)
        receipts = [_stage(sink, FIRST, _rows(b"a", b"b"))]
        sink.commit(FIRST, receipts)
        totals = sink.commit(FIRST, receipts)
        assert (totals.skipped, totals.rows, totals.bytes, totals.queues) == (True, 0, 0, 0)
        assert stored_bodies(location, "out") == [b"a", b"b"]

    def test_commit_of_a_batch_that_ran_again_stores_it_once(self, location: Location, sink: BatchSink) -> None:
        _require_exactly_once(sink)
        for _ in range(2):
            sink.commit(FIRST, [_stage(sink, FIRST, _rows(b"a", b"b"))])
        assert stored_bodies(location, "out") == [b"a", b"b"]

    def test_commit_of_one_of_two_attempts(self, location: Location, sink: BatchSink) -> None:
        _require_exactly_once(sink)
        _, chosen = (_stage(sink, FIRST, _rows(b"a")) for _ in range(2))
        assert sink.commit(FIRST, [chosen]).rows == 1
        assert stored_bodies(location, "out") == [b"a"]

    def test_commit_ignores_an_attempt_that_was_discarded(self, location: Location, sink: BatchSink) -> None:
        failed = sink.open_task(sink.prepare(), FIRST, "failed", 0)
        failed.write(_rows(b"a"))
        failed.discard()
        sink.commit(FIRST, [_stage(sink, FIRST, _rows(b"a"))])
        assert stored_bodies(location, "out") == [b"a"]

    def test_zombie_task_that_finishes_after_the_commit_changes_nothing(
        self, location: Location, sink: BatchSink
    ) -> None:
        _require_exactly_once(sink)
        zombie = sink.open_task(sink.prepare(), FIRST, "zombie", 0)
        zombie.write(_rows(b"a"))
        sink.commit(FIRST, [_stage(sink, FIRST, _rows(b"a"))])
        zombie.write(_rows(b"b"))
        zombie.finish()
        sink.commit(SECOND, [_stage(sink, SECOND, _rows(b"c"))])
        assert stored_bodies(location, "out") == [b"a", b"c"]

    def test_abort_removes_the_rows(self, location: Location, sink: BatchSink) -> None:
        _require_exactly_once(sink)
        receipts = [_stage(sink, FIRST, _rows(b"a"))]
        sink.abort(FIRST, receipts)
        assert stored_bodies(location, "out") == []
        sink.commit(FIRST, [_stage(sink, FIRST, _rows(b"b"))])
        assert stored_bodies(location, "out") == [b"b"]

    def test_abort_after_the_commit_changes_nothing(self, location: Location, sink: BatchSink) -> None:
        receipts = [_stage(sink, FIRST, _rows(b"a"))]
        sink.commit(FIRST, receipts)
        sink.abort(FIRST, receipts)
        assert stored_bodies(location, "out") == [b"a"]

    def test_batches_of_several_queries_do_not_interfere(self, location: Location, sink: BatchSink) -> None:
        _require_exactly_once(sink)
        keys = CommitKey("aborted", 0), CommitKey("one", 0), CommitKey("two", 0), CommitKey("write")
        receipts = [_stage(sink, key, _rows(key.query_id.encode())) for key in keys]
        sink.abort(keys[0], receipts[:1])
        for key, receipt in zip(keys[1:], receipts[1:], strict=True):
            assert sink.commit(key, [receipt]).rows == 1
        assert stored_bodies(location, "out") == [b"one", b"two", b"write"]

    # Batches that do not follow the earlier ones of their query.

    @pytest.mark.parametrize("on_gap", ["fail", "continue"])
    def test_commit_after_a_gap(self, location: Location, on_gap: str) -> None:
        sink = self.make_sink(location, CommitTerms(on_gap=on_gap))
        _require_exactly_once(sink)
        sink.commit(FIRST, [_stage(sink, FIRST, _rows(b"a"))])
        receipts = [_stage(sink, THIRD, _rows(b"c"))]
        if on_gap == "continue":
            assert sink.commit(THIRD, receipts).rows == 1
        else:
            with pytest.raises(BatchConflictError):
                sink.commit(THIRD, receipts)
        assert stored_bodies(location, "out") == [b"a", b"c"][: 1 + (on_gap == "continue")]

    @pytest.mark.parametrize("on_conflict", ["fail", "skip"])
    @pytest.mark.parametrize("key", [SECOND, FIRST], ids=["last batch", "earlier batch"])
    def test_commit_of_other_rows_for_a_stored_batch(
        self, location: Location, on_conflict: str, key: CommitKey
    ) -> None:
        sink = self.make_sink(location, CommitTerms(on_conflict=on_conflict))
        _require_exactly_once(sink)
        for earlier in (FIRST, SECOND):
            sink.commit(earlier, [_stage(sink, earlier, _rows(b"a"))])
        receipts = [_stage(sink, key, _rows(b"other"))]
        if on_conflict == "skip":
            assert sink.commit(key, receipts).skipped
        else:
            with pytest.raises(BatchConflictError):
                sink.commit(key, receipts)
        assert stored_bodies(location, "out") == [b"a", b"a"]

    def test_commit_of_an_earlier_version_of_a_transaction_is_skipped(self, location: Location) -> None:
        sink = self.make_sink(location, CommitTerms(is_transaction=True))
        _require_exactly_once(sink)
        skipped = []
        for version in (4, 9, 4, 9):
            key = CommitKey("txn:copy", version)
            skipped.append(sink.commit(key, [_stage(sink, key, _rows(b"%d" % version))]).skipped)
        assert skipped == [False, False, True, True]
        assert stored_bodies(location, "out") == [b"4", b"9"]

    def test_before_commit_is_called_only_for_a_new_batch(self, location: Location, sink: BatchSink) -> None:
        _require_exactly_once(sink)
        seen: list[list[bytes]] = []
        for _ in range(2):
            sink.commit(FIRST, [_stage(sink, FIRST, _rows(b"a"))], lambda: seen.append(stored_bodies(location, "out")))
        assert seen == [[]], "called once, before the first row is stored"

    def test_before_commit_that_fails_stores_nothing(self, location: Location, sink: BatchSink) -> None:
        _require_exactly_once(sink)

        def fail() -> None:
            raise NotFoundError("planted")

        receipts = [_stage(sink, FIRST, _rows(b"a"))]
        with pytest.raises(NotFoundError, match="planted"):
            sink.commit(FIRST, receipts, fail)
        assert stored_bodies(location, "out") == []
        sink.commit(FIRST, receipts)
        assert stored_bodies(location, "out") == [b"a"]

    # Ids and order of rows, whatever the guarantee.

    def test_discarded_task_stores_nothing(self, location: Location, sink: BatchSink) -> None:
        task = sink.open_task(sink.prepare(), FIRST, "task", 0)
        task.write(_rows(b"a"))
        task.write(_rows(b"b"))
        task.discard()
        assert stored_bodies(location, "out") == []

    def test_rows_have_distinct_ids(self, location: Location, sink: BatchSink) -> None:
        tasks = [(FIRST, 0), (FIRST, 1), (SECOND, 0), (CommitKey("other", 0), 0), (CommitKey("txn:name", 0), 0)]
        for key in dict.fromkeys(key for key, _ in tasks):
            partitions = [partition for of, partition in tasks if of == key]
            sink.commit(key, [_stage(sink, key, _rows(b"a", b"a", b"b"), partition) for partition in partitions])
        found = _ids(location)
        assert sorted(body for _, body in found) == [b"a"] * 10 + [b"b"] * 5
        assert len(dict(found)) == 15

    def test_rows_of_a_task_keep_their_order_in_a_queue(self, location: Location, sink: BatchSink) -> None:
        task = sink.open_task(sink.prepare(), FIRST, "task", 0)
        for numbers in (range(50), range(50, 51), range(51, 120)):
            task.write(_rows(*(b"%03d" % number for number in numbers)))
        sink.commit(FIRST, [task.finish()])
        found = [(row["queueId"], row["brokerName"], row["body"]) for row in stored_rows(location, "out", _PLACE)]
        assert len(found) == 120
        assert len({one[:2] for one in found}) > 1
        queues = itertools.groupby(found, lambda one: one[:2])
        assert not [one for one in queues if (bodies := [body for *_, body in one[1]]) != sorted(bodies)]

    def test_rows_with_a_sharding_key_keep_their_order_in_one_queue(self, location: Location, sink: BatchSink) -> None:
        keys = ("red", "green", "blue")
        for key in (FIRST, SECOND):
            rows = _rows(*(b"%d %03d" % (key.batch_id or 0, number) for number in range(90)))
            rows = rows.append_column("shardingKey", pa.array([keys[number % 3] for number in range(90)]))
            sink.commit(key, [_stage(sink, key, rows)])
        found = stored_rows(location, "out", [*_PLACE, "properties"])
        for name in keys:
            mine = [row for row in found if dict(row["properties"])["__SHARDINGKEY"] == name]
            assert len(mine) == 60
            assert len({(row["brokerName"], row["queueId"]) for row in mine}) == 1
            bodies = [row["body"] for row in mine]
            assert bodies == sorted(bodies)

    # Rows that are written again by a sink that is at least once: they are twins.

    @pytest.mark.parametrize("key", [FIRST, CommitKey("write"), CommitKey("txn:name", 7)], ids=str)
    def test_repeated_task_stores_twins_in_any_order(self, location: Location, sink: BatchSink, key: CommitKey) -> None:
        _require_at_least_once(sink)
        bodies = [b"a", b"b", b"a", b"a", b"c"]
        for order in (bodies, sorted(bodies), [b"c", *bodies[:4]]):
            _run_attempt(sink, _rows(*order), key)
        found = _ids(location)
        assert len(found) == 15
        assert found == sorted(3 * list(dict.fromkeys(found)))
        assert sorted(body for _, body in set(found)) == sorted(bodies)

    def test_repeated_task_in_other_pieces_stores_twins(self, location: Location, sink: BatchSink) -> None:
        _require_at_least_once(sink)
        bodies = [b"a", b"b", b"a", b"c", b"a"]
        for sizes in ((5,), (1, 1, 1, 1, 1), (2, 3)):
            task, rest = sink.open_task(sink.prepare(), FIRST, "task", 0), list(bodies)
            for size in sizes:
                task.write(_rows(*rest[:size]))
                del rest[:size]
            sink.commit(FIRST, [task.finish()])
        found = _ids(location)
        assert len(found) == 15
        assert sorted(body for _, body in set(found)) == sorted(bodies)

    def test_task_that_lost_rows_and_got_others_stores_twins_of_the_rest(
        self, location: Location, sink: BatchSink
    ) -> None:
        _require_at_least_once(sink)
        for bodies in ([b"a", b"b", b"b"], [b"b", b"b", b"c"]):
            _run_attempt(sink, _rows(*bodies))
        found = _ids(location)
        assert len(found) == 6
        assert sorted(body for _, body in set(found)) == [b"a", b"b", b"b", b"c"]

    def test_zombie_task_stores_twins(self, location: Location, sink: BatchSink) -> None:
        _require_at_least_once(sink)
        zombie = sink.open_task(sink.prepare(), FIRST, "zombie", 0)
        zombie.write(_rows(b"a", b"b"))
        sink.commit(FIRST, [_stage(sink, FIRST, _rows(b"b", b"a"))])
        zombie.finish()
        assert [body for _, body in sorted(set(_ids(location)), key=lambda one: one[1])] == [b"a", b"b"]

    def test_rows_of_an_aborted_batch_are_twins_of_the_repeated_one(self, location: Location, sink: BatchSink) -> None:
        _require_at_least_once(sink)
        sink.abort(FIRST, [_stage(sink, FIRST, _rows(b"a"))])
        _run_attempt(sink, _rows(b"a", b"b"))
        assert [body for _, body in sorted(set(_ids(location)), key=lambda one: one[1])] == [b"a", b"b"]

    def test_ids_do_not_depend_on_the_queues(self, location: Location, sink: BatchSink, grow_topic: GrowTopic) -> None:
        _require_at_least_once(sink)
        rows = _rows(*(b"%d" % (number % 7) for number in range(40)))
        keyed = rows.append_column("shardingKey", pa.array([str(number % 5) for number in range(40)]))
        for one, partition in ((rows, 0), (keyed, 1)):
            _run_attempt(sink, one, FIRST, partition)
        before = {(row["brokerName"], row["queueId"]) for row in stored_rows(location, "out", _PLACE)}
        grow_topic("out", 2 * self.QUEUES)
        for one, partition in ((rows, 0), (keyed, 1)):
            _run_attempt(sink, one, FIRST, partition)
        after = {(row["brokerName"], row["queueId"]) for row in stored_rows(location, "out", _PLACE)}
        assert after > before, "rows went to new queues"
        found = _ids(location)
        assert len(found) == 160
        assert len(set(found)) == 80

    # Rows and places that the sink refuses.

    def test_open_task_refuses_the_token_of_another_place(
        self, location: Location, sink: BatchSink, other_location: Location
    ) -> None:
        if Capability.NAME_SERVERS in location.capabilities:
            pytest.skip("tasks write to the servers that the token names")
        token = self.make_sink(other_location, CommitTerms()).prepare()
        if token is None:
            pytest.skip("the place has no token")
        sink.commit(FIRST, [_stage(sink, FIRST, _rows(b"a"))])
        with pytest.raises(StoreChangedError):
            sink.open_task(token, SECOND, "task", 0)

    def test_write_refuses_an_invalid_row_with_its_number(self, location: Location, sink: BatchSink) -> None:
        """Nothing of the task is stored, wherever the row is."""
        task = sink.open_task(sink.prepare(), FIRST, "task", 0)
        task.write(_rows(b"a", b"b"))
        invalid = pa.RecordBatch.from_pydict({"topic": pa.array(["out", None]), "body": pa.array([b"c", b"d"])})
        with pytest.raises(OptionError, match="row 3"):
            task.write(invalid)
        task.discard()
        assert stored_bodies(location, "out") == []

    def test_missing_topic_is_an_error_if_it_must_not_be_created(self, location: Location, append: Append) -> None:
        sink = self.make_sink(location, CommitTerms(), None, creates_topics=False)
        append("orders", 0, [Message(b"a")])
        with pytest.raises(NotFoundError):
            sink.commit(FIRST, [_stage(sink, FIRST, _rows(b"a"))])
        assert stored_bodies(location, "out") == []


class BackendSendBackTests(BackendFixtures):
    """The tests of the sink for failed messages. See `BackendFixtures` for the fixtures that a subclass gives.

    All rows have a delay level below 0, so that their copies are dead letters at once.
    """

    @pytest.fixture
    def send_back_sink(self, location: Location) -> SendBackSink:
        """A sink for the group's failed messages."""
        require(location, Capability.SEND_BACK)
        return location.send_back_sink(SendBackTerms(GROUP), CommitTerms(lock_timeout_ms=5_000))

    @pytest.fixture
    def failed(self, send_back_sink: SendBackSink, backend: Backend, append: Append) -> Failed:
        """A function of queue offsets. It returns rows of messages whose bodies are these numbers."""
        append("orders", 0, [Message(b"%d" % number) for number in range(8)])
        backend.refresh()
        queue = backend.queues(["orders"])["orders"][0]
        columns = ["commitLogOffset", "physicalTopic", "queueId", "queueOffset", "reconsumeTimes", "brokerName"]
        found = read_batches(backend, QueueRange(queue, 0, 8), columns)
        table = pa.Table.from_batches([batch for batch, _ in found])
        levels = pa.array([-1] * 8, pa.int32())
        (rows,) = table.append_column("delayLevel", levels).combine_chunks().to_batches()

        def choose(*offsets: int) -> pa.RecordBatch:
            return rows.take(pa.array(offsets, pa.int64()))

        return choose

    @pytest.mark.parametrize("tasks", [[(0, 1, 0)], [(0, 1), (1, 0)], [(0, 0), (), (1,), (0,)]])
    def test_send_back_a_row_twice_in_a_batch(
        self,
        location: Location,
        send_back_sink: SendBackSink,
        failed: Failed,
        tasks: Sequence[Sequence[int]],
    ) -> None:
        totals = send_back_sink.commit(FIRST, [_stage(send_back_sink, FIRST, failed(*offsets)) for offsets in tasks])
        assert totals.rows == 2
        assert stored_bodies(location, f"%DLQ%{GROUP}") == [b"0", b"1"]

    def test_send_back_a_repeated_batch(self, location: Location, send_back_sink: SendBackSink, failed: Failed) -> None:
        _require_exactly_once(send_back_sink)
        for offsets in ((0, 1), (0, 1), (1, 2)):  # the last attempt fails to consume another row
            send_back_sink.commit(FIRST, [_stage(send_back_sink, FIRST, failed(*offsets))])
        send_back_sink.commit(SECOND, [_stage(send_back_sink, SECOND, failed(0))])
        assert stored_bodies(location, f"%DLQ%{GROUP}") == [b"0", b"0", b"1", b"2"]

    def test_send_back_of_a_zombie_task_changes_nothing(
        self, location: Location, send_back_sink: SendBackSink, failed: Failed
    ) -> None:
        zombie = send_back_sink.open_task(send_back_sink.prepare(), FIRST, "zombie", 0)
        zombie.write(failed(0, 5))
        send_back_sink.commit(FIRST, [_stage(send_back_sink, FIRST, failed(0))])
        zombie.finish()
        send_back_sink.commit(SECOND, [_stage(send_back_sink, SECOND, failed(1))])
        assert stored_bodies(location, f"%DLQ%{GROUP}") == [b"0", b"1"]

    def test_send_back_of_an_aborted_batch_changes_nothing(
        self, location: Location, send_back_sink: SendBackSink, failed: Failed
    ) -> None:
        send_back_sink.abort(FIRST, [_stage(send_back_sink, FIRST, failed(0))])
        assert stored_bodies(location, f"%DLQ%{GROUP}") == []

    def test_send_back_refuses_a_row_without_a_place(self, send_back_sink: SendBackSink, failed: Failed) -> None:
        task = send_back_sink.open_task(send_back_sink.prepare(), FIRST, "task", 0)
        rows = failed(0)
        places = pa.array([None], pa.int64())
        broken = rows.set_column(rows.schema.get_field_index("commitLogOffset"), "commitLogOffset", places)
        with pytest.raises(OptionError, match="row 0"):
            task.write(broken)
        task.discard()

    def test_record_in_before_commit_suspends_and_resumes_queues(
        self, location: Location, send_back_sink: SendBackSink, failed: Failed
    ) -> None:
        require(location, Capability.SUSPENSIONS)
        queue = QueueKey("orders", 0)
        stopped = Suspension(resume=2, dead=frozenset({3}))
        first = [_stage(send_back_sink, FIRST, failed(3))]
        send_back_sink.commit(FIRST, first, lambda: send_back_sink.record(FIRST, {queue: stopped}, {}))
        ((suspension, is_settled),) = send_back_sink.suspended(FIRST).values()
        assert (suspension.resume, suspension.dead, is_settled) == (2, stopped.dead, False), "the batch may be repeated"
        ((suspension, is_settled),) = send_back_sink.suspended(SECOND).values()
        assert is_settled
        second = [_stage(send_back_sink, SECOND, failed(4))]
        known = {queue: suspension.number}
        send_back_sink.commit(SECOND, second, lambda: send_back_sink.record(SECOND, {queue: None}, known))
        assert send_back_sink.suspended(THIRD) == {}

    def test_record_keeps_a_later_suspension_of_another_query(
        self, location: Location, send_back_sink: SendBackSink, failed: Failed
    ) -> None:
        require(location, Capability.SUSPENSIONS)
        queue, other = QueueKey("orders", 0), CommitKey("other", 0)
        receipts = [_stage(send_back_sink, other, failed(3))]
        send_back_sink.commit(other, receipts, lambda: send_back_sink.record(other, {queue: Suspension(resume=2)}, {}))
        mine = [_stage(send_back_sink, FIRST, failed(4))]
        send_back_sink.commit(FIRST, mine, lambda: send_back_sink.record(FIRST, {queue: Suspension(resume=5)}, {}))
        assert send_back_sink.suspended(SECOND)[queue][0].resume == 2
