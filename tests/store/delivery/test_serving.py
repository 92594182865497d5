"""The loop of `rmq serve`, with a clock, a sleep and a scheduler of the test."""

import logging
from dataclasses import dataclass, field

import pytest

from rmq_spark.store.delivery.scheduler import DeliveryRound as Round
from rmq_spark.store.delivery.serve import Served, serve
from rmq_spark.store.errors import DiskFullError, StoreError


@dataclass
class Bench:
    """Returns the results of rounds in order, the last one repeatedly. Also the clock and the stop condition."""

    answers: list[Round | Exception]
    stops_at_ms: int
    now: int = 1_000
    tick_ms: int = 0
    ticked: list[int] = field(default_factory=list)

    def tick(self, now_ms: int) -> Round:
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


def test_serve_runs_ten_rounds_a_second_while_nothing_waits() -> None:
    bench = Bench([Round()], stops_at_ms=1_400)
    assert bench.run() == Served()
    assert bench.ticked == [1_000, 1_100, 1_200, 1_300]


def test_serve_sleeps_until_the_next_message_is_due() -> None:
    bench = Bench(
        [
            Round(0, 1_030),
            Round(1, 1_200),
            Round(0, 1_200),
            Round(1, None),
            Round(),
        ],
        stops_at_ms=1_350,
    )
    served = bench.run()
    assert bench.ticked == [1_000, 1_030, 1_130, 1_200, 1_300]
    assert served == Served(messages=2, rounds=2)


def test_serve_does_not_sleep_while_more_is_due() -> None:
    bench = Bench([Round(5, 1_000), Round(5, 1_000), Round()], stops_at_ms=1_100)
    assert bench.run().messages == 10
    assert bench.ticked == [1_000, 1_000, 1_000]


def test_serve_latest_ms_counts_from_the_first_due_message() -> None:
    bench = Bench([Round(0, 1_050), Round(3, None), Round()], stops_at_ms=1_200, tick_ms=20)
    assert bench.run().latest_ms == 20


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        (
            [Round(0, 1_050), Round(3, None), Round()],
            "delivered 3 messages, the last one at most 20 ms late",
        ),
        ([Round(3, None), Round()], "delivered 3 messages; some may have been due earlier"),
        (
            [Round(0, 1_000), Round(3, None), Round()],
            "delivered 3 messages; some may have been due earlier",
        ),
        (
            [Round(0, 1_050), Round(0, 1_070), Round(3, None), Round()],
            "delivered 3 messages, the last one at most 40 ms late",
        ),
    ],
)
def test_serve_logs_lateness_if_it_is_known(
    answers: list[Round | Exception], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rmq_spark")
    Bench(answers, stops_at_ms=1_200, tick_ms=20).run()
    assert line in caplog.text


def test_serve_finishes_the_round_and_begins_no_other_after_stop() -> None:
    bench = Bench([Round(4, 1_000)], stops_at_ms=1_001, tick_ms=10)
    assert bench.run().messages == 4
    assert bench.ticked == [1_000]


def test_serve_retries_a_problem_after_a_second() -> None:
    bench = Bench([Round(2, 1_000, DiskFullError("no room")), Round(1, None), Round()], stops_at_ms=2_200)
    assert bench.run() == Served(messages=3, rounds=2, failures=1, latest_ms=1_000)
    assert bench.ticked == [1_000, 2_000, 2_100]


def test_serve_delivers_earlier_messages_before_the_retry() -> None:
    problem = StoreError("broken")
    bench = Bench([Round(0, 1_250, problem), Round(1, 1_250, problem), Round()], stops_at_ms=2_200)
    bench.run()
    assert bench.ticked[:2] == [1_000, 1_250]


def test_serve_stops_while_it_waits_after_a_problem() -> None:
    bench = Bench([Round(problem=StoreError("broken"))], stops_at_ms=1_250)
    bench.run()
    assert bench.now == 1_300


def test_serve_logs_once_a_second_and_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "rmq_spark")
    bench = Bench([Round(1, None)], stops_at_ms=3_250)
    assert bench.run().messages == 23
    counts = [int(record.args[0]) for record in caplog.records if isinstance(record.args, tuple)]  # type: ignore[call-overload]
    assert counts == [1, 10, 10, 2]


def test_serve_raises_errors_of_other_kinds() -> None:
    with pytest.raises(ZeroDivisionError):
        Bench([ZeroDivisionError()], stops_at_ms=2_000).run()
