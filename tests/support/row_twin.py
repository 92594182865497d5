"""The rows of a store, read slowly and simply: the twin of the fast decoder.

One record at a time by `record.decode_record`, one message at a time by `properties.parse`; no column, no numpy.
For stores after a clean shutdown, without stale records: it reads only the log, no consume-queue entries.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.body_codec import decompress_body
from rmq_spark.store.format.consume_queue_entry import decode_items
from rmq_spark.store.format.java import decode_host
from rmq_spark.store.format.properties import KEYS, RETRY_TOPIC, TAGS, UNIQ_KEY, parse
from rmq_spark.store.format.record import (
    COMPRESSED,
    INNER_BATCH,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    Blank,
    Record,
    decode_record,
)
from rmq_spark.store.model import QueueKey

Row = dict[str, Any]
_NO_LIMIT = 1 << 40


def walk_records(store: str | Path) -> Iterator[Record]:
    """Yield the records of a store's commit log in order, up to the first position without one."""
    paths = sorted((Path(store) / filenames.COMMIT_LOG).iterdir())
    for path in paths:
        data, at = memoryview(path.read_bytes()), 0
        while at < len(data):
            found = decode_record(data[at:])
            if isinstance(found, Blank):
                break
            if not isinstance(found, Record) or found.physical_offset != int(path.name) + at:
                return
            yield found
            at += found.total_size


def slow_rows(store: str | Path) -> dict[QueueKey, list[Row]]:
    """Return all rows by queue, each with every column; times as microseconds, properties as a dict."""
    rows: dict[QueueKey, list[Row]] = {}
    for record in walk_records(store):
        if record.sys_flag & TRANSACTION_MASK in (0, TRANSACTION_COMMIT):
            key = QueueKey(record.topic.decode(), record.queue_id)
            rows.setdefault(key, []).extend(rows_of(record))
    return rows


def rows_of(record: Record) -> list[Row]:
    """Return the rows of one record: one, or one for each message of an inner batch.

    A message of a batch has its own flag, body and properties, reconsumeTimes 0, and all other fields, with WAIT, from
    the record (MessageDecoder#decodeMessage, 5.3).
    """
    if not record.sys_flag & INNER_BATCH:
        return [_row(record, 0, record.flag, record.body, parse(record.properties), record.reconsume_times)]
    items, fault = decode_items(record.body)
    assert fault is None, fault
    wait = {"WAIT": str(parse(record.properties).get("WAIT", "true").lower() == "true").lower()}
    return [
        _row(record, number, item.flag, item.body, {**parse(item.properties), **wait}, 0)
        for number, item in enumerate(items)
    ]


def _row(record: Record, number: int, flag: int, body: bytes, properties: dict[str, str], reconsumed: int) -> Row:
    if body and record.sys_flag & COMPRESSED:
        body = decompress_body(body, record.sys_flag, _NO_LIMIT)
    topic = record.topic.decode("utf-8", "replace")
    offset_id = (record.store_host + record.physical_offset.to_bytes(8, "big")).hex().upper()
    return {
        "topic": properties.get(RETRY_TOPIC, topic) if topic.startswith("%RETRY%") else topic,
        "queueId": record.queue_id,
        "queueOffset": record.queue_offset + number,
        "commitLogOffset": record.physical_offset,
        "tags": properties.get(TAGS),
        "keys": properties.get(KEYS),
        "body": body,
        "bornTimestamp": record.born_timestamp * 1000,
        "storeTimestamp": record.store_timestamp * 1000,
        "reconsumeTimes": reconsumed,
        "properties": properties,
        "msgId": properties.get(UNIQ_KEY, offset_id),
        "offsetMsgId": offset_id,
        "bornHost": str(decode_host(record.born_host)),
        "storeHost": str(decode_host(record.store_host)),
        "flag": flag,
        "sysFlag": record.sys_flag,
        "physicalTopic": topic,
    }
