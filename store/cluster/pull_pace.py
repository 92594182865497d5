"""How much to ask for in one pull, and how many pulls to keep in flight, by what the broker's earlier answers had.

A broker limits its answers, and no answer names the limit that it met. By default the limits are 32 messages or
256 KiB if they are in memory, and 8 messages or 64 KiB if the broker counts them as on disk. An operator may raise
them. A pull that asks for more than the broker gives leaves a rest, which takes another pull. Pulls that ask for less
waste the broker's time, because their number costs it more than their size.

So the pace begins with 32 and tries more while answers are full. Without a filter the unit is messages. With a filter
it is queue offsets, because a pull of a few matching messages may cover hundreds of offsets.

Source: DefaultMessageStore#isTheBatchFull, MessageStoreConfig (4.9, 5.3).
"""

FIRST_COUNT = 32  # maxTransferCountOnMessageInMemory
# A broker looks at this many queue entries for one pull with a filter, unless the pull asks for more messages
# (maxFilterMessageSize, 16,000 bytes of entries).
FIRST_FILTERED_COUNT = 800
_STEPS = (8, FIRST_COUNT, 256, 1024)
_MOST_WAITS = 64  # full answers between two tries, at most
_ANSWER_BYTES = 1 << 20  # larger answers are not faster
_UNKNOWN_BYTES = 256 << 10  # of an answer, before the first one: maxTransferBytesOnMessageInMemory
_FEW, _MANY = FIRST_COUNT // 4, FIRST_COUNT * 8
_DEPTHS = 64, 16, 8  # pulls in flight if a pull gives few messages, as usual, or many


class PullPace:
    """What to ask one broker for. One pace may serve many ranges, one after another.

    `depth` is how many pulls to keep in flight. It is `max_pulls`, or if that is None, the answers decide.
    """

    def __init__(self, *, is_filtered: bool = False, max_pulls: int | None = None) -> None:
        self._count = FIRST_FILTERED_COUNT if is_filtered else FIRST_COUNT
        self._max_pulls = max_pulls
        self.depth = self._new_depth()
        self._bytes_of_one: float | None = None  # moving average
        self._full_answers, self._wait = 0, 1
        self._tried = 0  # what the pull asks for that tries more and has no answer yet, or 0

    @property
    def count(self) -> int:
        """How many messages (with a filter: queue offsets) the broker gives in one answer, as far as is known."""
        return self._count

    def next_count(self, room: int) -> int:
        """Return how much the next pull asks for, at most `room`. From time to time this is more than `count`."""
        if self._full_answers >= self._wait and not self._tried:
            larger = self._larger_count()
            if larger > self._count < room:
                self._tried, self._full_answers = min(larger, room), 0
                return self._tried
        return min(self._count, room)

    def expected_bytes(self, count: int) -> int:
        """Return the estimated size (bytes) of the answer to a pull that asks for `count`."""
        return _UNKNOWN_BYTES if self._bytes_of_one is None else int(self._bytes_of_one * count)

    def answered(self, asked: int, given: int, size: int) -> None:
        """Learn from an answer of `size` bytes: it gave `given` of the `asked` messages or queue offsets. Both > 0."""
        mean = size / given
        before = self._bytes_of_one
        self._bytes_of_one = mean if before is None else before + (mean - before) / 8
        self.unanswered(asked)
        if asked > self._count:
            self._full_answers = 0
            if given >= asked or given >= 2 * self._count:
                self._count, self._wait = min(given, asked), 1
                self.depth = self._new_depth()
            else:
                self._wait = min(self._wait * 2, _MOST_WAITS)
        elif given >= asked:
            self._full_answers += asked == self._count  # the end of a range limits a smaller pull, not the broker
        else:
            if given * 2 < self._count:  # not a small variation of the sizes
                self._wait, self._full_answers = 1, 0
            self._count = given
            self.depth = self._new_depth()

    def unanswered(self, asked: int) -> None:
        """Learn that a pull got no answer."""
        if asked == self._tried:
            self._tried = 0

    def _new_depth(self) -> int:
        if self._max_pulls is not None:
            return self._max_pulls
        few, usual, many = _DEPTHS
        return few if self._count <= _FEW else many if self._count >= _MANY else usual

    def _larger_count(self) -> int:
        larger = next((step for step in _STEPS if step > self._count), self._count)
        return min(larger, int(_ANSWER_BYTES / self._bytes_of_one)) if self._bytes_of_one else larger
