"""Messages as rows that can be compared: from our reader, RocketMQ's store classes, and its client.

A row has all of our columns. A body is its SHA-1 and length, so that rows stay small; times are ms; an IPv6 address is
formatted as by Python. Properties that depend on the moment of consuming (MIN_OFFSET, MAX_OFFSET, CONSUME_START_TIME)
are left out.
"""

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import rmq_spark
from rmq_spark.store.format.body_codec import COMPRESSION_TYPE_MASK
from rmq_spark.store.format.record import COMPRESSED
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueKey

Row = dict[str, Any]
Rows = dict[QueueKey, list[Row]]

_SAME_NAME = (
    *("queueId", "queueOffset", "commitLogOffset", "tags", "keys", "bornTimestamp", "storeTimestamp", "reconsumeTimes"),
    *("msgId", "offsetMsgId", "flag", "sysFlag"),
)
_OF_A_PULL = ("MIN_OFFSET", "MAX_OFFSET", "CONSUME_START_TIME")


def our_rows(store: Path) -> Rows:
    """Return every message of a store as our reader sees it, bodies checked against their CRC."""
    found: Rows = {}
    with rmq_spark.open_reader(str(store)) as reader:
        follow(reader, found)
    return found


def follow(reader: StoreReader, found: Rows) -> None:
    """Add new rows of a reader to its earlier rows; bodies are checked against their CRC."""
    reader.refresh()
    for topic in reader.topics():
        for queue in reader.queues(topic):
            held, rows = reader.bounds(queue), found.setdefault(queue, [])
            begin = rows[-1]["queueOffset"] + 1 if rows else held.min_offset
            batches = reader.read(queue, begin, held.max_offset, tuple(rmq_spark.COLUMNS), check_crc=True)
            rows += [_of_ours(row) for batch in batches for row in batch.to_pylist()]


def table_rows(table: Iterable[Mapping[str, Any]]) -> Rows:
    """Return rows of a table with all of our columns, by queue, in the order of their offsets."""
    found: Rows = {}
    for row in sorted(table, key=lambda row: int(row["queueOffset"])):
        found.setdefault(QueueKey(row["physicalTopic"], row["queueId"]), []).append(_of_ours(row))
    return found


def our_bounds(store: Path) -> dict[QueueKey, tuple[int, int]]:
    """Return where every queue of a store begins and ends, as our reader sees it."""
    with rmq_spark.open_reader(str(store)) as reader:
        reader.refresh()
        queues = [queue for topic in reader.topics() for queue in reader.queues(topic)]
        bounds = {queue: reader.bounds(queue) for queue in queues}
    return {queue: (held.min_offset, held.max_offset) for queue, held in bounds.items()}


def their_rows(messages: Iterable[Mapping[str, Any]]) -> Rows:
    """Return the messages that RocketMQ's store classes or client printed, by queue, in the order of their offsets."""
    found: Rows = {}
    for message in messages:
        for one in message.get("inner", [message]):
            row = _of_theirs(one)
            found.setdefault(QueueKey(row["physicalTopic"], row["queueId"]), []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: row["queueOffset"])
    return found


def bound_differences(ours: Mapping[QueueKey, tuple[int, int]], theirs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each queue whose bounds differ from those of RocketMQ's store classes.

    A queue without messages equals a missing one. 4.9 leaves the min offset of a fully expired queue at 0, and then
    finds entries there without a record (ConsumeQueue#correctMinOffset).
    """
    lines, found = [], {QueueKey(queue["topic"], queue["queueId"]): queue for queue in theirs}
    for key in sorted({*ours, *found}):
        one, other = ours.get(key, (0, 0)), found.get(key, {"min": 0, "max": 0, "undecodable": 0})
        is_expired = one[0] == one[1] == other["max"] and other["min"] == 0
        if not is_expired and (one != (other["min"], other["max"]) or other["undecodable"]):
            lines.append(f"{key}: bounds {one}, theirs {dict(other)}")
    return lines


def differences(ours: Rows, theirs: Rows) -> list[str]:
    """Return a line for each difference: queues, offsets, columns. An empty queue equals a missing one."""
    lines = []
    for queue in sorted({*ours, *theirs}):
        one, other = ours.get(queue, []), theirs.get(queue, [])
        offsets, others = [row["queueOffset"] for row in one], [row["queueOffset"] for row in other]
        if offsets != others:
            lines.append(f"{queue}: offsets {_short(offsets)}, theirs {_short(others)}")
            continue
        for row, twin in zip(one, other, strict=True):
            lines += [
                f"{queue} at {row['queueOffset']}, {name}: {row.get(name)!r}, theirs {twin.get(name)!r}"
                for name in sorted({*row, *twin})
                if row.get(name) != twin.get(name)
            ]
    return lines


def count(rows: Rows) -> int:
    """Return how many messages there are."""
    return sum(map(len, rows.values()))


def _of_ours(row: Mapping[str, Any]) -> Row:
    found = {name: row[name] for name in _SAME_NAME}
    found |= {name: round(row[name].timestamp() * 1000) for name in ("bornTimestamp", "storeTimestamp")}
    found |= {name: _host(row[name]) for name in ("bornHost", "storeHost")}
    body = row["body"]
    return found | {
        "topic": row["topic"],
        "physicalTopic": row["physicalTopic"],
        "body": (len(body), hashlib.sha1(body).hexdigest()),
        "properties": dict(row["properties"]),
    }


def _of_theirs(message: Mapping[str, Any]) -> Row:
    found = {name: message.get(name) for name in _SAME_NAME}
    found |= {name: _host(message[name]) for name in ("bornHost", "storeHost")}
    properties = {name: text for name, text in message["properties"].items() if name not in _OF_A_PULL}
    if "storedSysFlag" in message:
        found["sysFlag"] = message["storedSysFlag"]
    elif found["sysFlag"] & COMPRESSION_TYPE_MASK:
        found["sysFlag"] |= COMPRESSED  # 5.x clears the bit of a body that it has decompressed, and leaves the type
    topic = message["topic"]
    # The client restores it for a listener: DefaultMQPushConsumerImpl#resetRetryAndNamespace.
    restored = properties.get("RETRY_TOPIC", topic) if topic.startswith("%RETRY%") else topic
    return found | {
        "topic": restored,
        "physicalTopic": topic,
        "body": (message["bodyLength"], message["bodySha1"]),
        "properties": properties,
    }


def _host(text: str) -> str:
    address, port = text.rsplit(":", 1)
    return f"{ipaddress.ip_address(address.strip('[]'))}:{port}"


def _short(numbers: list[int]) -> str:
    return f"[{numbers[0]}..{numbers[-1]}], {len(numbers)}" if numbers else "none"
