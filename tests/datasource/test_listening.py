"""Results of listeners: RocketMQ's tables of outcomes, with fake listeners and a fake clock."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from rmq_spark.datasource.spark.listener import (
    CONCURRENTLY,
    MAX_ERROR_CHARS,
    ORDERLY,
    Caller,
    ConsumeConcurrentlyStatus,
    ConsumeContext,
    ConsumeOrderlyStatus,
    Failure,
    History,
    ListenerTerms,
    Message,
    QueueOutcome,
    acknowledged,
)
from rmq_spark.datasource.spark.listener_calls import ListenerCalls, cut_calls
from rmq_spark.datasource.spark.orderly_queues import exhausted
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey

ONE, OTHER = QueueKey("orders", 0), QueueKey("orders", 1)
DONE, LATER = ConsumeConcurrentlyStatus.CONSUME_SUCCESS, ConsumeConcurrentlyStatus.RECONSUME_LATER
SUCCESS, SUSPEND = ConsumeOrderlyStatus.SUCCESS, ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT


class Row(NamedTuple):
    offset: int
    times: int


def messages(count: int, queue: QueueKey = ONE, first: int = 0, times: Sequence[int] = ()) -> list[Message]:
    padded = [*times, *[0] * (count - len(times))]
    return [
        Message((offset, tried), queue, offset, tried)
        for offset, tried in zip(range(first, first + count), padded, strict=True)
    ]


class Clock:
    """A clock that only listeners advance."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def caller(listener: Callable[..., object], terms: ListenerTerms, clock: Clock | None = None) -> Caller:
    return Caller(listener, terms, Row, clock or Clock())


def concurrently(listener: Callable[..., object], given: list[Message], **terms: Any) -> list[Failure]:
    chosen = ListenerTerms(CONCURRENTLY, **{"threads": 1, **terms})
    return list(ListenerCalls(caller(listener, chosen), chosen).concurrently(given))


def orderly(
    listener: Callable[..., object],
    given: list[Message],
    histories: dict[QueueKey, History] | None = None,
    **terms: Any,
) -> tuple[list[tuple[int, int]], list[QueueOutcome]]:
    """Return offset and delay level of each row that is sent back, and the outcomes."""
    chosen = ListenerTerms(ORDERLY, **{"max_reconsume_times": -1, "threads": 1, **terms})
    found = list(ListenerCalls(caller(listener, chosen), chosen).orderly(given, histories or {}, 1))
    sent = [(one.message.offset, one.delay_level) for one in found if isinstance(one, Failure)]
    return sent, [one for one in found if isinstance(one, QueueOutcome)]


@pytest.mark.parametrize(
    ("status", "ack_index", "count", "done"),
    [
        (DONE, 2**31 - 1, 5, 5),
        (DONE, 5, 5, 5),
        (DONE, 4, 5, 5),
        (DONE, 2, 5, 3),
        (DONE, 0, 1, 1),
        (DONE, -1, 5, 0),
        (LATER, 2**31 - 1, 5, 0),
        (LATER, 2, 5, 0),
        (SUCCESS, 2, 5, 5),
        (SUSPEND, 4, 5, 0),
    ],
)
def test_ack_index_is_the_last_row_that_is_done(status: str, ack_index: int, count: int, done: int) -> None:
    assert acknowledged(status, ack_index, count) == done

    def listen(rows: list[Row], context: ConsumeContext) -> str:
        context.ack_index = ack_index
        return status

    model = ORDERLY if isinstance(status, ConsumeOrderlyStatus) else CONCURRENTLY
    answer = caller(listen, ListenerTerms(model, count)).call(messages(count))
    assert answer.done == done
    assert bool(answer.error) == (done < count)


