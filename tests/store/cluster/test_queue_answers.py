"""The answers about queues of brokers that go away, come back, fail over, lose and delete."""

import itertools
from dataclasses import replace

import pytest

from rmq_spark.store.cluster.queue_answers import (
    DELETION_MS,
    LOWER_END_MS,
    REPLACED_MS,
    Denied,
    Found,
    NoTopic,
    QueueStats,
    Reply,
    Silent,
    TopicOnBroker,
)
from rmq_spark.store.cluster.routes import Listing
from rmq_spark.store.model import Away, Forbidden, Gone, QueueAnswer, QueueBounds, RecordProof

A = "broker-a"
LISTED = Listing(A, "h:1", has_broker=True, has_topic=True, has_master=True, read_count=1)
REMEMBERED = replace(LISTED, has_broker=False, has_topic=False)  # not in any route now
REGISTERED = replace(LISTED, has_topic=False)  # in the list of brokers only
ACTING = replace(LISTED, is_acting=True)
MOVED = replace(LISTED, address="h:2")
CLOSED = replace(LISTED, is_readable=False)
SILENT = Silent("refused")
DENIED = Denied("GET on the topic", "code 16")
PROOF = RecordProof(900, 1_700_000_000_000)


def found(low: int, high: int, *, is_expired: bool = False) -> Found:
    return Found({0: QueueStats(low, high, is_expired)})


def kind(answer: QueueAnswer) -> str:
    if isinstance(answer, QueueBounds):
        return f"{answer.min_offset}-{answer.max_offset}"
    return type(answer).__name__


def play(*steps: tuple[int, Listing, Reply], topic: TopicOnBroker | None = None) -> list[str]:
    """Return the kind of the answer for queue 0 after each look, (ms, listing, reply)."""
    topic = topic or TopicOnBroker("orders", A)
    kinds = []
    for now_ms, listing, reply in steps:
        topic.look(listing, reply, now_ms)
        kinds.append(kind(topic.answers[0]))
    return kinds


# First looks.


@pytest.mark.parametrize(
    ("listing", "reply", "expected"),
    [
        (LISTED, found(0, 5), "0-5"),
        (LISTED, found(3, 5), "3-5"),
        (LISTED, found(5, 5), "5-5"),
        (REMEMBERED, found(0, 5), "0-5"),  # a name server that has just started has no routes
        (ACTING, found(0, 5), "0-5"),
        (LISTED, SILENT, "Away"),
        (REMEMBERED, SILENT, "Away"),
        (ACTING, SILENT, "Away"),
        (LISTED, NoTopic(), "Away"),
        (REGISTERED, NoTopic(), "Away"),
        (REMEMBERED, NoTopic(), "Away"),
        (ACTING, NoTopic(), "Away"),
        (LISTED, DENIED, "Forbidden"),
        (CLOSED, found(0, 5), "Forbidden"),
        (CLOSED, SILENT, "Away"),
        (CLOSED, DENIED, "Forbidden"),
        (LISTED, Found({}), "Gone"),
    ],
)
def test_look_for_the_first_time(listing: Listing, reply: Reply, expected: str) -> None:
    assert play((0, listing, reply)) == [expected]


def test_look_answers_for_each_queue_and_for_those_that_the_caller_expects() -> None:
    topic = TopicOnBroker("orders", A)
    topic.expect(7)
    listing = replace(LISTED, read_count=2)
    topic.look(listing, Found({0: QueueStats(0, 4), 1: QueueStats(2, 6), 2: QueueStats(0, 9)}), 0)
    assert {queue: kind(answer) for queue, answer in topic.answers.items()} == {0: "0-4", 1: "2-6", 7: "Gone"}
    topic.look(listing, SILENT, 10)
    assert topic.answers == dict.fromkeys((0, 1, 7), Away(A, 10, "refused"))


def test_look_says_whether_answers_have_changed() -> None:
    topic = TopicOnBroker("orders", A)
    steps = [(found(0, 5), True), (found(0, 5), False), (found(0, 6), True), (SILENT, True), (SILENT, False)]
    assert [topic.look(LISTED, reply, number) for number, (reply, _) in enumerate(steps)] == [new for _, new in steps]


