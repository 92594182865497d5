"""The sink of failed rows: each row of a batch is sent back once, however often the batch is run."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.store.backend import SendBackTerms
from rmq_spark.store.client.producer import Producer
from rmq_spark.store.delivery.send_back_ledger import SendBackLedger
from rmq_spark.store.delivery.send_back_sink import (
    SendBackSettings,
    SendBackTask,
    StagedCopies,
    abort_copies,
    check_send_back_sink,
    commit_copies,
)
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import (
    BatchConflictError,
    DamageError,
    LockTimeoutError,
    NotFoundError,
    OptionError,
    StorePathError,
)
from rmq_spark.store.format.failed_columns import COPY_TIMES
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store
from rmq_spark.store.transaction.commit import CommitOptions
from rmq_spark.store.transaction.intents import Intent, Intents
from rmq_spark.store.transaction.sink import RecordBuilderSettings

GROUP = "billing"
PLACE = ["commitLogOffset", "physicalTopic", "queueId", "queueOffset", "reconsumeTimes"]
ROWS = 9


class Died(BaseException):
    """End the process here."""


def die(*_: object, **__: object) -> None:
    raise Died


DEATHS = {
    "announced": ("rmq_spark.store.delivery.send_back_sink.commit_staged", die),
    "promised": ("rmq_spark.store.log.write_session.WriteSession.append", die),
    "appended": ("rmq_spark.store.transaction.roll_forward.BatchRollForward.conclude", die),
}


class Query:
    """A query whose batches send rows back: a batch's rows are numbers, shared out over two tasks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        build_store(path, [SampleMessage("orders", 0, f"{number}".encode()) for number in range(ROWS)])
        with rmq_spark.open_reader(path) as reader:
            reader.refresh()
            (queue,) = reader.queues("orders")
            self.rows = pa.Table.from_batches(reader.read(queue, 0, ROWS, PLACE)).combine_chunks().to_batches()[0]
        self.attempts = 0

    def settings(self, **options: Any) -> SendBackSettings:
        return SendBackSettings(
            str(self.path), SendBackTerms(GROUP), commit=CommitOptions(**options), lock_timeout_ms=300
        )

    def stage(self, batch_id: int | None, *tasks: list[int], query: str = "q", **options: Any) -> list[StagedCopies]:
        staged = []
        for numbers in tasks:
            self.attempts += 1
            task = SendBackTask(self.settings(**options), CommitKey(query, batch_id), f"{self.attempts}")
            if numbers:
                task.write(self.rows.take(pa.array(numbers)))
            staged.append(task.finish())
        return staged

    def run(self, batch_id: int | None, *tasks: list[int], query: str = "q", **options: Any) -> int:
        """Run a batch; return how many rows it appended."""
        staged = self.stage(batch_id, *tasks, query=query, **options)
        return commit_copies(self.settings(**options), CommitKey(query, batch_id), staged).rows

    def sent(self) -> Counter[int]:
        """Return which rows were sent back, and how often, by whoever."""
        found: Counter[int] = Counter()
        with rmq_spark.open_reader(self.path) as reader:
            reader.refresh()
            for topic in set(reader.topics()) - {"orders"}:
                for queue in reader.queues(topic):
                    there = reader.bounds(queue)
                    for batch in reader.read(queue, there.min_offset, there.max_offset, ["body"]):
                        found.update(int(body) for body in batch.column("body").to_pylist())
        return found


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path / "store")


def once(*numbers: int) -> Counter[int]:
    return Counter(numbers)


def test_commit_copies_sends_a_repeated_batch_back_once(query: Query) -> None:
    assert query.run(0, [0, 1], [2]) == 3
    assert query.run(0, [0, 1], [2]) == 0
    assert query.run(0, [2], [1, 0]) == 0
    assert query.run(1, [3], []) == 1
    assert query.run(1, [], [3]) == 0
    assert query.sent() == once(0, 1, 2, 3)
    assert not list((query.path / "rmq" / "staging").iterdir())
    assert not (query.path / "abort").exists()


def test_commit_copies_sends_new_failures_of_a_repeated_batch(query: Query) -> None:
    query.run(0, [0, 1])
    assert query.run(0, [1, 2]) == 1
    assert query.run(0, [0, 1, 2, 3]) == 1
    assert query.run(0, [4]) == 1
    assert query.run(0, list(range(5))) == 0
    assert query.sent() == once(0, 1, 2, 3, 4)


def test_commit_copies_same_row_in_later_batch_and_other_query(query: Query) -> None:
    query.run(0, [0])
    query.run(1, [0])
    query.run(0, [0], query="other")
    assert query.sent() == Counter({0: 3})


