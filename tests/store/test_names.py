"""names: valid and internal names of topics, and the topics of a group."""

import pytest

from rmq_spark.store import names
from rmq_spark.store.errors import OptionError


@pytest.mark.parametrize("topic", ["a", "%RETRY%g", "A-z_0|%", "x" * 127, "%RETRY%" + "g" * 248, "%DLQ%" + "g" * 250])
def test_check_topic_name_accepts_a_brokers_names(topic: str) -> None:
    assert names.check_topic_name(topic) == topic


@pytest.mark.parametrize(
    "topic", ["a b", "a.b", "ä", "x" * 128, "%RETRY%" + "g" * 249, "a\n", "a@b", "😀", "\ud800", "a" * 100_000]
)
def test_check_topic_name_refuses_other_names(topic: str) -> None:
    with pytest.raises(OptionError, match=r"accepted are the characters .* at most 127") as caught:
        names.check_topic_name(topic)
    assert len(str(caught.value)) < 500


def test_check_group_name_leaves_room_for_the_retry_topic() -> None:
    longest = "g" * names.MAX_GROUP_CHARS
    assert names.check_topic_name(names.retry_topic(longest))
    assert names.check_topic_name(names.dlq_topic(longest))
    with pytest.raises(OptionError, match="at most 248"):
        names.retry_topic(longest + "g")


@pytest.mark.parametrize(
    "topic",
    ["SCHEDULE_TOPIC_XXXX", "TBW102", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRACE_TOPIC", "rmq_sys_wheel_timer",
     "rmq_sys_REVIVE_LOG_c", "%RETRY%g", "%DLQ%g", "%LMQ%q", "TRANS_CHECK_MAX_TIME_TOPIC", "SELF_TEST_TOPIC",
     "OFFSET_MOVED_EVENT", "BenchmarkTest", "DefaultCluster_REPLY_TOPIC", "CHECKPOINT_TOPIC",
     "RMQ_SPARK_STAGE", "RMQ_SPARK_LEDGER", "ns%RMQ_SPARK_STAGE"],
)  # fmt: skip
def test_is_system_topic_is_true_for_topics_of_brokers_groups_and_sinks(topic: str) -> None:
    assert names.is_system_topic(topic)


@pytest.mark.parametrize("topic", ["orders", "TBW1020", "SCHEDULE_TOPIC", "RETRY", "rmqsys", "my_RMQ_SYS_", "%x%", ""])
def test_is_system_topic_is_false_for_other_topics(topic: str) -> None:
    assert not names.is_system_topic(topic)
