"""Checks of complete records: bodies, properties, topics, sysFlag and store times.

| field | what is verified |
| --- | --- |
| body | matches its CRC in the header, unless the body is empty |
| whole record, if it has the property `__CRC32#` (enabledAppendPropCRC, 5.2) | matches the CRC in that property |
| properties | are UTF-8; each has a separator, and a name without control characters |
| topic | is a topic name that a broker accepts |
| sysFlag | has only defined bits, and a defined kind of compression |
| store time | is within minutes of the previous or the next record's, if these two are in order |

The other fields have no checksum: flag, born time, born host, store host, reconsumeTimes, the transaction's offset and
the text of the properties. If one of them was changed, the check cannot detect it, unless the record has `__CRC32#`.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.properties import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR, RECORD_CRC
from rmq_spark.store.format.record import BODY_CRC_MASK, COMPRESSED, RECORD_HEAD
from rmq_spark.store.format.record_headers import gather
from rmq_spark.store.names import check_topic_name
from rmq_spark.store.tools.finding import Action, field_position
from rmq_spark.store.tools.log_walk import LogBlock

_CONTROLS = re.compile(rb"[\x00-\x1f\x7f]")
_KNOWN_FLAGS = 0x7FF  # see docs/FORMAT.md; MessageSysFlag (5.3)
_COMPRESSIONS, _LAST_COMPRESSION = 0x700, 0x300
CRC_PROPERTY = RECORD_CRC.encode() + b"\x01"
CRC_PROPERTY_BYTES = 20  # name, separator, ten digits in reverse order, separator
_CRC_AT = field_position(RECORD_HEAD, "body_crc")
_FLAG_AT = field_position(RECORD_HEAD, "sys_flag")
_TIME_AT = field_position(RECORD_HEAD, "store_timestamp")
_SPACE = 32  # lower bytes are control characters
_FAR_MS = 600_000  # a store time is wrong if it differs by more than this from both neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFault:
    """A wrong field of the record at `physical_offset`. `position` is the field's position in the record (bytes).

    `row` is the record's index in the block, or -1 if it is the last record of the previous block. `action` is KEEP if
    a repair does not depend on the field, CUT if recovery would truncate the log before the record, else LEAVE.
    """

    physical_offset: int
    row: int
    position: int
    what: str
    expected: str
    found: str
    action: Action = Action.LEAVE


class RecordCheck:
    """Checks the records of blocks, which must be given in the order of the log. Not thread-safe.

    An instance keeps the last two store times of earlier blocks, to compare them with those of the next block.
    """

    def __init__(self) -> None:
        self._topics: dict[str, bool] = {}  # topic name -> whether a broker accepts it
        # Physical offsets and store times (ms) of the last two records of earlier blocks.
        self._last_offsets = self._last_times = np.zeros(0, np.int64)

    def faults(self, block: LogBlock) -> Iterator[RecordFault]:
        """Yield the wrong fields of a block's records. One record may have several."""
        yield from _wrong_body_crcs(block)
        yield from _wrong_record_crcs(block)
        yield from _wrong_properties(block)
        yield from _wrong_flags(block)
        yield from self._wrong_topics(block)
        yield from self._odd_times(block)

    def _wrong_topics(self, block: LogBlock) -> Iterator[RecordFault]:
        for number, topic in enumerate(block.columns.topics):
            if topic not in self._topics:
                try:
                    check_topic_name(topic)
                    self._topics[topic] = True
                except OptionError:  # a broker also uses names that clients may not use, such as that of its cluster
                    is_printable = topic.isascii() and topic.isprintable()
                    self._topics[topic] = len(topic) <= 255 and is_printable and "/" not in topic
            if not self._topics[topic]:
                row = int(np.argmax(block.columns.topic_numbers == number))
                yield RecordFault(
                    physical_offset=int(block.columns.places[row]),
                    row=row,
                    position=int(block.whole.topic_begins[row] - block.whole.positions[row]),
                    what="the topic of a record",
                    expected="a topic name",
                    found=repr(topic),
                )

    def _odd_times(self, block: LogBlock) -> Iterator[RecordFault]:
        """Yield records whose store time is far from those of both neighbours, if the neighbours are in order."""
        known = len(self._last_times)
        times = np.append(self._last_times, block.columns.store_times)
        physical_offsets = np.append(self._last_offsets, block.columns.places)
        self._last_times, self._last_offsets = times[-2:], physical_offsets[-2:]
        if len(times) < 3:
            return
        before, these, after = times[:-2], times[1:-1], times[2:]
        gap = np.minimum(np.abs(these - before), np.abs(these - after))
        is_odd = (after >= before) & ((these < before) | (these > after)) & (gap > _FAR_MS)
        for at in (np.flatnonzero(is_odd) + 1).tolist():
            yield RecordFault(
                physical_offset=int(physical_offsets[at]),
                row=max(at - known, -1),
                position=_TIME_AT,
                what="the store time of a record",
                expected=f"{times[at - 1]} to {times[at + 1]}",
                found=str(times[at]),
            )


