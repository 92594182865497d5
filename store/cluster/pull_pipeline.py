"""Which pulls of planned ranges are in flight, and what they gave, in the order of the queue.

Queue offsets are dense, so pulls of one queue at different offsets are independent: `PullPipeline` cuts ranges of one
broker into pulls, and the caller keeps as many in flight as `PullPace` says. Answers come in any order. A short answer
is followed by a pull of its rest. No pull asks for an offset at or above the planned end, or the queue's end as the
broker gave it last: a broker of 4.9 stores a message for each such pull.

Every answer is checked. A planned range has no gaps, so without a filter an answer begins at the asked offset. An
answer that begins later, or that says that the messages are gone, is an OffsetRangeError. It is raised after all
earlier messages were taken.

With a filter an answer cannot show that matching messages have expired: the broker skips them silently. Retention
deletes from the front. So before messages are taken, one pull without a filter asks for the first offset that was
searched for them. If its message exists after their answers have come, they are complete.

The module is pure: no clock, no socket. Source: PullMessageProcessor, DefaultMessageStore#getMessage (4.9, 5.3).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from rmq_spark.store.cluster.codes import GetMessageStatus, PullStatus
from rmq_spark.store.cluster.pull_pace import PullPace
from rmq_spark.store.cluster.responses import PullResponse
from rmq_spark.store.errors import DamageError, OffsetRangeError, StoreError
from rmq_spark.store.format.record import INNER_BATCH, MIN_RECORD_BYTES, RECORD_HEAD
from rmq_spark.store.model import QueueKey, QueueRange

JOINED_BYTES = 8 << 20  # this much is taken at once, unless the range ends
MAX_BYTES = 32 << 20  # of answers that are in flight or wait for earlier ones
_JOINED_OFFSETS = 32_768
_JOINED_FILTERED_OFFSETS = 1 << 20


class Purpose(Enum):
    """What a pull is for."""

    MESSAGES = "messages of the range"
    PROOF = "whether the message at the offset exists"
    BOUNDS = "whether the queue has grown"


class Pull(NamedTuple):
    """One pull: at most `max_messages` of the range number `part`, from the queue offset `offset`.

    `expected_bytes` is what its answer may take. Only pulls for the purpose MESSAGES have the filter.
    """

    part: int
    queue: QueueKey
    offset: int
    max_messages: int
    expected_bytes: int
    purpose: Purpose = Purpose.MESSAGES


class Pulled(NamedTuple):
    """What was found at the queue offsets [offset, next_offset): records of the commit log.

    With a filter the body may also have records at `next_offset` and above.
    """

    offset: int
    next_offset: int
    body: bytes | memoryview


class Taken(NamedTuple):
    """Adjacent results of the range number `part`, in the order of the queue."""

    part: int
    pulled: list[Pulled]


class Verdict(Enum):
    """What the caller does after an answer."""

    GO_ON = "send the next pulls"
    RESET = "store the answer's next offset as the group's offset; the pull will be repeated"
    SHORT_QUEUE = "the queue ends below the planned end; see PullPipeline.short_queue"
    REDIRECTED = "the broker does not serve the queue; look its address up again; the pull will be repeated"


@dataclass(frozen=True, slots=True)
class ShortQueue:
    """A queue whose broker said that it ends at `max_offset`, below the end of the planned range."""

    part: QueueRange
    next_offset: int  # the first queue offset without an answer
    min_offset: int
    max_offset: int

    def error(self) -> OffsetRangeError:
        """Return the error for a queue that lost messages."""
        return OffsetRangeError(
            str(self.part.queue), self.next_offset, self.part.end, self.min_offset, self.max_offset, _REPLACED
        )


_REPLACED = "The broker lost messages, or another one has its name. Restore it, or start the query again."
_DAMAGED = "Read around the message with startingOffsets and endingOffsets, or repair the broker's store."


@dataclass(slots=True)
class _Part:
    """The state of one range."""

    asked: QueueRange
    todo: list[tuple[int, int]]  # a heap of the intervals without an answer that are not in flight
    front: int  # all offsets below have answers
    ready: dict[int, Pulled] = field(default_factory=dict)  # answers above the front, by offset
    line: list[Pulled] = field(default_factory=list)  # answers below the front that were not taken
    line_bytes: int = 0
    proof_end: int = 0  # a proof is needed for the answers below this offset; 0 if none is needed
    proved_end: int = 0  # the answers in `line` below this offset are proved
    is_proof_sent: bool = False
    error: StoreError | None = None
    error_at: int = 0  # the queue offset of the error
    limit: int | None = None  # the queue's end, if it is below the range's end
    min_offset: int = 0
    is_looking: bool = False  # whether the next pull finds out whether the queue has grown


class PullPipeline:
    """The pulls of ranges of one broker, in the order of the ranges.

    Loop: send pulls while `next_pull` returns one; give each answer to `answered`, or its pull to `unanswered` if there
    is no answer; `take` what is complete, until `is_done`.
    """

    def __init__(
        self,
        parts: Sequence[QueueRange],
        pace: PullPace,
        *,
        is_filtered: bool = False,
        max_bytes: int = MAX_BYTES,
        joined_bytes: int = JOINED_BYTES,
    ) -> None:
        self._parts = [_Part(part, [(part.begin, part.end)], part.begin) for part in parts]
        self._pace, self._is_filtered = pace, is_filtered
        self._max_bytes, self._joined_bytes = max_bytes, joined_bytes
        self._joined_offsets = _JOINED_FILTERED_OFFSETS if is_filtered else _JOINED_OFFSETS
        self._current = 0
        self._in_flight = 0
        self._held_bytes = 0  # answers that were not taken, and what answers in flight may take
        self._skip_empty()

    @property
    def is_done(self) -> bool:
        """Whether everything was taken."""
        return self._current == len(self._parts)

    @property
    def in_flight(self) -> int:
        """How many pulls were sent and have neither an answer nor a failure."""
        return self._in_flight

    @property
    def short_queue(self) -> ShortQueue | None:
        """The queue that the pipeline waits for, if it can continue only when that queue has grown."""
        if self.is_done or self._in_flight:
            return None
        part = self._parts[self._current]
        if part.limit is None or part.is_looking or part.proof_end:
            return None
        if not part.todo or part.todo[0][0] < part.limit:
            return None
        return ShortQueue(part.asked, part.front, part.min_offset, part.limit)

    def look_again(self) -> None:
        """Let the next pull find out whether the `short_queue` has grown. It asks for the offset at the queue's end."""
        self._parts[self._current].is_looking = True

    def next_pull(self) -> Pull | None:
        """Return the next pull to send, or None if enough are in flight or none is left."""
        if self._in_flight >= self._pace.depth:
            return None
        for number in range(self._current, len(self._parts)):
            part = self._parts[number]
            if part.proof_end and not part.is_proof_sent:
                part.is_proof_sent = True
                return self._send(number, part, part.line[0].offset, 1, Purpose.PROOF)
            if part.is_looking and part.limit is not None:
                part.is_looking = False
                return self._send(number, part, part.limit, 1, Purpose.BOUNDS)
            if part.todo and self._may_pull(part, is_first=number == self._current):
                begin, end = heapq.heappop(part.todo)
                top = end if part.limit is None else min(end, part.limit)
                count = self._pace.next_count(top - begin)
                if begin + count < end:
                    heapq.heappush(part.todo, (begin + count, end))
                return self._send(number, part, begin, count)
            if part.todo or part.error is not None:
                return None  # later ranges wait too, because their results would be taken later
        return None

    def _may_pull(self, part: _Part, *, is_first: bool) -> bool:
        """Say whether the next pull of a range may be sent: by memory, by the queue's end, and by an earlier error."""
        begin, end = part.todo[0]
        if part.error is not None and begin >= part.error_at:
            return False
        if part.limit is not None and begin >= part.limit:
            return False
        if is_first and begin == part.front:
            return True  # all others wait for it
        count = min(self._pace.count, end - begin)
        return self._held_bytes + self._pace.expected_bytes(count) <= self._max_bytes

    def _send(self, number: int, part: _Part, offset: int, count: int, purpose: Purpose = Purpose.MESSAGES) -> Pull:
        expected_bytes = self._pace.expected_bytes(count)
        self._in_flight += 1
        self._held_bytes += expected_bytes
        return Pull(number, part.asked.queue, offset, count, expected_bytes, purpose)

    def unanswered(self, pull: Pull) -> None:
        """Accept that a pull failed. It will be sent again."""
        self._pace.unanswered(pull.max_messages)
        self._ended(pull)
        self._repeat(pull)

    def _ended(self, pull: Pull) -> None:
        self._in_flight -= 1
        self._held_bytes -= pull.expected_bytes

    def _repeat(self, pull: Pull) -> None:
        part = self._parts[pull.part]
        if pull.purpose is Purpose.PROOF:
            part.is_proof_sent = False
        elif pull.purpose is Purpose.MESSAGES:
            heapq.heappush(part.todo, (pull.offset, pull.offset + pull.max_messages))

    def answered(self, pull: Pull, answer: PullResponse) -> Verdict:
        """Accept the answer to a pull."""
        self._ended(pull)
        part = self._parts[pull.part]
        if answer.reason != GetMessageStatus.OFFSET_RESET:
            part.limit = answer.max_offset if answer.max_offset < part.asked.end else None
            part.min_offset = answer.min_offset
        if pull.purpose is Purpose.BOUNDS:
            return Verdict.RESET if answer.reason == GetMessageStatus.OFFSET_RESET else Verdict.GO_ON
        is_filtered = self._is_filtered and pull.purpose is Purpose.MESSAGES
        found = judge(pull, answer, part.asked, is_filtered=is_filtered)
        if isinstance(found, int):
            self._found(pull, answer, found)
            return Verdict.GO_ON
        self._pace.unanswered(pull.max_messages)
        self._repeat(pull)
        if isinstance(found, Verdict):
            return found
        if part.error is None or pull.offset < part.error_at:
            part.error, part.error_at = found, pull.offset
        return Verdict.GO_ON

    def _found(self, pull: Pull, answer: PullResponse, next_offset: int) -> None:
        part = self._parts[pull.part]
        if pull.purpose is Purpose.PROOF:
            part.proved_end, part.proof_end, part.is_proof_sent = part.proof_end, 0, False
            return
        end, size = pull.offset + pull.max_messages, len(answer.records)
        self._pace.answered(pull.max_messages, next_offset - pull.offset, size)
        self._held_bytes += size
        if next_offset < end:
            heapq.heappush(part.todo, (next_offset, end))
        pulled = Pulled(pull.offset, next_offset, answer.records)
        if pull.offset != part.front:
            part.ready[pull.offset] = pulled
            return
        following: Pulled | None = pulled
        while following is not None:
            part.line.append(following)
            part.line_bytes += len(following.body)
            part.front = following.next_offset
            following = part.ready.pop(part.front, None) if part.ready else None

    def take(self) -> Taken | None:
        """Return the next results, or None if too few answers have come.

        These are all results of the rest of a range, or about `JOINED_BYTES` of them, and never of two ranges. Raises
        the error of an answer when all results before it were taken: OffsetRangeError if messages are missing, and
        DamageError if what came is not what was asked for.
        """
        if self.is_done:
            return None
        part = self._parts[self._current]
        if part.error is not None and part.error_at == (part.line[0].offset if part.line else part.front):
            raise part.error
        if not part.line or not self._is_enough(part):
            return None
        if self._is_filtered and part.line[0].offset >= part.proved_end:
            part.proof_end = part.proof_end or part.front
            return None
        taken = Taken(self._current, self._cut_line(part))
        self._skip_empty()
        return taken

    def _is_enough(self, part: _Part) -> bool:
        first = part.line[0].offset
        return (
            part.line_bytes >= self._joined_bytes
            or part.front - first >= self._joined_offsets
            or part.front == part.asked.end
            or (part.error is not None and part.front == part.error_at)
            or first < part.proved_end
        )

    def _cut_line(self, part: _Part) -> list[Pulled]:
        """Remove the results that are taken from the line, and return them."""
        line = part.line
        if self._is_filtered and part.front > part.proved_end:
            count = next(number for number, pulled in enumerate(line) if pulled.offset >= part.proved_end)
            line, part.line = line[:count], line[count:]
        else:
            part.line = []
        size = sum(len(pulled.body) for pulled in line)
        part.line_bytes -= size
        self._held_bytes -= size
        return line

    def _skip_empty(self) -> None:
        """Go on to the first range that is not complete."""
        while not self.is_done:
            part = self._parts[self._current]
            if part.line or part.front < part.asked.end:
                return
            self._current += 1


