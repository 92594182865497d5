"""A listener task on Arrow rows: calls of the listener, and unchanged rows to send back."""

import threading
import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any
from unittest.mock import ANY

import pyarrow as pa
import pytest

from rmq_spark.datasource.spark.listener import (
    CONCURRENTLY,
    ORDERLY,
    ConsumeContext,
    History,
    ListenerTerms,
    QueueOutcome,
)
from rmq_spark.datasource.spark.listener_task import PIECE_ROWS, ListenerTask
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey

AT = datetime(2026, 1, 2, tzinfo=UTC)
QUEUE = QueueKey("%RETRY%billing", 0)


def rows(count: int, queue_id: int = 0, first: int = 0, **more: pa.Array) -> pa.RecordBatch:
    columns = {
        "topic": pa.repeat("orders", count),
        "physicalTopic": pa.repeat("%RETRY%billing", count),
        "queueId": pa.repeat(pa.scalar(queue_id, pa.int32()), count),
        "queueOffset": pa.array(range(first, first + count), pa.int64()),
        "commitLogOffset": pa.array(range(1000 + first, 1000 + first + count), pa.int64()),
        "reconsumeTimes": pa.repeat(pa.scalar(3, pa.int32()), count),
        "body": pa.array([b"%d" % (first + number) for number in range(count)], pa.binary()),
        **more,
    }
    return pa.RecordBatch.from_pydict(columns)


def make_row(names: Sequence[str]) -> Callable[..., Any]:
    return namedtuple("Row", names)  # type: ignore[misc]


def run(
    listener: Callable[..., object],
    *batches: pa.RecordBatch,
    histories: dict[QueueKey, History] | None = None,
    drops: bool = False,
    resends: bool = False,
    **terms: Any,
) -> tuple[ListenerTask, list[pa.RecordBatch]]:
    chosen = ListenerTerms(**{"threads": 1, **terms})
    task = ListenerTask(listener, chosen, make_row, histories or {}, drops=drops, resends=resends)
    return task, list(task.failed_batches(batches))


def failing(*offsets: int) -> Callable[..., object]:
    def listen(messages: list[Any], context: ConsumeContext) -> str | None:
        wrong = {row.queueOffset for row in messages} & set(offsets)
        return None if wrong else "CONSUME_SUCCESS"

    return listen


def offsets(batches: list[pa.RecordBatch]) -> list[int]:
    return [offset for batch in batches for offset in batch["queueOffset"].to_pylist()]


def test_a_listener_sees_rows_with_all_their_columns() -> None:
    seen = []

    def listen(messages: list[Any], context: ConsumeContext) -> str:
        seen.extend(messages)
        assert (context.topic, context.queue_id) == ("%RETRY%billing", 0)
        return "CONSUME_SUCCESS"

    maps = pa.array([[("a", "b")], None], pa.map_(pa.string(), pa.string()))
    times = pa.array([AT, None], pa.timestamp("us", tz="UTC"))
    task, failed = run(listen, rows(2, properties=maps, storeTimestamp=times))
    assert failed == []
    assert (task.rows, task.failures) == (2, 0)
    assert seen[0].topic == "orders"
    assert (seen[0].body, seen[0].properties, seen[0].storeTimestamp) == (b"0", {"a": "b"}, AT)
    assert (seen[1].properties, seen[1].storeTimestamp) == (None, None)


def test_what_failed_goes_back_as_it_came_with_level_and_error() -> None:
    def listen(messages: list[Any], context: ConsumeContext) -> str:
        context.delay_level_when_next_consume = 7
        if messages[0].queueOffset % 2:
            raise KeyError("odd")
        return "CONSUME_SUCCESS"

    task, [failed] = run(listen, rows(4, extra=pa.array([1, 2, 3, 4])))
    assert failed.to_pylist() == [
        {
            "topic": "orders",
            "physicalTopic": "%RETRY%billing",
            "queueId": 0,
            "queueOffset": offset,
            "commitLogOffset": 1000 + offset,
            "reconsumeTimes": 3,
            "delayLevel": 7,
            "error": "KeyError: 'odd'",
        }
        for offset in (1, 3)
    ]
    assert (task.rows, task.failures) == (4, 2)
    assert task.errors[0] == "%RETRY%billing/0, queue offset 1: KeyError: 'odd'"


def test_what_a_query_made_of_a_body_stays_out_of_what_goes_back_unless_that_is_sent_from_the_row() -> None:
    made = pa.StructArray.from_arrays([pa.array([1])], ["amount"])
    ids = {"msgId": pa.array(["AC11"]), "offsetMsgId": pa.array(["7F00"])}
    _, [failed] = run(failing(0), rows(1, body=made, **ids))
    assert not {"body", *ids} & set(failed.schema.names)
    _, [failed] = run(failing(0), rows(1, **ids), resends=True)
    assert {"body", *ids} <= set(failed.schema.names)


def test_a_queue_that_stops_says_why() -> None:
    task, _ = run(lambda messages, context: None, rows(2), model=ORDERLY, max_reconsume_times=-1)
    assert [one.error for one in task.outcomes] == ["it returned None"]


