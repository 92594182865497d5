"""Topics that RocketMQ denies to consumers: refused to queries of a group, read by all others with a log line."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.parsed_options import parse_options

import rmq_spark
from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.spark.batch_reader import RmqBatchReader
from rmq_spark.store.errors import NoPermissionError, NotFoundError
from rmq_spark.store.model import QueueKey

GROUP = {"consumerGroup": "billing"}
EARLIEST = {"startingOffsets": "earliest"}
SHARED = GROUP | {"assignment": "shared", "groupFallback": "earliest"}
ALL_KINDS = [GROUP | EARLIEST, SHARED, GROUP | EARLIEST | {"messageModel": "broadcasting"}]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two topics with two queues, two messages in each queue."""
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 16) as writer:
        for topic in ("orders", "payments"):
            writer.create_topic(topic, 2)
            for number in range(4):
                writer.send(topic, "x", queue_id=number % 2)
    return tmp_path / "store"


def set_topic(store: Path, topic: str, **fields: Any) -> None:
    path = store / "config" / "topics.json"
    table = json.loads(path.read_text())
    table["topicConfigTable"][topic] |= fields
    new = path.with_suffix(".new")  # a file of its own: two changes of one file may have the same time
    new.write_text(json.dumps(table))
    new.replace(path)


def set_group(store: Path, **fields: Any) -> None:
    table = {"subscriptionGroupTable": {"billing": {"groupName": "billing", **fields}}}
    (store / "config" / "subscriptionGroup.json").write_text(json.dumps(table))


def batch(store: Path, **given: str) -> list[QueueKey]:
    parsed = parse_options({"path": str(store), "subscribe": "orders"} | given, 0)
    parts = RmqBatchReader(parsed, ReadSettings(("topic",), False, 1 << 20, True)).partitions()
    return sorted(piece.queue for part in parts for piece in part.pieces)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


AT_GROUP = {"consumerGroup": "billing", "startingOffsets": "group", "groupFallback": "earliest"}


def leave(query: Any) -> None:
    if query.reader._group is not None:
        query.reader._group.query.leave({})


@pytest.mark.parametrize("options", ALL_KINDS)
def test_a_topic_without_the_permission_to_read_is_refused_to_a_group(store: Path, query_on, options) -> None:
    set_topic(store, "orders", perm=2)
    query = query_on(store, **options)
    with pytest.raises(NoPermissionError, match=r'group "billing" may not read: topic "orders" has perm=2'):
        query.trigger()
    leave(query)
    with pytest.raises(NoPermissionError, match="NO_PERMISSION"):
        batch(store, **AT_GROUP)


@pytest.mark.parametrize("options", ALL_KINDS)
def test_a_group_that_may_not_consume_is_refused(store: Path, query_on, options) -> None:
    set_group(store, consumeEnable=False)
    query = query_on(store, **options)
    with pytest.raises(NoPermissionError, match=r'"billing" may not consume: .*subscriptionGroup.json.*consumeEnable'):
        query.trigger()
    leave(query)
    with pytest.raises(NoPermissionError, match="consumeEnable=false"):
        batch(store, **AT_GROUP)


def test_broadcasting_is_refused_where_the_group_may_not(store: Path, query_on) -> None:
    set_group(store, consumeBroadcastEnable=False)
    with pytest.raises(NoPermissionError, match="consumeBroadcastEnable=false"):
        query_on(store, **ALL_KINDS[2]).trigger()
    query = query_on(store, **ALL_KINDS[0])
    assert len(query.trigger()) == 4
    leave(query)


@pytest.mark.parametrize("options", ALL_KINDS)
def test_a_queue_beyond_those_of_consumers_is_not_read_and_that_is_said_once(
    store: Path, query_on, caplog, options
) -> None:
    set_topic(store, "orders", readQueueNums=1)
    query = query_on(store, **options)
    rows = [row for some in query.drain() for row in some]
    assert rows == [(0, 0), (0, 1)]
    said = [one for one in warnings(caplog) if "readQueueNums=1" in one]
    assert len(said) == 1
    assert "queue orders/1 is beyond readQueueNums=1" in said[0]
    leave(query)
    assert batch(store, **AT_GROUP | {"consumerGroup": "other"}) == [QueueKey("orders", 0)]


