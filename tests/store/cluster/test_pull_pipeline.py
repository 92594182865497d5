"""Pulls of planned ranges against a simulated broker: limits, order, short answers, expiry, filters, short queues."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.store.cluster.codes import GetMessageStatus, PullStatus
from rmq_spark.store.cluster.pull_pace import FIRST_COUNT, PullPace
from rmq_spark.store.cluster.pull_pipeline import Pull, Pulled, PullPipeline, Purpose, Verdict, judge
from rmq_spark.store.cluster.responses import PullResponse
from rmq_spark.store.errors import DamageError, OffsetRangeError
from rmq_spark.store.format.record import INNER_BATCH
from rmq_spark.store.model import QueueKey, QueueRange

QUEUE = QueueKey("orders", 3, "broker-a")
RECORD_BYTES = 120
MIB = 1 << 20


def record(queue_offset: int, size: int = RECORD_BYTES, sys_flag: int = 0) -> bytes:
    """Return bytes with the two fields of a record that the pipeline reads."""
    return struct.pack(">20xqqi", queue_offset, 0, sys_flag).ljust(size, b"\0")


@dataclass
class Broker:
    """A queue with the offsets [gone, end), and the limits of a broker's answers. `gone` <= `minimum` is possible."""

    end: int
    minimum: int = 0
    gone: int = 0  # the records below have expired, although the minimum may be lower
    messages: int = 32
    answer_bytes: int = 256 << 10
    sizes: Callable[[int], int] = lambda _: RECORD_BYTES
    matches: Callable[[int], bool] | None = None
    asked: list[Pull] = field(default_factory=list)

    def answer(self, pull: Pull) -> PullResponse:
        """Answer as DefaultMessageStore#getMessage does."""
        self.asked.append(pull)
        offset = pull.offset
        if self.end == 0:
            status = PullStatus.OFFSET_ILLEGAL if offset else PullStatus.NO_NEW_MSG
            return self._empty(status, 0, GetMessageStatus.NO_MESSAGE_IN_QUEUE)
        if offset < self.minimum:
            return self._empty(PullStatus.OFFSET_ILLEGAL, self.minimum, GetMessageStatus.OFFSET_TOO_SMALL)
        if offset == self.end:
            return self._empty(PullStatus.NO_NEW_MSG, offset, GetMessageStatus.OFFSET_OVERFLOW_ONE)
        if offset > self.end:
            return self._empty(PullStatus.OFFSET_ILLEGAL, self.end, GetMessageStatus.OFFSET_OVERFLOW_BADLY)
        return self._scan(pull)

    def _scan(self, pull: Pull) -> PullResponse:
        body, count, number, was_removed = bytearray(), 0, pull.offset, False
        matches = self.matches if pull.purpose is Purpose.MESSAGES else None
        scanned = max(800, pull.max_messages) if matches is not None else self.end
        while number < min(self.end, pull.offset + scanned):
            if matches is None or matches(number):
                if number < self.gone:
                    was_removed = True
                else:
                    size = self.sizes(number)
                    if count and len(body) + size > self.answer_bytes:
                        break
                    body += record(number, size)
                    count += 1
                    if count >= min(self.messages, max(pull.max_messages, 1)):
                        number += 1
                        break
            number += 1
        if body:
            found = PullStatus.FOUND, number, self.minimum, self.end, bytes(body), GetMessageStatus.FOUND
            return PullResponse(*found)
        reason = GetMessageStatus.MESSAGE_WAS_REMOVING if was_removed else GetMessageStatus.NO_MATCHED_MESSAGE
        return self._empty(PullStatus.NO_MATCHED_MSG, number, reason)

    def _empty(self, status: PullStatus, following: int, reason: str) -> PullResponse:
        return PullResponse(status, following, self.minimum, self.end, b"", reason)


def offsets_of(pulled: Sequence[Pulled], size: int = RECORD_BYTES) -> list[int]:
    """Return the queue offsets of the records of equal size that the results have."""
    return [struct.unpack_from(">q", part.body, at + 20)[0] for part in pulled for at in range(0, len(part.body), size)]