def test_calls_go_on_over_batches_and_pieces_and_end_where_the_queue_does() -> None:
    calls = []

    def listen(messages: list[Any], context: ConsumeContext) -> str:
        calls.append([(row.queueId, row.queueOffset) for row in messages])
        return "RECONSUME_LATER"

    _, failed = run(listen, rows(2), rows(0), rows(2, first=2), rows(1, queue_id=1), batch_size=3)
    assert calls == [[(0, 0), (0, 1), (0, 2)], [(0, 3)], [(1, 0)]]
    assert offsets(failed) == [0, 1, 2, 3, 0]
    calls.clear()
    _, failed = run(listen, rows(2 * PIECE_ROWS + 1), batch_size=PIECE_ROWS + 1)
    assert [len(call) for call in calls] == [PIECE_ROWS + 1, PIECE_ROWS]
    assert offsets(failed) == list(range(2 * PIECE_ROWS + 1))
    assert max(batch.num_rows for batch in failed) <= PIECE_ROWS


def test_without_rows_the_listener_is_not_called() -> None:
    assert run(failing())[1] == run(failing(), rows(0))[1] == []


def test_a_broadcasting_query_counts_what_failed_and_goes_on_in_order_too() -> None:
    seen = []

    def listen(messages: list[Any], context: ConsumeContext) -> None:
        seen.extend(row.queueOffset for row in messages)

    task, _ = run(listen, rows(3), drops=True, model=ORDERLY)
    assert (seen, task.failures, task.outcomes) == ([0, 1, 2], 3, [])


def test_a_broadcasting_query_in_order_calls_a_queue_once_at_a_time_and_queues_side_by_side() -> None:
    running, seen = set[int](), list[tuple[int, int]]()
    together = threading.Barrier(2)

    def listen(messages: list[Any], context: ConsumeContext) -> None:
        assert context.queue_id not in running
        running.add(context.queue_id)
        if messages[0].queueOffset == 0:
            together.wait(60)
        time.sleep(0.001)
        seen.append((context.queue_id, messages[0].queueOffset))
        running.remove(context.queue_id)

    task, _ = run(listen, rows(20), rows(20, queue_id=1), drops=True, model=ORDERLY, threads=4)
    assert [task.failures, task.errors[0]] == [40, "%RETRY%billing/0, queue offset 0: it returned None"]
    for queue_id in (0, 1):
        assert [offset for one, offset in seen if one == queue_id] == list(range(20))


def test_what_fails_in_threads_goes_back_in_the_order_of_the_rows() -> None:
    def listen(messages: list[Any], context: ConsumeContext) -> str | None:
        time.sleep(messages[0].queueOffset % 5 / 5000)
        return None if messages[0].queueOffset % 3 == 0 else "CONSUME_SUCCESS"

    batches = rows(100), rows(100, queue_id=1), rows(100, first=100)
    one, expected = run(listen, *batches)
    several, failed = run(listen, *batches, threads=8)
    assert failed == expected
    assert (several.rows, several.failures, several.errors) == (one.rows, one.failures, one.errors) == (300, 101, ANY)
    assert (several.counts.rows, several.counts.calls, several.counts.failed_rows) == (300, 300, 101)


def test_calls_have_ended_when_what_failed_is_no_more_asked_for() -> None:
    running: set[int] = set()

    def listen(messages: list[Any], context: ConsumeContext) -> None:
        running.add(messages[0].queueOffset)
        time.sleep(0.005)
        running.remove(messages[0].queueOffset)

    task = ListenerTask(listen, ListenerTerms(threads=4), make_row, {})
    batches = (rows(10, first=first) for first in range(0, 10**6, 10))
    with closing(task.failed_batches(batches)) as failed:
        assert offsets([next(failed)]) == list(range(10))
    assert running == set()


def test_the_time_of_a_tasks_calls_is_told() -> None:
    times = iter([1_000, 3_500])
    task = ListenerTask(failing(), ListenerTerms(threads=1), make_row, {}, now_ms=lambda: next(times))
    assert list(task.failed_batches([rows(5)])) == []
    assert (task.counts.begin_ms, task.counts.end_ms, task.counts.rows_per_s) == (1_000, 3_500, 2.0)


def test_in_order_a_queue_stops_and_says_where_it_goes_on() -> None:
    seen = []

    def listen(messages: list[Any], context: ConsumeContext) -> str:
        seen.append((messages[0].queueOffset, messages[0].reconsumeTimes))
        return "SUCCESS" if messages[0].queueOffset != 2 else "SUSPEND_CURRENT_QUEUE_A_MOMENT"

    histories = {QUEUE: History(1, {1: 4})}
    task, failed = run(listen, rows(4), histories=histories, model=ORDERLY, max_reconsume_times=-1)
    assert seen == [(0, 3), (1, 7), (2, 3)]
    assert failed == []
    assert task.outcomes == [QueueOutcome(QUEUE, 2, 1_000, {2: 1})]


