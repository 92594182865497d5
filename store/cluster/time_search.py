"""The search for the first message of a queue that was stored at or after a time, by single looks at messages.

A broker's own answer (SEARCH_OFFSET_BY_TIMESTAMP) is only a hint, because its meaning differs between versions. 5.3
answers with the first such message, or with the max offset if there is none. 4.9 answers with a neighbour: any message
of the same time, the nearest one, or the last one of the queue. The search proves a hint by two looks, and moves away
from a wrong one in growing steps. Without a hint it bisects. Pure: the caller looks at the messages.

Source: ConsumeQueue#getOffsetInQueueByTime (4.9), ConsumeQueue#binarySearchInQueueByTime (5.3).
"""

from rmq_spark.store.model import QueueBounds


class TimeSearch:
    """One search in one queue. Ask for `next_look` until it is None; then `found` is the queue offset.

    Store times must not decrease in the queue. Where they do, as after a change of the broker's clock, the search ends
    at one of the places where the time is passed.
    """

    def __init__(self, bounds: QueueBounds, time_ms: int, hint: int | None = None) -> None:
        self._time_ms = time_ms
        # Messages below `_low` are earlier than the time. The message at `_high` is not, or it is the end.
        self._low, self._high = bounds.min_offset, bounds.max_offset
        self._step = 1
        self._look = None if hint is None else min(max(hint, self._low), self._high)
        if self._look == self._high:
            self._look -= 1  # the hint is the end: the last message must be earlier
        self._is_bisecting = hint is None
        self._moves: set[bool] = set()  # the directions in which the search has moved

    @property
    def found(self) -> int:
        """The queue offset of the first message at or after the time, or the max offset if there is none."""
        return self._low

    def next_look(self) -> int | None:
        """Return the queue offset of the message whose store time is needed next, or None at the end."""
        if self._low >= self._high:
            return None
        if self._is_bisecting or self._look is None:
            return (self._low + self._high) // 2
        return min(max(self._look, self._low), self._high - 1)

    def note(self, offset: int, store_time_ms: int) -> None:
        """Note the store time of the message at `offset`, the answer of `next_look` or the next one that exists."""
        is_late = store_time_ms >= self._time_ms
        if is_late:
            self._high = min(self._high, offset)
            self._look = self._high - self._step
        else:
            self._low = max(self._low, offset + 1)
            self._look = self._low + self._step - 1
        self._step *= 2
        self._moves.add(is_late)
        # One look next to the hint may confirm it. After that both sides are known, and the rest is bisected.
        self._is_bisecting = self._is_bisecting or (len(self._moves) == 2 and self._high - self._low > 1)

    def note_expired(self, first: int) -> None:
        """Note that no message below the queue offset `first` exists."""
        self._low = min(max(self._low, first), self._high)