@dataclass
class Loop:
    """The loop around a pipeline. `choose` gives the index of the pull in flight that is answered next."""

    pipeline: PullPipeline
    broker: Broker
    choose: Callable[[int], int] = lambda _: 0
    fails: Callable[[], bool] = lambda: False
    most_in_flight: int = 0
    taken: list[tuple[int, Pulled]] = field(default_factory=list)
    in_flight: list[Pull] = field(default_factory=list)

    def run(self, rounds: int = 100_000) -> None:
        """Go on until everything is taken, or the pipeline waits for a queue that is too short."""
        for _ in range(rounds):
            while (found := self.pipeline.take()) is not None:
                self.taken += [(found.part, one) for one in found.pulled]
            if self.pipeline.is_done or self.pipeline.short_queue is not None:
                return
            while (pull := self.pipeline.next_pull()) is not None:
                self.in_flight.append(pull)
            assert len(self.in_flight) == self.pipeline.in_flight > 0
            self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
            pull = self.in_flight.pop(self.choose(len(self.in_flight)))
            if self.fails():
                self.pipeline.unanswered(pull)
            else:
                assert self.pipeline.answered(pull, self.broker.answer(pull)) is not Verdict.REDIRECTED
        raise AssertionError("the pipeline makes no progress")

    def pulled(self, part: int = 0) -> list[Pulled]:
        """Return what was taken of one range."""
        return [one for number, one in self.taken if number == part]


def loop(broker: Broker, begin: int, end: int, *, is_filtered: bool = False, pace: PullPace | None = None) -> Loop:
    """Return a loop over one range."""
    pace = pace or PullPace(is_filtered=is_filtered)
    return Loop(PullPipeline([QueueRange(QUEUE, begin, end)], pace, is_filtered=is_filtered), broker)


def check_complete(found: Sequence[Pulled], begin: int, end: int) -> None:
    """Check that the results are adjacent, and reach from `begin` to `end`."""
    assert [one.offset for one in found] == [begin, *(one.next_offset for one in found[:-1])]
    assert found[-1].next_offset == end


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    begin=st.integers(0, 3000),
    counts=st.lists(st.integers(0, 2500), min_size=1, max_size=3),
    messages=st.sampled_from([1, 3, 8, 32, 33, 300, 5000]),
    answer_bytes=st.sampled_from([1, 1000, 64 << 10, MIB]),
    max_pulls=st.sampled_from([None, 1, 5]),
    max_bytes=st.sampled_from([1, 100_000, 32 * MIB]),
)
def test_pipeline_gives_every_message_once_and_in_order(
    seed: int, begin: int, counts: list[int], messages: int, answer_bytes: int, max_pulls: int | None, max_bytes: int
) -> None:
    random = Random(seed)
    parts = [QueueRange(QUEUE, begin, begin + count) for count in counts]
    broker = Broker(begin + max(counts), messages=messages, answer_bytes=answer_bytes)
    pipeline = PullPipeline(parts, PullPace(max_pulls=max_pulls), max_bytes=max_bytes, joined_bytes=20_000)
    run = Loop(pipeline, broker, random.randrange, lambda: random.random() < 0.1)
    run.run()
    for number, part in enumerate(parts):
        found = run.pulled(number)
        assert offsets_of(found) == list(range(part.begin, part.end))
        if part.count:
            check_complete(found, part.begin, part.end)
    assert all(pull.offset + pull.max_messages <= parts[pull.part].end for pull in broker.asked)
    assert run.most_in_flight <= (max_pulls or 64)
    assert [number for number, _ in run.taken] == sorted(number for number, _ in run.taken)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 6000),
    share=st.sampled_from([0.0, 0.001, 0.03, 0.5, 1.0]),
    messages=st.sampled_from([1, 8, 32]),
)
def test_pipeline_gives_every_matching_message(seed: int, count: int, share: float, messages: int) -> None:
    random = Random(seed)
    wanted = {number for number in range(count + 500) if random.random() < share}
    broker = Broker(count + 500, messages=messages, matches=wanted.__contains__)
    run = loop(broker, 0, count, is_filtered=True)
    run.choose, run.fails = random.randrange, lambda: random.random() < 0.1
    run.run()
    check_complete(run.pulled(), 0, count)
    found = [number for one in run.pulled() for number in offsets_of([one]) if number < one.next_offset]
    assert found == sorted(number for number in wanted if number < count)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), count=st.integers(10, 3000), is_filtered=st.booleans(), keeps_minimum=st.booleans())