# Absence.


@pytest.mark.parametrize("listing", [LISTED, REMEMBERED, REGISTERED, ACTING, MOVED])
def test_absence_never_becomes_deletion(listing: Listing) -> None:
    times = range(0, 10 * LOWER_END_MS, 1000)
    topic = TopicOnBroker("orders", A)
    kinds = play((0, LISTED, found(0, 5)), *((now, listing, SILENT) for now in times), topic=topic)
    assert set(kinds[1:]) == {"Away"}
    assert topic.answers[0] == Away(A, 0, "refused"), "away since the first of them"


def test_absence_ends_with_the_bounds_and_begins_again_later() -> None:
    topic = TopicOnBroker("orders", A)
    steps = (0, LISTED, found(0, 5)), (10, LISTED, SILENT), (20, LISTED, found(0, 7)), (30, LISTED, SILENT)
    assert play(*steps, topic=topic) == ["0-5", "Away", "0-7", "Away"]
    assert topic.answers[0] == Away(A, 30, "refused")


# Deletion.


@pytest.mark.parametrize(
    ("listings", "later_ms", "expected"),
    [
        ((LISTED, LISTED), DELETION_MS, "Gone"),
        ((LISTED, LISTED), DELETION_MS - 1, "Away"),
        ((LISTED, REGISTERED), DELETION_MS, "Gone"),
        ((REMEMBERED, REMEMBERED), 100_000, "Away"),
        ((REMEMBERED, LISTED), 100_000, "Away"),
        ((ACTING, ACTING), 100_000, "Away"),
        ((ACTING, LISTED), 100_000, "Away"),
    ],
)
def test_deletion_needs_two_replies_of_a_listed_master(
    listings: tuple[Listing, Listing], later_ms: int, expected: str
) -> None:
    one, other = listings
    assert play((0, LISTED, found(0, 5)), (50, one, NoTopic()), (50 + later_ms, other, NoTopic()))[2] == expected


def test_deletion_is_doubted_again_after_a_reply_with_bounds() -> None:
    steps = (0, LISTED, NoTopic()), (10, LISTED, found(0, 5)), (DELETION_MS, LISTED, NoTopic())
    assert play(*steps) == ["Away", "0-5", "Away"]


def test_deletion_stays_until_the_topic_exists_again() -> None:
    steps = [(now, LISTED, NoTopic()) for now in (0, DELETION_MS, 10 * DELETION_MS)]
    topic = TopicOnBroker("orders", A)
    assert play(*steps, topic=topic) == ["Away", "Gone", "Gone"]
    assert not topic.is_away
    assert play((99_000, LISTED, found(0, 0)), topic=topic) == ["0-0"]


def test_deletion_and_creation_again_is_a_loss_only_after_a_second_look() -> None:
    steps = (0, LISTED, found(0, 9)), (10, LISTED, NoTopic()), (20, LISTED, found(0, 2))
    assert play(*steps, (20 + LOWER_END_MS, LISTED, found(0, 3))) == ["0-9", "Away", "Away", "0-3"]


# Lower ends.


@pytest.mark.parametrize(
    ("listing", "later_ms", "expected"),
    [
        (LISTED, LOWER_END_MS, ["Away", "0-6"]),
        (LISTED, LOWER_END_MS - 1, ["Away", "Away"]),
        (ACTING, 10 * LOWER_END_MS, ["0-9", "0-9"]),
        (REMEMBERED, LOWER_END_MS, ["Away", "0-6"]),
    ],
)
def test_lower_end_is_lag_of_an_acting_master_and_loss_of_a_master(
    listing: Listing, later_ms: int, expected: list[str]
) -> None:
    assert play((0, LISTED, found(0, 9)), (50, listing, found(0, 5)), (50 + later_ms, listing, found(0, 6)))[1:] == (
        expected
    )


def test_lower_end_that_recovers_in_time_is_no_loss() -> None:
    steps = (
        (0, LISTED, found(0, 9)),
        (10, LISTED, found(0, 5)),
        (20, LISTED, found(0, 9)),
        (30_000, LISTED, found(0, 8)),
    )
    assert play(*steps) == ["0-9", "Away", "0-9", "Away"], "the second time begins anew"


