"""The messages of a record run: positions of bodies and properties, and their selection by a property test.

Most records are one message. A record with the inner-batch bit holds several messages. Each of them takes flag, body
and properties from its item, and the other fields from the record (MessageDecoder#decodeMessage, 5.3).

If messages are selected by a property test, headers and properties of all records are checked. If no message of a
record is selected, the record's body is not copied, decompressed or compared with its CRC. So damage in such a body
raises no error.

Small records of one size are cut into header, body and the rest. The records are copied block by block first. Then
each byte is fetched from memory only once, and the copies of the parts read it from the processor's caches.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.body_codec import BodyError, decompress_body
from rmq_spark.store.format.byte_ranges import Positions, gather_bytes, take_ranges
from rmq_spark.store.format.consume_queue_entry import item_positions
from rmq_spark.store.format.properties import WAIT, PropertyPairs
from rmq_spark.store.format.property_encoder import UniformPairs
from rmq_spark.store.format.record import COMPRESSED, HOST_BITS, INNER_BATCH, RECORD_HEAD, body_crc
from rmq_spark.store.format.record_headers import RecordFault, RecordHeaders, RecordRun
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES

_MIN_RECORDS = 64  # with fewer records cutting is not faster
_MAX_RECORD_BYTES = 1024  # with larger records cutting is not faster than reading each part from memory
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RecordParts:
    """The parts of all records of a run. Each array has one item per record, and all its items have the same size.

    All records are cut at the positions that the header of the first one gives. So check that all headers have the same
    body size before you use the bodies. `tails` is empty if it was not requested.
    """

    headers: NDArray[np.void]
    bodies: NDArray[np.void]
    tails: NDArray[np.void]  # the bytes after the body: topic and properties with their length fields

    @property
    def body_size(self) -> int:
        """Return the size of each body (bytes)."""
        return self.bodies.dtype.itemsize


def cut_records(run: RecordRun, *, with_tails: bool) -> RecordParts | None:
    """Return the parts of the run's records. `with_tails` requests the bytes after the bodies too.

    Returns None if the records have different sizes, if the first one has no body or an IPv6 host, or if reading the
    records part by part is expected to be as fast.
    """
    if len(run) < _MIN_RECORDS:
        return None
    size = int(run.sizes[0])
    if size > _MAX_RECORD_BYTES or not (run.sizes == size).all():
        return None
    # If the tails are not copied, cutting is only faster if most records directly follow the one before. Then the
    # processor fetches headers and bodies together.
    if not with_tails and int(np.count_nonzero(np.diff(run.positions) == size)) * 2 <= len(run):
        return None
    first = gather_bytes(run.buffer, run.positions[:1], RECORD_HEAD.itemsize).view(RECORD_HEAD)[0]
    body_size = int(first["body_size"])
    rest = size - RECORD_HEAD.itemsize - body_size
    if body_size <= 0 or rest <= 0 or int(first["sys_flag"]) & HOST_BITS:
        return None
    widths = [RECORD_HEAD.itemsize, body_size, *([rest] if with_tails else [])]
    parts = [np.empty(len(run), f"V{width}") for width in widths]
    step, taken = max(_BLOCK_BYTES // size, 1), sum(widths)
    for begin in range(0, len(run), step):
        block = gather_bytes(run.buffer, run.positions[begin : begin + step], taken)
        at = 0
        for part, width in zip(parts, widths, strict=True):
            part[begin : begin + step] = np.ndarray(len(block), f"V{width}", block, at, taken)
            at += width
    return RecordParts(parts[0].view(RECORD_HEAD), parts[1], parts[2] if with_tails else np.empty(0, "V1"))


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Whether decoding checks the CRCs of bodies, and how many bytes decompressed bodies may take."""

    check_crc: bool = False
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES  # of one body
    result_decompressed_bytes: int = 32 << 20  # of all bodies in one result; later messages go to the next result