def test_expiry_during_the_read_is_an_error_and_what_came_before_is_complete(
    seed: int, count: int, is_filtered: bool, keeps_minimum: bool
) -> None:
    random = Random(seed)
    broker = Broker(count, matches=(lambda number: number % 3 == 0) if is_filtered else None)
    run = loop(broker, 0, count, is_filtered=is_filtered)
    run.choose = random.randrange
    gone, at = random.randrange(1, count + 1), random.randrange(1, 60)

    def expire() -> bool:
        if len(broker.asked) == at:
            broker.gone = gone
            broker.minimum = 0 if keeps_minimum else gone
        return False

    run.fails = expire
    lost: OffsetRangeError | None = None
    try:
        run.run()
    except OffsetRangeError as error:
        lost = error
    begin = count if lost is None else lost.begin
    if lost is not None:
        assert lost.begin < lost.min_offset <= gone
        assert lost.end == count
        assert broker.gone
    if begin:
        check_complete(run.pulled(), 0, begin)
    found = [number for one in run.pulled() for number in offsets_of([one]) if number < one.next_offset]
    assert found == [number for number in range(begin) if not is_filtered or number % 3 == 0]


def test_a_filtered_range_that_expired_silently_is_an_error() -> None:
    broker = Broker(1000, matches=lambda number: number == 5 or number > 900)
    run = loop(broker, 0, 1000, is_filtered=True)

    def expire() -> bool:
        broker.gone = 800
        return False

    run.fails = expire
    with pytest.raises(OffsetRangeError) as caught:
        run.run()
    assert (caught.value.begin, caught.value.min_offset) == (0, 800)
    assert not run.taken


def test_filtered_messages_are_taken_after_a_proof_that_was_sent_after_them() -> None:
    broker = Broker(1000, matches=lambda number: number == 5)
    run = loop(broker, 0, 1000, is_filtered=True)
    run.run()
    assert [(pull.offset, pull.max_messages, pull.purpose) for pull in broker.asked] == [
        (0, 800, Purpose.MESSAGES),
        (800, 200, Purpose.MESSAGES),
        (0, 1, Purpose.PROOF),
    ]


def test_large_filtered_ranges_are_proved_part_by_part() -> None:
    broker = Broker(20_000, matches=lambda _: True)
    pipeline = PullPipeline([QueueRange(QUEUE, 0, 20_000)], PullPace(is_filtered=True), is_filtered=True,
                            joined_bytes=100_000)  # fmt: skip
    run = Loop(pipeline, broker)
    run.run()
    assert offsets_of(run.pulled()) == list(range(20_000))
    assert 10 < sum(pull.purpose is Purpose.PROOF for pull in broker.asked) < 30


def test_results_of_a_large_range_are_taken_in_large_parts() -> None:
    broker, sizes = Broker(40_000), []
    run = loop(broker, 0, 40_000)
    while not run.pipeline.is_done:
        if (pull := run.pipeline.next_pull()) is not None:
            run.pipeline.answered(pull, broker.answer(pull))
        if (taken := run.pipeline.take()) is not None:
            sizes.append(taken.pulled[-1].next_offset - taken.pulled[0].offset)
    assert len(sizes) == 2
    assert sizes[0] >= 32_768


def test_pulls_go_on_with_the_next_range_while_the_first_one_waits() -> None:
    parts = [QueueRange(QUEUE, 0, 40), QueueRange(QueueKey("orders", 4, "broker-a"), 0, 40)]
    pipeline = PullPipeline(parts, PullPace())
    pulls = [pull for _ in range(9) if (pull := pipeline.next_pull()) is not None]
    assert [(pull.part, pull.queue.queue_id, pull.offset, pull.max_messages) for pull in pulls] == [
        (0, 3, 0, 32), (0, 3, 32, 8), (1, 4, 0, 32), (1, 4, 32, 8),
    ]  # fmt: skip
    broker = Broker(40)
    for pull in reversed(pulls):
        assert pipeline.take() is None
        pipeline.answered(pull, broker.answer(pull))
    assert [taken.part for _ in range(2) if (taken := pipeline.take()) is not None] == [0, 1]
    assert pipeline.is_done


