"""Messages whose originals are gone, made from their rows: what a client sends where a broker cannot look one up.

It is a new message with the body, flag, tags, keys and properties of the row, and with the row's id and born time where
the row has them. Names that the engine owns are left out as in any message; RECONSUME_TIME and MAX_RECONSUME_TIMES say
what a client says. Source: DefaultMQPushConsumerImpl#sendMessageBackAsNormalMessage, SendMessageProcessor
#handleRetryAndDLQ (5.3; 4.9 gives a message up one failure earlier here).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.store.commit.outbox import Outbox, OutboxSettings
from rmq_spark.store.delivery.failed_rows import FailedRows
from rmq_spark.store.delivery.retry_properties import ORIGIN_MESSAGE_ID
from rmq_spark.store.delivery.retry_topics import RetryTopics
from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.format.filenames import RETRY_TOPIC_PREFIX
from rmq_spark.store.format.message_columns import RowFault
from rmq_spark.store.format.properties import RETRY_TOPIC, UNIQ_KEY
from rmq_spark.store.format.property_edits import Put, edit_properties
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.format.whole_records import WholeRecords, unaligned

RECONSUME_TIME, MAX_RECONSUME_TIMES = "RECONSUME_TIME", "MAX_RECONSUME_TIMES"
_TAKEN = ("body", "tags", "keys", "properties", "flag")
_FIELDS: Any = RECORD_HEAD.fields
_NONE = pa.scalar(None, pa.string())


@dataclass(frozen=True, slots=True)
class Resent:
    """Records of rows, and the properties that their copies are to begin with."""

    records: EncodedRecords
    texts: pa.BinaryArray


class Resender:
    """Encodes rows for the retry topic of a group. For one thread."""

    def __init__(self, root: str, topics: RetryTopics, commit_log_path: str | None) -> None:
        self._topics = topics
        self._outbox = Outbox(root, OutboxSettings(commit_log_path, queue_count=topics.retry_queues))

    def encode(self, batch: pa.RecordBatch, rows: FailedRows) -> Resent:
        """Return the rows, at least one, as records. Raises RowFault for one that has no body."""
        columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
        body = columns.get("body")
        if body is None or body.null_count:
            row = 0 if body is None else body.is_null().index(True).as_py()
            raise RowFault(
                row,
                f"{rows.describe(row)} is to be sent from the row, for its original cannot be used, and the row has no "
                "body. Select the column body too (and tags, keys, properties to keep them).",
            )
        taken = {name: columns[name] for name in _TAKEN if name in columns}
        retry = pa.repeat(pa.scalar(self._topics.retry), batch.num_rows)
        try:
            records = self._outbox.encode(pa.RecordBatch.from_pydict({"topic": retry, **taken}), None)
        except OptionError as error:
            raise RowFault(0, f"from this row on: {error}") from None
        ends = np.cumsum(records.sizes)
        if "bornTimestamp" in columns:
            layout, at = _FIELDS["born_timestamp"][:2]
            born_ms = columns["bornTimestamp"].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
            known = born_ms.is_valid().to_numpy(zero_copy_only=False)
            data = records.data if records.data.flags.writeable else records.data.copy()
            places = (ends - records.sizes + at)[known]
            unaligned(data, layout)[places] = pc.fill_null(born_ms, 0).to_numpy()[known] // 1000
            records = replace(records, data=data)
        texts = WholeRecords.of(records.data, ends - records.sizes, ends).texts()
        return Resent(records, edit_properties(texts, (), self._trail(columns, rows)))

    def _trail(self, columns: dict[str, Any], rows: FailedRows) -> dict[str, Put]:
        """Return what the row knows of the message's earlier copies."""
        properties = columns.get("properties")

        def held(name: str) -> pa.Array:
            if properties is None:
                return pa.nulls(len(rows), pa.string())
            return _without_blanks(pc.map_lookup(properties, name, "last").cast(pa.string()))

        message_ids = _without_blanks(columns["msgId"]) if "msgId" in columns else pa.nulls(len(rows), pa.string())
        unique = pc.coalesce(held(UNIQ_KEY), message_ids)
        first = pc.coalesce(held(ORIGIN_MESSAGE_ID), unique)
        if "offsetMsgId" in columns:
            first = pc.coalesce(first, _without_blanks(columns["offsetMsgId"]))
        seen = [held(RETRY_TOPIC)]
        for topics in (rows.topics, rows.physical_topics):
            if topics is not None:
                seen.append(pc.if_else(pc.starts_with(topics, RETRY_TOPIC_PREFIX), _NONE, topics))
        put: dict[str, Put] = {
            UNIQ_KEY: unique.cast(pa.binary()),
            ORIGIN_MESSAGE_ID: first.cast(pa.binary()),
            RETRY_TOPIC: pc.coalesce(*seen).cast(pa.binary()),
            RECONSUME_TIME: pa.array(rows.copy_times).cast(pa.string()).cast(pa.binary()),
            MAX_RECONSUME_TIMES: str(self._topics.max_reconsume_times).encode(),
        }
        return put


def _without_blanks(texts: pa.Array) -> pa.Array:
    return pc.if_else(pc.fill_null(pc.equal(pc.utf8_trim_whitespace(texts), ""), True), _NONE, texts)
