"""What is wrong with whole records by themselves: bodies, properties, topics, times.

| looked at | by |
| --- | --- |
| the body | its CRC in the head; an empty body has none |
| all of a record with `__CRC32#` (enabledAppendPropCRC, 5.2) | that property |
| properties | each part has a separator, and a name without control characters; all is UTF-8 |
| the topic | a name that a broker takes |
| sysFlag | bits that mean something, and a kind of compression that there is |
| the store time | a single record hours apart from both neighbours, which agree: no clock does that |

Nothing vouches for flag, born time and host, store host, reconsumeTimes, the transaction's offset and the text of
properties: but for records with `__CRC32#` a change there is not to be told from what was sent.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.store.errors import OptionError
from rmq_spark.store.explore.layouts import field_position
from rmq_spark.store.explore.log_walk import LogBlock
from rmq_spark.store.format.filenames import check_topic_name
from rmq_spark.store.format.heads import gather
from rmq_spark.store.format.properties import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR
from rmq_spark.store.format.record import BODY_CRC_MASK, COMPRESSED, RECORD_HEAD

_CONTROLS = re.compile(rb"[\x00-\x1f\x7f]")
_KNOWN_FLAGS = 0x7FF  # see docs/FORMAT.md; MessageSysFlag (5.3)
_COMPRESSIONS, _LAST_COMPRESSION = 0x700, 0x300
CRC_PROPERTY = b"__CRC32#\x01"
CRC_PROPERTY_BYTES = 20  # name, separator, ten digits in reverse, separator
_CRC_AT = field_position(RECORD_HEAD, "body_crc")
_FLAG_AT = field_position(RECORD_HEAD, "sys_flag")
_TIME_AT = field_position(RECORD_HEAD, "store_timestamp")
_SPACE = 32  # below it are control characters
_FAR_MS = 600_000  # a record that is further from both its neighbours was never stored at that time


@dataclass(frozen=True, slots=True)
class RecordFault:
    """What is wrong with the record at physical offset `place`, at `position` bytes behind its begin.

    `row` is its number in the block; -1: it was the last one of the block before.
    """

    place: int
    row: int
    position: int
    what: str
    expected: str
    found: str
    action: str = "leave"  # "keep": no repair minds it; "cut": a writer's recovery would end the log there


class RecordCheck:
    """Looks at blocks in the order of the log; keeps the last time that it saw. One thread."""

    def __init__(self) -> None:
        self._topics: dict[str, bool] = {}
        self._last_places = self._last_times = np.zeros(0, np.int64)  # of the last two records before

    def faults(self, block: LogBlock) -> Iterator[RecordFault]:
        """Yield what is wrong with the records of a block."""
        yield from _wrong_bodies(block)
        yield from _wrong_sums(block)
        yield from _wrong_properties(block)
        yield from _wrong_flags(block)
        yield from self._wrong_topics(block)
        yield from self._odd_times(block)

    def _wrong_topics(self, block: LogBlock) -> Iterator[RecordFault]:
        for number, topic in enumerate(block.columns.topics):
            if not self._is_topic(topic):
                row = int(np.argmax(block.columns.topic_numbers == number))
                position = int(block.whole.topic_begins[row] - block.whole.positions[row])
                yield RecordFault(
                    int(block.columns.places[row]),
                    row,
                    position,
                    "the topic of a record",
                    "a topic's name",
                    repr(topic),
                )

    def _is_topic(self, topic: str) -> bool:
        if topic not in self._topics:
            try:
                check_topic_name(topic)
                self._topics[topic] = True
            except OptionError:
                self._topics[topic] = len(topic) <= 255 and topic.isascii() and topic.isprintable() and "/" not in topic
        return self._topics[topic]

    def _odd_times(self, block: LogBlock) -> Iterator[RecordFault]:
        """Tell single records stored far before or behind both their neighbours, which are in order."""
        known = len(self._last_times)
        times = np.append(self._last_times, block.columns.store_times)
        places = np.append(self._last_places, block.columns.places)
        self._last_times, self._last_places = times[-2:], places[-2:]
        if len(times) < 3:
            return
        before, these, after = times[:-2], times[1:-1], times[2:]
        gap = np.minimum(np.abs(these - before), np.abs(these - after))
        is_odd = (after >= before) & ((these < before) | (these > after)) & (gap > _FAR_MS)
        for at in (np.flatnonzero(is_odd) + 1).tolist():
            expected = f"{times[at - 1]} to {times[at + 1]}"
            row = max(at - known, -1)
            yield RecordFault(int(places[at]), row, _TIME_AT, "the store time of a record", expected, str(times[at]))


def _wrong_bodies(block: LogBlock) -> Iterator[RecordFault]:
    whole = block.whole
    view = whole.data.data
    begins, ends = whole.body_begins.tolist(), whole.body_ends.tolist()
    crc32 = zlib.crc32
    found = np.array([crc32(view[begin:end]) for begin, end in zip(begins, ends, strict=True)], np.int64)
    found &= BODY_CRC_MASK
    told = whole.field("body_crc").astype(np.int64)
    for row in np.flatnonzero((found != told) & (whole.body_begins < whole.body_ends)).tolist():
        yield RecordFault(
            block.begin + int(whole.positions[row]),
            row,
            _CRC_AT,
            "the CRC of a body",
            f"{told[row]:#010x}",
            f"{found[row]:#010x}",
            "cut",
        )


def _wrong_sums(block: LogBlock) -> Iterator[RecordFault]:
    """Compare the CRC of whole records that have one among their properties."""
    whole = block.whole
    rows = np.flatnonzero(whole.ends - whole.text_begins >= CRC_PROPERTY_BYTES)
    if not len(rows):
        return
    begins = whole.ends[rows] - CRC_PROPERTY_BYTES
    tails = gather(whole.data, begins, np.dtype([("text", f"S{CRC_PROPERTY_BYTES}")]))["text"]
    has_sum = np.char.startswith(tails, CRC_PROPERTY)
    for row, text in zip(rows[has_sum].tolist(), tails[has_sum].tolist(), strict=True):
        digits = text[len(CRC_PROPERTY) :][:10]
        begin, end = int(whole.positions[row]), int(whole.ends[row]) - CRC_PROPERTY_BYTES
        crc = zlib.crc32(whole.data.data[begin:end]) & BODY_CRC_MASK
        if not digits.isdigit() or int(digits[::-1]) != crc:
            yield RecordFault(
                block.begin + begin,
                row,
                end - begin,
                "the CRC of a record",
                f"{crc}",
                digits[::-1].decode("latin-1"),
                "keep",
            )


def _wrong_properties(block: LogBlock) -> Iterator[RecordFault]:
    """Tell parts of properties without a name or a separator, which every reader passes over in silence."""
    whole, texts = block.whole, block.whole.texts()
    if _are_regular(texts) and _are_texts(texts):
        return
    for row, text in enumerate(texts.to_pylist()):
        position = int(whole.text_begins[row] - whole.positions[row])
        place = block.begin + int(whole.positions[row])
        try:
            text.decode()
        except UnicodeDecodeError as error:
            at, shown = position + error.start, repr(text[max(error.start - 20, 0) : error.end + 20])
            yield RecordFault(place, row, at, "the properties of a record", "UTF-8", shown, "keep")
            continue
        for part in text.split(b"\x02"):
            name = part.partition(b"\x01")[0]
            if part and (part.find(b"\x01") <= 0 or _CONTROLS.search(name)):
                at = position + text.find(part)
                what, shown = "a property of a record", repr(part[:40])
                yield RecordFault(place, row, at, what, "name, 0x01, value", shown, "keep")
                break


def _wrong_flags(block: LogBlock) -> Iterator[RecordFault]:
    flags = block.columns.sys_flags
    is_wrong = (flags & ~_KNOWN_FLAGS != 0) | ((flags & COMPRESSED != 0) & (flags & _COMPRESSIONS > _LAST_COMPRESSION))
    for row in np.flatnonzero(is_wrong).tolist():
        expected, found = f"bits of {_KNOWN_FLAGS:#x}", f"{int(flags[row]) & 0xFFFFFFFF:#x}"
        yield RecordFault(int(block.columns.places[row]), row, _FLAG_AT, "the sysFlag of a record", expected, found)


def _are_texts(texts: pa.BinaryArray) -> bool:
    """Say whether all are UTF-8: brokers make them of Java's strings."""
    try:
        texts.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def _are_regular(texts: pa.BinaryArray) -> bool:
    """Say whether each text is name, 0x01, value, 0x02 again and again; the last 0x02 may be missing (before 5.2)."""
    _, bounds, data = texts.buffers()
    if data is None:
        return True
    offsets = np.frombuffer(bounds, np.int32, len(texts) + 1, texts.offset * 4).astype(np.int64)
    given = offsets[1:] > offsets[:-1]
    raw = np.frombuffer(data, np.uint8)
    lasts = raw[offsets[1:][given] - 1]
    if (lasts != PROPERTY_SEPARATOR).any():  # texts of 4.9: bring them to the other form
        texts = pc.binary_join_element_wise(texts.filter(pa.array(given)), pa.scalar(b"", pa.binary()), b"\x02")
        return _are_regular(texts) if (lasts != PROPERTY_SEPARATOR).all() else False
    raw = raw[offsets[0] : offsets[-1]]
    controls = np.flatnonzero(raw < _SPACE)
    kinds = raw[controls]
    is_separator = (kinds == NAME_VALUE_SEPARATOR) | (kinds == PROPERTY_SEPARATOR)
    if not is_separator.all():
        return False
    places = controls
    if len(kinds) % 2 or (kinds[0::2] != NAME_VALUE_SEPARATOR).any() or (kinds[1::2] != PROPERTY_SEPARATOR).any():
        return False
    begins = np.append(np.zeros(1, np.int64), places[1:-1:2] + 1) if len(places) else places
    return bool((places[0::2] > begins).all())
