"""Messages that have left their broker's log, sent again from their rows to the retry topic of a group.

A client of RocketMQ does the same if a broker cannot send a message back. The message has body, flag, tags, keys and
properties of the row, and also its id and born time if the row has these columns. Properties whose names the engine
owns are left out, as in any message. A message without an id gets one that is made from the place of its original, so
that it has the same id if it is sent again, and messages of equal content have different ids. These are set:

| property or field | value |
| --- | --- |
| RETRY_TOPIC | the topic from which the message was first consumed |
| ORIGIN_MESSAGE_ID | the id of the first original |
| DELAY | the delay level of the row, or 3 + reconsumeTimes; none for a dead letter |
| reconsumeTimes (j) | one more than in the row |
| maxReconsumeTimes (l) | so that brokers of both releases store the same messages in the dead letters |

A broker of 5.x compares j > l, one of 4.9 j >= l. So where the limit is known, l is 0 for a dead letter, and above j
for the others. Where the group's own limit decides, a broker of 4.9 makes a dead letter one failure earlier.

Source: DefaultMQPushConsumerImpl#sendMessageBackAsNormalMessage, SendMessageProcessor#handleRetryAndDLQ (4.9, 5.3).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.store.batch_sink import SendBackTerms
from rmq_spark.store.format.batch_items import DELAY, ItemEncoder, split_item
from rmq_spark.store.format.body_codec import BodyRules
from rmq_spark.store.format.broker_router import BrokerRouter
from rmq_spark.store.format.content_ids import ContentIds
from rmq_spark.store.format.failed_rows import FailedRows
from rmq_spark.store.format.message_columns import RowFault
from rmq_spark.store.format.properties import RETRY_TOPIC, UNIQ_KEY, encode, parse
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import RETRY_TOPIC_PREFIX, retry_topic

ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
FIRST_LEVEL = 3  # the delay level of a message that fails for the first time
_TAKEN = ("body", "tags", "keys", "properties", "flag")


@dataclass(frozen=True, slots=True)
class ResentMessage:
    """The parts of a request that sends a message again. `max_times` None means the group's own limit."""

    body: bytes
    properties: str
    flag: int
    born_ms: int
    times: int
    max_times: int | None


class Resender:
    """Makes messages for the retry topic of the group in `terms`. Not thread-safe.

    `stored_name` returns the cluster's name of a topic. `born_ms` is the current time, in ms since the epoch.
    """

    def __init__(self, terms: SendBackTerms, stored_name: Callable[[str], str], born_ms: int) -> None:
        self._terms, self._stored_name, self._born_ms = terms, stored_name, born_ms
        self._retry = retry_topic(terms.group)
        queues = (QueueKey(self._retry, 0, "-"),)  # the caller chooses the broker
        self._router = BrokerRouter(lambda _: queues, 0)
        self._encoder = ItemEncoder(BodyRules(), lambda _: None)

    def encode(
        self, rows: pa.RecordBatch, failed: FailedRows, row: int, queue: QueueKey, shown_row: int | None
    ) -> ResentMessage:
        """Return the message of one row. `failed` are the same rows as `rows`. `queue` had the original.

        Raises RowFault if the row has no body, and OptionError with the number `shown_row` if it cannot be encoded.
        """
        columns: dict[str, Any] = dict(zip(rows.schema.names, rows.columns, strict=True))
        if "body" not in columns or not columns["body"][row].is_valid:
            raise RowFault(
                row,
                f"{failed.describe(row)} cannot be sent back: its original has expired, and the row has no body. "
                "Select the column body too (and tags, keys, properties to keep them).",
            )
        taken = {name: columns[name].slice(row, 1) for name in _TAKEN if name in columns}
        message = pa.RecordBatch.from_pydict({"topic": pa.array([self._retry]), **taken})
        ids = ContentIds(self._describe_place(failed, row, queue)).take(np.zeros(1, np.uint64))
        items = self._encoder.encode(message, self._router, lambda _, __: ids, self._born_ms, shown_row)
        flag, body, text = split_item(items.data.tobytes())
        times, level, limit = self._decide(failed, row)
        properties = {**parse(text.encode()), **self._trail(columns, failed, row)}
        if level:
            properties[DELAY] = str(level)
        return ResentMessage(body, encode(properties).decode(), flag, self._born_of(columns, row), times, limit)

    def _describe_place(self, failed: FailedRows, row: int, queue: QueueKey) -> str:
        """Return a text that only the message of this row has, in this group."""
        stored = self._stored_name(queue.topic), queue.broker, queue.queue_id
        offsets = int(failed.queue_offsets[row]), int(failed.physical_offsets[row])
        return "/".join(map(str, ("resent", self._terms.group, *stored, *offsets)))

    def _decide(self, failed: FailedRows, row: int) -> tuple[int, int, int | None]:
        """Return reconsumeTimes, delay level (0 for a dead letter) and maxReconsumeTimes of a message."""
        earlier, times = int(failed.reconsume_times[row]), int(failed.copy_times[row])
        level, limit = int(failed.asked_levels[row]), self._terms.max_reconsume_times
        if level < 0 or (limit is not None and earlier >= limit):
            return times, 0, 0
        return times, level or FIRST_LEVEL + max(earlier, 0), None if limit is None else max(limit, times) + 1

    def _trail(self, columns: Mapping[str, Any], failed: FailedRows, row: int) -> dict[str, str]:
        """Return the properties that link a message with its original and its earlier copies."""

        def existing(name: str) -> str:
            properties = columns.get("properties")
            found = None if properties is None else pc.map_lookup(properties.slice(row, 1), name, "last")[0].as_py()
            return (found or "").strip()

        def value(name: str) -> str:
            return (columns[name][row].as_py() or "").strip() if name in columns else ""

        unique = existing(UNIQ_KEY) or value("msgId")
        seen = [existing(RETRY_TOPIC)]
        for topics in (failed.topics, failed.physical_topics):
            name = None if topics is None else topics[row].as_py()
            seen.append("" if name is None or name.startswith(RETRY_TOPIC_PREFIX) else self._stored_name(name))
        trail = {
            UNIQ_KEY: unique,
            ORIGIN_MESSAGE_ID: existing(ORIGIN_MESSAGE_ID) or unique or value("offsetMsgId"),
            RETRY_TOPIC: next(filter(None, seen), ""),
        }
        return {name: text for name, text in trail.items() if text}

    def _born_of(self, columns: Mapping[str, Any], row: int) -> int:
        if "bornTimestamp" not in columns or not columns["bornTimestamp"][row].is_valid:
            return self._born_ms
        return (
            int(columns["bornTimestamp"].slice(row, 1).cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())[0].as_py())
            // 1000
        )
