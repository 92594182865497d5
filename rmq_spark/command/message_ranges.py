"""Which messages `rmq cat` prints: the queues of topics, where each begins, and in which order they come."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import click

from rmq_spark.command.merged import PLACE, merge
from rmq_spark.command.output import say

_AT_ONCE = 65_536  # messages that are held of all queues, so that their order can be told
_FIRST_AT_ONCE, _LEAST_AT_ONCE = 256, 64
_LOOK_S = 0.1


class Beginning(NamedTuple):
    """Where to begin; at most one of these is given, and without any with the first message that is there."""

    time_ms: int | None
    offset: int | None
    last: int | None  # the last so many messages of all queues together


class MessageRanges:
    """Messages of topics, each once. `note` is called with (looked at, to look at) of a round, in messages."""

    def __init__(
        self,
        store: Any,
        topics: Sequence[str],
        queue_ids: Sequence[int],
        filters: Mapping[str, str | None],
        limit: int | None,
    ) -> None:
        self._store, self._topics, self._queue_ids, self._filters = store, topics, queue_ids, filters
        self._at_once = min(_AT_ONCE, max(limit, _LEAST_AT_ONCE)) if limit else _AT_ONCE
        self._next: dict[Any, int] = {}
        self._limit = None if any(filters.values()) else limit  # with a filter nobody knows how many that takes
        self._looked_count = self._chosen_count = 0
        self.note: Callable[[int, int], None] = lambda done, total: None

    def rounds(
        self, names: Sequence[str], begin: Beginning, end_ms: int | None, *, follow: bool
    ) -> Iterator[Iterator[Any]]:
        """Yield tables of messages by their place in the log: those that are there, then, with `follow`, what comes."""
        columns = list(dict.fromkeys([*names, PLACE]))
        self._store.refresh()
        ranges = self._first_ranges(begin, end_ms)
        while True:
            self._next |= {queue: end for queue, (_, end) in ranges.items()}
            self._looked_count, self._chosen_count = 0, sum(end - begin for begin, end in ranges.values())
            if self._limit is not None:
                self._chosen_count = min(self._chosen_count, self._limit)
            at_once = max(_LEAST_AT_ONCE, self._at_once // max(1, len(ranges)))
            yield merge({queue: self._read(queue, *ranges[queue], columns, at_once) for queue in ranges})
            if not follow:
                return
            while not self._store.refresh():
                time.sleep(_LOOK_S)
            ranges = dict(self._new_ranges())

    def _chosen(self) -> Iterator[Any]:
        for topic in self._topics:
            queues = self._store.queues(topic)
            wrong = set(self._queue_ids) - {queue.queue_id for queue in queues}
            if wrong:
                there = ", ".join(str(queue.queue_id) for queue in queues)
                raise click.UsageError(f"--queue {min(wrong)}: {topic} has no such queue. Its queues are: {there}.")
            yield from (queue for queue in queues if not self._queue_ids or queue.queue_id in self._queue_ids)

    def _first_ranges(self, begin: Beginning, end_ms: int | None) -> dict[Any, tuple[int, int]]:
        """Return the queue offsets [begin, end) of each queue that are to be printed."""
        ranges = {}
        for queue in self._chosen():
            held = self._store.bounds(queue)
            end = held.max_offset if end_ms is None else self._store.offset_at_time(queue, end_ms)
            first = begin.offset or 0
            if begin.time_ms is not None:
                first = self._store.offset_at_time(queue, begin.time_ms)
            ranges[queue] = min(max(first, held.min_offset), end), end
        return ranges if begin.last is None else self._last_of(ranges, begin.last)

    def _new_ranges(self) -> Iterator[tuple[Any, tuple[int, int]]]:
        """Yield the queue offsets of each queue that came since; of a queue that is new, all."""
        for queue in self._chosen():
            held = self._store.bounds(queue)
            first = self._next.get(queue, held.min_offset)
            if first < held.min_offset:
                say(f"rmq cat: {queue}: {held.min_offset - first} messages were deleted before they were printed")
            yield queue, (max(first, held.min_offset), max(first, held.max_offset))

    def _last_of(self, ranges: dict[Any, tuple[int, int]], count: int) -> dict[Any, tuple[int, int]]:
        """Return where the last `count` messages begin that the filters choose, of all queues together."""
        places: list[tuple[int, Any, int]] = []
        for queue, (begin, end) in ranges.items():
            places += [(place, queue, offset) for place, offset in self._last_places(queue, begin, end, count)]
        kept = sorted(places, key=lambda one: (one[0], one[2]), reverse=True)[:count]
        first: dict[Any, int] = {}
        for _, queue, offset in kept:
            first[queue] = min(offset, first.get(queue, offset))
        return {queue: (first.get(queue, end), end) for queue, (_, end) in ranges.items()}

    def _last_places(self, queue: Any, begin: int, end: int, count: int) -> list[tuple[int, int]]:
        """Return place in the log and queue offset of a queue's last `count` messages, read from its end backwards."""
        found: list[tuple[int, int]] = []
        at_once = max(count, _FIRST_AT_ONCE)
        while end > begin and len(found) < count:
            first = max(begin, end - at_once)
            rows: list[tuple[int, int]] = []
            for batch in self._store.read(queue, first, end, [PLACE, "queueOffset"], **self._filters):
                rows += zip(*(column.to_pylist() for column in batch.columns), strict=True)
            found = rows + found
            end, at_once = first, min(at_once * 4, _AT_ONCE)
        return found[max(0, len(found) - count) :]

    def _read(self, queue: Any, begin: int, end: int, columns: list[str], at_once: int) -> Iterator[Any]:
        """Yield a queue's messages, few at first: somebody may want no more."""
        count = min(_FIRST_AT_ONCE, at_once)
        while begin < end:
            stop = min(begin + count, end)
            yield from self._store.read(queue, begin, stop, columns, **self._filters)
            self._looked_count += stop - begin
            self.note(min(self._looked_count, self._chosen_count), self._chosen_count)
            begin, count = stop, min(count * 4, at_once)
