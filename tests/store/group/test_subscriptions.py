"""A consumer that pulls with an expression: what a broker chooses by units or properties, and what its client keeps."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.client.pull_consumer import PullConsumer
from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.group.pull_limits import PullLimits
from rmq_spark.store.group.pull_reader import PullReader
from rmq_spark.store.model import QueueKey
from rmq_spark.store.pull_result import GetMessageStatus, PullStatus
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import QUEUE_FILE_BYTES, build_store

QUEUE = QueueKey("T", 0)
MESSAGES = 2000
LAST = 799  # the last message that a pull looks at in search of wanted ones


def tag_of(number: int) -> str:
    if number == LAST:
        return "last"
    if number == LAST + 1:
        return "behind"
    return ["Aa", "BB", "C"][number % 3]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """2,000 messages of T, with tags of which two collide, and their number as a property; and 3 retried ones."""
    messages = [
        SampleMessage("T", 0, b"%d" % number, tags=tag_of(number), properties={"n": str(number)})
        for number in range(MESSAGES)
    ]
    retried = [SampleMessage("%RETRY%G", 0, b"again", tags=tag) for tag in ("Aa", "C", "x")]
    path = tmp_path_factory.mktemp("subscriptions") / "store"
    return str(build_store(path, messages + retried, segment_bytes=1 << 20, queue_file_bytes=QUEUE_FILE_BYTES).path)


@pytest.fixture
def consumer(store: str) -> Iterator[PullConsumer]:
    with PullConsumer(store, "G", columns=("queueOffset", "tags")) as opened:
        yield opened


def offsets(result) -> list[int]:
    return result.messages.column("queueOffset").to_pylist()


def test_tags_are_asked_of_units_and_collisions_left_out_of_what_was_found(consumer: PullConsumer) -> None:
    consumer.subscribe("T", "Aa")
    found = consumer.pull(QUEUE, 0, 4)
    # A broker takes Aa and BB alike: four of them fill the batch before message 5, and the client drops two.
    assert (found.pull_status, found.next_begin_offset, offsets(found)) == (PullStatus.FOUND, 5, [0, 3])


def test_a_result_may_be_found_and_empty_where_all_of_it_collides(consumer: PullConsumer) -> None:
    consumer.subscribe("T", "Aa")
    found = consumer.pull(QUEUE, 1, 1)
    assert (found.status, found.next_begin_offset, offsets(found)) == (GetMessageStatus.FOUND, 2, [])


def test_sql92_decides_what_counts_as_found(consumer: PullConsumer) -> None:
    consumer.subscribe("T", sql92="n >= 100 AND TAGS = 'Aa'")
    found = consumer.pull(QUEUE, 0, 4)
    assert (found.pull_status, found.next_begin_offset, offsets(found)) == (PullStatus.FOUND, 112, [102, 105, 108, 111])


@pytest.mark.parametrize("given", [{"tags": "nobody"}, {"sql92": "n < 0"}])
def test_where_nothing_matches_a_pull_looks_as_far_as_a_broker_and_says_where_to_go_on(
    consumer: PullConsumer, given: dict[str, str]
) -> None:
    consumer.subscribe("T", **given)
    for at_most, next_offset in ((32, 800), (800, 800), (1000, 1000)):
        found = consumer.pull(QUEUE, 0, at_most)
        assert (found.status, found.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, next_offset)
        assert found.pull_status is PullStatus.NO_MATCHED_MSG


@pytest.mark.parametrize(("last", "behind"), [("last", "behind"), ("n = 799", "n = 800")])
def test_the_last_message_that_is_looked_at_is_found_and_the_one_behind_it_by_the_next_pull(
    consumer: PullConsumer, last: str, behind: str
) -> None:
    kind = "sql92" if "=" in last else "tags"
    consumer.subscribe("T", **{kind: last})
    found = consumer.pull(QUEUE, 0)
    assert (found.status, offsets(found), found.next_begin_offset) == (GetMessageStatus.FOUND, [799], 800)
    consumer.subscribe("T", **{kind: behind})
    missed = consumer.pull(QUEUE, 0)
    assert (missed.status, missed.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 800)
    assert offsets(consumer.pull(QUEUE, missed.next_begin_offset)) == [800]


def test_pulling_on_and_on_gives_every_message_that_matches(consumer: PullConsumer) -> None:
    for given, expected in (
        ({"tags": "C || last"}, [n for n in range(MESSAGES) if tag_of(n) in ("C", "last")]),
        ({"sql92": "n > 1990 OR TAGS = 'behind'"}, [800, *range(1991, MESSAGES)]),
    ):
        consumer.subscribe("T", **given)
        at, seen = 0, []
        while (found := consumer.pull(QUEUE, at)).pull_status is not PullStatus.NO_NEW_MSG:
            seen += offsets(found)
            at = found.next_begin_offset
        assert (seen, at) == (expected, MESSAGES)


def test_sql92_is_asked_of_no_more_records_than_fill_the_pull(consumer: PullConsumer, monkeypatch) -> None:
    asked: list[int] = []
    real = PullReader.which_match

    def counted(self, queue, units, wanted, limits):
        asked.append(len(units))
        return real(self, queue, units, wanted, limits)

    monkeypatch.setattr(PullReader, "which_match", counted)
    consumer.subscribe("T", sql92="n >= 3")
    assert offsets(consumer.pull(QUEUE, 0, 4)) == [3, 4, 5, 6]
    assert asked == [64]


def test_a_subscription_is_one_topic_s_and_the_last_one_counts(consumer: PullConsumer) -> None:
    consumer.subscribe("T", sql92="n = 5")
    assert offsets(consumer.pull(QueueKey("%RETRY%G", 0), 0)) == [0, 1, 2]
    consumer.subscribe("T", "C")
    assert offsets(consumer.pull(QUEUE, 0, 2)) == [2, 5]
    consumer.subscribe("T")
    assert offsets(consumer.pull(QUEUE, 0, 2)) == [0, 1]


def test_an_expression_and_a_function_are_both_asked(consumer: PullConsumer) -> None:
    consumer.subscribe("T", sql92="n > 3")
    found = consumer.pull(QUEUE, 0, 2, accept=lambda codes: codes == string_hash("C"))
    assert offsets(found) == [5, 8]


def test_wrong_subscriptions_are_refused_and_change_nothing(consumer: PullConsumer) -> None:
    consumer.subscribe("T", "C")
    for given, why in (
        ({"tags": "||"}, "nothing between"),
        ({"sql92": "n >"}, "sql92"),
        ({"tags": "A", "sql92": "n"}, "both"),
    ):
        with pytest.raises(OptionError, match=why):
            consumer.subscribe("T", **given)
    with pytest.raises(NotFoundError, match="Did you mean"):
        consumer.subscribe("TT", "A")
    assert offsets(consumer.pull(QUEUE, 0, 1)) == [2]


@pytest.mark.parametrize(
    ("given", "wakes"), [({"tags": "C"}, False), ({"sql92": "n > 4000"}, False), ({"sql92": "n = 2000"}, True)]
)
def test_a_held_pull_is_woken_at_once_by_what_matches_only(tmp_path: Path, given: dict[str, str], wakes: bool) -> None:
    path = str(tmp_path / "store")
    clock = [0.0]
    with rmq_spark.open_store(path, queues=1) as sender:
        sender.send("T", b"first", tags="A")

        def sleep(seconds: float) -> None:
            if clock[0] == 0.0:
                sender.send("T", b"second", tags="A", properties={"n": "2000"})
            clock[0] += seconds * 1000

        limits = PullLimits()
        with PullConsumer(path, limits=limits, now_ms=lambda: clock[0], sleep=sleep) as consumer:
            consumer.subscribe("T", **given)
            found = consumer.pull_block_if_not_found(QUEUE, 1, timeout_ms=15_000)
    assert found.pull_status is (PullStatus.FOUND if wakes else PullStatus.NO_MATCHED_MSG)
    assert found.next_begin_offset == 2
    assert clock[0] < 1000 if wakes else 5000 <= clock[0] < 6000
