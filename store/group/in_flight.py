"""Messages of one queue that are at work, and up to where everything is finished.

The rule by which a RocketMQ consumer commits: the offset of the smallest message that is not finished, or one beyond
the newest when all are. So a crash delivers again whatever was finished out of order, and never loses one.

Offsets lie sorted in one array. Finished ones are marked there, and taken out when they are half of it: many at once
cost a few array operations, a single one a search, however many are at work.

Source: ProcessQueue (4.9, 5.3).
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Offsets: TypeAlias = NDArray[np.int64]

_FEW_OFFSETS = 64  # below this, taking finished ones out of the array is not worth it


class InFlight:
    """The unfinished messages of one queue, by their queue offsets. One thread at a time.

    A queue consumed in any order needs `put` and `remove`; one consumed in order `put`, `take`, and then `commit`,
    `roll_back` or `give_back`.
    """

    def __init__(self) -> None:
        self._offsets: Offsets = np.zeros(0, np.int64)  # sorted, each once, some finished ones among them
        self._is_open: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._count = 0  # of the open ones
        self._first = 0  # where the smallest open one is
        self._taken: Offsets = np.zeros(0, np.int64)  # sorted
        self._newest = -1  # the last offset that was put and was new (ProcessQueue#queueOffsetMax)

    def __len__(self) -> int:
        """Return how many messages are neither finished nor taken."""
        return self._count

    @property
    def taken_count(self) -> int:
        """Return how many messages are taken, and neither committed nor given back."""
        return len(self._taken)

    @property
    def span(self) -> int:
        """Return how far the newest unfinished message lies beyond the oldest, 0 without any (#getMaxSpan).

        A client stops pulling when this is over consumeConcurrentlyMaxSpan: one stuck message holds back its queue.
        """
        if not self._count:
            return 0
        last = len(self._offsets) - 1 - int(self._is_open[::-1].argmax())
        return int(self._offsets[last] - self._offsets[self._first])

    def put(self, offsets: ArrayLike) -> int:
        """Add messages that were pulled; return how many were new. Those at work already change nothing."""
        pulled = _as_offsets(offsets)
        self._drop_finished()
        _, is_known = self._find(pulled)
        pulled = pulled[~is_known]
        if not len(pulled):
            return 0
        if _is_ascending(pulled):  # as a pull's answer is
            self._newest = int(pulled[-1])
        else:
            pulled, first_seen = np.unique(pulled, return_index=True)
            self._newest = int(pulled[first_seen.argmax()])
        self._insert(pulled)
        return len(pulled)

    def remove(self, offsets: ArrayLike) -> int | None:
        """Finish messages and return the offset to commit; None, no update, when none was at work (Java's -1).

        Those that are not at work are passed over. The offset goes back when messages were put in front of what is
        finished, so that a consumer in any order commits by `raise_offset`.
        """
        if not self._count:
            return None
        finished = _as_offsets(offsets)
        places, is_known = self._find(finished if _is_ascending(finished) else np.unique(finished))
        places = places[is_known]
        self._is_open[places] = False
        self._count -= len(places)
        if not self._count:
            self._drop_finished()
            return self._newest + 1
        self._first += int(self._is_open[self._first :].argmax())
        smallest = int(self._offsets[self._first])
        if len(self._offsets) > max(_FEW_OFFSETS, 2 * self._count):
            self._drop_finished()
        return smallest

    def take(self, count: int) -> Offsets:
        """Take the first `count` messages to consume them in order; fewer, or none, when there are no more."""
        assert count > 0, count
        self._drop_finished()
        batch = self._offsets[:count]
        # Views: a queue that is taken one by one copies nothing.
        self._offsets, self._is_open = self._offsets[count:], self._is_open[count:]
        self._count = len(self._offsets)
        self._taken = np.union1d(self._taken, batch)
        return batch.copy()

    def commit(self) -> int | None:
        """Finish all that is taken and return the offset to commit, one beyond it; None when nothing is taken.

        It is stored as it is, even if it goes back.
        """
        if not len(self._taken):
            return None
        newest = int(self._taken[-1])
        self._taken = self._taken[:0]
        return newest + 1

    def roll_back(self) -> None:
        """Put all that is taken back to be consumed again."""
        self._put_back(self._taken)

    def give_back(self, offsets: ArrayLike) -> None:
        """Put some of what is taken back to be consumed again (#makeMessageToConsumeAgain)."""
        self._put_back(np.intersect1d(self._taken, _as_offsets(offsets)))

    def _find(self, offsets: Offsets) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Return the places of the offsets, and which of them are at work: only their places mean something."""
        places = np.searchsorted(self._offsets, offsets)
        if not len(self._offsets):
            return places, np.zeros(len(offsets), np.bool_)
        places = np.minimum(places, len(self._offsets) - 1)
        return places, (self._offsets[places] == offsets) & self._is_open[places]

    def _put_back(self, some: Offsets) -> None:
        self._taken = np.setdiff1d(self._taken, some, assume_unique=True)
        self._drop_finished()
        self._insert(some[~self._find(some)[1]])

    def _insert(self, fresh: Offsets) -> None:
        # Only where nothing finished is left.
        if len(self._offsets) and len(fresh) and fresh[0] < self._offsets[-1]:
            self._offsets = np.insert(self._offsets, np.searchsorted(self._offsets, fresh), fresh)
        else:
            self._offsets = np.concatenate([self._offsets, fresh])
        self._is_open = np.ones(len(self._offsets), np.bool_)
        self._count = len(self._offsets)

    def _drop_finished(self) -> None:
        if self._count < len(self._offsets):
            self._offsets = self._offsets[self._is_open]
            self._is_open = np.ones(self._count, np.bool_)
        self._first = 0


def raise_offset(stored: int | None, result: int | None, *, is_dropped: bool = False) -> int | None:
    """Return the offset to store after a `remove`: never one below what is stored, and no other for a dropped queue.

    A dropped queue is another member's already (ConsumeMessageConcurrentlyService#processConsumeResult, 4.9).
    """
    if result is None or is_dropped:
        return stored
    return result if stored is None else max(stored, result)


def _is_ascending(offsets: Offsets) -> bool:
    return bool((offsets[1:] > offsets[:-1]).all())


def _as_offsets(offsets: ArrayLike) -> Offsets:
    return np.atleast_1d(np.asarray(offsets, np.int64))
