"""Search by message key and message id. Uses the key index for the part of the log that the index covers.

An answer has two parts. The first part lists messages that were found; each was compared with its record, because
hashes collide. The second part lists ranges of queues that the index does not cover, so the caller must read these
messages and compare them. Every matching message is in one of the two parts. Usually the second part has only one or
two records, at the ends of the index files.

Index files have no checksums, and do not show what they lack. A broker that ran without messageIndexEnable added no
keys. A broker that crashed drops its newest file. And a user may have deleted any file. So `IndexFolder` determines
which part of the log each file covers:

- A file covers only the records strictly between its first and its last record. Some keys of these two records may be
  in another file, and records between two files may have been in a file that is now missing.
- A file covers nothing unless its header, its first and last entry and a sample of its entries agree.
- After a crash of a broker or of the machine, only files that the checkpoint covers are used (IndexService#load).

`MessageSearch` detects gaps within a file: it searches the index for the keys of some sampled records.
Source: DefaultMessageStore#queryMessage, IndexService#queryOffset, MessageDecoder#decodeMessageId (5.3).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rmq_spark.store.backend import SearchAnswer
from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.filter.row_filter import LOOKUP_COLUMNS, KeyLookup, matches_lookup
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.consume_queue_entry import message_count
from rmq_spark.store.format.index_file import INDEX_SLOT, INDEX_UNIT, ChainFault, IndexFile, IndexShape
from rmq_spark.store.format.java import decode_host, index_key_hash
from rmq_spark.store.format.message_ids import may_be_offset_message_id, parse_offset_message_id
from rmq_spark.store.format.properties import KEYS, UNIQ_KEY, parse
from rmq_spark.store.format.record import INNER_BATCH, TRANSACTION_COMMIT, TRANSACTION_MASK, Record
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import BatchConsumeQueue, ConsumeQueue
from rmq_spark.store.model import QueueKey, QueueRange, subtract_ranges

MAX_STEPS = 20_000  # entries per key; if a chain is longer, reading the messages in order is faster
_SAMPLE_ENTRIES = 64


@dataclass(slots=True)
class IndexCoverage:
    """An index file, and the part that it covers: the records strictly between physical offsets `begin` and `end`.

    `fault` is the reason why the file is not trusted, or "" if it is trusted.
    """

    path: str
    begin: int
    end: int
    index: IndexFile
    fault: str = ""

    def candidates(self, key_hash: int, most: int = MAX_STEPS) -> list[int] | None:
        """Return the physical offsets of records that may have the key. Records with another key may be among them.

        If the chain of entries is longer than `most` or is broken, set `fault` and return None. In a valid chain each
        entry belongs to the key's slot, and the physical offsets never increase from newer to older entries.
        """
        shape = self.index.shape
        assert shape is not None  # a file of unknown shape has a fault
        slot, newer, found = key_hash % shape.slot_count, 1 << 63, []
        for step, entry in enumerate(self.index.walk(key_hash)):
            if isinstance(entry, ChainFault):
                self.fault = f"{entry.what} at position {entry.position}"
                return None
            if entry.key_hash < 0 or entry.key_hash % shape.slot_count != slot:
                self.fault = f"entry {entry.number} has the hash {entry.key_hash}, which is not of slot {slot}"
            elif not self.begin <= entry.physical_offset <= newer:
                self.fault = f"entry {entry.number} has the physical offset {entry.physical_offset} out of order"
            elif step >= most:
                self.fault = f"more than {most} keys have the slot {slot}"
            if self.fault:
                return None
            newer = entry.physical_offset
            if entry.key_hash == key_hash:
                found.append(entry.physical_offset)
        return found


@dataclass(slots=True)
class _Opened:
    """An open index file. Its shape and its fault were determined when it had `unit_count` entries."""

    file: OpenFile
    shape: IndexShape | None = None
    unit_count: int = -1
    fault: str = ""


@dataclass(slots=True)
class IndexCoverages:
    """The trusted index files, oldest first, and the faults of the others."""

    files: list[IndexCoverage]
    faults: list[str] = field(default_factory=list)
    stamp: tuple[tuple[str, int], ...] = ()  # path and number of the next entry of every file, trusted or not

    def distrust(self, coverage: IndexCoverage) -> None:
        """Remove a file from the trusted ones, and add its fault to the faults."""
        self.faults.append(f"{coverage.path}: {coverage.fault}")
        self.files = [other for other in self.files if other is not coverage]


class IndexFolder:
    """The index files of a store, for searches. Each file is opened only once, and its shape is determined only once.

    Not thread-safe. Call `close` when done; the object can be used again after that.
    """

    def __init__(self, root: str) -> None:
        self._folder = files.join(root, filenames.INDEX)
        self._opened: dict[str, _Opened] = {}  # by name

    def close(self) -> None:
        """Close every file."""
        for opened in self._opened.values():
            opened.file.close()
        self._opened.clear()

    def refresh(self, safe_until_ms: int | None) -> IndexCoverages:
        """Return the coverage of the current files. Files with other names are skipped, as in IndexService#load.

        After a crash, `safe_until_ms` must be the store time (ms) of the last key that is durable, from the checkpoint.
        Otherwise it is None.
        """
        found = []
        for opened in self._open_all():
            index = IndexFile(opened.file.read, opened.file.size(), opened.shape)
            if opened.shape is None and index.header.next_unit != opened.unit_count:
                opened.shape = index.shape  # a file that gets more keys may show its shape now
            found.append((opened, index))
        # A nearly empty file does not show its shape, but all files of a broker have the same shape.
        shapes = {opened.file.size(): opened.shape for opened, _ in found if opened.shape}
        stamp = tuple((opened.file.path, index.header.next_unit) for opened, index in found)
        coverages = IndexCoverages([], stamp=stamp)
        for opened, index in found:
            shape = opened.shape or shapes.get(opened.file.size())
            if index.header.is_empty:
                continue
            if shape is not None and opened.shape is None:
                index = IndexFile(opened.file.read, opened.file.size(), shape)
            if opened.unit_count != index.header.next_unit:
                opened.fault, opened.unit_count = _fault_of(opened.file, index, shape), index.header.next_unit
            header = index.header
            begin, end = header.begin_physical_offset, header.end_physical_offset
            coverage = IndexCoverage(opened.file.path, begin, end, index, opened.fault)
            if safe_until_ms is not None and header.end_timestamp > safe_until_ms:
                coverage.fault = (
                    coverage.fault or "the store was not closed, and its checkpoint does not cover this file"
                )
            if coverages.files and coverage.begin < coverages.files[-1].end:
                coverage.fault = coverage.fault or "it begins before the end of the previous file"
            coverages.files.append(coverage)
            if coverage.fault:
                coverages.distrust(coverage)
        return coverages

    def _open_all(self) -> Iterator[_Opened]:
        listed = files.list_folder(self._folder)
        names = [name for name, is_folder in listed if not is_folder and filenames.is_index_name(name)]
        for gone in self._opened.keys() - set(names):
            self._opened.pop(gone).file.close()
        for name in names:
            if name not in self._opened:
                self._opened[name] = _Opened(OpenFile(files.join(self._folder, name)))
            yield self._opened[name]


def last_indexed_place(root: str) -> int:
    """Return the physical offset of the last message in a store's key index. Return -1 if the index is empty."""
    folder = files.join(root, filenames.INDEX)
    names = [name for name, is_folder in files.list_folder(folder) if not is_folder and filenames.is_index_name(name)]
    for name in reversed(names):
        file = OpenFile(files.join(folder, name))
        header = IndexFile(file.read, file.size()).header
        file.close()
        if not header.is_empty:
            return header.end_physical_offset
    return -1