def test_acting_master_may_extend_the_end() -> None:
    steps = (0, LISTED, found(0, 9)), (10, ACTING, found(0, 12)), (20, ACTING, found(4, 10)), (30, LISTED, found(0, 12))
    assert play(*steps) == ["0-9", "0-12", "4-12", "0-12"]


def test_lower_end_of_an_acting_master_counts_from_the_time_a_master_has_it() -> None:
    steps = (0, LISTED, found(0, 9)), (10, ACTING, found(0, 5)), (60_000, LISTED, found(0, 5))
    assert play(*steps, (60_000 + LOWER_END_MS, LISTED, found(0, 5))) == ["0-9", "0-9", "Away", "0-5"]


def test_lower_end_than_a_record_that_was_read_counts_too() -> None:
    topic = TopicOnBroker("orders", A)
    topic.note_read(0, 20, PROOF)
    assert play((0, LISTED, found(0, 9)), (LOWER_END_MS, LISTED, found(0, 9)), topic=topic) == ["Away", "0-9"]


# Queues that cannot be read any more.


@pytest.mark.parametrize("reply", [Found({0: QueueStats(0, 5), 1: QueueStats(0, 7)}), Found({0: QueueStats(0, 5)})])
def test_shrunk_queue_is_frozen_at_its_end(reply: Found) -> None:
    topic = TopicOnBroker("orders", A)
    two = replace(LISTED, read_count=2)
    topic.look(two, Found({0: QueueStats(0, 5), 1: QueueStats(0, 7)}), 0)
    topic.look(LISTED, reply, 10)
    assert [kind(topic.answers[number]) for number in (0, 1)] == ["0-5", "7-7"]
    topic.look(two, Found({0: QueueStats(0, 5), 1: QueueStats(0, 8)}), 20)
    assert kind(topic.answers[1]) == "0-8", "the topic has grown again"


def test_shrunk_queue_is_not_frozen_if_only_the_route_is_missing() -> None:
    two = replace(LISTED, read_count=2)
    stats = Found({0: QueueStats(0, 5), 1: QueueStats(0, 7)})
    topic = TopicOnBroker("orders", A)
    topic.look(two, stats, 0)
    topic.look(replace(two, has_topic=False), stats, 10)
    assert kind(topic.answers[1]) == "0-7"


def test_shrunk_queue_stays_frozen_without_a_route() -> None:
    topic = TopicOnBroker("orders", A)
    topic.expect(1)
    stats = Found({0: QueueStats(0, 5), 1: QueueStats(0, 7)})
    for number, listing in enumerate((LISTED, REMEMBERED)):
        topic.look(listing, stats, number)
        assert kind(topic.answers[1]) == "7-7"


def test_queue_that_the_caller_expects_is_not_frozen_before_it_was_listed() -> None:
    topic = TopicOnBroker("orders", A)
    topic.expect(0)
    assert play((0, replace(REGISTERED, read_count=0), found(2, 5)), topic=topic) == ["2-5"]


# Records compared.


def returned(
    reply: Reply = SILENT, back: Found | None = None, listing: Listing = LISTED
) -> tuple[TopicOnBroker, list[str]]:
    topic = TopicOnBroker("orders", A)
    topic.look(LISTED, found(0, 9), 0)
    topic.note_read(0, 5, PROOF)
    return topic, play((10, LISTED, reply), (20, listing, back or found(0, 12)), topic=topic)


@pytest.mark.parametrize("reply", [SILENT, NoTopic()])
def test_record_is_compared_after_an_absence(reply: Reply) -> None:
    topic, kinds = returned(reply)
    assert kinds == ["Away", "Away"]
    assert topic.to_compare() == {0: (5, PROOF)}
    topic.compared(0, PROOF, 30)
    assert kind(topic.answers[0]) == "0-12"
    assert topic.to_compare() == {}
    assert play((40, LISTED, found(0, 13)), topic=topic) == ["0-13"]


def test_record_is_compared_after_a_change_of_the_address() -> None:
    topic, kinds = returned(found(0, 9), listing=MOVED)
    assert kinds == ["0-9", "Away"]
    assert topic.to_compare() == {0: (5, PROOF)}


