"""Which queues a query reads, and that a pattern does not catch RocketMQ's own topics by accident."""

import pytest

from rmq_spark.datasource.options.subscription import Assignment, Pattern, Topics
from rmq_spark.store.errors import NotFoundError
from rmq_spark.store.model import QueueKey


class FakeCatalog:
    def __init__(self, **topics):
        self._topics = {name.replace("RETRY_", "%RETRY%"): count for name, count in topics.items()}

    def topics(self):
        return sorted(self._topics)

    def queues(self, topics, *, missing_ok=()):
        for topic in topics:
            if topic not in self._topics and topic not in missing_ok:
                raise NotFoundError(f'no topic "{topic}"')
        return {
            topic: [QueueKey(topic, n) for n in range(self._topics[topic])] for topic in topics if topic in self._topics
        }


CATALOG = FakeCatalog(
    orders=2, payments=1, RETRY_billing=1, SCHEDULE_TOPIC_XXXX=1, RMQ_SYS_TRACE_TOPIC=1, c_REPLY_TOPIC=1
)


def topics_of(queues):
    return sorted({queue.topic for queue in queues})


def test_topics_by_name_give_all_their_queues_sorted() -> None:
    found = Topics(("payments", "orders")).find_queues(CATALOG)
    assert found == [QueueKey("orders", 0), QueueKey("orders", 1), QueueKey("payments", 0)]
    assert topics_of(Topics(("%RETRY%billing",)).find_queues(CATALOG)) == ["%RETRY%billing"]


def test_a_topic_that_is_not_there_is_an_error_unless_it_was_known() -> None:
    topics = Topics(("orders", "gone"))
    with pytest.raises(NotFoundError, match="gone"):
        topics.find_queues(CATALOG)
    assert topics_of(topics.find_queues(CATALOG, {QueueKey("gone", 3)})) == ["orders"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (".*", ["orders", "payments"]),
        ("ord.*", ["orders"]),
        ("ord", []),
        ("orders|payments", ["orders", "payments"]),
        ("orders|%RETRY%billing", ["%RETRY%billing", "orders"]),
        ("%RETRY%.*", []),
        ("SCHEDULE_TOPIC_XXXX", ["SCHEDULE_TOPIC_XXXX"]),
        ("SCHEDULE.*", []),
        ("c_REPLY_TOPIC", ["c_REPLY_TOPIC"]),
        (".*_REPLY_TOPIC", []),
        ("RMQ_SYS_TRACE_TOPIC|x", ["RMQ_SYS_TRACE_TOPIC"]),
    ],
)
def test_a_pattern_matches_whole_names_and_system_topics_only_spelt_out(pattern, found) -> None:
    assert topics_of(Pattern(pattern).find_queues(CATALOG)) == found


def test_an_assignment_gives_just_its_queues() -> None:
    assert Assignment((QueueKey("orders", 1),)).find_queues(CATALOG) == [QueueKey("orders", 1)]


def test_an_assigned_queue_that_is_not_there_is_an_error_that_lists_those_there() -> None:
    wanted = Assignment((QueueKey("orders", 0), QueueKey("orders", 7)))
    with pytest.raises(NotFoundError, match=r"no queue 7. Its queues are: 0, 1\."):
        wanted.find_queues(CATALOG)
    assert wanted.find_queues(CATALOG, {QueueKey("orders", 7)}) == [QueueKey("orders", 0)]


def test_each_kind_says_what_it_covers() -> None:
    assert Topics(("a",)).covers(QueueKey("a", 9))
    assert not Topics(("a",)).covers(QueueKey("b", 0))
    assert Pattern("a.*").covers(QueueKey("ab", 9))
    assert not Pattern(".*").covers(QueueKey("%RETRY%a", 0))
    assert Assignment((QueueKey("a", 1),)).covers(QueueKey("a", 1))
    assert not Assignment((QueueKey("a", 1),)).covers(QueueKey("a", 2))