def test_memory_bounds_the_pulls_in_flight_but_not_the_first_one() -> None:
    pipeline = PullPipeline([QueueRange(QUEUE, 0, 10_000)], PullPace(), max_bytes=540 << 10)
    pulls = [pull for _ in range(20) if (pull := pipeline.next_pull()) is not None]
    assert len(pulls) == 2, "256 KiB are expected of each"
    broker = Broker(10_000, sizes=lambda _: 10_000)
    pipeline.answered(pulls[1], broker.answer(pulls[1]))
    assert pipeline.next_pull() is None, "the answer waits, and the first pull is in flight"
    pipeline.unanswered(pulls[0])
    again = pipeline.next_pull()
    assert again is not None
    assert again.offset == 0


def test_ranges_without_messages_are_passed_over() -> None:
    pipeline = PullPipeline([QueueRange(QUEUE, 5, 5), QueueRange(QUEUE, 7, 7)], PullPace())
    assert pipeline.is_done
    assert pipeline.take() is None
    assert pipeline.next_pull() is None


# Queues that end below the planned end.


@pytest.mark.parametrize("end", [0, 10, 40, 64])
def test_a_short_queue_is_waited_for_without_pulls_beyond_its_end(end: int) -> None:
    broker = Broker(end)
    run = loop(broker, 20, 100)
    run.run()
    short = run.pipeline.short_queue
    assert short is not None
    assert (short.next_offset, short.max_offset) == (max(min(end, 100), 20), end)
    asked = len(broker.asked)
    for _ in range(3):
        run.pipeline.look_again()
        assert run.pipeline.short_queue is None
        run.run()
    assert [(pull.offset, pull.purpose) for pull in broker.asked[asked:]] == [(end, Purpose.BOUNDS)] * 3
    broker.end = 100
    run.pipeline.look_again()
    run.run()
    assert run.pipeline.is_done
    assert offsets_of(run.pulled()) == list(range(20, 100))


def test_pulls_end_at_the_end_of_a_short_queue() -> None:
    broker = Broker(60)
    run = loop(broker, 20, 100, pace=PullPace(max_pulls=1))
    run.run()
    assert [(pull.offset, pull.max_messages) for pull in broker.asked] == [(20, 32), (52, 8)]


def test_later_ranges_wait_for_a_short_queue() -> None:
    parts = [QueueRange(QUEUE, 0, 40), QueueRange(QueueKey("orders", 4, "broker-a"), 0, 40)]
    broker = Broker(10)
    run = Loop(PullPipeline(parts, PullPace(max_pulls=1)), broker)
    run.run()
    assert run.pipeline.short_queue is not None
    assert {pull.part for pull in broker.asked} == {0}


def test_a_short_queue_before_an_error_is_waited_for() -> None:
    broker = Broker(100)
    run = loop(broker, 0, 100)
    pulls = [pull for _ in range(4) if (pull := run.pipeline.next_pull()) is not None]
    run.pipeline.answered(pulls[2], respond(PullStatus.FOUND, 96, body=BODY))
    for pull in (pulls[0], pulls[1], pulls[3]):
        run.pipeline.unanswered(pull)
    broker.end = 40
    run.run()
    short = run.pipeline.short_queue
    assert short is not None
    assert (short.next_offset, short.max_offset) == (40, 40)
    broker.end = 100
    run.pipeline.look_again()
    with pytest.raises(DamageError):
        run.run()
    assert offsets_of(run.pulled()) == list(range(64))


def test_the_error_of_a_short_queue_has_its_bounds() -> None:
    run = loop(Broker(30, minimum=3), 20, 100)
    run.run()
    assert run.pipeline.short_queue is not None
    error = run.pipeline.short_queue.error()
    assert (error.begin, error.end, error.min_offset, error.max_offset) == (30, 100, 3, 30)
    assert "orders/broker-a:3" in str(error)


# The meaning of single answers.