def _fault_of(file: OpenFile, index: IndexFile, shape: IndexShape | None) -> str:
    """Return the fault of an index file that has entries. Return "" if no fault was found."""
    if shape is None:
        return f"no numbers of slots and entries fit the {file.size()} bytes of the file and their contents"
    header, last = index.header, index.header.next_unit - 1
    if last >= shape.unit_count or file.size() < shape.file_bytes:
        return f"{last} entries; expected at most {shape.unit_count - 1} in {file.size()} bytes"
    numbers = np.unique(np.linspace(1, last, _SAMPLE_ENTRIES).astype(np.int64))
    entries = np.frombuffer(_gather(file, [shape.unit_position(number) for number in numbers.tolist()]), INDEX_UNIT)
    offsets = entries["physical_offset"]
    if offsets[0] != header.begin_physical_offset or offsets[-1] != header.end_physical_offset:
        return (
            f"the header has the physical offsets {header.begin_physical_offset} to {header.end_physical_offset}, the "
            f"entries have {offsets[0]} to {offsets[-1]}"
        )
    at = [shape.slot_position(key_hash) for key_hash in entries["key_hash"].tolist()]
    newest = np.frombuffer(_gather(file, at, INDEX_SLOT.itemsize), INDEX_SLOT)["newest_unit"]
    is_good = (entries["key_hash"] >= 0) & (entries["previous_unit"] >= 0) & (entries["previous_unit"] < numbers)
    is_good &= (numbers <= newest) & (newest < shape.unit_count)
    is_good[1:] &= offsets[1:] >= offsets[:-1]
    return "" if is_good.all() else f"entry {numbers[~is_good][0]} and its slot do not match"


