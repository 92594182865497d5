"""The fields of one record of the commit log: position, size, name and value of each, as a picture or a table needs."""

from dataclasses import dataclass

import numpy as np

from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.format.java import decode_host
from rmq_spark.store.format.record import MAGIC_V1, RecordParts, find_parts
from rmq_spark.store.model import QueueKey
from rmq_spark.store.tools.finding import field_position
from rmq_spark.store.view.explorer import StoreExplorer

_SIZE_BYTES = 4  # of the record's first field, its size


@dataclass(frozen=True, slots=True)
class RecordField:
    """One field of a record. `position` counts from the record's first byte, and `size` is in bytes.

    `value` is a text: a number in decimal, the magic and the CRC in hex, a host as `address:port`, and texts as they
    are. Bytes that are not UTF-8 are shown as U+FFFD.
    """

    position: int
    size: int
    name: str
    value: str


def record_fields(reader: StoreExplorer, queue: QueueKey, queue_offset: int) -> tuple[bytes, list[RecordField]]:
    """Return the bytes of a message's record as they are in the commit log, and its fields in their order.

    A message of a batch has the record of its batch. Raises the errors of `StoreExplorer.message`, and
    StoreChangedError if the record is removed meanwhile.
    """
    physical_offset = reader.message(queue, queue_offset).commit_log_offset
    size = int.from_bytes(reader.log.bytes_at(physical_offset, _SIZE_BYTES), "big")
    data = reader.log.bytes_at(physical_offset, size)
    parts = find_parts(data)
    if not isinstance(parts, RecordParts):  # it was one a moment ago
        raise StoreChangedError(
            f"record at physical offset {physical_offset}: it was removed or replaced meanwhile. Read again."
        )
    return data, fields_of(data, parts)


def fields_of(data: bytes, parts: RecordParts) -> list[RecordField]:
    """Return the fields of the record that starts at the first byte of `data`, in their order."""
    fields = []
    head = np.frombuffer(data, parts.layout, 1)[0]
    for name in parts.layout.names or ():
        position = field_position(parts.layout, name)
        fields.append(RecordField(position, parts.layout[name].itemsize, name, _value_text(name, head[name])))
    length_bytes = 1 if int(head["magic"]) == MAGIC_V1 else 2
    topic_end = parts.topic + parts.topic_size
    texts = (
        ("body", parts.body, parts.body + parts.body_size),
        ("topic_size", parts.topic - length_bytes, parts.topic),
        ("topic", parts.topic, topic_end),
        ("properties_size", topic_end, parts.properties),
        ("properties", parts.properties, parts.total_size),
    )
    for name, begin, end in texts:
        shown = data[begin:end]
        value = str(int.from_bytes(shown, "big")) if name.endswith("_size") else shown.decode("utf-8", "replace")
        fields.append(RecordField(begin, end - begin, name, value))
    return fields


def _value_text(name: str, value: np.generic) -> str:
    if name.endswith("_host"):
        return str(decode_host(value.tobytes()))
    number = int(value)  # all other fields of a head are numbers
    return f"{number:#x}" if name in ("magic", "body_crc") else str(number)