_FIELDS: Any = RECORD_HEAD.fields
_QUEUE_OFFSET_AT, _SYS_FLAG_AT = _FIELDS["queue_offset"][1], _FIELDS["sys_flag"][1]
_SEARCHED = (GetMessageStatus.NO_MATCHED_MESSAGE, GetMessageStatus.MESSAGE_WAS_REMOVING, "")
_GONE = (GetMessageStatus.OFFSET_FOUND_NULL, GetMessageStatus.MESSAGE_WAS_REMOVING, GetMessageStatus.OFFSET_TOO_SMALL)


def judge(pull: Pull, answer: PullResponse, part: QueueRange, *, is_filtered: bool) -> int | Verdict | StoreError:
    """Return the queue offset up to which an answer has all messages, or what it means instead.

    Source: PullMessageProcessor#composeResponseHeader, PullAPIWrapper#processPullResult (4.9, 5.3).
    """
    offset, following = pull.offset, answer.next_offset
    if answer.status is PullStatus.FOUND:
        return _judge_found(pull, answer, part, is_filtered=is_filtered)
    if answer.reason == GetMessageStatus.OFFSET_RESET:
        return Verdict.RESET
    is_searched = answer.status is PullStatus.NO_MATCHED_MSG
    if is_searched and answer.reason not in _SEARCHED:
        return Verdict.REDIRECTED  # a slave answers so whatever it has, even if it has found messages
    is_gone = answer.reason in _GONE or (is_searched and not is_filtered)
    if offset < answer.min_offset or (is_gone and following > offset):
        return _expired(pull, part, max(following, answer.min_offset), answer)
    if is_searched:
        return min(following, offset + pull.max_messages) if following > offset else Verdict.REDIRECTED
    return Verdict.SHORT_QUEUE if answer.max_offset < part.end else Verdict.REDIRECTED