def test_a_dead_letter_in_order_is_the_row_that_came() -> None:
    task, [failed] = run(
        lambda messages, context: None,
        rows(4),
        histories={QUEUE: History(0, {0: 5})},
        model=ORDERLY,
        max_reconsume_times=8,
    )
    [row] = failed.to_pylist()
    assert (row["queueOffset"], row["reconsumeTimes"], row["delayLevel"]) == (0, 3, -1)
    assert row["copyReconsumeTimes"] == 8, "of the row's own 3, and 5 tries"
    assert task.outcomes == [QueueOutcome(QUEUE, 1, dead=frozenset({0}))]
    assert task.failures == 1


def test_rows_out_of_order_are_refused_in_order_only() -> None:
    both = rows(2, first=5), rows(1)
    assert run(failing(), *both)[1] == []
    with pytest.raises(OptionError, match="%RETRY%billing/0 come out of order: found 0 after 6"):
        run(lambda messages, context: "SUCCESS", *both, model=ORDERLY, max_reconsume_times=-1)


@pytest.mark.parametrize("model", [CONCURRENTLY, ORDERLY])
@pytest.mark.parametrize("name", ["physicalTopic", "queueId", "queueOffset", "commitLogOffset", "reconsumeTimes"])
def test_a_row_without_its_place_is_no_message_of_the_source(name: str, model: str) -> None:
    batch = rows(2)
    at = batch.schema.get_field_index(name)
    batch = batch.set_column(at, name, pa.array([batch[name][0].as_py(), None], batch[name].type))
    with pytest.raises(OptionError, match=f"no {name}; expected a message of the source"):
        run(failing(), batch, model=model)


def test_an_odd_time_fails_no_row() -> None:
    seen = []

    def listen(messages: list[Any], context: ConsumeContext) -> str:
        seen.extend(row.bornTimestamp for row in messages)
        return "RECONSUME_LATER"

    born = pa.array([2**60, 1_767_312_000_000_000], pa.int64()).view(pa.timestamp("us", tz="GMT+8"))
    _, [failed] = run(listen, rows(2, bornTimestamp=born), batch_size=2, resends=True)
    assert seen == [None, AT]
    assert failed["bornTimestamp"].equals(born), "what goes back is what came"


def test_a_level_beyond_all_and_a_text_that_is_no_unicode_go_back() -> None:
    def listen(messages: list[Any], context: ConsumeContext) -> str:
        context.delay_level_when_next_consume = 2**40
        raise OSError(2, "no such file", "caf\udce9")

    _, [failed] = run(listen, rows(1))
    [row] = failed.to_pylist()
    assert row["delayLevel"] == 2**31 - 1
    assert row["error"] == "FileNotFoundError: [Errno 2] no such file: 'caf\\udce9'"


def default_rows(times: Sequence[int], topic: str = "orders", first: int = 0) -> pa.RecordBatch:
    """Return rows with the default columns: a retried one shows the topic that it was first sent to."""
    batch = rows(len(times), first=first, reconsumeTimes=pa.array(times, pa.int32())).drop_columns(["physicalTopic"])
    return batch.set_column(batch.schema.get_field_index("topic"), "topic", pa.repeat(topic, len(times)))


def queues_of(*batches: pa.RecordBatch, retry_topic: str | None, **terms: Any) -> list[tuple[str, int, list[int]]]:
    seen = []

    def listen(messages: list[Any], context: ConsumeContext) -> str:
        seen.append((context.topic, context.queue_id, [row.queueOffset for row in messages]))
        return "CONSUME_SUCCESS"

    task = ListenerTask(listen, ListenerTerms(**terms, threads=1), make_row, {}, retry_topic=retry_topic)
    assert list(task.failed_batches(batches)) == []
    return seen


def test_a_retried_row_with_the_default_columns_is_one_of_the_retry_topics_queue() -> None:
    seen = queues_of(default_rows([0]), default_rows([2]), retry_topic="%RETRY%billing")
    assert seen == [("orders", 0, [0]), ("%RETRY%billing", 0, [0])]


def test_a_call_has_rows_of_one_queue_where_partitions_are_merged() -> None:
    merged = default_rows([0, 0, 1, 1, 0], first=3)
    seen = queues_of(merged, retry_topic="%RETRY%billing", batch_size=10)
    assert seen == [("orders", 0, [3, 4]), ("%RETRY%billing", 0, [5, 6]), ("orders", 0, [7])]


def test_a_retried_row_of_a_query_without_a_retry_topic_keeps_its_topic() -> None:
    assert queues_of(default_rows([2]), retry_topic=None) == [("orders", 0, [0])]


def test_a_dead_letter_is_no_row_of_the_retry_topic() -> None:
    seen = queues_of(default_rows([3], topic="%DLQ%billing"), retry_topic="%RETRY%billing")
    assert seen == [("%DLQ%billing", 0, [0])]


def test_an_error_of_a_retried_row_names_the_queue_that_it_is_in() -> None:
    task = ListenerTask(failing(7), ListenerTerms(), make_row, {}, retry_topic="%RETRY%billing")
    assert len(list(task.failed_batches([default_rows([2], first=7)]))) == 1
    assert task.errors == ["%RETRY%billing/0, queue offset 7: it returned None"]
