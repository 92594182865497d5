"""Requests for single messages: by physical offset, and by key.

Source: QueryMessageProcessor (4.9, 5.3).
"""

from typing import TYPE_CHECKING

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.testing.brokers.server import HandlerTable
from rmq_spark.store.testing.brokers.wire import Answer, Call, Refusal

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

HANDLERS = HandlerTable()
_MAX_MESSAGES = 64  # maxMsgsNumBatch
_MAX_OF_UNIQUE_KEY = 32  # defaultQueryMaxNum


@HANDLERS.on(RequestCode.VIEW_MESSAGE_BY_ID)
def view_message(broker: "Broker", call: Call) -> Answer:
    """Answer with the record at a physical offset (#viewMessageById)."""
    offset = call.number("offset")
    record = broker.store.record_at(offset)
    if record is None:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {offset}")
    return Answer(body=record)


@HANDLERS.on(RequestCode.QUERY_MESSAGE)
def query_message(broker: "Broker", call: Call) -> Answer:
    """Answer with the records that have the hash of a key (#queryMessage)."""
    is_unique_key = call.flag("_UNIQUE_KEY_QUERY", default=False)
    count = _MAX_OF_UNIQUE_KEY if is_unique_key else min(call.number("maxNum"), _MAX_MESSAGES)
    begin_ms, end_ms = call.number("beginTimestamp"), call.number("endTimestamp")
    records = broker.store.records_with_key(call.text("topic"), call.text("key"), begin_ms, end_ms)[:count]
    newest = records[0] if records else bytes(64)
    fields = {
        "indexLastUpdatePhyoffset": str(int.from_bytes(newest[28:36], "big")),
        "indexLastUpdateTimestamp": str(int.from_bytes(newest[56:64], "big")),
    }
    if not records:
        raise Refusal(ResponseCode.QUERY_NOT_FOUND, "can not find message, maybe time range not correct", fields)
    return Answer(fields=fields, body=b"".join(records))
