"""consume() through real Spark: failing listeners, in both models and in broadcasting, and refused calls."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

import rmq_spark
from rmq_spark import ConsumeContext, OptionError, consuming
from rmq_spark.consuming import _check_terms as check_terms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark

NOW = {"availableNow": True}
WITHIN_S = 240
LEVELS = "1s 1s 1s 1s 1s"


class Orders:
    """A store of the topic orders, two queues, three messages in each, and listeners that note their rows."""

    def __init__(self, spark: "SparkSession", folder: Path) -> None:
        self.spark, self.folder, self.path = spark, folder, folder / "store"
        self.seen = folder / "seen"
        self.store = rmq_spark.open_store(self.path, segment_bytes=1 << 20, message_delay_level=LEVELS)
        self.store.create_topic("orders", 2)
        for number in range(3):
            for queue_id in (0, 1):
                self.store.send("orders", f"{queue_id}-{number}", queue_id=queue_id)
        self.queries: list[StreamingQuery] = []

    def stream(self, **given: str) -> "DataFrame":
        options = {"subscribe": "orders", "consumerGroup": "billing", "startingOffsets": "earliest", "columns": "*"}
        return self.spark.readStream.format("rmq").options(**{**options, **given}).load(str(self.path))

    def listener(self, answer: Callable[[str, ConsumeContext], object]) -> Callable[..., object]:
        """Return a listener that notes each row, and answers a call as the first row's body has it."""
        seen = str(self.seen)

        def listen(rows: "list[Row]", context: ConsumeContext) -> object:
            with Path(seen).open("a") as file:
                file.writelines(f"{row.topic} {row.body.decode()} {row.reconsumeTimes}\n" for row in rows)
            return answer(rows[0].body.decode(), context)

        return listen

    def consume(
        self, answer: Callable[[str, ConsumeContext], object], df: Any = None, **given: Any
    ) -> "StreamingQuery":
        options = {"path": self.path, "group": "billing", "checkpoint_location": self.folder / "checkpoint"}
        frame = self.stream() if df is None else df
        query = rmq_spark.consume(frame, self.listener(answer), **{**options, "trigger": NOW, **given})
        self.queries.append(query)
        return query

    def run(self, answer: Callable[[str, ConsumeContext], object], df: Any = None, **given: Any) -> "StreamingQuery":
        query = self.consume(answer, df, **given)
        assert query.awaitTermination(WITHIN_S), "does not come to an end"
        return query

    def noted(self) -> list[str]:
        """Return the rows that the listener has noted, in order for each queue, and clear them."""
        lines = self.seen.read_text().splitlines() if self.seen.exists() else []
        self.seen.unlink(missing_ok=True)
        return lines

    def rows(self, topic: str, *columns: str) -> list[dict[str, Any]]:
        with rmq_spark.open_reader(self.path) as store:
            store.refresh()
            if topic not in store.topics():
                return []
            return [
                row
                for queue in store.queues(topic)
                for batch in store.read(queue, 0, store.bounds(queue).max_offset, [*columns])
                for row in batch.to_pylist()
            ]


@pytest.fixture
def orders(spark: "SparkSession", tmp_path: Path) -> Iterator[Orders]:
    made = Orders(spark, tmp_path)
    yield made
    for query in made.queries:
        query.stop()
    made.store.close()


@pytest.mark.slow
def test_a_row_that_fails_comes_again_from_the_retry_topic_and_ends_as_a_dead_letter(orders: Orders) -> None:
    def answer(body: str, context: ConsumeContext) -> str:
        if body == "1-1":
            raise ValueError("no such order")
        return "CONSUME_SUCCESS"

    orders.run(answer, max_reconsume_times=1)
    assert sorted(orders.noted()) == [f"orders {queue}-{number} 0" for queue in (0, 1) for number in range(3)]
    [waiting] = orders.rows("SCHEDULE_TOPIC_XXXX", "properties", "reconsumeTimes")
    assert waiting["reconsumeTimes"] == 1
    assert dict(waiting["properties"])["REAL_TOPIC"] == "%RETRY%billing"
    assert "ValueError: no such order" in dict(waiting["properties"]).values()
    time.sleep(1.1)
    orders.run(answer, max_reconsume_times=1)
    orders.run(answer, max_reconsume_times=1)
    assert orders.noted() == ["orders 1-1 1"]
    [dead] = orders.rows("%DLQ%billing", "body", "reconsumeTimes", "properties")
    assert (dead["body"], dead["reconsumeTimes"]) == (b"1-1", 2)
    assert dict(dead["properties"])["RETRY_TOPIC"] == "orders"
    assert rmq_spark.group_offsets(orders.path, "billing")["orders"] == {0: 3, 1: 3}