def test_record_is_compared_after_a_restart_of_the_reader() -> None:
    topic = TopicOnBroker("orders", A)
    topic.note_read(0, 5, PROOF)
    assert play((0, LISTED, found(0, 9)), topic=topic) == ["Away"]
    assert topic.to_compare() == {0: (5, PROOF)}


def test_record_is_not_compared_while_the_broker_stays() -> None:
    topic = TopicOnBroker("orders", A)
    topic.look(LISTED, found(0, 9), 0)
    topic.note_read(0, 5, PROOF)
    assert play((10, LISTED, found(0, 10)), topic=topic) == ["0-10"]
    assert topic.to_compare() == {}


def test_record_that_differs_means_that_the_queue_was_replaced() -> None:
    topic, _ = returned()
    topic.compared(0, RecordProof(900, PROOF.store_time_ms + 1), 30)
    gone = topic.answers[0]
    assert isinstance(gone, Gone)
    for part in ("replaced", "queue offset 5", "physical offset 900", A):
        assert part in gone.reason
    steps = (40, LISTED, found(0, 12)), (30 + REPLACED_MS - 1, LISTED, found(0, 12))
    assert play(*steps, (30 + REPLACED_MS, LISTED, found(0, 3)), topic=topic) == ["Gone", "Gone", "0-3"], (
        "then it is new"
    )


def test_record_that_has_expired_is_not_compared() -> None:
    topic, kinds = returned(back=found(6, 12))
    assert kinds[1] == "6-12"
    assert topic.to_compare() == {}
    topic, _ = returned()
    topic.compared(0, None, 30)
    assert kind(topic.answers[0]) == "0-12"


def test_record_beyond_the_end_is_not_compared() -> None:
    topic, kinds = returned(back=found(0, 5))
    assert kinds[1] == "Away"
    assert topic.to_compare() == {}
    assert play((20 + LOWER_END_MS, LISTED, found(0, 5)), topic=topic) == ["0-5"]


def test_record_below_a_lower_end_is_compared() -> None:
    topic = TopicOnBroker("orders", A)
    topic.look(LISTED, found(0, 900), 0)
    topic.note_read(0, 5, PROOF)
    lower = found(0, 500)
    assert play((10, LISTED, lower), (10 + LOWER_END_MS, LISTED, lower), topic=topic) == ["Away", "Away"]
    assert topic.to_compare() == {0: (5, PROOF)}
    topic.compared(0, PROOF, 20 + LOWER_END_MS)
    assert kind(topic.answers[0]) == "0-500"


def test_record_that_differs_means_that_queues_without_a_record_were_replaced_too() -> None:
    topic = TopicOnBroker("orders", A)
    topic.note_read(0, 5, PROOF)
    topic.note_read(2, 5, PROOF)
    topic.look(replace(LISTED, read_count=3), Found(dict.fromkeys(range(3), QueueStats(0, 9))), 0)
    assert [kind(topic.answers[number]) for number in range(3)] == ["Away", "0-9", "Away"]
    topic.compared(0, RecordProof(901, PROOF.store_time_ms), 0)
    topic.compared(2, PROOF, 0)
    assert [kind(topic.answers[number]) for number in range(3)] == ["Gone", "Gone", "0-9"]
    for queue_id, message in ((0, "its message at"), (1, "the message of queue 0 at")):
        gone = topic.answers[queue_id]
        assert isinstance(gone, Gone)
        assert gone.reason.startswith(f"it was replaced: {message} queue offset 5 was at physical offset 900, stored ")


def test_record_of_an_earlier_run_is_compared_at_the_next_look() -> None:
    topic = TopicOnBroker("orders", A)
    topic.look(LISTED, found(0, 9), 0)
    topic.note_earlier_read(0, 5, PROOF)
    assert play((10, LISTED, found(0, 9)), topic=topic) == ["Away"]
    assert topic.to_compare() == {0: (5, PROOF)}
    topic.compared(0, PROOF, 20)
    assert kind(topic.answers[0]) == "0-9"