class Rows:
    """The messages of a run with queue offsets in [begin, end), one row per message.

    If `want_bodies` is True, compressed bodies are decompressed. If they would exceed the limit for one result, the
    rows end before `end`; read the other messages starting at `next_offset`. `want_properties` is a hint that `pairs`
    will be used. The constructor and the methods raise RecordFault if a record is damaged.
    """

    def __init__(
        self,
        run: RecordRun,
        begin: int,
        end: int,
        limits: DecodeLimits,
        *,
        want_bodies: bool,
        want_properties: bool,
    ) -> None:
        parts = None
        if want_bodies and run.message_counts is None:
            parts = cut_records(run, with_tails=want_properties)
        self.headers = RecordHeaders(run, None if parts is None else parts.headers)
        self.run = run
        self.unpacked: dict[int, bytes] = {}  # record -> its decompressed body
        self.want_bodies = want_bodies
        if limits.check_crc:
            self._check_crcs()
        self.sys_flags = self.headers.sys_flags
        is_cut_well = (
            parts is not None
            and self.headers.have_one_length
            and bool((self.headers.body_sizes == parts.body_size).all())
        )
        self.parts = parts if is_cut_well else None
        if want_bodies and (self.sys_flags & COMPRESSED).any():
            self.parts = None
            fitting = self._decompress(limits)
            if fitting < len(run):
                self.run = run.take(slice(fitting))
                self.headers = RecordHeaders(self.run)
                self.sys_flags = self.sys_flags[:fitting]
        self.body_begins = self.headers.begins
        self.body_ends = self.headers.begins + self.headers.body_sizes
        self.queue_offsets = self.run.queue_offsets
        self.record_of: NDArray[np.intp] | None = None  # row -> record; None if row and record are the same
        self._item_flags: NDArray[Any] | None = None
        self._item_properties: tuple[Positions, Positions] | None = None
        self.from_item: NDArray[np.bool_] | None = None
        self.next_offset = end
        if self.run.message_counts is not None:
            self._split_batches(self.run.message_counts, begin, end)
        if len(self.run) < len(run):
            self.next_offset = int(run.queue_offsets[len(self.run)])

    def __len__(self) -> int:
        return len(self.queue_offsets)

    def keep(self, chosen: NDArray[np.bool_]) -> None:
        """Keep only the messages that are `chosen` (a mask of the rows), and remove the others.

        Only for runs with inner batches. Call this before you use `field` or `pairs`.
        """
        assert self.record_of is not None
        assert self._item_flags is not None
        assert self._item_properties is not None
        assert self.from_item is not None
        self.body_begins, self.body_ends = self.body_begins[chosen], self.body_ends[chosen]
        self._item_flags = self._item_flags[chosen]
        self._item_properties = self._item_properties[0][chosen], self._item_properties[1][chosen]
        self.from_item, self.record_of = self.from_item[chosen], self.record_of[chosen]
        self.queue_offsets = self.queue_offsets[chosen]

    def field(self, name: str) -> NDArray[Any]:
        """Return the header field `name` for each message. An item of an inner batch has its own `flag`.

        All other fields are those of the message's record.
        """
        if name == "flag" and self._item_flags is not None:
            return self._item_flags
        return self.of_record(self.sys_flags if name == "sys_flag" else self.headers.field(name))

    def of_record(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return for each message the value of its record. `values` has one element per record."""
        return values if self.record_of is None else values[self.record_of]

    @cached_property
    def pairs(self) -> PropertyPairs | UniformPairs:
        """The name-value pairs of all messages."""
        if self.parts is not None and len(self.parts.tails) and isinstance(self.headers.topic_length_bytes, int):
            topic = self.run.topic.encode()
            before = len(topic).to_bytes(self.headers.topic_length_bytes, "big") + topic
            uniform = UniformPairs.after_topic(self.parts.tails, before)
            if uniform is not None:
                return uniform
        begins, ends = self._item_properties or self.headers.properties_ranges(self.run)
        texts = take_ranges(self.run.buffer, begins, ends)
        if self.from_item is not None and self.from_item.any():
            texts = pc.if_else(self.from_item, pc.binary_join_element_wise(texts, self._waits(), b"\x02"), texts)
        uniform = UniformPairs.of(texts)
        return PropertyPairs.split(texts) if uniform is None else uniform

    def _waits(self) -> pa.BinaryArray:
        """Return for each message the WAIT property of its record, as a properties string.

        A message of an inner batch inherits this property. If the record does not have it, the value is `true`.
        """
        begins, ends = self.headers.properties_ranges(self.run)
        values = PropertyPairs.split(take_ranges(self.run.buffer, begins, ends)).column(WAIT)
        waits = pc.fill_null(pc.equal(pc.utf8_lower(values), "true"), True)
        texts = pc.if_else(waits, pa.scalar(b"WAIT\x01true\x02"), pa.scalar(b"WAIT\x01false\x02"))
        return texts if self.record_of is None else texts.take(pa.array(self.record_of))

    def _check_crcs(self) -> None:
        """Compare every stored body with its CRC, record by record. Raises RecordFault if they differ."""
        crcs = self.headers.field("body_crc")
        begins, ends = self.headers.begins.tolist(), (self.headers.begins + self.headers.body_sizes).tolist()
        for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            found = body_crc(self.run.buffer[begin:end].data)
            if end > begin and found != int(crcs[row]):
                raise RecordFault(row, "CRC of the body", int(crcs[row]), found)

    def _decompress(self, limits: DecodeLimits) -> int:
        """Decompress bodies until they fill one result. Return the number of records that the result can have."""
        total = 0
        for record in np.flatnonzero(self.sys_flags & COMPRESSED).tolist():
            sys_flag = int(self.sys_flags[record])
            if sys_flag & INNER_BATCH:
                raise RecordFault(record, "sysFlag", "an inner batch is not compressed", hex(sys_flag))
            begin = int(self.headers.begins[record])
            stored = self.run.buffer[begin : begin + int(self.headers.body_sizes[record])].tobytes()
            try:
                body = decompress_body(stored, sys_flag, limits.max_decompressed_bytes)
            except BodyError as error:
                raise RecordFault(record, "body", "one that decompresses", str(error)) from error
            total += len(body)
            if total > limits.result_decompressed_bytes and record:
                return record
            self.unpacked[record] = body
        return len(self.run)

    def _split_batches(self, message_counts: NDArray[np.int64], begin: int, end: int) -> None:
        """Replace each record that is an inner batch by its messages with queue offsets in [begin, end)."""
        batches = np.flatnonzero(self.sys_flags & INNER_BATCH)
        items = item_positions(self.run.buffer, self.body_begins[batches], self.body_ends[batches])
        if items.fault is not None:
            raise RecordFault(int(batches[items.fault.row]), "inner batch", "whole items", items.fault.what)
        counts = np.ones(len(self.run), np.int64)
        counts[batches] = np.bincount(items.rows, minlength=len(batches))
        wrong = np.flatnonzero(counts != message_counts)
        if len(wrong):
            record = int(wrong[0])
            raise RecordFault(record, "messages in the batch", int(message_counts[record]), int(counts[record]))
        record_of = np.repeat(np.arange(len(self.run)), counts)
        firsts = np.cumsum(counts) - counts
        ordinals = np.arange(len(record_of)) - firsts[record_of]
        # The items are in the order of their batches, so they fill the rows of these batches in order.
        from_item = np.isin(record_of, batches)
        properties = self.headers.properties_ranges(self.run)
        columns = [
            (self.body_begins, items.body_begins),
            (self.body_ends, items.body_ends),
            (self.headers.field("flag").astype(np.int64), items.flags),
            (properties[0], items.properties_begins),
            (properties[1], items.properties_ends),
        ]
        merged = []
        offsets = self.run.queue_offsets[record_of] + ordinals
        kept = (offsets >= begin) & (offsets < end)
        for of_records, of_items in columns:
            values = of_records[record_of]
            values[from_item] = of_items
            merged.append(values[kept])
        self.body_begins, self.body_ends, flags, first, last = merged
        self._item_flags = flags.astype(np.int32)
        self._item_properties = first, last
        self.from_item = from_item[kept]
        self.record_of = record_of[kept]
        self.queue_offsets = offsets[kept]


class PropertyTest(Protocol):
    """A condition on the properties of messages."""

    @property
    def property_names(self) -> tuple[str, ...]:
        """The names of the properties that `matches` needs."""

    def matches(self, columns: Mapping[str, Any], count: int) -> NDArray[np.bool_]:
        """Return for each of `count` messages whether it matches.

        `columns` has a column of values for each of `property_names`. A value is null if the message does not have the
        property.
        """


def choose_rows(
    run: RecordRun,
    begin: int,
    end: int,
    limits: DecodeLimits,
    test: PropertyTest,
    *,
    want_bodies: bool,
    want_properties: bool,
    expects_all: bool,
) -> Rows | None:
    """Return the messages of the run that match `test`. Returns None if no message matches.

    Set `expects_all` if you expect that nearly all messages match. Then all bodies are read before the test, which is
    faster if all messages match. Raises RecordFault, with the index of the record in `run`, if a record is damaged. If
    no message of a record matches, only the record's header, topic and properties are checked.
    """
    if expects_all:
        with suppress(RecordFault):  # a damaged body is only an error if its record matches, which is tested below
            rows = Rows(run, begin, end, limits, want_bodies=want_bodies, want_properties=True)
            if _match(rows, test).all():
                return rows
    seen = Rows(run, begin, end, replace(limits, check_crc=False), want_bodies=False, want_properties=True)
    mask = _match(seen, test)
    if not mask.any():
        return None
    of_row = np.arange(len(run)) if seen.record_of is None else seen.record_of
    records = np.unique(of_row[mask])
    try:
        rows = Rows(run.take(records), begin, end, limits, want_bodies=want_bodies, want_properties=want_properties)
    except RecordFault as fault:
        raise RecordFault(int(records[fault.row]), fault.what, fault.expected, fault.found) from fault
    if rows.record_of is not None:
        rows.keep(mask[np.isin(of_row, records)][: len(rows)])
    elif want_properties and len(rows) == len(seen):
        rows.pairs = seen.pairs  # all messages match, so the properties need not be split again
    return rows


def _match(rows: Rows, test: PropertyTest) -> NDArray[np.bool_]:
    """Return for each row whether it matches `test`. Only the properties that the test needs are decoded."""
    mask = test.matches({name: rows.pairs.column(name) for name in test.property_names}, len(rows))
    assert len(mask) == len(rows), (len(mask), len(rows))  # required of PropertyTest.matches
    return mask