@pytest.mark.slow
def test_with_the_default_columns_a_call_of_merged_partitions_has_rows_of_one_queue(orders: Orders) -> None:
    calls = orders.folder / "calls"

    def frame() -> "DataFrame":
        options = {"subscribe": "orders", "consumerGroup": "billing", "startingOffsets": "earliest"}
        return orders.spark.readStream.format("rmq").options(**options).load(str(orders.path)).coalesce(1)

    def answer(body: str, context: ConsumeContext) -> object:
        with calls.open("a") as file:
            file.write(f"{context.topic}/{context.queue_id} {body}\n")
        return None if context.topic == "orders" and body == "0-0" else "CONSUME_SUCCESS"

    orders.run(answer, frame(), batch_size=1, threads=1)
    assert calls.read_text().splitlines()[0] == "orders/0 0-0"
    calls.unlink()
    time.sleep(1.1)
    orders.store.send("orders", "0-3", queue_id=0)
    orders.run(answer, frame(), batch_size=10)
    assert sorted(calls.read_text().splitlines()) == ["%RETRY%billing/0 0-0", "orders/0 0-3"]


def test_rows_behind_ack_index_go_back_when_the_listener_says(orders: Orders) -> None:
    def answer(body: str, context: ConsumeContext) -> str:
        context.ack_index, context.delay_level_when_next_consume = 1, -1
        return rmq_spark.ConsumeConcurrentlyStatus.CONSUME_SUCCESS

    orders.run(answer, batch_size=3, query_name="acks")
    assert sorted(row["body"] for row in orders.rows("%DLQ%billing", "body")) == [b"0-2", b"1-2"]


def test_an_answer_that_means_nothing_fails_the_query_which_names_it(orders: Orders) -> None:
    with pytest.raises(Exception, match=r"the listener returned 'yes' \(str\)"):
        orders.run(lambda body, context: "yes")
    assert orders.rows("%DLQ%billing", "body") == []


@pytest.mark.slow
def test_in_order_a_queue_stops_at_the_row_that_fails_and_goes_on_there(orders: Orders) -> None:
    df = orders.stream(orderly="true").where("queueId >= 0")
    failing = {"0-1"}

    def answer(body: str, context: ConsumeContext) -> str | None:
        context.suspend_ms = 10
        return None if body in failing else "SUCCESS"

    orders.run(answer, df, model="orderly", max_reconsume_times=1)
    assert sorted(orders.noted()) == ["orders 0-0 0", "orders 0-1 0", "orders 1-0 0", "orders 1-1 0", "orders 1-2 0"]
    assert rmq_spark.group_offsets(orders.path, "billing")["orders"] == {0: 1, 1: 3}
    orders.run(answer, df, model="orderly", max_reconsume_times=1)
    assert orders.noted() == ["orders 0-1 1", "orders 0-2 0"]
    assert [row["body"] for row in orders.rows("%DLQ%billing", "body")] == [b"0-1"]
    assert rmq_spark.group_offsets(orders.path, "billing")["orders"] == {0: 3, 1: 3}


@pytest.mark.slow
def test_broadcasting_drops_what_fails(orders: Orders) -> None:
    orders.run(lambda body, context: None, orders.stream(messageModel="broadcasting"))
    assert len(orders.noted()) == 6
    again = {"model": "orderly", "checkpoint_location": orders.folder / "another"}
    orders.run(lambda body, context: None, orders.stream(messageModel="broadcasting"), **again)
    assert len(orders.noted()) == 6
    assert orders.rows("%DLQ%billing", "body") == []
    assert orders.rows("SCHEDULE_TOPIC_XXXX", "body") == []


