"""The sink of a listener: suspended queues as a task gets them, a task that fails, and the line of a commit."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark.datasource.options.write_options import SendBackOptions
from rmq_spark.datasource.spark import listener_sink
from rmq_spark.datasource.spark.call_counts import CallCounts
from rmq_spark.datasource.spark.listener import CONCURRENTLY, Answer, ConsumeContext, History, ListenerTerms
from rmq_spark.datasource.spark.listener_sink import ConsumedRows, ListenerJob, history_of
from rmq_spark.datasource.spark.task_writer import SinkTask
from rmq_spark.store.local.directory import StoreDirectory
from rmq_spark.store.model import CommitKey, Suspension

KEY = CommitKey("query", 7)

STOPPED = Suspension(5, 0, {5: 2}, frozenset({2}), frozenset({4}), 3, "query", 7)


@pytest.mark.parametrize(
    ("key", "is_shared", "counts_from_resume", "is_repeated"),
    [
        (CommitKey("query", 7), False, False, True),
        (CommitKey("query", 7), True, False, True),
        (CommitKey("query", 8), False, True, False),
        (CommitKey("query", 8), True, False, False),
        (CommitKey("other", 7), False, True, False),
        (CommitKey("other", 7), True, False, False),
    ],
)
@pytest.mark.parametrize(
    ("is_settled", "sent", "pending"), [(True, {2, 4}, set()), (False, {2}, {4})], ids=["settled", "not settled"]
)
def test_who_repeats_a_batch_or_shares_a_queue_is_told_all_and_who_begins_anew_only_from_the_stop_on(
    key: CommitKey,
    is_shared: bool,
    counts_from_resume: bool,
    is_repeated: bool,
    is_settled: bool,
    sent: set[int],
    pending: set[int],
) -> None:
    assert history_of(STOPPED, key, is_settled=is_settled, is_shared=is_shared) == History(
        5,
        {5: 2},
        frozenset(sent),
        frozenset(pending),
        counts_from_resume,
        is_repeated,
        key.query_id != "query",
        STOPPED.number,
    )


def job_of(folder: Path, listener: Callable[..., object], **given: Any) -> ListenerJob:
    options = SendBackOptions(location=StoreDirectory(str(folder)), group="g", max_reconsume_times=16)
    return ListenerJob(listener, ListenerTerms(CONCURRENTLY, threads=4), options, **given)


def test_no_call_runs_when_the_task_has_failed_because_its_rows_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, running = threading.Lock(), set[int]()

    def listen(rows: list[Any], context: ConsumeContext) -> None:
        with lock:
            running.add(rows[0].queueOffset)
        time.sleep(0.01)
        with lock:
            running.remove(rows[0].queueOffset)

    def stage_rows(batches: Iterable[pa.RecordBatch], *given: object) -> None:
        assert next(iter(batches)).num_rows
        raise OSError("the disk is full")

    monkeypatch.setattr(listener_sink, "stage_rows", stage_rows)
    columns = {"topic": pa.repeat("orders", 10)} | {
        name: pa.array(range(10), pa.int64()) for name in ("queueOffset", "commitLogOffset")
    }
    columns |= {name: pa.array([0] * 10, pa.int32()) for name in ("queueId", "reconsumeTimes")}
    batch = pa.RecordBatch.from_pydict(columns)
    with pytest.raises(OSError, match="the disk is full") as raised:
        job_of(tmp_path, listen).run([batch] * 500, None, KEY, SinkTask(0, 0, 0))
    assert running == set(), raised  # whose traceback keeps the generators of the task


@pytest.mark.parametrize(("failed", "level"), [(0, "INFO"), (3, "WARNING")])
def test_a_commit_logs_the_counts_of_its_tasks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failed: int, level: str
) -> None:
    messages = []
    for begin_ms in (1_000, 2_000):
        counts = CallCounts(begin_ms=begin_ms, end_ms=begin_ms + 1_000)
        counts.add(10, Answer(10 - failed, took_s=0.05))
        messages.append(ConsumedRows(KEY, None, (), counts))
    with caplog.at_level(logging.INFO, "rmq_spark"):
        job_of(tmp_path, print, drops=True).commit(messages, KEY, 0)
    [record] = caplog.records
    assert record.levelname == level
    text = f"20 rows in 2 calls, 10.0 rows/s, {2 * failed} rows failed, 0 calls timed out; a call took p50 50 ms, p95"
    assert text in record.message
    assert record.message.endswith("; 0 queues stopped")