def test_record_of_an_earlier_run_that_is_noted_again_is_compared_again() -> None:
    topic = TopicOnBroker("orders", A)
    for now_ms in (0, 2 * REPLACED_MS, 2 * REPLACED_MS + 1):
        topic.note_earlier_read(0, 5, PROOF)
        assert play((now_ms, LISTED, found(0, 9)), topic=topic) == ["Away"]
        topic.compared(0, RecordProof(901, PROOF.store_time_ms), now_ms)
        assert kind(topic.answers[0]) == "Gone"


def test_record_of_an_earlier_run_does_not_tell_the_end_of_a_queue_that_was_removed() -> None:
    topic = TopicOnBroker("orders", A)
    topic.note_earlier_read(0, 5, PROOF)
    listing = replace(LISTED, read_count=0)
    assert play((0, listing, Found({})), topic=topic) == ["Gone"]
    assert play((10, listing, found(0, 9)), topic=topic) == ["9-9"]


def test_note_read_keeps_the_record_with_the_highest_offset() -> None:
    topic = TopicOnBroker("orders", A)
    for offset in (5, 8, 6):
        topic.note_read(0, offset, RecordProof(offset, offset))
    topic.look(LISTED, found(0, 9), 0)
    assert topic.to_compare() == {0: (8, RecordProof(8, 8))}


# Expired records.


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (found(0, 9), {}),
        (found(4, 9), {0: 4}),
        (found(9, 9), {}),
        (found(0, 9, is_expired=True), {0: 0}),
        (found(4, 9, is_expired=True), {0: 4}),
        (found(9, 9, is_expired=True), {}),
    ],
)
def test_first_record_is_looked_for_where_the_min_offset_is_doubtful(reply: Found, expected: dict[int, int]) -> None:
    topic = TopicOnBroker("orders", A)
    topic.look(LISTED, reply, 0)
    assert topic.to_check() == expected
    for queue, first in expected.items():
        topic.checked(queue, first, 0)
    topic.look(LISTED, reply, 10)
    assert topic.to_check() == {}, "once for each min offset"


def test_first_record_that_exists_is_the_min_offset_from_then_on() -> None:
    topic = TopicOnBroker("orders", A)
    topic.look(LISTED, found(4, 9, is_expired=True), 0)
    topic.checked(0, 9, 0)
    kinds = [kind(topic.answers[0])]
    later = (10, LISTED, found(4, 9, is_expired=True)), (20, LISTED, found(4, 11)), (30, LISTED, found(10, 11))
    assert kinds + play(*later, topic=topic) == ["9-9", "9-9", "9-11", "10-11"]


def test_first_record_of_a_replaced_queue_is_unknown_again() -> None:
    topic = TopicOnBroker("orders", A)
    topic.look(LISTED, found(0, 9), 0)
    topic.note_expired(0, 7, 0)
    assert kind(topic.answers[0]) == "7-9"
    steps = (10, LISTED, found(0, 3)), (10 + LOWER_END_MS, LISTED, found(0, 3))
    assert play(*steps, topic=topic) == ["Away", "0-3"]


# All short histories.


def test_every_history_obeys_the_rules() -> None:
    replies: list[Reply] = [found(0, 9), found(2, 4), SILENT, NoTopic(), DENIED]
    events = list(itertools.product((LISTED, REMEMBERED, ACTING), replies))
    for history in itertools.product(events, repeat=3):
        for step_ms in (1, LOWER_END_MS):
            topic = TopicOnBroker("orders", A)
            ends = [0]
            for number, (listing, reply) in enumerate(history):
                before = topic.answers
                changed = topic.look(listing, reply, number * step_ms)
                answer = topic.answers[0]
                assert changed == (before != topic.answers)
                assert not topic.look(listing, reply, number * step_ms), "the same at the same time"
                assert topic.answers[0] == answer
                if isinstance(answer, Gone):
                    assert isinstance(reply, NoTopic)
                if isinstance(answer, Forbidden):
                    assert isinstance(reply, Denied)
                if isinstance(reply, Silent):
                    assert isinstance(answer, Away)
                if isinstance(answer, QueueBounds):
                    assert isinstance(reply, Found)
                    assert 0 <= answer.min_offset <= answer.max_offset
                    assert answer.max_offset >= ends[-1] or (step_ms == LOWER_END_MS and listing is not ACTING)
                    ends.append(answer.max_offset)
