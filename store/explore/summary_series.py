"""What pictures of a store are made of: messages and bytes by time, shares of tags, delays. Whole columns, no rows.

Of queues with very many messages a sample is read, evenly spread; what comes out says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.explore.summary_reader import StoreExplorer
from rmq_spark.store.explore.summary_units import NO_TIME, SampleSize, UnitSample
from rmq_spark.store.format import filenames
from rmq_spark.store.format.unit_ext import MAX_ADDRESS
from rmq_spark.store.units import QueueKey

_HEADS = 1 << 15  # read for one picture: pages of the log that it touches
_MIN_HEADS = 64  # of a queue
_TAG_SIZE = SampleSize(1 << 21, 1 << 11, 64)
_DECODED_TAGS = 100_000  # of a queue whose units do not say their message's tag
_NAMED_CODES = 64
_NAMES_ASKED = 4  # messages of one tags code: two tags may have the same one
_STEPS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000)
_LONG_STEPS_MS = (600_000, 900_000, 1_800_000, 3_600_000, 7_200_000, 14_400_000, 43_200_000)
_DAY_MS = 86_400_000

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """How many messages, or bytes of records, were stored in each of some equal spans of time, by topic or queue.

    `begin_ms` is where the first span begins (ms since the epoch), `step_ms` how long each is.
    """

    begin_ms: int
    step_ms: int
    values: dict[str, Floats]
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Delays:
    """How long messages took from birth to store, ms, in ascending order, and how many messages each stands for.

    Below 0 where the producer's clock was ahead of the store's.
    """

    delays_ms: NDArray[np.int64]
    messages: Floats
    is_exact: bool

    def quantile(self, part: float) -> float:
        """Return the delay that this part of all messages stays within, ms."""
        reached = np.cumsum(self.messages)
        at = int(np.searchsorted(reached, part * reached[-1]))
        return float(self.delays_ms[min(at, len(self.delays_ms) - 1)])


@dataclass(frozen=True, slots=True)
class TagCounts:
    """How many messages have each tag, None for those without one, the most frequent first.

    Of very many tags the rare ones are not named: `rare_tags` is how many these are, in `rare_messages` messages.
    """

    messages: dict[str | None, float]
    rare_tags: int
    rare_messages: float
    is_exact: bool


class _CodeCounts:
    """How many messages of a topic have each tags code, and where a few of them lie."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._places: dict[int, list[tuple[QueueKey, int]]] = {}

    def add(self, queue: QueueKey, sample: UnitSample) -> None:
        """Count a queue's units."""
        codes, firsts, which = np.unique(sample.units.tags_codes, return_index=True, return_inverse=True)
        totals = np.bincount(which, weights=sample.messages)
        lasts = np.zeros(len(codes), np.int64)
        lasts[which] = np.arange(len(which))  # of equal ones the last assignment stays
        for code, total, *rows in zip(codes.tolist(), totals.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
            self._counts[code] = self._counts.get(code, 0) + total
            places = self._places.setdefault(code, [])
            if len(places) < _NAMES_ASKED:
                places.extend((queue, int(sample.units.queue_offsets[row])) for row in sorted(set(rows)))

    def by_name(self, reader: StoreExplorer) -> Iterator[tuple[str | None, float]]:
        """Yield tags and how many messages have them, the most frequent first, without the rare ones."""
        for code, count in self._ordered()[:_NAMED_CODES]:
            names = {_tag_at(reader, queue, offset) for queue, offset in self._places[code]}
            yield next(iter(names)) if len(names) == 1 else " / ".join(sorted(str(one) for one in names)), count

    def rare(self) -> list[float]:
        """Return how many messages have each of the rare tags."""
        return [count for _, count in self._ordered()[_NAMED_CODES:]]

    def _ordered(self) -> list[tuple[int, float]]:
        return sorted(self._counts.items(), key=lambda one: -one[1])


def chosen_topics(reader: StoreExplorer, topics: str | Sequence[str] | None) -> list[str]:
    """Return the topics that are meant, each once: those named, or all that are not RocketMQ's own.

    Raises NotFoundError, which names others, for one that is not there.
    """
    if topics is None:
        return [topic for topic in reader.topics() if not filenames.is_system_topic(topic)]
    named = [topics] if isinstance(topics, str) else list(dict.fromkeys(topics))
    for topic in named:
        reader.queues(topic)
    return named


def stored_over_time(
    reader: StoreExplorer, topics: str | Sequence[str] | None, what: str, bin_count: int
) -> TimeSeries | None:
    """Return what was stored when, in at most `bin_count` spans; None if there is no message.

    A topic's name gives a series for each of its queues, several or None one for each topic. `what` is "messages" or
    "bytes". Store times are read from heads alone.
    """
    reader.refresh()
    parts: list[tuple[str, UnitSample, NDArray[np.int64]]] = []
    for queue, sample in _samples(reader, chosen_topics(reader, topics)):
        _, stored = reader.times_of(sample.units)
        parts.append((f"queue {queue.queue_id}" if isinstance(topics, str) else queue.topic, sample, stored))
    known = [stored[stored != NO_TIME] for _, _, stored in parts]
    known = [stored for stored in known if len(stored)]
    if not known:
        return None
    first, last = min(int(stored.min()) for stored in known), max(int(stored.max()) for stored in known)
    step_ms = _step(last - first + 1, bin_count)
    begin_ms = first // step_ms * step_ms
    edges = np.arange(begin_ms, last + step_ms + 1, step_ms, dtype=np.float64)
    values: dict[str, Floats] = {}
    for name, sample, stored in parts:
        counted = _histogram(sample, stored, what, edges)
        values[name] = values[name] + counted if name in values else counted
    return TimeSeries(begin_ms, step_ms, values, all(sample.is_whole for _, sample, _ in parts))


def stored_delays(reader: StoreExplorer, topics: str | Sequence[str] | None) -> Delays | None:
    """Return how long messages took from birth to store; None if there is no message. Heads alone are read."""
    reader.refresh()
    delays, messages, is_exact = [], [], True
    for _, sample in _samples(reader, chosen_topics(reader, topics)):
        born, stored = reader.times_of(sample.units)
        good = stored != NO_TIME
        delays.append((stored - born)[good])
        messages.append(sample.messages[good])
        is_exact &= sample.is_whole
    all_delays, all_messages = np.concatenate(delays or [[]]), np.concatenate(messages or [[]])
    if not len(all_delays):
        return None
    order = np.argsort(all_delays, kind="stable")
    return Delays(all_delays[order].astype(np.int64), all_messages[order], is_exact)


def tag_counts(reader: StoreExplorer, topic: str) -> TagCounts:
    """Return how many messages have each tag.

    Counted by the units' tags codes (Java hashes); a few messages of each say the name, and tags that share a code
    are counted together, as "AaAa / BBBB". Where units hold something else messages are decoded, the latest of many.
    """
    reader.refresh()
    counts: dict[str | None, float] = {}
    codes, is_exact = _CodeCounts(), True
    for queue in reader.queues(topic):
        sample = reader.sample(queue, _TAG_SIZE)
        if not len(sample.units):
            continue
        is_other = sample.units.message_counts is not None or topic in filenames.WAITING_TOPICS
        if is_other or int(sample.units.tags_codes.min()) <= MAX_ADDRESS:
            decoded, is_whole = _decoded_tags(reader, queue)
            for tag, count in decoded.items():
                counts[tag] = counts.get(tag, 0) + count
        else:
            is_whole = sample.is_whole
            codes.add(queue, sample)
        is_exact &= is_whole
    for tag, count in codes.by_name(reader):
        counts[tag] = counts.get(tag, 0) + count
    rare = codes.rare()
    return TagCounts(dict(sorted(counts.items(), key=lambda one: -one[1])), len(rare), sum(rare), is_exact)


def _samples(reader: StoreExplorer, topics: Sequence[str]) -> list[tuple[QueueKey, UnitSample]]:
    queues = [queue for topic in topics for queue in reader.queues(topic)]
    share = max(_HEADS // max(1, len(queues)), _MIN_HEADS)
    found = ((queue, reader.sample(queue, SampleSize(share, share, 1))) for queue in queues)
    return [(queue, sample) for queue, sample in found if len(sample.units)]


def _step(span_ms: int, bin_count: int) -> int:
    """Return the shortest step, of those that people count in, by which so many bins reach over the span."""
    least = -(-span_ms // bin_count)
    for step in (*_STEPS_MS, *_LONG_STEPS_MS):
        if step >= least:
            return step
    return -(-least // _DAY_MS) * _DAY_MS


def _histogram(sample: UnitSample, stored: NDArray[np.int64], what: str, edges: Floats) -> Floats:
    good = stored != NO_TIME
    weights = sample.messages[good]
    if what == "bytes":
        counts = sample.units.message_counts
        weights = weights * sample.units.sizes[good] / (1 if counts is None else counts[good])
    if sample.is_whole:
        return np.histogram(stored[good], edges, weights=weights)[0].astype(np.float64)
    # What a unit stands for was stored between it and the next one of the sample.
    times = np.maximum.accumulate(stored[good])
    before = np.append(0.0, np.cumsum(weights))[:-1]
    reached = np.interp(edges, times, before, left=0.0, right=float(weights.sum()))
    reached[[0, -1]] = 0.0, weights.sum()  # messages of one ms are one step, which may lie at either end
    return np.diff(reached)


def _tag_at(reader: StoreExplorer, queue: QueueKey, offset: int) -> str | None:
    (batch,) = reader.read(queue, offset, offset + 1, ["tags"])
    tag: str | None = batch["tags"][0].as_py()
    return tag


def _decoded_tags(reader: StoreExplorer, queue: QueueKey) -> tuple[dict[str | None, float], bool]:
    """Return tags and how many messages of a queue have them, and whether all were looked at."""
    bounds = reader.bounds(queue)
    begin = max(bounds.min_offset, bounds.max_offset - _DECODED_TAGS)
    counts: dict[str | None, float] = {}
    for batch in reader.read(queue, begin, bounds.max_offset, ["tags"]):
        for one in batch["tags"].value_counts().to_pylist():
            counts[one["values"]] = counts.get(one["values"], 0) + one["counts"]
    share = (bounds.max_offset - bounds.min_offset) / max(1, bounds.max_offset - begin)
    return {tag: count * share for tag, count in counts.items()}, begin == bounds.min_offset