@pytest.mark.parametrize("answer", [None, LATER, "RECONSUME_LATER", ValueError("no such order")])
def test_later_none_and_an_exception_fail_all_rows_of_the_call(answer: object) -> None:
    def listen(rows: list[Row], context: ConsumeContext) -> object:
        context.ack_index = 1  # counts only with success
        if rows[0].offset != 2:
            return DONE
        if isinstance(answer, Exception):
            raise answer
        return answer

    failed = concurrently(listen, messages(6), batch_size=2)
    assert [(one.message.offset, one.delay_level) for one in failed] == [(2, 0), (3, 0)]
    shown = {None: "it returned None"}.get(answer, "it returned RECONSUME_LATER")  # type: ignore[call-overload]
    assert failed[0].error == ("ValueError: no such order" if isinstance(answer, Exception) else shown)


@pytest.mark.parametrize("nonsense", [True, 0, "ok", "SUCCESS", SUCCESS, [DONE], b"CONSUME_SUCCESS", object()])
def test_an_answer_that_means_nothing_fails_the_query_and_is_named(nonsense: object) -> None:
    with pytest.raises(OptionError) as raised:
        concurrently(lambda rows, context: nonsense, messages(1))
    text = str(raised.value)
    assert repr(nonsense)[:200] in text
    assert type(nonsense).__name__ in text
    assert "CONSUME_SUCCESS, RECONSUME_LATER" in text
    assert "rmq_spark.ConsumeConcurrentlyStatus" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [("ack_index", -2), ("ack_index", None), ("delay_level_when_next_consume", "3"), ("suspend_ms", 1.5)],
)
def test_a_context_that_means_nothing_fails_the_query_too(name: str, value: object) -> None:
    def listen(rows: list[Row], context: ConsumeContext) -> str:
        setattr(context, name, value)
        return DONE

    with pytest.raises(OptionError, match=rf"context\.{name} to {value!r}"):
        concurrently(listen, messages(1))


@pytest.mark.parametrize("level", [-1, 0, 5, 25])
def test_a_failed_row_comes_again_when_the_listener_says(level: int) -> None:
    def listen(rows: list[Row], context: ConsumeContext) -> str:
        context.delay_level_when_next_consume = level
        return LATER

    assert [one.delay_level for one in concurrently(listen, messages(1))] == [level]


def test_a_call_has_rows_of_one_queue_in_order_and_no_more_than_was_asked_for() -> None:
    given = messages(5) + messages(3, OTHER) + messages(1, first=5)
    calls = [[(one.queue.queue_id, one.offset) for one in call] for call in cut_calls(given, 2)]
    assert calls == [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4)], [(1, 0), (1, 1)], [(1, 2)], [(0, 5)]]


def test_a_call_that_is_full_does_not_wait_for_another_row() -> None:
    given = iter(messages(3))
    assert len(next(iter(cut_calls(given, 2)))) == 2
    assert next(given).offset == 2


def test_a_call_that_took_longer_than_the_timeout_failed_when_it_returns() -> None:
    clock, seen = Clock(), []

    def listen(rows: list[Row], context: ConsumeContext) -> str:
        seen.append(rows[0].offset)
        clock.now_s += 5.0 if rows[0].offset == 1 else 4.999
        return DONE

    terms = ListenerTerms(timeout_s=4.9995, threads=1)
    [failed] = ListenerCalls(caller(listen, terms, clock), terms).concurrently(messages(3))
    assert (failed.message.offset, failed.error) == (1, "it took 5.000 s, and timeout=4.9995")
    assert failed.delay_level == 3, "ProcessQueue#cleanExpiredMsg"
    assert seen == [0, 1, 2]


def test_what_is_kept_of_an_error_is_cut() -> None:
    def listen(rows: list[Row], context: ConsumeContext) -> str:
        raise ValueError("x" * 5000)

    assert len(concurrently(listen, messages(1))[0].error) == MAX_ERROR_CHARS