@pytest.mark.parametrize(
    ("source", "given", "message"),
    [
        ({"orderly": "true"}, {}, "orderly=true do not go together"),
        ({}, {"model": "orderly"}, r'Add \.option\("orderly", "true"\)'),
        ({}, {"model": "ordered"}, '"concurrently", "orderly"'),
        ({"consumerGroup": "other"}, {}, r'read by consumerGroup=other\. Add \.option\("consumerGroup", "billing"\)'),
        ({}, {"path": "/elsewhere"}, "is not where the stream reads"),
        ({}, {"group": "%RETRY%billing"}, "is the name of a topic of the group"),
        ({}, {"batch_size": 0}, "batch_size=0"),
        ({}, {"batch_size": True}, "batch_size=True"),
        ({}, {"threads": 0}, "threads=0 must be an integer from 1 to 1000"),
        ({}, {"threads": 1001}, "threads=1001"),
        ({}, {"threads": 2.0}, r"threads=2\.0"),
        ({}, {"max_reconsume_times": -2}, "max_reconsume_times=-2"),
        ({}, {"timeout": 0}, "timeout=0"),
        ({}, {"timeout": float("nan")}, "timeout=nan"),
        (
            {},
            {"timeout": 1_000_000_001},
            "timeout=1000000001. Accepted: .* at most 1,000,000,000; math.inf",
        ),
        ({}, {"timeout": 10**400}, "timeout=1000"),
        ({}, {"expired_original": "drop"}, "error, resend"),
        (
            {"columns": "body,commitLogOffset,topic,queueId,queueOffset,reconsumeTimes"},
            {"expired_original": "resend"},
            "these lack msgId",
        ),
        ({"subscribeRetry": "false"}, {}, "%RETRY%billing, and this query would never see it again"),
        ({}, {"checkpoint_location": None}, "checkpoint_location=None is not a folder"),
        ({}, {"checkpoint_location": ""}, "checkpoint_location='' is not a folder"),
        ({}, {"trigger": 5}, "^trigger=5: found int; expected a text such as '1 second', or a mapping such as "),
        ({}, {"path": "hdfs://elsewhere/store"}, "found the scheme hdfs:"),
        ({"columns": "topic,body,queueId"}, {}, "lack commitLogOffset, queueOffset, reconsumeTimes"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_runs(
    orders: Orders, source: dict[str, str], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        orders.consume(lambda body, context: None, orders.stream(**source), **given)
    assert orders.queries == []


def no_context(messages: list[Any]) -> str:
    return "CONSUME_SUCCESS"


def three(messages: list[Any], context: ConsumeContext, more: object) -> str:
    return "CONSUME_SUCCESS"


def by_name(messages: list[Any], *, context: ConsumeContext) -> str:
    return "CONSUME_SUCCESS"


async def later(messages: list[Any], context: ConsumeContext) -> str:
    return "CONSUME_SUCCESS"


def one_by_one(messages: list[Any], context: ConsumeContext) -> Iterator[str]:
    yield "CONSUME_SUCCESS"


class Waiting:
    async def __call__(self, messages: list[Any], context: ConsumeContext) -> str:
        return "CONSUME_SUCCESS"


@pytest.mark.parametrize("listener", [no_context, three, by_name, lambda: None, later, one_by_one, Waiting()])
def test_a_listener_whose_signature_does_not_fit_is_refused_before_anything_runs(
    orders: Orders, listener: Callable[..., object]
) -> None:
    where = {"path": orders.path, "group": "billing", "checkpoint_location": orders.folder / "checkpoint"}
    with pytest.raises(OptionError, match=r"is called with two arguments, messages and context|is a coroutine or a"):
        orders.queries.append(rmq_spark.consume(orders.stream(), listener, **where, trigger=NOW))


def with_default(messages: list[Any], context: ConsumeContext, more: int = 1) -> str:
    return "CONSUME_SUCCESS"


def with_any(*arguments: Any) -> str:
    return "CONSUME_SUCCESS"


class Listener:
    def consume(self, messages: list[Any], context: ConsumeContext) -> str:
        return "CONSUME_SUCCESS"

    def __call__(self, messages: list[Any], context: ConsumeContext) -> str:
        return "CONSUME_SUCCESS"


@pytest.mark.parametrize(
    "listener", [with_default, with_any, functools.partial(three, more=1), Listener(), Listener().consume, max]
)
def test_a_listener_that_takes_messages_and_context_is_not_refused(listener: Callable[..., object]) -> None:
    assert check_terms(listener, "concurrently", 1, 20, None, None).batch_size == 1


@pytest.mark.parametrize(
    ("model", "timeout", "timeout_s"),
    [
        ("concurrently", None, 900.0),
        ("orderly", None, None),
        ("concurrently", 2.5, 2.5),
        ("concurrently", 1e9, 1e9),
        ("orderly", 3, 3),
        ("concurrently", float("inf"), None),
    ],
)
def test_the_timeout_is_that_of_RocketMQ_unless_it_is_given(
    model: str, timeout: float | None, timeout_s: float | None
) -> None:
    assert check_terms(with_any, model, 1, 20, None, timeout).timeout_s == timeout_s


def test_the_counts_of_the_queries_that_were_started_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consuming, "_counts", {})
    for number in range(consuming._MOST_COUNTS + 3):
        writer = Mock()
        writer.format.return_value.start.return_value.runId = number
        consuming._start(Mock(), writer, Mock(listener_id=f"rmq_listener_{number}", batch_counts=number))
    assert list(consuming._counts.values()) == list(range(3, consuming._MOST_COUNTS + 3))


def together(folder: Path, count: int, status: str) -> Callable[[str, ConsumeContext], str]:
    """Return an answer for a call that first waits until `count` calls have begun, by the files that they make."""
    at = str(folder)

    def answer(body: str, context: ConsumeContext) -> str:
        (Path(at) / body).touch()
        until = time.monotonic() + WITHIN_S
        while len(list(Path(at).iterdir())) < count:
            assert time.monotonic() < until, "the calls do not run side by side"
            time.sleep(0.01)
        return status

    return answer


def test_calls_of_a_task_run_side_by_side_and_are_counted(orders: Orders) -> None:
    folder = orders.folder / "calls"
    folder.mkdir()
    query = orders.run(together(folder, 6, "CONSUME_SUCCESS"), threads=6, query_name="counted")
    assert orders.rows("SCHEDULE_TOPIC_XXXX", "properties") == []
    found = rmq_spark.listener_progress(query)
    assert found is not None
    assert (found["id"], found["runId"], found["name"]) == (query.id, query.runId, "counted")
    assert (found["batchId"], found["rows"], found["calls"], found["failedRows"]) == (0, 6, 6, 0)
    assert found["callMs"]["p50"] <= found["callMs"]["p95"] <= found["callMs"]["max"]
    assert found["rowsPerSecond"] > 0
    assert found["total"] == {name: found[name] for name in found["total"]}


@pytest.mark.slow
def test_in_order_the_queues_of_a_task_run_side_by_side(orders: Orders) -> None:
    folder = orders.folder / "calls"
    folder.mkdir()
    orders.store.create_topic("many", 8)  # more queues than cores
    for queue_id in range(8):
        orders.store.send("many", f"{queue_id}", queue_id=queue_id)
    stream = orders.stream(subscribe="many", orderly="true")
    found = rmq_spark.listener_progress(orders.run(together(folder, 8, "SUCCESS"), stream, model="orderly"))
    assert found is not None
    assert (found["rows"], found["failedRows"]) == (8, 0)


@pytest.mark.slow
def test_a_call_that_takes_too_long_is_sent_back_at_level_3_and_the_batch_goes_on(orders: Orders) -> None:
    may_return = str(orders.folder / "may return")

    def answer(body: str, context: ConsumeContext) -> str:
        until = time.monotonic() + WITHIN_S
        while body == "1-1" and not Path(may_return).exists() and time.monotonic() < until:
            time.sleep(0.01)
        return "CONSUME_SUCCESS"

    query = orders.run(answer, timeout=1.0)
    Path(may_return).touch()
    [waiting] = orders.rows("SCHEDULE_TOPIC_XXXX", "queueId", "properties")
    assert waiting["queueId"] == 2, "that of delay level 3"
    assert "has not ended, and timeout=1" in dict(waiting["properties"])["CONSUME_ERROR"]
    found = rmq_spark.listener_progress(query)
    assert found is not None
    assert (found["calls"], found["failedRows"], found["timedOutCalls"]) == (6, 1, 1)


def test_progress_is_that_of_batches_that_spark_has_reported_and_of_queries_of_consume_only(orders: Orders) -> None:
    may_go = str(orders.folder / "may go")

    def answer(body: str, context: ConsumeContext) -> str:
        until = time.monotonic() + WITHIN_S
        while not Path(may_go).exists() and time.monotonic() < until:
            time.sleep(0.01)
        return "CONSUME_SUCCESS"

    query = orders.consume(answer)
    assert rmq_spark.listener_progress(query) is None
    Path(may_go).touch()
    assert query.awaitTermination(WITHIN_S)
    found = rmq_spark.listener_progress(query)
    assert found is not None
    assert found["rows"] == 6
    other = orders.stream().writeStream.format("noop").trigger(**NOW).start()
    orders.queries.append(other)
    with pytest.raises(OptionError, match=r"is not one of the last 1,000 queries that consume"):
        rmq_spark.listener_progress(other)


def test_another_groups_retry_topic_needs_the_column_that_names_it(orders: Orders) -> None:
    orders.store.create_topic("%RETRY%other", 1)
    columns = "topic,queueId,queueOffset,commitLogOffset,reconsumeTimes,body"
    with pytest.raises(OptionError, match=r"lack physicalTopic, and the stream reads %RETRY%other"):
        orders.consume(lambda body, context: None, orders.stream(subscribe="orders,%RETRY%other", columns=columns))


def test_a_place_whose_type_the_query_changed_is_refused(orders: Orders) -> None:
    with pytest.raises(OptionError, match="column queueId is string, expected int"):
        orders.consume(lambda body, context: None, orders.stream().selectExpr("* except (queueId)", "'1' as queueId"))


def test_a_listener_that_cannot_be_pickled_is_named(orders: Orders) -> None:
    lock = threading.Lock()

    def careful(rows: "list[Row]", context: ConsumeContext) -> str:
        with lock:
            return "CONSUME_SUCCESS"

    with pytest.raises(OptionError, match=r"listener .*careful cannot be pickled: TypeError: .*lock"):
        rmq_spark.consume(
            orders.stream(), careful, path=orders.path, group="billing", checkpoint_location=orders.folder / "c"
        )


def test_a_message_of_which_a_query_makes_several_rows_goes_back_once_and_what_it_made_of_the_body_stays(
    orders: Orders,
) -> None:
    df = orders.spark.readStream.format("rmq").options(
        subscribe="orders", consumerGroup="billing", startingOffsets="earliest", columns="*"
    )
    frame = df.load(f"file://{orders.path}").selectExpr(
        "* except (body)", "struct(body as inner) as body", "explode(array(1, 2, 3)) as part"
    )
    seen = str(orders.seen)

    def listen(rows: "list[Row]", context: ConsumeContext) -> str:
        with Path(seen).open("a") as file:
            file.write(f"{rows[0].body['inner'].decode()} {rows[0].part}\n")
        return "RECONSUME_LATER" if rows[0].queueOffset == 1 else "CONSUME_SUCCESS"

    query = rmq_spark.consume(
        frame,
        listen,
        path=f"file://{orders.path}",
        group="billing",
        checkpoint_location=orders.folder / "checkpoint",
        trigger=NOW,
    )
    orders.queries.append(query)
    assert query.awaitTermination(WITHIN_S)
    assert len(orders.noted()) == 18
    sent = sorted(row["body"] for row in orders.rows("SCHEDULE_TOPIC_XXXX", "body"))
    assert sent == [b"0-1", b"1-1"]


def test_a_listener_that_leaves_and_times_that_nobody_can_say_stop_no_query(orders: Orders) -> None:
    def answer(body: str, context: ConsumeContext) -> str:
        raise SystemExit(f"caf\udce9 {body}")

    orders.spark.conf.set("spark.sql.session.timeZone", "GMT+8")
    try:
        frame = orders.stream().selectExpr("* except (bornTimestamp)", "timestamp_micros(1L << 60) as bornTimestamp")
        orders.run(answer, frame)
    finally:
        orders.spark.conf.unset("spark.sql.session.timeZone")
    waiting = orders.rows("SCHEDULE_TOPIC_XXXX", "properties")
    errors = sorted(dict(row["properties"])["CONSUME_ERROR"] for row in waiting)
    assert errors == [f"SystemExit: caf\\udce9 {queue}-{number}" for queue in (0, 1) for number in range(3)]


def test_what_is_no_stream_of_ours_is_refused(orders: Orders) -> None:
    batch = orders.spark.range(1)
    rate = orders.spark.readStream.format("rate").load()
    stream = orders.stream(orderly="true")
    for frame, message in [
        (batch, "needs a stream"),
        (rate, 'this is one of format\\("rate"\\)'),
        (stream.union(stream), "this query has 2"),
    ]:
        with pytest.raises(OptionError, match=message):
            orders.consume(lambda body, context: None, frame)
    for frame, message in [
        (stream.repartition(2), "Repartition"),
        (stream.drop("physicalTopic"), "lack physicalTopic"),
    ]:
        with pytest.raises(OptionError, match=message):
            orders.consume(lambda body, context: None, frame, model="orderly")
    with pytest.raises(OptionError, match="cannot be called"):
        rmq_spark.consume(stream, "listener", path=orders.path, group="billing", checkpoint_location="x")  # type: ignore[arg-type]
