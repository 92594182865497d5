"""Messages by key and by id: what the index or the id says, and which messages only reading can tell about.

An answer has two parts: messages that were found, each checked against its record, since hashes collide; and ranges
of queues for which the index does not vouch (see `index_reach`), to be read and compared. No message that is sought is
in neither. Mostly the second part is a record or two at the ends of the index's files.

Source: DefaultMessageStore#queryMessage, IndexService#queryOffset, MessageDecoder#decodeMessageId (5.3).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rmq_spark.store.format.batch_body import message_count
from rmq_spark.store.format.java import decode_host, index_key_hash
from rmq_spark.store.format.message_id import may_be_offset_message_id, parse_offset_message_id
from rmq_spark.store.format.properties import KEYS, UNIQ_KEY, parse
from rmq_spark.store.format.record import INNER_BATCH, TRANSACTION_COMMIT, TRANSACTION_MASK, Record
from rmq_spark.store.format.sought import SOUGHT_COLUMNS, Sought, has_sought
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.index_reach import IndexFolder, Reaches
from rmq_spark.store.log.queues import BatchConsumeQueue, ConsumeQueue
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")
_SAMPLE_RECORDS = 32  # of those that the index vouches for: are their keys in it?
_SAMPLE_STEPS = 1000
_MEASURED_MESSAGES = 10_000


class Span(NamedTuple):
    """The messages [begin, end) of a queue, as queue offsets."""

    queue: QueueKey
    begin: int
    end: int


class _Hit(NamedTuple):
    """A record that is sought: the messages that it says it holds, and its physical offset."""

    span: Span
    place: int


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """What of the spans asked for is sought.

    `found` are messages that are, and may overlap; what is behind a `found` of several offsets is an inner batch. Of
    those in `unknown` only reading tells; `why` says why the index does not, where that is more than its files' ends.
    """

    found: list[Span]
    unknown: list[Span]
    why: tuple[str, ...] = ()


class MessageSearch:
    """Searches in one store. One thread at a time.

    `queue_of` gives the files of a queue and the number after its last unit, None where it has none. `safe_until_ms`
    says what a crash has left safe, see `IndexFolder.look`.
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

    def search(self, spans: Sequence[Span], sought: Sought) -> SearchAnswer:
        """Return where in the spans, none empty, messages with one of the keys or ids lie."""
        reaches = self._index.look(self._safe_until_ms())
        if reaches.files and not self._has_samples(reaches, spans):
            reaches.faults.append("keys of messages that it should have are not in the index: it was off for a while")
            reaches.files.clear()
        by_queue: dict[QueueKey, list[Span]] = {}
        for span in spans:
            by_queue.setdefault(span.queue, []).append(span)
        at_place = {message_id: self._by_offset_id(message_id) for message_id in sought.message_ids}
        # An id that names the place of a message is nobody's UNIQ_KEY: that would begin with the same host and port.
        words = dict.fromkeys((*sought.keys, *(one for one, hit in at_place.items() if hit is None)))
        hits = [hit for hit in at_place.values() if hit is not None]
        for topic in sorted({queue.topic for queue in by_queue}):
            for word in filter(None, words):
                places = self._places(reaches, f"{topic}#{word}")
                hits += [hit for place in places if (hit := self._by_word(place, topic, word)) is not None]
        found = list(self._standing(dict.fromkeys(hits), by_queue))
        unknown = [part for span in spans for part in self._unknown(span, reaches)] if words else []
        why = tuple(reaches.faults)
        if not reaches.stamp:
            why = (*why, "the store has no index file")
        return SearchAnswer(found, unknown, why)

    def _places(self, reaches: Reaches, key: str) -> Iterator[int]:
        key_hash = index_key_hash(key)
        for reach in reversed(list(reaches.files)):
            places = reach.places(key_hash)
            if places is None:
                reaches.refuse(reach)
            yield from places or ()

    def _standing(self, hits: Iterable[_Hit], by_queue: Mapping[QueueKey, Sequence[Span]]) -> Iterator[Span]:
        """Yield what of the spans are messages of these records.

        A record that a truncation left behind the end of the log looks whole, and its queue offset may be another
        message's by now. So only what the queue's unit names is believed.
        """
        looked: dict[QueueKey, tuple[ConsumeQueue, int]] = {}
        for hit in hits:
            key, spans = hit.span.queue, by_queue.get(hit.span.queue, ())
            for part in _overlaps(hit.span, spans):
                if key not in looked:
                    looked[key] = self._queue_of(key, min(s.begin for s in spans), max(s.end for s in spans))
                queue, units_end = looked[key]
                unit = queue.unit_of(part.begin, units_end)
                if hit.place in queue.read(unit, unit + 1).physical_offsets:
                    yield part

    def _by_word(self, place: int, topic: str, word: str) -> _Hit | None:
        """Return the messages of a record that carries the word, None for one that only has its hash."""
        record = self._log.record_at(place)
        if not isinstance(record, Record) or record.topic != topic.encode() or not _is_in_a_queue(record):
            return None
        return _Hit(_span_of(record), place) if word in keys_of(record) else None

    def _by_offset_id(self, message_id: str) -> _Hit | None:
        """Return the message at the place that an offsetMsgId names, None for a text that names none."""
        if not may_be_offset_message_id(message_id):
            return None
        wanted = parse_offset_message_id(message_id)
        record = self._log.record_at(wanted.physical_offset)
        if not isinstance(record, Record) or not _is_in_a_queue(record):
            return None
        if decode_host(record.store_host) != wanted.store_host:
            return None
        return _Hit(_span_of(record), wanted.physical_offset)

    def _unknown(self, span: Span, reaches: Reaches) -> Iterator[Span]:
        """Yield what of a span the believed files do not vouch for."""
        queue, units_end = self._queue_of(*span)
        if isinstance(queue, BatchConsumeQueue):
            yield span  # messages of inner batches have keys of their own, which no index gets
            return
        begin = span.begin
        for reach in reaches.files:
            known, until = queue.first_from(reach.begin + 1, units_end), queue.first_from(reach.end, units_end)
            known, until = max(known, begin), min(until, span.end)
            if known < until:
                if begin < known:
                    yield Span(span.queue, begin, known)
                begin = until
        if begin < span.end:
            yield Span(span.queue, begin, span.end)

    def _has_samples(self, reaches: Reaches, spans: Sequence[Span]) -> bool:
        """Say whether the index has the keys of records that lie all over what it vouches for.

        What it lacks is not seen otherwise. A broker that ran without an index leaves out all of a time, so
        that a few records show it.
        """
        stamp = reaches.stamp, tuple(spans)
        if self._sampled[0] != stamp:
            self._sampled = stamp, all(self._is_indexed(reaches, record) for record in self._samples(reaches, spans))
        return self._sampled[1]

    def _samples(self, reaches: Reaches, spans: Sequence[Span]) -> Iterator[Record]:
        total = sum(span.end - span.begin for span in spans)
        wanted = np.unique(np.linspace(0, max(total - 1, 0), _SAMPLE_RECORDS).astype(np.int64)).tolist()
        before = 0
        for span in spans:
            count = span.end - span.begin
            here = [number - before for number in wanted if before <= number < before + count]
            before += count
            if not here:
                continue
            queue, units_end = self._queue_of(*span)
            if isinstance(queue, BatchConsumeQueue):
                continue
            for number in here:
                unit = queue.unit_of(span.begin + number, units_end)
                units = queue.read(unit, unit + 1)
                place = int(units.physical_offsets[0]) if len(units) else -1
                if any(reach.begin < place < reach.end for reach in reaches.files):
                    record = self._log.record_at(place)
                    if isinstance(record, Record):
                        yield record

    def _is_indexed(self, reaches: Reaches, record: Record) -> bool:
        words = [word for word in keys_of(record) if word]
        if not words:
            return True
        key_hash = index_key_hash(f"{record.topic.decode('utf-8', 'replace')}#{words[0]}")
        for reach in reaches.files:
            if reach.begin < record.physical_offset < reach.end:
                places = reach.places(key_hash, _SAMPLE_STEPS)
                if places is None:
                    reach.fault = ""  # a long chain proves nothing, and a broken one is met where it is asked for
                    return True
                return record.physical_offset in places
        return True


