"""Tests of the contract (`store.backend`) for places whose queues are on servers that go away and come back.

They need the fixtures `take_away` and `bring_back`, and are skipped without them.
"""

import threading
import time
from collections.abc import Callable

import pytest

from rmq_spark.store.backend import Backend, Capability
from rmq_spark.store.errors import BackendUnavailableError
from rmq_spark.store.model import Away, Gone, QueueBounds, QueueKey, QueueRange, RecordProof
from rmq_spark.store.testing.backend_fixtures import (
    Append,
    BackendFixtures,
    Expire,
    Message,
    Switch,
    read_rows,
    require,
)

COUNT = 6
MESSAGES = [Message(b"body %d" % number) for number in range(COUNT)]
OTHER = RecordProof(1, 1)  # no message is there
_LOOKS_MAX = 600  # looks at the place, 50 ms apart, until a server is back
_BACK_AFTER_S = 0.3


def look_until(backend: Backend, queue: QueueKey, is_wanted: Callable[[object], bool]) -> object:
    """Refresh until the answer about a queue is a wanted one, and return it."""
    for _ in range(_LOOKS_MAX):
        backend.refresh()
        answer = backend.bounds([queue])[queue]
        if is_wanted(answer):
            return answer
        time.sleep(0.05)
    raise AssertionError(f"the last answer was {answer}")


def is_there(answer: object) -> bool:
    """Return whether an answer has bounds."""
    return isinstance(answer, QueueBounds)


def is_known(answer: object) -> bool:
    """Return whether the server has answered."""
    return not isinstance(answer, Away)


class BackendAbsenceTests(BackendFixtures):
    """The tests of servers that go away. See `BackendFixtures` for the fixtures that a subclass gives."""

    @pytest.fixture
    def stored(self, backend: Backend, append: Append) -> QueueKey:
        """The queue whose offsets 0 to 5 have `MESSAGES`. `backend` knows it."""
        append("orders", 1, MESSAGES)
        backend.refresh()
        (queue,) = [queue for queue in backend.queues(["orders"])["orders"] if queue.queue_id == 1]
        assert backend.bounds([queue]) == {queue: QueueBounds(0, COUNT)}
        return queue

    @pytest.fixture
    def away(self, backend: Backend, stored: QueueKey, take_away: Switch) -> QueueKey:
        """The same queue, whose server is away. `backend` has looked."""
        take_away(stored)
        assert backend.refresh()
        return stored

    def test_bounds_of_an_absent_queue_name_its_broker(self, backend: Backend, away: QueueKey) -> None:
        answer = backend.bounds([away])[away]
        assert isinstance(answer, Away)
        assert (answer.broker, bool(answer.reason)) == (away.broker, True)

    def test_bounds_of_an_absent_queue_do_not_change_without_an_event(self, backend: Backend, away: QueueKey) -> None:
        before = backend.bounds([away])[away]
        backend.refresh()
        after = backend.bounds([away])[away]
        assert isinstance(before, Away)
        assert isinstance(after, Away)
        assert before.since_ms == after.since_ms

    def test_queues_include_absent_ones(self, backend: Backend, away: QueueKey) -> None:
        assert away in backend.queues(["orders"])["orders"]

    def test_positions_leave_out_absent_queues(self, backend: Backend, away: QueueKey) -> None:
        assert backend.positions([(away, 0)]) == {}

    def test_offsets_at_of_an_absent_queue_is_an_error(self, backend: Backend, away: QueueKey) -> None:
        with pytest.raises(BackendUnavailableError, match=away.broker):
            backend.offsets_at({away: 0})

    def test_queue_is_read_when_it_is_back(self, backend: Backend, away: QueueKey, bring_back: Switch) -> None:
        bring_back(away)
        assert look_until(backend, away, is_there) == QueueBounds(0, COUNT)
        rows = read_rows(backend, QueueRange(away, 0, COUNT), ["body"])
        assert [row["body"] for row in rows] == [message.body for message in MESSAGES]

    def test_queue_that_is_back_has_the_same_positions(
        self, backend: Backend, stored: QueueKey, take_away: Switch, bring_back: Switch
    ) -> None:
        before = backend.positions([(stored, COUNT - 1)])
        take_away(stored)
        look_until(backend, stored, lambda answer: isinstance(answer, Away))
        bring_back(stored)
        look_until(backend, stored, is_there)
        assert backend.positions([(stored, COUNT - 1)]) == before

    def test_messages_that_arrive_after_an_absence_are_found(
        self, backend: Backend, away: QueueKey, bring_back: Switch, append: Append
    ) -> None:
        bring_back(away)
        append("orders", 1, MESSAGES)
        assert look_until(backend, away, is_there) == QueueBounds(0, 2 * COUNT)

    def test_read_waits_for_an_absent_queue(self, backend: Backend, away: QueueKey, bring_back: Switch) -> None:
        back = threading.Timer(_BACK_AFTER_S, bring_back, [away])
        back.start()
        try:
            rows = read_rows(backend, QueueRange(away, 1, COUNT), ["queueOffset"])
        finally:
            back.join()
        assert [row["queueOffset"] for row in rows] == list(range(1, COUNT))

    def test_note_read_of_the_same_message_changes_no_answer(self, backend: Backend, stored: QueueKey) -> None:
        records = backend.positions([(stored, COUNT - 1)])
        backend.close()
        fresh = backend.location.open()
        try:
            fresh.note_read(records)
            assert look_until(fresh, stored, is_known) == QueueBounds(0, COUNT)
        finally:
            fresh.close()

    def test_note_read_of_another_message_says_that_all_queues_of_the_topic_are_gone(
        self, backend: Backend, stored: QueueKey
    ) -> None:
        require(backend.location, Capability.BROKERS)
        backend.note_read(dict.fromkeys(backend.positions([(stored, COUNT - 1)]), OTHER))
        answers = [look_until(backend, queue, is_known) for queue in backend.queues(["orders"])["orders"]]
        assert len(answers) > 1
        for answer in answers:
            assert isinstance(answer, Gone)
            assert "replaced" in answer.reason

    def test_note_read_of_an_expired_message_changes_no_answer(
        self, backend: Backend, stored: QueueKey, expire: Expire
    ) -> None:
        require(backend.location, Capability.BROKERS)
        begin = expire(stored, COUNT // 2)
        backend.note_read({(stored, begin - 1): OTHER})
        assert look_until(backend, stored, is_known) == QueueBounds(begin, COUNT)

    def test_note_read_is_compared_when_the_queue_is_back(
        self, backend: Backend, away: QueueKey, bring_back: Switch
    ) -> None:
        backend.note_read({(away, COUNT - 1): OTHER})
        backend.refresh()
        assert isinstance(backend.bounds([away])[away], Away)
        bring_back(away)
        assert isinstance(look_until(backend, away, is_known), Gone)

    def test_new_backend_answers_for_an_absent_queue(self, backend: Backend, away: QueueKey) -> None:
        backend.close()
        fresh = backend.location.open()
        try:
            assert isinstance(fresh.bounds([away])[away], Away)
        finally:
            fresh.close()