def test_commit_copies_sends_duplicate_rows_back_once(query: Query) -> None:
    assert query.run(0, [0, 0, 1], [1, 2, 0, 2], [3], [1]) == 4
    assert query.run(0, [3, 3], [3, 4], [4]) == 1
    assert query.run(0, [0, 1, 2], [2, 3, 4]) == 0
    assert query.run(None, [5, 5], [5, 6]) == 2
    assert query.sent() == once(0, 1, 2, 3, 4, 5, 6)
    assert not list((query.path / "rmq" / "staging").iterdir())


def test_send_back_task_duplicates_in_two_batches_of_rows(query: Query) -> None:
    staged = []
    for numbers in ([[7, 3, 5], [5, 3, 8, 8]], [[8, 7], [6]]):
        query.attempts += 1
        task = SendBackTask(query.settings(), CommitKey("q", 0), f"{query.attempts}")
        for some in numbers:
            task.write(query.rows.take(pa.array(some)))
        staged.append(task.finish())
    assert commit_copies(query.settings(), CommitKey("q", 0), staged).rows == 5
    assert query.sent() == once(3, 5, 6, 7, 8)


@pytest.mark.parametrize("where", ["announced", "promised", "appended"])
def test_commit_copies_leaves_no_duplicates_after_a_crash(
    query: Query, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    staged = query.stage(0, [0, 1], [1, 2], [2])
    with monkeypatch.context() as patch:
        patch.setattr(*DEATHS[where])
        with pytest.raises(Died):
            commit_copies(query.settings(), CommitKey("q", 0), staged)
    abort_copies(query.settings(), CommitKey("q", 0), staged)
    assert query.run(0, [0, 1], [1, 2], [2]) == (3 if where == "announced" else 0)
    assert query.sent() == once(0, 1, 2)
    assert not list((query.path / "rmq" / "staging").iterdir())


def test_copy_times_set_reconsume_times(query: Query) -> None:
    times = pa.array([7, None], pa.int32())
    given = query.rows.slice(0, 2)
    task = SendBackTask(query.settings(), CommitKey("q", 0), "1")
    levels = pa.array([-1, -1], pa.int32())
    task.write(
        pa.RecordBatch.from_pydict(
            {**dict(zip(PLACE, given.columns, strict=True)), "delayLevel": levels, COPY_TIMES: times}
        )
    )
    commit_copies(query.settings(), CommitKey("q", 0), [task.finish()])
    with rmq_spark.open_reader(query.path) as reader:
        reader.refresh()
        (queue,) = reader.queues(f"%DLQ%{GROUP}")
        [batch] = reader.read(queue, 0, 2, ["reconsumeTimes"])
        assert batch["reconsumeTimes"].to_pylist() == [7, 1]


def test_commit_copies_without_batch_id_sends_back_each_time(query: Query) -> None:
    assert query.run(None, [0, 1], query="one") == 2
    assert query.run(None, [0, 1], query="two") == 2
    assert not (query.path / "rmq" / "sentback").exists()


def test_commit_copies_completes_a_repeated_batch_with_expired_originals(query: Query) -> None:
    query.run(0, [0, 1])
    with Producer(str(query.path), WriterSettings(), RecordBuilderSettings(), "async") as store:
        for _ in range(4):
            store.send("orders", bytes(30_000))
    (query.path / "commitlog" / f"{0:020d}").unlink()
    assert query.run(0, [0, 1]) == 0
    with pytest.raises(NotFoundError, match=r"row 2: orders/0 at queue offset 2.* has expired"):
        query.run(0, [0, 1, 2])


def test_commit_copies_counts_batches_without_failures(query: Query) -> None:
    assert query.run(0, [], []) == 0
    assert query.run(1, [0]) == 1
    assert query.run(2, []) == 0
    assert query.run(3, [1]) == 1
    assert query.sent() == once(0, 1)


def test_commit_copies_refuses_older_and_too_new_batches(query: Query) -> None:
    query.run(5, [0])
    with pytest.raises(BatchConflictError, match="batches are written once and in order"):
        query.run(4, [1])
    assert query.run(4, [1], on_conflict="skip") == 0
    with pytest.raises(BatchConflictError, match="6 to 7 would be missing"):
        query.run(8, [1])
    assert query.run(8, [1], on_gap="continue") == 1
    assert query.sent() == once(0, 1)


def test_commit_copies_transaction_may_skip_numbers(query: Query) -> None:
    assert query.run(5, [0], query="txn:app", is_transaction=True) == 1
    assert query.run(9, [1], query="txn:app", is_transaction=True) == 1
    assert query.run(9, [1], query="txn:app", is_transaction=True) == 0
    assert query.run(5, [0], query="txn:app", is_transaction=True) == 0
    assert query.sent() == once(0, 1)


@pytest.mark.parametrize("where", ["announced", "promised", "appended"])
def test_commit_copies_is_atomic_after_a_crash(query: Query, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    query.run(0, [0])

    staged = query.stage(0, [0, 1], [2])
    with monkeypatch.context() as patch:
        patch.setattr(*DEATHS[where])
        with pytest.raises(Died):
            commit_copies(query.settings(), CommitKey("q", 0), staged)
    assert query.run(0, [1, 2, 3]) == (3 if where == "announced" else 1)
    assert query.sent() == once(0, 1, 2, 3)


def test_send_back_ledger_announce_keeps_the_last_commit(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    query.run(0, [0, 1])
    staged = query.stage(1, [2])

    with monkeypatch.context() as patch:
        patch.setattr(*DEATHS["announced"])
        with pytest.raises(Died):
            commit_copies(query.settings(), CommitKey("q", 1), staged)
    assert query.run(0, [0, 1, 3]) == 1
    assert query.sent() == once(0, 1, 3)


def test_commit_copies_two_drivers_send_no_row_twice(query: Query) -> None:
    first, second = query.stage(0, [0, 1]), query.stage(0, [1, 2])
    assert commit_copies(query.settings(), CommitKey("q", 0), first).rows == 2
    with pytest.raises(BatchConflictError, match="another process sent it back while its tasks ran"):
        commit_copies(query.settings(), CommitKey("q", 0), second)
    abort_copies(query.settings(), CommitKey("q", 0), second)
    assert query.run(0, [1, 2]) == 1
    assert query.sent() == once(0, 1, 2)
    assert not list((query.path / "rmq" / "staging").iterdir())


def test_send_back_ledger_read_during_a_commit(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    first, read = query.stage(0, [0, 1]), Intents.read

    def commit_first(self: Intents, query_id: str) -> Intent | None:
        monkeypatch.setattr(Intents, "read", read)
        commit_copies(query.settings(), CommitKey("q", 0), first)
        return read(self, query_id)

    monkeypatch.setattr(Intents, "read", commit_first)
    second = query.stage(0, [1, 2])
    assert commit_copies(query.settings(), CommitKey("q", 0), second).rows == 1
    assert query.sent() == once(0, 1, 2)


def test_commit_copies_waits_for_a_running_commit(query: Query) -> None:
    staged = query.stage(0, [0])
    lock = SendBackLedger(str(query.path), Disk(), CommitKey("q", 0)).lock()
    assert lock.try_take()
    with pytest.raises(LockTimeoutError, match="another process has held the query's lock"):
        commit_copies(query.settings(), CommitKey("q", 0), staged)
    lock.release()
    assert commit_copies(query.settings(), CommitKey("q", 0), staged).rows == 1


def test_send_back_ledger_reports_a_corrupt_file(query: Query) -> None:
    query.run(0, [0])
    (file,) = (query.path / "rmq" / "sentback").glob("*.json")
    fields = json.loads(file.read_text())
    fields["commits"]["0"] = [0, "bm8="]
    file.write_text(json.dumps(fields))
    with pytest.raises(DamageError, match="which rows of a query's last batch were sent back"):
        query.run(0, [0])


def test_send_back_task_discard_removes_its_file(query: Query) -> None:
    task = SendBackTask(query.settings(), CommitKey("q", 0), "1")
    task.write(query.rows)
    wrong = query.rows.set_column(0, "commitLogOffset", pa.array([1] * ROWS))
    with pytest.raises(OptionError, match=f"row {ROWS}: .* was never in this store"):
        task.write(wrong)
    task.discard()
    assert not list((query.path / "rmq" / "staging").iterdir())


def test_check_send_back_sink_refuses_before_any_task_runs(query: Query, tmp_path: Path) -> None:
    assert check_send_back_sink(query.settings()) is None, "nobody of us has written yet"
    table = {"subscriptionGroupTable": {GROUP: {"groupName": GROUP, "retryQueueNums": 0}}}
    (query.path / "config" / "subscriptionGroup.json").write_text(json.dumps(table))
    with pytest.raises(OptionError, match="retryQueueNums=0"):
        check_send_back_sink(query.settings())
    with pytest.raises(StorePathError):
        check_send_back_sink(SendBackSettings(str(tmp_path / "none"), SendBackTerms(GROUP)))