def respond(
    status: PullStatus, following: int, reason: str = "", minimum: int = 0, maximum: int = 1000, body: bytes = b""
) -> PullResponse:
    return PullResponse(status, following, minimum, maximum, body, reason)


PULL = Pull(0, QUEUE, 100, 32, 0)
PART = QueueRange(QUEUE, 0, 500)
BODY = b"".join(map(record, range(100, 132)))


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (respond(PullStatus.FOUND, 132, body=BODY), 132),
        (respond(PullStatus.FOUND, 108, body=BODY[: 8 * RECORD_BYTES]), 108),
        (respond(PullStatus.FOUND, 102, body=record(99, sys_flag=INNER_BATCH)), 102),
        (respond(PullStatus.OFFSET_ILLEGAL, 7, "OFFSET_RESET", maximum=0), Verdict.RESET),
        (respond(PullStatus.NO_NEW_MSG, 100, "OFFSET_OVERFLOW_ONE", maximum=100), Verdict.SHORT_QUEUE),
        (respond(PullStatus.OFFSET_ILLEGAL, 50, "OFFSET_OVERFLOW_BADLY", maximum=50), Verdict.SHORT_QUEUE),
        (respond(PullStatus.OFFSET_ILLEGAL, 0, "NO_MESSAGE_IN_QUEUE", maximum=0), Verdict.SHORT_QUEUE),
        (respond(PullStatus.NO_MATCHED_MSG, 100, "NO_MATCHED_MESSAGE"), Verdict.REDIRECTED),
        (respond(PullStatus.NO_NEW_MSG, 100, ""), Verdict.REDIRECTED),
    ],
)
def test_judge_of_answers_that_are_no_error(answer: PullResponse, found: object) -> None:
    assert judge(PULL, answer, PART, is_filtered=False) == found


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("reason", ["FOUND", "OFFSET_TOO_SMALL", "OFFSET_OVERFLOW_BADLY", "NO_MESSAGE_IN_QUEUE"])
def test_judge_believes_no_slave(reason: str, is_filtered: bool) -> None:
    answer = respond(PullStatus.NO_MATCHED_MSG, 132, reason, minimum=120)
    assert judge(PULL, answer, PART, is_filtered=is_filtered) is Verdict.REDIRECTED


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize(
    ("answer", "minimum"),
    [
        (respond(PullStatus.OFFSET_ILLEGAL, 300, "OFFSET_TOO_SMALL", minimum=300), 300),
        (respond(PullStatus.OFFSET_ILLEGAL, 300, "", minimum=300), 300),
        (respond(PullStatus.NO_MATCHED_MSG, 800, "MESSAGE_WAS_REMOVING", minimum=99), 800),
        (respond(PullStatus.NO_NEW_MSG, 400, "OFFSET_FOUND_NULL"), 400),
    ],
)
def test_judge_of_messages_that_are_gone(answer: PullResponse, minimum: int, is_filtered: bool) -> None:
    error = judge(PULL, answer, PART, is_filtered=is_filtered)
    assert isinstance(error, OffsetRangeError)
    assert (error.queue, error.begin, error.end) == ("orders/broker-a:3", 100, 500)
    assert (error.min_offset, error.max_offset) == (minimum, 1000)


def test_judge_of_a_jump() -> None:
    answer = respond(PullStatus.FOUND, 111, body=record(109) + record(110))
    error = judge(PULL, answer, PART, is_filtered=False)
    assert isinstance(error, OffsetRangeError)
    assert (error.begin, error.min_offset) == (100, 109)
    assert judge(PULL, answer, PART, is_filtered=True) == 111


def test_judge_of_a_broker_that_filtered_without_being_asked() -> None:
    error = judge(PULL, respond(PullStatus.NO_MATCHED_MSG, 132, "NO_MATCHED_MESSAGE"), PART, is_filtered=False)
    assert isinstance(error, OffsetRangeError)


@pytest.mark.parametrize(
    "answer",
    [
        respond(PullStatus.FOUND, 100, body=BODY),
        respond(PullStatus.FOUND, 132),
        respond(PullStatus.FOUND, 132, body=BODY[:90]),
        respond(PullStatus.FOUND, 131, body=record(99) + BODY),
        respond(PullStatus.FOUND, 132, body=record(132)),
        respond(PullStatus.FOUND, 133, body=BODY + record(132)),
    ],
)
def test_judge_of_answers_that_do_not_fit_is_damage(answer: PullResponse) -> None:
    assert isinstance(judge(PULL, answer, PART, is_filtered=False), DamageError)


