"""The loop of `rmq serve`, with a clock, a sleep and a ticker that the test makes."""

import logging
from dataclasses import dataclass, field

import pytest

from rmq_spark.store.delivery.serving import Served, serve
from rmq_spark.store.errors import DiskFullError, RmqError, StoreError


@dataclass
class Tick:
    delivered: int = 0
    next_due_ms: int | None = None
    problem: RmqError | None = None


@dataclass
class Bench:
    """Answers ticks in turn, the last one again and again; stands in for the clock, and for who says stop."""

    answers: list[Tick | Exception]
    stops_at_ms: int
    now: int = 1_000
    tick_ms: int = 0
    ticked: list[int] = field(default_factory=list)

    def tick(self, now_ms: int) -> Tick:
        self.ticked.append(now_ms)
        self.now += self.tick_ms
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1000)

    def run(self) -> Served:
        return serve(self, lambda: self.now, self.sleep, lambda: self.now >= self.stops_at_ms)


def test_while_nothing_waits_it_looks_ten_times_a_second() -> None:
    bench = Bench([Tick()], stops_at_ms=1_400)
    assert bench.run() == Served()
    assert bench.ticked == [1_000, 1_100, 1_200, 1_300]


def test_it_sleeps_until_the_next_message_is_due_but_never_longer_than_it_looks() -> None:
    bench = Bench([Tick(0, 1_030), Tick(1, 1_200), Tick(0, 1_200), Tick(1, None), Tick()], stops_at_ms=1_350)
    served = bench.run()
    assert bench.ticked == [1_000, 1_030, 1_130, 1_200, 1_300]
    assert served == Served(messages=2, ticks=2)


def test_where_more_is_due_it_goes_on_at_once() -> None:
    bench = Bench([Tick(5, 1_000), Tick(5, 1_000), Tick()], stops_at_ms=1_100)
    assert bench.run().messages == 10
    assert bench.ticked == [1_000, 1_000, 1_000]


def test_lateness_counts_from_when_the_first_message_was_due_to_when_all_were_there() -> None:
    bench = Bench([Tick(0, 1_050), Tick(3, None), Tick()], stops_at_ms=1_200, tick_ms=20)
    assert bench.run().latest_ms == 20


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ([Tick(0, 1_050), Tick(3, None), Tick()], "delivered 3 messages, the last within 20 ms of its time"),
        ([Tick(3, None), Tick()], "delivered 3 messages; some may have been due before"),
        ([Tick(0, 1_000), Tick(3, None), Tick()], "delivered 3 messages; some may have been due before"),
        ([Tick(0, 1_050), Tick(0, 1_070), Tick(3, None), Tick()], "delivered 3 messages, the last within 40 ms"),
    ],
)
def test_how_late_messages_are_is_said_where_it_was_known_when_they_are_due(
    answers: list[Tick | Exception], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rmq_spark")
    Bench(answers, stops_at_ms=1_200, tick_ms=20).run()
    assert line in caplog.text


def test_a_tick_that_runs_is_finished_and_none_begun_after_the_word_to_stop() -> None:
    bench = Bench([Tick(4, 1_000)], stops_at_ms=1_001, tick_ms=10)
    assert bench.run().messages == 4
    assert bench.ticked == [1_000]


def test_a_tick_that_could_not_deliver_is_tried_again_a_second_later() -> None:
    bench = Bench([Tick(2, 1_000, DiskFullError("no room")), Tick(1, None), Tick()], stops_at_ms=2_200)
    assert bench.run() == Served(messages=3, ticks=2, problems=1, latest_ms=1_000)
    assert bench.ticked == [1_000, 2_000, 2_100]


def test_what_is_due_earlier_does_not_wait_for_that_second() -> None:
    problem = StoreError("broken")
    bench = Bench([Tick(0, 1_250, problem), Tick(1, 1_250, problem), Tick()], stops_at_ms=2_200)
    bench.run()
    assert bench.ticked[:2] == [1_000, 1_250]


def test_it_stops_within_a_look_while_it_waits_after_a_problem() -> None:
    bench = Bench([Tick(problem=StoreError("broken"))], stops_at_ms=1_250)
    bench.run()
    assert bench.now == 1_300


def test_what_was_delivered_is_logged_once_a_second_at_most_and_the_rest_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "rmq_spark")
    bench = Bench([Tick(1, None)], stops_at_ms=3_250)
    assert bench.run().messages == 23
    counts = [int(record.args[0]) for record in caplog.records if isinstance(record.args, tuple)]  # type: ignore[call-overload]
    assert counts == [1, 10, 10, 2]


def test_a_bug_is_no_error_of_the_store() -> None:
    with pytest.raises(ZeroDivisionError):
        Bench([ZeroDivisionError()], stops_at_ms=2_000).run()