def _gather(file: OpenFile, positions: Sequence[int], size: int = INDEX_UNIT.itemsize) -> bytes:
    return b"".join(file.read(position, size).ljust(size, b"\0") for position in positions)


_LOG = logging.getLogger("rmq_spark")
_SAMPLE_RECORDS = 32  # number of covered records whose keys are searched in the index
_SAMPLE_STEPS = 1000
_MEASURED_MESSAGES = 10_000


class _Hit(NamedTuple):
    """A matching record: the queue offsets of its messages, from its header, and its physical offset."""

    part: QueueRange
    physical_offset: int


class MessageSearch:
    """A search by key and id in one store. Not thread-safe.

    `queue_of` takes a queue and a range of queue offsets. It returns the queue's files and an entry number: the entries
    below it cover the range. `safe_until_ms` returns the argument of `IndexFolder.refresh`.
    """

    def __init__(
        self,
        index: IndexFolder,
        log: CommitLog,
        queue_of: Callable[[QueueKey, int, int], tuple[ConsumeQueue, int]],
        safe_until_ms: Callable[[], int | None],
    ) -> None:
        self._index, self._log, self._queue_of, self._safe_until_ms = index, log, queue_of, safe_until_ms
        self._sampled: tuple[object, bool] = None, False

    def search(self, ranges: Sequence[QueueRange], sought: KeyLookup) -> SearchAnswer:
        """Return the positions of messages in the ranges that have one of the keys or ids. No range may be empty."""
        coverages = self._index.refresh(self._safe_until_ms())
        if coverages.files and not self._has_samples(coverages, ranges):
            coverages.faults.append("the index lacks keys of messages between its entries: it was off for a while")
            coverages.files.clear()
        by_queue: dict[QueueKey, list[QueueRange]] = {}
        for part in ranges:
            by_queue.setdefault(part.queue, []).append(part)
        by_id = {message_id: self._by_offset_id(message_id) for message_id in sought.message_ids}
        # If an offsetMsgId has a message at its position, it need not be searched as a UNIQ_KEY: such a key would begin
        # with the same host and port.
        words = dict.fromkeys((*sought.keys, *(one for one, hit in by_id.items() if hit is None)))
        hits = [hit for hit in by_id.values() if hit is not None]
        for topic in sorted({queue.topic for queue in by_queue}):
            for word in filter(None, words):
                candidates = self._candidates(coverages, f"{topic}#{word}")
                hits += [hit for offset in candidates if (hit := self._by_word(offset, topic, word)) is not None]
        found = list(self._in_queues(dict.fromkeys(hits), by_queue))
        unknown = [part for one in ranges for part in self._unknown(one, coverages)] if words else []
        why = tuple(coverages.faults)
        if not coverages.stamp:
            why = (*why, "the store has no index file")
        return SearchAnswer(found, unknown, why)

    def _candidates(self, coverages: IndexCoverages, key: str) -> Iterator[int]:
        """Yield the physical offsets of records that may have the key."""
        key_hash = index_key_hash(key)
        for coverage in reversed(list(coverages.files)):
            candidates = coverage.candidates(key_hash)
            if candidates is None:
                coverages.distrust(coverage)
            yield from candidates or ()

    def _in_queues(
        self, hits: Iterable[_Hit], by_queue: Mapping[QueueKey, Sequence[QueueRange]]
    ) -> Iterator[QueueRange]:
        """Yield the parts of the ranges that are messages of these records.

        A truncation may leave a record after the end of the log that looks valid, although another message has its
        queue offset now. So a record is used only if the queue's entry points to it.
        """
        opened: dict[QueueKey, tuple[ConsumeQueue, int]] = {}
        for hit in hits:
            key, ranges = hit.part.queue, by_queue.get(hit.part.queue, ())
            for part in _overlaps(hit.part, ranges):
                if key not in opened:
                    opened[key] = self._queue_of(key, min(s.begin for s in ranges), max(s.end for s in ranges))
                queue, entries_end = opened[key]
                number = queue.unit_of(part.begin, entries_end)
                if hit.physical_offset in queue.read(number, number + 1).physical_offsets:
                    yield part

    def _by_word(self, physical_offset: int, topic: str, word: str) -> _Hit | None:
        """Return the messages of a record if it has the key `word`.

        Return None if only the hash of the key is the same.
        """
        record = self._log.record_at(physical_offset)
        if not isinstance(record, Record) or record.topic != topic.encode() or not _is_in_a_queue(record):
            return None
        return _Hit(_messages_of(record), physical_offset) if word in keys_of(record) else None

    def _by_offset_id(self, message_id: str) -> _Hit | None:
        """Return the message at the position that an offsetMsgId contains.

        Return None if `message_id` is not an offsetMsgId, or if no message is there.
        """
        if not may_be_offset_message_id(message_id):
            return None
        wanted = parse_offset_message_id(message_id)
        record = self._log.record_at(wanted.physical_offset)
        if not isinstance(record, Record) or not _is_in_a_queue(record):
            return None
        if decode_host(record.store_host) != wanted.store_host:
            return None
        return _Hit(_messages_of(record), wanted.physical_offset)

    def _unknown(self, part: QueueRange, coverages: IndexCoverages) -> Iterator[QueueRange]:
        """Yield the parts of a range that no trusted file covers."""
        queue, entries_end = self._queue_of(part.queue, part.begin, part.end)
        try:
            yield from _uncovered(queue, entries_end, part, coverages)
        finally:
            queue.run.close()  # a store may have more queues than a process may have open files

    def _has_samples(self, coverages: IndexCoverages, ranges: Sequence[QueueRange]) -> bool:
        """Return whether the index has the keys of sampled records, which are spread over the parts that it covers.

        There is no other way to detect missing keys. A broker that ran without an index added no keys for any message
        of that time, so a few records are sufficient.
        """
        stamp = coverages.stamp, tuple(ranges)
        if self._sampled[0] != stamp:
            samples = self._samples(coverages, ranges)
            self._sampled = stamp, all(self._is_indexed(coverages, record) for record in samples)
        return self._sampled[1]

    def _samples(self, coverages: IndexCoverages, ranges: Sequence[QueueRange]) -> Iterator[Record]:
        total = sum(part.count for part in ranges)
        wanted = np.unique(np.linspace(0, max(total - 1, 0), _SAMPLE_RECORDS).astype(np.int64)).tolist()
        before = 0
        for part in ranges:
            count = part.count
            here = [number - before for number in wanted if before <= number < before + count]
            before += count
            if not here:
                continue
            queue, entries_end = self._queue_of(part.queue, part.begin, part.end)
            if isinstance(queue, BatchConsumeQueue):
                continue
            for index in here:
                number = queue.unit_of(part.begin + index, entries_end)
                entries = queue.read(number, number + 1)
                offset = int(entries.physical_offsets[0]) if len(entries) else -1
                if any(coverage.begin < offset < coverage.end for coverage in coverages.files):
                    record = self._log.record_at(offset)
                    if isinstance(record, Record):
                        yield record

    def _is_indexed(self, coverages: IndexCoverages, record: Record) -> bool:
        words = [word for word in keys_of(record) if word]
        if not words:
            return True
        key_hash = index_key_hash(f"{record.topic.decode('utf-8', 'replace')}#{words[0]}")
        for coverage in coverages.files:
            if coverage.begin < record.physical_offset < coverage.end:
                candidates = coverage.candidates(key_hash, _SAMPLE_STEPS)
                if candidates is None:
                    coverage.fault = ""  # a long chain proves nothing; the search itself detects a broken chain
                    return True
                return record.physical_offset in candidates
        return True