def test_a_listener_that_changes_its_list_changes_nothing_else() -> None:
    def listen(rows: list[Row], context: ConsumeContext) -> str:
        rows.clear()
        return LATER

    assert [one.message.offset for one in concurrently(listen, messages(2), batch_size=2)] == [0, 1]


@pytest.mark.parametrize("status", ["SUCCESS", "COMMIT", "ROLLBACK"])
def test_orderly_success_goes_on_to_the_end(status: str, caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def listen(rows: list[Row], context: ConsumeContext) -> str:
        seen.extend(row.offset for row in rows)
        return status

    assert orderly(listen, messages(4)) == ([], [])
    assert seen == [0, 1, 2, 3]
    assert (status in caplog.text) == (status != "SUCCESS")


@pytest.mark.parametrize("answer", [None, SUSPEND, RuntimeError()])
def test_orderly_the_queue_stops_at_the_first_call_that_fails_and_others_go_on(answer: object) -> None:
    seen = []

    def listen(rows: list[Row], context: ConsumeContext) -> object:
        seen.append((context.queue_id, rows[0].offset))
        if (context.queue_id, rows[0].offset) != (0, 1):
            return SUCCESS
        context.suspend_ms = 77
        if isinstance(answer, Exception):
            raise answer
        return answer

    sent, outcomes = orderly(listen, messages(3) + messages(2, OTHER) + messages(2, first=3))
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (sent, outcomes) == ([], [QueueOutcome(ONE, 1, 77, {1: 1})])


@pytest.mark.parametrize(("asked", "got"), [(0, 10), (9, 10), (1_000, 1_000), (30_001, 30_000)])
def test_a_queue_waits_between_10_ms_and_30_s(asked: int, got: int) -> None:
    def listen(rows: list[Row], context: ConsumeContext) -> None:
        context.suspend_ms = asked

    assert orderly(listen, messages(1))[1][0].suspend_ms == got


@pytest.mark.parametrize(
    ("times", "most", "dead"),
    [
        ([0, 0], -1, [False, False]),
        ([2**31 - 1], -1, [False]),
        ([0, 0], 0, [True, True]),
        ([2, 3, 4], 3, [False, True, True]),
    ],
)
def test_rows_that_were_tried_often_enough_are_sent_and_others_kept(
    times: list[int], most: int, dead: list[bool]
) -> None:
    assert exhausted(times, most) == dead


def test_a_row_is_given_once_more_than_it_may_come_again_and_is_a_dead_letter_then() -> None:
    seen = []

    def listen(rows: list[Row], context: ConsumeContext) -> str:
        seen.extend(row.times for row in rows)
        return SUSPEND

    histories: dict[QueueKey, History] = {}
    for expected in (1, 2, 3):
        sent, [outcome] = orderly(listen, messages(2), histories, max_reconsume_times=3)
        assert (sent, outcome) == ([], QueueOutcome(ONE, 0, 1_000, {0: expected}))
        histories = {ONE: History(0, outcome.attempts)}
    assert orderly(listen, messages(2), histories, max_reconsume_times=3) == (
        [(0, -1)],
        [QueueOutcome(ONE, 1, dead=frozenset({0}))],
    )
    assert seen == [0, 1, 2, 3]


def test_of_a_failed_call_the_exhausted_rows_are_sent_and_do_not_come_again() -> None:
    sent, [outcome] = orderly(
        lambda rows, context: None, messages(3, times=[0, 9, 1]), batch_size=3, max_reconsume_times=9
    )
    assert sent == [(1, -1)]
    assert outcome == QueueOutcome(ONE, 0, 1_000, {0: 1, 2: 1}, dead=frozenset({1}))
    seen = []

    def listen(rows: list[Row], context: ConsumeContext) -> str:
        seen.append([tuple(row) for row in rows])
        return SUCCESS

    history = History(0, outcome.attempts, outcome.dead)
    found = orderly(listen, messages(4, times=[0, 9, 1]), {ONE: history}, batch_size=3, max_reconsume_times=9)
    assert found == ([], [QueueOutcome(ONE, 4, sent=frozenset({1}))])
    assert seen == [[(0, 1), (2, 2), (3, 0)]]


def test_rows_that_were_sent_stay_known_while_a_batch_that_reads_them_may_be_repeated() -> None:
    history = {ONE: History(0, {0: 1}, frozenset({2}))}

    def succeed(rows: list[Row], context: ConsumeContext) -> str:
        return SUCCESS

    assert orderly(succeed, messages(2), history) == ([], [QueueOutcome(ONE, 2, sent=frozenset({2}))])
    assert orderly(succeed, messages(4), history) == ([], [QueueOutcome(ONE, 4, sent=frozenset({2}))])
    behind = {ONE: History(4, sent=frozenset({2}))}
    assert orderly(succeed, messages(1, first=4), behind) == ([], [QueueOutcome(ONE)])


def test_a_queue_that_has_not_come_to_its_place_yet_stays_as_it_was_left() -> None:
    history = {ONE: History(5, {5: 1}), OTHER: History(0)}
    assert orderly(lambda rows, context: SUCCESS, messages(5), history) == ([], [])


def test_when_all_rows_of_a_call_are_dead_letters_the_queue_goes_on_behind_them_at_once() -> None:
    found = orderly(lambda rows, context: None, messages(5), batch_size=2, max_reconsume_times=0)
    assert found == ([(0, -1), (1, -1)], [QueueOutcome(ONE, 2, dead=frozenset({0, 1}))])


def test_a_dead_letter_of_an_earlier_try_is_made_again_and_the_queue_stops_behind_it() -> None:
    seen = []

    def listen(rows: list[Row], context: ConsumeContext) -> str:
        seen.extend(row.offset for row in rows)
        return SUCCESS

    history = {ONE: History(0, {0: 1, 3: 2}, pending=frozenset({2}))}
    found = orderly(listen, messages(5), history, batch_size=3)
    assert found == ([(2, -1)], [QueueOutcome(ONE, 3, 0, {3: 2}, dead=frozenset({2}))])
    assert seen == [0, 1]


def test_a_dead_letter_of_an_earlier_try_is_made_again_where_the_queue_stops_before_it_too() -> None:
    history = {ONE: History(0, {0: 1}, pending=frozenset({2}))}
    found = orderly(lambda rows, context: None, messages(5), history)
    assert found == ([(2, -1)], [QueueOutcome(ONE, 0, 1_000, {0: 2}, dead=frozenset({2}))])


def test_a_dead_letter_that_this_batch_does_not_come_to_is_no_more_known_of() -> None:
    history = {ONE: History(0, {0: 1}, pending=frozenset({2}))}
    assert orderly(lambda rows, context: SUCCESS, messages(2), history) == ([], [QueueOutcome(ONE)])


@pytest.mark.parametrize(
    ("begin", "is_continued", "given"),
    [(3, True, [3, 5]), (0, True, [0, 1, 2, 3, 4, 5]), (0, False, [0, 1, 3, 5]), (4, True, [5])],
)
def test_who_begins_before_a_stopped_queue_goes_on_gets_all_of_its_rows(
    begin: int, is_continued: bool, given: list[int]
) -> None:
    seen = []

    def listen(rows: list[Row], context: ConsumeContext) -> str:
        seen.extend(row.offset for row in rows)
        return "SUCCESS"

    history = History(3, {3: 2}, frozenset({2, 4}), counts_from_resume=is_continued)
    sent, outcomes = orderly(listen, messages(6 - begin, first=begin), {ONE: history})
    assert (seen, sent) == (given, [])
    assert len(outcomes) == 1, "the suspended queue resumes"


def test_a_batch_that_ends_before_the_place_of_rows_asked_for_again_forgets_all_but_the_place() -> None:
    left = [QueueOutcome(ONE, 3)]
    for history, expected in [
        (History(3, {3: 2}, frozenset({4}), counts_from_resume=True), left),
        (History(3, pending=frozenset({2}), counts_from_resume=True), left),
        (History(3, is_repeated=True), left),  # another try of that batch
        (History(3, counts_from_resume=True), []),  # the next batch: there is nothing to forget any more
    ]:
        assert orderly(lambda rows, context: SUCCESS, messages(3), {ONE: history}) == ([], expected)


def test_a_batch_that_is_repeated_forgets_no_dead_letter_behind_its_end() -> None:
    gone = frozenset({2, 3})
    for history, expected in [
        (History(3, sent=gone, is_repeated=True), [QueueOutcome(ONE, 3, sent=gone)]),
        (History(3, sent=gone), []),
    ]:
        assert orderly(lambda rows, context: SUCCESS, messages(1, first=2), {ONE: history}) == ([], expected)


@pytest.mark.parametrize(
    ("history", "limit", "copy_times"),
    [(History(), 3, 3), (History(0, {0: 2}), 5, 5), (History(0, pending=frozenset({0})), 7, 7)],
)
def test_a_dead_letter_in_order_says_how_often_its_message_was_tried_anew(
    history: History, limit: int, copy_times: int
) -> None:
    terms = ListenerTerms(ORDERLY, max_reconsume_times=limit)
    given = messages(1, times=[3])  # it had been sent back before it came into this queue
    calls = ListenerCalls(caller(lambda rows, context: None, terms), terms)
    found = calls.orderly(given, {ONE: history}, 1)
    assert [one.copy_times for one in found if isinstance(one, Failure)] == [copy_times]


class NamelessError(Exception):
    def __str__(self) -> str:
        raise AttributeError("no such field")


class TextlessError(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("caf\udce9"), "ValueError: caf\\udce9"),
        (NamelessError(), "NamelessError: (its text cannot be had: AttributeError)"),
        (TextlessError(), "TextlessError: (its text cannot be had: TypeError)"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError: "),
        (StopIteration(), "StopIteration: "),
    ],
)
def test_whatever_a_listener_raises_fails_the_rows_and_not_the_query(error: BaseException, text: str) -> None:
    def listen(rows: list[Row], context: ConsumeContext) -> object:
        raise error

    [failure] = concurrently(listen, messages(1))
    assert failure.error == text
    assert failure.error.encode()


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_what_ends_the_task_is_no_answer(error: type[BaseException]) -> None:
    def listen(rows: list[Row], context: ConsumeContext) -> object:
        raise error

    with pytest.raises(error):
        concurrently(listen, messages(1))


def test_numbers_of_numpy_and_of_more_than_java_has_are_numbers() -> None:
    def listen(rows: list[Row], context: ConsumeContext) -> object:
        context.ack_index = np.int64(0)  # type: ignore[assignment]
        context.delay_level_when_next_consume = 2**40
        return DONE

    [failure] = concurrently(listen, messages(2), batch_size=2)
    assert (failure.message.offset, failure.delay_level) == (1, 2**31 - 1)


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("not today")


def test_an_answer_or_a_number_that_cannot_be_shown_is_named_all_the_same() -> None:
    with pytest.raises(OptionError, match=r"returned something whose repr\(\) raises RuntimeError \(Unshowable\)"):
        concurrently(lambda rows, context: Unshowable(), messages(1))

    def listen(rows: list[Row], context: ConsumeContext) -> object:
        context.ack_index = Unshowable()  # type: ignore[assignment]
        return DONE

    with pytest.raises(OptionError, match=r"context\.ack_index to something whose repr"):
        concurrently(listen, messages(1))

    def forget(rows: list[Row], context: ConsumeContext) -> object:
        del context.ack_index
        return DONE

    with pytest.raises(OptionError, match=r"context\.ack_index to None"):
        concurrently(forget, messages(1))
