"""A segment of the commit log as a table: records, fillers, damage, and where it ends."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from rmq_spark.store.disk import files
from rmq_spark.store.explore.log_walk import LogBlock, LogFault, LogWalk
from rmq_spark.store.explore.sound_log import SoundLog
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS
from rmq_spark.store.format.filenames import parse_segment_name
from rmq_spark.store.format.java import decode_host
from rmq_spark.store.format.properties import KEYS, TAGS
from rmq_spark.store.format.ragged import as_text
from rmq_spark.store.format.record import BORN_HOST_V6, RECORD_HEAD, STORE_HOST_V6, Blank, body_crc
from rmq_spark.store.format.whole_records import WholeRecords, field_shift
from rmq_spark.store.log.segments import Segment, SegmentRun

_FIELDS: Any = RECORD_HEAD.fields
# Who names a position need not know where records begin.
_WITHIN = "position {} may be within a record; the next one that can be read is behind this"
_HOST_BYTES, _V6_HOST_BYTES = 8, 20
SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("entry", pa.string()),  # record, filler, damage, end
        ("size", pa.int64()),
        ("physicalOffset", pa.int64()),
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("queueOffset", pa.int64()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("storeTimestamp", pa.timestamp("ms", tz="UTC")),
        ("bornTimestamp", pa.timestamp("ms", tz="UTC")),
        ("storeHost", pa.string()),
        ("bornHost", pa.string()),
        ("magic", pa.int64()),
        ("sysFlag", pa.int32()),
        ("flag", pa.int32()),
        ("reconsumeTimes", pa.int32()),
        ("preparedTransactionOffset", pa.int64()),
        ("bodyPosition", pa.int64()),
        ("bodySize", pa.int32()),
        ("bodyCrc", pa.int64()),
        ("crcMatches", pa.bool_()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("found", pa.string()),
    ]
)


class _OneSegment(SoundLog):
    """A log of one segment, wherever its file lies."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        super().__init__(())

    def look(self) -> None:
        """Have that one segment."""
        self.close()
        self.segments = SegmentRun((self._segment,), self._segment.size)


def dump_log(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the entries of a segment from a position on; what stands there may be the middle of a record."""
    begin = parse_segment_name(path.rpartition("/")[2]) or 0
    segment = Segment(begin, max(files.file_size(path), 0), path)
    if position >= segment.size:
        return
    log = _OneSegment(segment)
    try:
        walk, at = LogWalk(log, DEFAULT_DELAY_LEVELS), begin + position
        for step in walk.run(at, None):
            if isinstance(step, LogFault):
                if step.begin < step.end:
                    is_first = position > 0 and step.begin == begin + position
                    found = f"{_WITHIN.format(position)}: {step.found}" if is_first else step.found
                    yield _one(step.begin - begin, "damage", step.end - step.begin, step.begin, found)
                    at = step.end
                continue
            yield _records(step, begin)
            at = step.begin + int(step.whole.ends[-1])
        if at < segment.end:
            yield _last(log, segment, at)
    finally:
        log.close()


def _last(log: SoundLog, segment: Segment, at: int) -> pa.RecordBatch:
    stands = log.record_at(at)
    size, position = segment.end - at, at - segment.begin
    if isinstance(stands, Blank):
        return _one(position, "filler", size, at, f"a filler of {stands.remaining_size} bytes")
    rest = log.bytes_at(at, 8)
    why = "zeros" if not rest.strip(b"\0") else getattr(stands, "why", "no record")
    return _one(position, "end", size, at, why)


def _one(position: int, entry: str, size: int, place: int, found: str) -> pa.RecordBatch:
    row = {"position": position, "entry": entry, "size": size, "physicalOffset": place, "found": found}
    return pa.RecordBatch.from_pylist([row], SCHEMA)


def _records(block: LogBlock, segment_begin: int) -> pa.RecordBatch:
    whole, columns, count = block.whole, block.columns, len(block.whole)
    pairs = whole.pairs()
    shift = block.begin - segment_begin
    crcs = whole.field("body_crc").astype(np.int64)
    view = whole.data.data
    found = [
        body_crc(view[begin:end]) if end > begin else -1
        for begin, end in zip(whole.body_begins.tolist(), whole.body_ends.tolist(), strict=True)
    ]
    matches = (np.array(found, np.int64) == crcs) | (whole.body_begins == whole.body_ends)
    arrays = [
        pa.array(whole.positions + shift),
        pa.repeat(pa.scalar("record"), count),
        pa.array(columns.sizes),
        pa.array(columns.places),
        pa.array(columns.topics, pa.string()).take(pa.array(columns.topic_numbers)),
        pa.array(columns.queue_ids.astype(np.int32)),
        pa.array(columns.queue_offsets),
        pairs.column(TAGS),
        pairs.column(KEYS),
        pa.array(columns.store_times, pa.timestamp("ms", tz="UTC")),
        pa.array(whole.field("born_timestamp").astype(np.int64), pa.timestamp("ms", tz="UTC")),
        _hosts(whole, "store_host"),
        _hosts(whole, "born_host"),
        pa.array(whole.field("magic").astype(np.int64)),
        pa.array(columns.sys_flags.astype(np.int32)),
        pa.array(whole.field("flag").astype(np.int32)),
        pa.array(whole.field("reconsume_times").astype(np.int32)),
        pa.array(whole.field("prepared_transaction_offset").astype(np.int64)),
        pa.array(whole.body_begins + shift),
        pa.array((whole.body_ends - whole.body_begins).astype(np.int32)),
        pa.array(crcs),
        pa.array(matches),
        pairs.maps(),
        pa.nulls(count, pa.string()),
    ]
    texts = [as_text(array) if pa.types.is_binary(array.type) else array for array in arrays]
    return pa.RecordBatch.from_arrays(
        [array.cast(field.type) for array, field in zip(texts, SCHEMA, strict=True)], schema=SCHEMA
    )


def _hosts(whole: WholeRecords, name: str) -> pa.StringArray:
    """Return hosts as text; each distinct one is spelt once."""
    bit = BORN_HOST_V6 if name == "born_host" else STORE_HOST_V6
    sizes = np.where(whole.sys_flags & bit, _V6_HOST_BYTES, _HOST_BYTES)
    begins = whole.positions + _FIELDS[name][1] + field_shift(name, whole.sys_flags)
    each = zip(begins.tolist(), (begins + sizes).tolist(), strict=True)
    raw = pa.array([whole.data[begin:end].tobytes() for begin, end in each], pa.binary()).dictionary_encode()
    spelt = pa.array([str(decode_host(host)) for host in raw.dictionary.to_pylist()], pa.string())
    return spelt.take(raw.indices)