def _wrong_body_crcs(block: LogBlock) -> Iterator[RecordFault]:
    whole = block.whole
    view = whole.data.data
    begins, ends = whole.body_begins.tolist(), whole.body_ends.tolist()
    crc32 = zlib.crc32
    actual = np.array([crc32(view[begin:end]) for begin, end in zip(begins, ends, strict=True)], np.int64)
    actual &= BODY_CRC_MASK
    stored = whole.field("body_crc").astype(np.int64)
    for row in np.flatnonzero((actual != stored) & (whole.body_begins < whole.body_ends)).tolist():
        yield RecordFault(
            physical_offset=block.begin + int(whole.positions[row]),
            row=row,
            position=_CRC_AT,
            what="the CRC of a body",
            expected=f"{stored[row]:#010x}",
            found=f"{actual[row]:#010x}",
            action=Action.CUT,
        )


def _wrong_record_crcs(block: LogBlock) -> Iterator[RecordFault]:
    """Yield records that differ from the CRC in their property `__CRC32#`. Records without it are skipped."""
    whole = block.whole
    rows = np.flatnonzero(whole.ends - whole.text_begins >= CRC_PROPERTY_BYTES)
    if not len(rows):
        return
    begins = whole.ends[rows] - CRC_PROPERTY_BYTES
    tails = gather(whole.data, begins, np.dtype([("text", f"S{CRC_PROPERTY_BYTES}")]))["text"]
    has_crc = np.char.startswith(tails, CRC_PROPERTY)
    for row, text in zip(rows[has_crc].tolist(), tails[has_crc].tolist(), strict=True):
        digits = text[len(CRC_PROPERTY) :][:10]
        begin, end = int(whole.positions[row]), int(whole.ends[row]) - CRC_PROPERTY_BYTES
        crc = zlib.crc32(whole.data.data[begin:end]) & BODY_CRC_MASK
        if not digits.isdigit() or int(digits[::-1]) != crc:
            yield RecordFault(
                physical_offset=block.begin + begin,
                row=row,
                position=end - begin,
                what="the CRC of a record",
                expected=f"{crc}",
                found=digits[::-1].decode("latin-1"),
                action=Action.KEEP,
            )


def _wrong_properties(block: LogBlock) -> Iterator[RecordFault]:
    """Yield records whose properties are not UTF-8, or that have a property without a valid name or a separator.

    Readers skip such a property silently. At most one fault is yielded for each record.
    """
    whole, texts = block.whole, block.whole.texts()
    if _are_regular(texts) and _are_utf8(texts):
        return
    for row, text in enumerate(texts.to_pylist()):
        position = int(whole.text_begins[row] - whole.positions[row])
        physical_offset = block.begin + int(whole.positions[row])
        try:
            text.decode()
        except UnicodeDecodeError as error:
            yield RecordFault(
                physical_offset=physical_offset,
                row=row,
                position=position + error.start,
                what="the properties of a record",
                expected="UTF-8",
                found=repr(text[max(error.start - 20, 0) : error.end + 20]),
                action=Action.KEEP,
            )
            continue
        for part in text.split(b"\x02"):
            name = part.partition(b"\x01")[0]
            if part and (part.find(b"\x01") <= 0 or _CONTROLS.search(name)):
                yield RecordFault(
                    physical_offset=physical_offset,
                    row=row,
                    position=position + text.find(part),
                    what="a property of a record",
                    expected="name, 0x01, value",
                    found=repr(part[:40]),
                    action=Action.KEEP,
                )
                break


def _wrong_flags(block: LogBlock) -> Iterator[RecordFault]:
    flags = block.columns.sys_flags
    is_wrong = (flags & ~_KNOWN_FLAGS != 0) | ((flags & COMPRESSED != 0) & (flags & _COMPRESSIONS > _LAST_COMPRESSION))
    for row in np.flatnonzero(is_wrong).tolist():
        yield RecordFault(
            physical_offset=int(block.columns.places[row]),
            row=row,
            position=_FLAG_AT,
            what="the sysFlag of a record",
            expected=f"bits of {_KNOWN_FLAGS:#x}",
            found=f"{int(flags[row]) & 0xFFFFFFFF:#x}",
        )


def _are_utf8(texts: pa.BinaryArray) -> bool:
    try:
        texts.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def _are_regular(texts: pa.BinaryArray) -> bool:
    """Return whether each text consists of properties: name, 0x01, value, 0x02.

    The last 0x02 of a text may be missing, as in records from before RocketMQ 5.2.
    """
    _, bounds, data = texts.buffers()
    if data is None:
        return True
    offsets = np.frombuffer(bounds, np.int32, len(texts) + 1, texts.offset * 4).astype(np.int64)
    given = offsets[1:] > offsets[:-1]
    raw = np.frombuffer(data, np.uint8)
    lasts = raw[offsets[1:][given] - 1]
    if (lasts != PROPERTY_SEPARATOR).any():  # RocketMQ 4.9 writes no last separator, so add it
        texts = pc.binary_join_element_wise(texts.filter(pa.array(given)), pa.scalar(b"", pa.binary()), b"\x02")
        return _are_regular(texts) if (lasts != PROPERTY_SEPARATOR).all() else False
    raw = raw[offsets[0] : offsets[-1]]
    controls = np.flatnonzero(raw < _SPACE)
    kinds = raw[controls]
    is_separator = (kinds == NAME_VALUE_SEPARATOR) | (kinds == PROPERTY_SEPARATOR)
    if not is_separator.all():
        return False
    if len(kinds) % 2 or (kinds[0::2] != NAME_VALUE_SEPARATOR).any() or (kinds[1::2] != PROPERTY_SEPARATOR).any():
        return False
    begins = np.append(np.zeros(1, np.int64), controls[1:-1:2] + 1) if len(controls) else controls
    return bool((controls[0::2] > begins).all())