def test_judge_counts_filtered_messages_only_below_the_end_of_the_pull() -> None:
    answer = respond(PullStatus.NO_MATCHED_MSG, 900, "NO_MATCHED_MESSAGE")
    assert judge(PULL, answer, PART, is_filtered=True) == 132
    assert judge(PULL, respond(PullStatus.FOUND, 900, body=BODY), PART, is_filtered=True) == 132


def test_messages_before_a_damaged_answer_are_taken_first() -> None:
    broker = Broker(100)
    run = loop(broker, 0, 100)
    pulls = [pull for _ in range(4) if (pull := run.pipeline.next_pull()) is not None]
    run.pipeline.answered(pulls[1], respond(PullStatus.FOUND, 32, body=BODY))
    assert run.pipeline.take() is None
    assert run.pipeline.next_pull() is None, "nothing behind the damage is read"
    run.pipeline.answered(pulls[0], broker.answer(pulls[0]))
    taken = run.pipeline.take()
    assert taken is not None
    assert offsets_of(taken.pulled) == list(range(32))
    with pytest.raises(DamageError, match="orders"):
        run.pipeline.take()


def test_a_reset_repeats_the_same_pull() -> None:
    run = loop(Broker(100), 0, 20)
    pull = run.pipeline.next_pull()
    assert pull is not None
    reset = respond(PullStatus.OFFSET_ILLEGAL, 7, "OFFSET_RESET", maximum=0)
    assert run.pipeline.answered(pull, reset) is Verdict.RESET
    assert run.pipeline.next_pull() == pull


# Pace.


def settled(broker: Broker, *, is_filtered: bool = False, count: int = 20_000) -> PullPace:
    """Return the pace after a range was read."""
    pace = PullPace(is_filtered=is_filtered)
    loop(broker, 0, count, is_filtered=is_filtered, pace=pace).run()
    return pace


@pytest.mark.parametrize(
    ("messages", "size", "count", "depth"),
    [(8, 120, 8, 64), (32, 120, 32, 16), (256, 120, 256, 8), (4096, 120, 1024, 8), (32, 30_000, 8, 64)],
)
def test_pace_finds_what_the_broker_gives(messages: int, size: int, count: int, depth: int) -> None:
    broker = Broker(20_000, messages=messages, sizes=lambda _: size)
    pace = settled(broker)
    assert (pace.count, pace.depth) == (count, depth)
    needed = 20_000 / count
    assert len(broker.asked) < needed * 1.1 + 50


def test_pace_grows_again_when_messages_are_in_memory() -> None:
    broker = Broker(40_000, messages=8)
    pace = settled(broker)
    broker.messages = 32
    run = loop(broker, 0, 40_000, pace=pace)
    broker.asked.clear()
    run.run()
    assert pace.count == FIRST_COUNT
    assert len(broker.asked) < 40_000 / FIRST_COUNT * 1.1 + 64


def test_pace_is_not_slowed_down_by_one_short_answer() -> None:
    pace = PullPace()
    for _ in range(3):
        pace.answered(32, 32, 32 * 400)
    pace.answered(32, 3, 3 * 400)  # where a file of the queue ends
    for _ in range(4):
        asked = pace.next_count(10_000)
        pace.answered(asked, min(asked, 32), min(asked, 32) * 400)
    assert pace.count == FIRST_COUNT


def test_pace_limits_the_size_of_answers() -> None:
    pace = settled(Broker(20_000, messages=5000, answer_bytes=16 * MIB, sizes=lambda _: 5000))
    assert 5000 * pace.count <= MIB


def test_pace_covers_many_offsets_if_few_messages_match() -> None:
    broker = Broker(20_000, matches=lambda number: number % 100 == 0)
    assert settled(broker, is_filtered=True).count == 1024
    assert len(broker.asked) < 30


def test_pace_obeys_the_number_of_pulls_that_is_given() -> None:
    assert PullPace(max_pulls=3).depth == 3