def keys_of(record: Record) -> list[str]:
    """Return what the index gets of a record: UNIQ_KEY, which may be empty, and the words of KEYS."""
    properties = parse(record.properties)
    return [properties.get(UNIQ_KEY, ""), *properties.get(KEYS, "").split(" ")]


def log_reading_instead(answer: SearchAnswer, record_bytes: Callable[[QueueKey, int, int], int]) -> None:
    """Log what the index does not tell, why, and what it costs to read that, where it is more than files' ends."""
    if answer.why and answer.unknown:
        count = sum(span.end - span.begin for span in answer.unknown)
        size = sum(_about(span, record_bytes) for span in answer.unknown)
        shown = "; ".join(answer.why[:3]) + (f"; and {len(answer.why) - 3} more" if len(answer.why) > 3 else "")
        _LOG.warning(
            "rmq: the key index does not tell of %d messages, which are read instead (about %d bytes): %s",
            count,
            size,
            shown,
        )


def _about(span: Span, record_bytes: Callable[[QueueKey, int, int], int]) -> int:
    """Return about how long the records of a span are: of a long one only the first are looked at."""
    queue, begin, end = span
    measured = min(end, begin + _MEASURED_MESSAGES)
    return record_bytes(queue, begin, measured) * (end - begin) // (measured - begin)