def keys_of(record: Record) -> list[str]:
    """Return the keys that the index gets for a record: first UNIQ_KEY, which may be "", then the words of KEYS."""
    properties = parse(record.properties)
    return [properties.get(UNIQ_KEY, ""), *properties.get(KEYS, "").split(" ")]


def log_reading_instead(answer: SearchAnswer, record_bytes: Callable[[QueueKey, int, int], int]) -> None:
    """Log a warning about the part that the index does not cover: its size, and the reasons.

    Logs nothing if this part is empty, or consists only of the ends of index files. `record_bytes` returns the size
    (bytes) of the records in a range of a queue.
    """
    if answer.why and answer.unknown:
        count = sum(part.count for part in answer.unknown)
        size = sum(_about(part, record_bytes) for part in answer.unknown)
        shown = "; ".join(answer.why[:3]) + (f"; and {len(answer.why) - 3} more" if len(answer.why) > 3 else "")
        _LOG.warning(
            "rmq: the key index does not cover %d messages, which are read instead (about %d bytes): %s",
            count,
            size,
            shown,
        )


def _about(part: QueueRange, record_bytes: Callable[[QueueKey, int, int], int]) -> int:
    """Estimate the size (bytes) of the records of a range. In a long range, only its first records are measured."""
    queue, begin, end = part.queue, part.begin, part.end
    measured = min(end, begin + _MEASURED_MESSAGES)
    return record_bytes(queue, begin, measured) * (end - begin) // (measured - begin)


