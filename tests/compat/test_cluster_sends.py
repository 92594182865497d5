"""What our programs and Spark send to two brokers of a live cluster, as Java consumers get it.

Each column and property, the order within queues and sharding keys, delays at the brokers' times, compressed bodies.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from compat_kit.clusters import NAMES, TwoBrokers
from compat_kit.deliveries import Delivery, pull_deliveries
from compat_kit.rocketmq import Java
from compat_kit.their_lives import CONF

pytestmark = pytest.mark.compat

Row = dict[str, Any]
_SINGLE, _MANY, _SPARK, _KEYED, _DELAYED, _PACKED = "single", "many", "spark", "keyed", "delayed", "packed"
_CONF = CONF | {"messageDelayLevel": "1s 5s 10s"}
_TOPICS = (_SINGLE, _MANY, _SPARK, _KEYED, _DELAYED, _PACKED)
_COUNT = 3000
_KEYS = 13
_DELAYS_MS = {1: 1000, 2: 5000}  # of the brokers' levels
_LATE_MS = 3000  # how late a message of a busy broker may come
_SCHEMA = "body binary, tags string, keys string, properties map<string,string>, flag int, shardingKey string"


def rows_of(prefix: str, count: int) -> list[Row]:
    """Return rows with all columns that a message may have, some of them null or unusual."""
    return [
        {
            "body": f"{prefix}-{number:05d}".encode() + bytes([number % 256, 0, 255]),
            "tags": (None, "red", "grün", "A")[number % 4],
            "keys": (None, f"k{number}", f"k{number} all", "ключ")[number % 4],
            "properties": {"number": f"{number}", "text": 'a "quoted" \\ 字 \t', "empty": ""} if number % 3 else None,
            "flag": number - 5,
            "shardingKey": f"shard-{number % _KEYS}" if number % 2 else None,
        }
        for number in range(count)
    ]


class Sent:
    """Messages that we sent in every way, what we were told, and what a Java consumer got of each topic."""

    def __init__(self, java: Java, folder: Path) -> None:
        self.is_5 = java.is_5
        self.rows = {topic: rows_of(topic, 40 if topic == _SINGLE else _COUNT) for topic in (_SINGLE, _MANY, _SPARK)}
        self.keyed = [{"body": b"%06d" % number, "shardingKey": f"s{number % _KEYS}"} for number in range(20_000)]
        bodies = [b"%06d" % number + b"x" * 9000 for number in range(20)]
        self.packed = dict.fromkeys(("zlib", "lz4", "zstd"), bodies)
        with TwoBrokers(java, folder, **_CONF) as cluster, cluster.client() as client:
            single = [_as_arguments(row) for row in self.rows[_SINGLE]]
            self.single = cluster.write("send_messages", topic=_SINGLE, rows=single)
            self.many = cluster.write("send_table", topic=_MANY, rows=self.rows[_MANY], settings={})
            cluster.write("send_table", topic=_KEYED, rows=self.keyed, settings={})
            for kind, bodies in self.packed.items():
                rows = [{"body": kind.encode() + body} for body in bodies]
                cluster.write("send_table", topic=_PACKED, rows=rows, settings={"compression": kind})
            cluster.write("write_batch", topic=_SPARK, rows=self.rows[_SPARK], schema=_SCHEMA, options={"queues": "3"})
            self.delayed = self._send_delayed(cluster, is_5=java.is_5)
            time.sleep(8)
            found = pull_deliveries(client, _TOPICS)
        self.found = {topic: [one for one in found if one.topic == topic] for topic in _TOPICS}

    def _send_delayed(self, cluster: TwoBrokers, *, is_5: bool) -> dict[bytes, tuple[int, int]]:
        """Send delayed messages. Return for each body the earliest and the latest time of its delivery."""
        began_ms = _now_ms()
        at_ms = began_ms + 15_000
        rows: list[Row] = [
            {"body": f"level {level} {number}", "delay_level": level} for level in _DELAYS_MS for number in range(3)
        ]
        if is_5:
            rows += [{"body": f"at {number}", "deliver_at_ms": at_ms} for number in range(3)]
        cluster.write("send_messages", topic=_DELAYED, rows=rows)
        ended_ms = _now_ms()
        times = {}
        for row in rows:
            level, at = row.get("delay_level"), row.get("deliver_at_ms", 0)
            delay_ms = _DELAYS_MS[level] if level else 0
            bounds = (began_ms + delay_ms, ended_ms + delay_ms) if level else (at, max(at, ended_ms))
            times[row["body"].encode()] = (bounds[0], bounds[1] + _LATE_MS)
        if is_5:
            time.sleep(max(at_ms - _now_ms(), 0) / 1000)
        return times


def _now_ms() -> int:
    return time.time_ns() // 1_000_000  # noqa: TID251 - the clock of the producer and of the brokers


def _as_arguments(row: Row) -> Row:
    return {("sharding_key" if name == "shardingKey" else name): value for name, value in row.items()}


@pytest.fixture(scope="module")
def sent(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Sent:
    return Sent(java, tmp_path_factory.mktemp(f"sends-{java.version}"))


def assert_equal(found: Sequence[Delivery], rows: Sequence[Row]) -> None:
    """Compare each column and property of the rows with what a consumer got."""
    by_body = {one.body: one for one in found}
    assert len(by_body) == len(found) == len(rows)
    for row in rows:
        one = by_body[row["body"]]
        assert (one.flag, one.tags or None, one.keys or None) == (row["flag"], row["tags"], row["keys"])
        given = {name: text for name, text in (row["properties"] or {}).items() if text}
        if row["shardingKey"]:
            given["__SHARDINGKEY"] = row["shardingKey"]
        assert {name: one.properties.get(name) for name in given} == given
        brokers_own = {"UNIQ_KEY", "TAGS", "KEYS", "MSG_REGION", "TRACE_ON", "CLUSTER", "WAIT"}
        clients_own = {"MIN_OFFSET", "MAX_OFFSET", "CONSUME_START_TIME"}
        assert one.properties.keys() <= given.keys() | brokers_own | clients_own
        assert one.properties["UNIQ_KEY"] == one.msg_id
        assert one.reconsume_times == 0
        assert one.born_ms <= one.store_ms


def test_columns_and_properties_arrive_of_single_messages(sent: Sent) -> None:
    assert_equal(sent.found[_SINGLE], sent.rows[_SINGLE])


def test_columns_and_properties_arrive_of_many_messages(sent: Sent) -> None:
    assert_equal(sent.found[_MANY], sent.rows[_MANY])


def test_columns_and_properties_arrive_of_spark_rows(sent: Sent) -> None:
    assert_equal(sent.found[_SPARK], sent.rows[_SPARK])
    assert {(one.broker, one.queue_id) for one in sent.found[_SPARK]} == {
        (name, id_) for name in NAMES for id_ in range(3)
    }


def test_send_and_send_many_return_where_the_messages_are(sent: Sent) -> None:
    for topic, places in ((_SINGLE, sent.single), (_MANY, sent.many)):
        by_body = {one.body: one for one in sent.found[topic]}
        for row, place in zip(sent.rows[topic], places, strict=True):
            one = by_body[row["body"]]
            broker = place.get("broker") or place["brokerName"]
            expected = broker, place["queueId"], place["queueOffset"], place["msgId"]
            assert (one.broker, one.queue_id, one.queue_offset, one.msg_id) == expected


def test_messages_of_a_queue_keep_their_order(sent: Sent) -> None:
    for topic in (_MANY, _SPARK, _KEYED):
        queues: defaultdict[tuple[str, int], list[bytes]] = defaultdict(list)
        for one in sent.found[topic]:
            queues[one.broker, one.queue_id].append(one.body)
        assert len(queues) >= 6
        assert all(bodies == sorted(bodies) for bodies in queues.values())


def test_messages_of_a_sharding_key_are_in_one_queue_in_order(sent: Sent) -> None:
    keys: defaultdict[str, list[Delivery]] = defaultdict(list)
    for one in sent.found[_KEYED]:
        keys[one.properties["__SHARDINGKEY"]].append(one)
    assert len(keys) == _KEYS
    for found in keys.values():
        assert len({(one.broker, one.queue_id) for one in found}) == 1
        assert [one.body for one in found] == sorted(one.body for one in found)
    assert len(sent.found[_KEYED]) == len(sent.keyed)


def test_delayed_messages_are_delivered_at_the_brokers_times(sent: Sent) -> None:
    assert {one.body for one in sent.found[_DELAYED]} == sent.delayed.keys()
    assert len(sent.found[_DELAYED]) == len(sent.delayed)
    for one in sent.found[_DELAYED]:
        earliest, latest = sent.delayed[one.body]
        assert earliest <= one.store_ms + 1000, (one.body, one.store_ms - earliest)
        assert one.store_ms <= latest, (one.body, one.store_ms - latest)


def test_java_reads_compressed_bodies(sent: Sent) -> None:
    found = {one.body for one in sent.found[_PACKED]}
    assert found == {kind.encode() + body for kind, bodies in sent.packed.items() for body in bodies}
    if not sent.is_5:  # a client of 5.x removes the bit
        assert all(one.sys_flag & 1 for one in sent.found[_PACKED]), "they were compressed"