def read_found(
    answer: SearchAnswer,
    sought: Sought,
    begin_ms: int,
    end_ms: int,
    read: Callable[[QueueKey, int, int, Sequence[str]], Iterator[pa.RecordBatch]],
) -> list[tuple[QueueKey, int]]:
    """Return queue and queue offset of what was found, and of what is in the unknown rest, sorted, each once.

    Only what was stored in [begin_ms, end_ms]. `read` yields the messages of a span.
    """
    found: set[tuple[QueueKey, int]] = set()
    parts = [(span, False) for span in answer.found]
    for span, is_unknown in [*parts, *((span, True) for span in subtract_spans(answer.unknown, answer.found))]:
        for batch in read(*span, ("queueOffset", "storeTimestamp", *SOUGHT_COLUMNS)):
            rows = batch.filter(has_sought(batch, sought)) if is_unknown else batch
            times = rows.column("storeTimestamp").cast(pa.int64()).to_pylist()
            for offset, time_us in zip(rows.column("queueOffset").to_pylist(), times, strict=True):
                if begin_ms <= time_us // 1000 <= end_ms:
                    found.add((span.queue, offset))
    return sorted(found)


def subtract_spans(spans: Iterable[Span], taken: Collection[Span]) -> list[Span]:
    """Return what of the spans is in none of `taken`, none empty."""
    rest = list(spans)
    for cut in taken:
        rest = [
            part
            for span in rest
            for part in (
                (
                    Span(span.queue, span.begin, min(span.end, cut.begin)),
                    Span(span.queue, max(span.begin, cut.end), span.end),
                )
                if span.queue == cut.queue and span.begin < cut.end and cut.begin < span.end
                else (span,)
            )
            if part.begin < part.end
        ]
    return rest


def _overlaps(span: Span, others: Iterable[Span]) -> Iterator[Span]:
    for other in others:
        begin, end = max(span.begin, other.begin), min(span.end, other.end)
        if begin < end:
            yield Span(span.queue, begin, end)


def _is_in_a_queue(record: Record) -> bool:
    return record.sys_flag & TRANSACTION_MASK in (0, TRANSACTION_COMMIT)


def _span_of(record: Record) -> Span:
    key = QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id)
    count = message_count(record) if record.sys_flag & INNER_BATCH else 1
    return Span(key, record.queue_offset, record.queue_offset + count)