def read_found(
    answer: SearchAnswer,
    sought: KeyLookup,
    begin_ms: int,
    end_ms: int,
    read: Callable[[QueueKey, int, int, Sequence[str]], Iterator[pa.RecordBatch]],
) -> list[tuple[QueueKey, int]]:
    """Return (queue, queue offset) of all matching messages stored in [begin_ms, end_ms], sorted and unique.

    Reads the found messages for their store times, and the unknown messages to compare them too. `read` yields the
    messages of a part.
    """
    found: set[tuple[QueueKey, int]] = set()
    parts = [(part, False) for part in answer.found]
    for part, is_unknown in [*parts, *((part, True) for part in subtract_ranges(answer.unknown, answer.found))]:
        for batch in read(part.queue, part.begin, part.end, ("queueOffset", "storeTimestamp", *LOOKUP_COLUMNS)):
            rows = batch.filter(matches_lookup(batch, sought)) if is_unknown else batch
            times = rows.column("storeTimestamp").cast(pa.int64()).to_pylist()
            for offset, time_us in zip(rows.column("queueOffset").to_pylist(), times, strict=True):
                if begin_ms <= time_us // 1000 <= end_ms:
                    found.add((part.queue, offset))
    return sorted(found)


def _overlaps(part: QueueRange, others: Iterable[QueueRange]) -> Iterator[QueueRange]:
    for other in others:
        begin, end = max(part.begin, other.begin), min(part.end, other.end)
        if begin < end:
            yield QueueRange(part.queue, begin, end)


def _is_in_a_queue(record: Record) -> bool:
    return record.sys_flag & TRANSACTION_MASK in (0, TRANSACTION_COMMIT)


def _messages_of(record: Record) -> QueueRange:
    key = QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id)
    count = message_count(record) if record.sys_flag & INNER_BATCH else 1
    return QueueRange(key, record.queue_offset, record.queue_offset + count)


def _uncovered(
    queue: ConsumeQueue, entries_end: int, part: QueueRange, coverages: IndexCoverages
) -> Iterator[QueueRange]:
    if isinstance(queue, BatchConsumeQueue):
        yield part  # messages of inner batches have keys of their own, which are not in any index
        return
    begin = part.begin
    for coverage in coverages.files:
        known = max(queue.first_from(coverage.begin + 1, entries_end), begin)
        until = min(queue.first_from(coverage.end, entries_end), part.end)
        if known < until:
            if begin < known:
                yield QueueRange(part.queue, begin, known)
            begin = until
    if begin < part.end:
        yield QueueRange(part.queue, begin, part.end)
