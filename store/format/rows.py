"""The messages of a run of records: where body and properties of each lie in the buffer.

Nearly always one record is one message. A record with the inner-batch bit holds several: each takes flag, body
and properties from its item and everything else from the record (MessageDecoder#decodeMessage, 5.3).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.batch_body import item_positions
from rmq_spark.store.format.body_codec import BodyError, decompress_body
from rmq_spark.store.format.heads import RecordFault, RecordHeads, RecordRun
from rmq_spark.store.format.properties import WAIT, PropertyPairs
from rmq_spark.store.format.ragged import Positions, take_ranges
from rmq_spark.store.format.record import COMPRESSED, INNER_BATCH, body_crc
from rmq_spark.store.format.record_cut import RecordParts, cut_records
from rmq_spark.store.format.shaped_properties import ShapedPairs
from rmq_spark.store.options import MAX_DECOMPRESSED_BYTES


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What one decoding may do: check body CRCs, and how large (bytes) decompressed bodies may become."""

    check_crc: bool = False
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES  # of one body
    result_decompressed_bytes: int = 32 << 20  # all bodies of one result: the rest comes in the next


class Rows:
    """The messages of a run with queue offsets in [begin, end); raises RecordFault where one is not as promised.

    With `want_bodies` compressed bodies are decompressed, and the rows end early when those would exceed
    their limit: `next_offset` says where to go on. `want_properties` only says what will be asked for.
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
        self.heads = RecordHeads(run, None if parts is None else parts.heads)
        self.run = run
        self.unpacked: dict[int, bytes] = {}  # record -> its decompressed body
        self.want_bodies = want_bodies
        if limits.check_crc:
            self._check_crcs()
        self.sys_flags = self.heads.sys_flags
        self.parts = parts if parts is not None and self._are_cut_well(parts) else None
        if want_bodies and (self.sys_flags & COMPRESSED).any():
            self.parts = None
            fitting = self._decompress(limits)
            if fitting < len(run):
                self.run = run.head(fitting)
                self.heads = RecordHeads(self.run)
                self.sys_flags = self.sys_flags[:fitting]
        self.body_begins = self.heads.begins
        self.body_ends = self.heads.begins + self.heads.body_sizes
        self.queue_offsets = self.run.queue_offsets
        self.record_of: NDArray[np.intp] | None = None  # row -> record; None: they are the same
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

    def _are_cut_well(self, parts: RecordParts) -> bool:
        """Say whether every body lies where it was cut."""
        return self.heads.have_one_length and bool((self.heads.body_sizes == parts.body_size).all())

    def keep(self, chosen: NDArray[np.bool_]) -> None:
        """Leave out the messages of a run of batches that are not `chosen`; before anything was asked of the rows."""
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
        """Return a field of the record's head for every message."""
        if name == "flag" and self._item_flags is not None:
            return self._item_flags
        return self.of_record(self.sys_flags if name == "sys_flag" else self.heads.field(name))

    def of_record(self, values: NDArray[Any]) -> NDArray[Any]:
        """Repeat a value of each record for each of its messages."""
        return values if self.record_of is None else values[self.record_of]

    @cached_property
    def pairs(self) -> PropertyPairs | ShapedPairs:
        """All properties of all messages, split."""
        if self.parts is not None and len(self.parts.tails) and isinstance(self.heads.topic_length_bytes, int):
            topic = self.run.topic.encode()
            before = len(topic).to_bytes(self.heads.topic_length_bytes, "big") + topic
            shaped = ShapedPairs.after_topic(self.parts.tails, before)
            if shaped is not None:
                return shaped
        begins, ends = self._item_properties or self.heads.properties_ranges(self.run)
        texts = take_ranges(self.run.buffer, begins, ends)
        if self.from_item is not None and self.from_item.any():
            texts = pc.if_else(self.from_item, pc.binary_join_element_wise(texts, self._waits(), b"\x02"), texts)
        shaped = ShapedPairs.of(texts)
        return PropertyPairs.split(texts) if shaped is None else shaped

    def _waits(self) -> pa.BinaryArray:
        """Return the WAIT that a message of an inner batch takes from its record, `true` where that has none."""
        begins, ends = self.heads.properties_ranges(self.run)
        values = PropertyPairs.split(take_ranges(self.run.buffer, begins, ends)).column(WAIT)
        waits = pc.fill_null(pc.equal(pc.utf8_lower(values), "true"), True)
        texts = pc.if_else(waits, pa.scalar(b"WAIT\x01true\x02"), pa.scalar(b"WAIT\x01false\x02"))
        return texts if self.record_of is None else texts.take(pa.array(self.record_of))

    def _check_crcs(self) -> None:
        """Compare every stored body with its CRC: one call a message, for who asked for it."""
        crcs = self.heads.field("body_crc")
        begins, ends = self.heads.begins.tolist(), (self.heads.begins + self.heads.body_sizes).tolist()
        for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            found = body_crc(self.run.buffer[begin:end].data)
            if end > begin and found != int(crcs[row]):
                raise RecordFault(row, "CRC of the body", int(crcs[row]), found)

    def _decompress(self, limits: DecodeLimits) -> int:
        """Decompress bodies until they fill one result; return how many records fit into it."""
        total = 0
        for record in np.flatnonzero(self.sys_flags & COMPRESSED).tolist():
            sys_flag = int(self.sys_flags[record])
            if sys_flag & INNER_BATCH:
                raise RecordFault(record, "sysFlag", "an inner batch is not compressed", hex(sys_flag))
            begin = int(self.heads.begins[record])
            stored = self.run.buffer[begin : begin + int(self.heads.body_sizes[record])].tobytes()
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
        """Put the messages of inner batches in the place of their records, within [begin, end)."""
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
        # The items come in the order of their batches, so they fill the rows of those records in order.
        from_item = np.isin(record_of, batches)
        properties = self.heads.properties_ranges(self.run)
        columns = [
            (self.body_begins, items.body_begins),
            (self.body_ends, items.body_ends),
            (self.heads.field("flag").astype(np.int64), items.flags),
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