def _judge_found(pull: Pull, answer: PullResponse, part: QueueRange, *, is_filtered: bool) -> int | StoreError:
    offset, following, body = pull.offset, answer.next_offset, answer.records
    end = offset + pull.max_messages
    if following <= offset:
        return _damage(pull, "the next offset of the answer", f"more than {offset}", following)
    if len(body) < MIN_RECORD_BYTES:
        return _damage(pull, "the answer", "a record", f"{len(body)} bytes")
    if is_filtered:
        return min(following, end)
    first = int.from_bytes(body[_QUEUE_OFFSET_AT : _QUEUE_OFFSET_AT + 8], "big", signed=True)
    if first != offset:
        sys_flag = int.from_bytes(body[_SYS_FLAG_AT : _SYS_FLAG_AT + 4], "big")
        if offset < first < following:
            return _expired(pull, part, first, answer)
        if first > offset or not sys_flag & INNER_BATCH:
            return _damage(pull, "the queue offset of the first record in the answer", offset, first)
    if following > end:
        return _damage(pull, "the next offset of the answer", f"at most {end}", following)
    return following


def _expired(pull: Pull, part: QueueRange, first: int, answer: PullResponse) -> OffsetRangeError:
    return OffsetRangeError(str(pull.queue), pull.offset, part.end, first, max(first, answer.max_offset))


def _damage(pull: Pull, what: str, expected: object, found: object) -> DamageError:
    path = f"broker {pull.queue.broker}, queue {pull.queue} from offset {pull.offset}"
    return DamageError(what, path, 0, expected, found, _DAMAGED)
