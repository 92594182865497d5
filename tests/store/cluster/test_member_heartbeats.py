"""When a member's heartbeats are due, and at which brokers."""

from math import inf

from rmq_spark.store.cluster.heartbeats import FORGOTTEN_S, INTERVAL_S, HeartbeatSchedule

A, B = "broker-a", "broker-b"


def registered(*brokers: str) -> HeartbeatSchedule:
    """Return a schedule whose brokers have acknowledged a heartbeat that was sent at 0."""
    schedule = HeartbeatSchedule()
    schedule.change_brokers(brokers, 0.0)
    assert schedule.take_due(0.0) == list(brokers)
    for broker in brokers:
        schedule.note_answer(broker, 0.0)
    return schedule


def test_heartbeats_to_new_brokers_are_due_at_once() -> None:
    schedule = registered(A)
    schedule.change_brokers([A, B], 7.0)
    assert schedule.take_due(7.0) == [B]
    assert list(schedule.brokers) == [A, B]


def test_a_broker_that_answers_gets_the_next_heartbeat_after_30_s() -> None:
    schedule = registered(A)
    assert schedule.next_s() == INTERVAL_S
    assert schedule.take_due(INTERVAL_S - 0.1) == []
    assert schedule.take_due(INTERVAL_S) == [A]


def test_a_heartbeat_in_flight_is_not_due_again_unless_it_is_hastened() -> None:
    schedule = registered(A)
    assert schedule.take_due(30.0) == [A]
    assert schedule.take_due(100.0) == []
    assert schedule.next_s() == inf
    schedule.hasten([A], 30.5)
    schedule.note_answer(A, 30.0)  # of the heartbeat that was sent before
    assert schedule.take_due(30.5) == [A]


def test_pauses_grow_while_a_broker_is_away_and_end_with_its_answer() -> None:
    schedule, now_s, pauses = registered(A), 30.0, []
    for _ in range(5):
        assert schedule.take_due(now_s) == [A]
        schedule.note_failure(A, now_s)
        pauses.append(schedule.next_s() - now_s)
        now_s = schedule.next_s()
    assert pauses == [1, 2, 4, 5, 5]
    assert schedule.take_due(now_s) == [A]
    schedule.note_answer(A, now_s)
    schedule.take_due(now_s + INTERVAL_S)
    schedule.note_failure(A, now_s + INTERVAL_S)
    assert schedule.next_s() == now_s + INTERVAL_S + 1


def test_a_lost_connection_makes_the_next_heartbeat_due_once() -> None:
    schedule = registered(A, B)
    assert schedule.is_registered(A)
    assert schedule.note_loss(A, 5.0)
    assert not schedule.is_registered(A)
    assert schedule.is_registered(B)
    assert not schedule.note_loss(A, 5.0), "it was noted before"
    assert schedule.take_due(5.0) == [A]


def test_a_loss_while_the_broker_is_away_keeps_the_pause() -> None:
    schedule = registered(A)
    schedule.note_loss(A, 5.0)
    schedule.take_due(5.0)
    schedule.note_failure(A, 5.0)
    assert not schedule.note_loss(A, 5.1)
    assert schedule.next_s() == 6.0


def test_a_broker_forgets_a_member_that_is_silent() -> None:
    schedule = registered(A)
    assert schedule.forgetful(FORGOTTEN_S) == []
    assert schedule.forgetful(FORGOTTEN_S + 0.1) == [A]
    schedule.take_due(30.0)
    schedule.note_failure(A, 33.0)
    assert schedule.has_failed(A)
    assert schedule.forgetful(FORGOTTEN_S + 0.1) == [A], "only an answer counts"
    schedule.take_due(34.0)
    assert not schedule.note_answer(A, 34.0), "it has known the member all the time"
    assert not schedule.has_failed(A)
    assert schedule.forgetful(FORGOTTEN_S + 34) == []
    assert schedule.note_loss(A, FORGOTTEN_S + 35)
    assert schedule.forgetful(FORGOTTEN_S + 35) == [], "it is known"
    assert schedule.note_answer(A, FORGOTTEN_S + 36), "it knows the member again"


def test_answers_of_brokers_that_are_not_ours_any_more_are_skipped() -> None:
    schedule = registered(A, B)
    schedule.change_brokers([A], 1.0)
    schedule.note_answer(B, 1.0)
    schedule.note_failure(B, 1.0)
    assert not schedule.note_loss(B, 1.0)
    assert not schedule.is_registered(B)
    schedule.change_brokers([], 1.0)
    assert schedule.next_s() == inf