@pytest.mark.parametrize("options", ALL_KINDS)
def test_a_queue_that_is_closed_and_opened_again_goes_on_where_it_was(store: Path, query_on, options) -> None:
    query = query_on(store, **options)
    query.drain()
    set_topic(store, "orders", readQueueNums=1)
    with rmq_spark.open_store(store) as writer:
        for number in range(4):
            writer.send("orders", "x", queue_id=number % 2)
    assert [row for some in query.drain() for row in some] == [(0, 2), (0, 3)]
    set_topic(store, "orders", readQueueNums=2)
    with rmq_spark.open_store(store) as writer:
        writer.send("orders", "x", queue_id=1)
    assert [row for some in query.drain() for row in some] == [(1, 2), (1, 3), (1, 4)]
    leave(query)


def test_a_stream_notices_that_its_group_or_topic_was_closed(store: Path, query_on) -> None:
    query = query_on(store, maxOffsetsPerTrigger="1", **ALL_KINDS[0])
    query.trigger()
    set_group(store, consumeEnable=False)
    with pytest.raises(NoPermissionError):
        query.trigger()
    set_group(store, consumeEnable=True)
    query.trigger()
    set_topic(store, "orders", perm=2)
    with pytest.raises(NoPermissionError):
        query.trigger()
    set_topic(store, "orders", perm=6)
    assert len([row for some in query.drain() for row in some]) == 2
    leave(query)


def test_a_pattern_leaves_a_closed_topic_out_and_an_assignment_refuses_it(store: Path, query_on, caplog) -> None:
    set_topic(store, "orders", perm=2, readQueueNums=2)
    set_topic(store, "payments", readQueueNums=1)
    query = query_on(store, subscribePattern="orders|payments", **ALL_KINDS[0])
    assert query.drain() == [[(0, 0), (0, 1)]]
    assert len([one for one in warnings(caplog) if 'topic "orders" has perm=2' in one]) == 1
    leave(query)
    query = query_on(store, assign='{"payments": [1]}', **ALL_KINDS[0])
    with pytest.raises(NotFoundError, match="payments/1 is beyond readQueueNums=1"):
        query.trigger()
    leave(query)


def test_a_query_without_a_group_reads_all_and_says_so_once(store: Path, query_on, caplog) -> None:
    set_topic(store, "orders", perm=2)
    set_topic(store, "payments", readQueueNums=1)
    query = query_on(store, subscribe="orders,payments", **EARLIEST)
    assert len(query.drain()[0]) == 8
    query.drain()
    said = warnings(caplog)
    assert len(said) == 2
    assert all("This query has no group and reads it" in one for one in said)
    assert len(batch(store, subscribe="orders,payments")) == 4


def test_a_pull_consumer_is_refused_as_by_a_broker_and_one_without_a_group_is_not(store: Path, caplog) -> None:
    set_topic(store, "orders", perm=2)
    set_topic(store, "payments", readQueueNums=1)
    with rmq_spark.open_consumer(store, "billing") as consumer:
        with pytest.raises(NoPermissionError, match="without 4"):
            consumer.pull(QueueKey("orders", 0), 0)
        with pytest.raises(NoPermissionError):
            consumer.queues("orders")
        assert consumer.queues("payments") == [QueueKey("payments", 0)]
        assert consumer.pull(QueueKey("payments", 0), 0).messages.num_rows == 2
        with pytest.raises(NotFoundError, match="readQueueNums=1"):
            consumer.pull(QueueKey("payments", 1), 0)
        set_group(store, consumeEnable=False)
        with pytest.raises(NoPermissionError, match="consumeEnable=false"):
            consumer.pull(QueueKey("payments", 0), 0)
        set_group(store, consumeEnable=True)
        set_topic(store, "orders", perm=6)
        assert consumer.pull_block_if_not_found(QueueKey("orders", 0), 0).messages.num_rows == 2
        set_topic(store, "orders", perm=2)
    assert warnings(caplog) == []
    with rmq_spark.open_consumer(store) as consumer:
        for queue_id in (0, 1, 0):
            assert consumer.pull(QueueKey("orders", queue_id), 0).messages.num_rows == 2
    [said] = warnings(caplog)
    assert 'topic "orders" has perm=2' in said
