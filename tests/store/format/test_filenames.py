"""File names: paths are built and parsed, and invalid names are refused."""

import pytest

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format import file_names as names


@pytest.mark.parametrize("offset", [0, 1, 1 << 30, 16384 * 3, names.MAX_OFFSET])
def test_parse_segment_name_restores_the_offset(offset: int) -> None:
    name = names.segment_name(offset)
    assert len(name) == 20
    assert names.parse_segment_name(name) == offset


@pytest.mark.parametrize(
    "name",
    ["", "0", "0" * 19, "0" * 21, "-" + "0" * 19, "+" + "0" * 19, " " + "0" * 19, "0" * 19 + "x",
     "9223372036854775808".zfill(20), "99999999999999999999", "\u0660" * 20, "0" * 19 + "\n"],
)  # fmt: skip
def test_parse_segment_name_returns_none_for_other_names(name: str) -> None:
    assert names.parse_segment_name(name) is None


def test_path_builders_return_a_brokers_paths() -> None:
    assert names.commit_log_segment(1 << 30) == "commitlog/00000000001073741824"
    assert names.queue_folder("orders", 3) == "consumequeue/orders/3"
    assert names.queue_folder("o", 0, names.CONSUME_QUEUE_EXT) == "consumequeue_ext/o/0"
    assert names.config_file(names.TOPICS_JSON) == "config/topics.json"


@pytest.mark.parametrize("topic", ["", ".", "..", "../x", "a/b", "/etc", "a\0b"])
def test_queue_folder_refuses_a_topic_that_leads_out_of_the_store(topic: str) -> None:
    with pytest.raises(OptionError, match="cannot be a folder's name"):
        names.queue_folder(topic, 0)
    with pytest.raises(OptionError, match="is not a topic's name"):
        names.check_topic_name(topic)
    with pytest.raises(OptionError, match="is not a group's name"):
        names.check_group_name(topic)


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
     "OFFSET_MOVED_EVENT", "BenchmarkTest", "DefaultCluster_REPLY_TOPIC", "CHECKPOINT_TOPIC"],
)  # fmt: skip
def test_is_system_topic_is_true_for_topics_of_brokers_and_groups(topic: str) -> None:
    assert names.is_system_topic(topic)


@pytest.mark.parametrize("topic", ["orders", "TBW1020", "SCHEDULE_TOPIC", "RETRY", "rmqsys", "my_RMQ_SYS_", "%x%", ""])
def test_is_system_topic_is_false_for_other_topics(topic: str) -> None:
    assert not names.is_system_topic(topic)


@pytest.mark.parametrize("name", ["", "2026112105503176", "202611210550317640", "2026112105503176x", ".DS_Store"])
def test_is_index_name_is_false_for_other_names(name: str) -> None:
    assert not names.is_index_name(name)
    assert names.is_index_name("20261121055031764")
