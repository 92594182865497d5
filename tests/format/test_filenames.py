"""Names and paths in a store: built, parsed again, and refused where they would lead out of it."""

import pytest

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format import filenames as names


@pytest.mark.parametrize("offset", [0, 1, 1 << 30, 16384 * 3, names.MAX_OFFSET])
def test_a_segment_name_gives_its_offset_back(offset: int) -> None:
    name = names.segment_name(offset)
    assert len(name) == 20
    assert names.parse_segment_name(name) == offset


@pytest.mark.parametrize(
    "name",
    ["", "0", "0" * 19, "0" * 21, "-" + "0" * 19, "+" + "0" * 19, " " + "0" * 19, "0" * 19 + "x",
     "9223372036854775808".zfill(20), "99999999999999999999", "\u0660" * 20, "0" * 19 + "\n"],
)  # fmt: skip
def test_a_name_that_no_broker_writes_is_no_segment(name: str) -> None:
    assert names.parse_segment_name(name) is None


def test_paths_are_those_of_a_broker() -> None:
    assert names.commit_log_segment(1 << 30) == "commitlog/00000000001073741824"
    assert names.queue_folder("orders", 3) == "consumequeue/orders/3"
    assert names.queue_folder("o", 0, names.CONSUME_QUEUE_EXT) == "consumequeue_ext/o/0"
    assert names.config_file(names.TOPICS_JSON) == "config/topics.json"
    assert names.index_name("20261121011454660") == "index/20261121011454660"


@pytest.mark.parametrize("tree", [names.CONSUME_QUEUE, names.CONSUME_QUEUE_EXT, names.BATCH_CONSUME_QUEUE])
def test_a_queue_folder_gives_topic_and_queue_back(tree: str) -> None:
    assert names.parse_queue_folder(names.queue_folder("%RETRY%g", 7, tree)) == (tree, "%RETRY%g", 7)


@pytest.mark.parametrize("path", ["", "consumequeue", "consumequeue/t", "consumequeue/t/x", "consumequeue/t/1/2",
                                  "consumequeue/t/-1", "consumequeue//1", "index/t/1", "consumequeue/t/²"])  # fmt: skip
def test_another_path_is_no_queue_folder(path: str) -> None:
    assert names.parse_queue_folder(path) is None


@pytest.mark.parametrize("topic", ["", ".", "..", "../x", "a/b", "/etc", "a\0b"])
def test_no_topic_leads_out_of_the_store(topic: str) -> None:
    with pytest.raises(OptionError, match="cannot be a folder's name"):
        names.queue_folder(topic, 0)
    with pytest.raises(OptionError, match="is not a topic's name"):
        names.check_topic_name(topic)
    with pytest.raises(OptionError, match="is not a group's name"):
        names.check_group_name(topic)


@pytest.mark.parametrize("topic", ["a", "%RETRY%g", "A-z_0|%", "x" * 127, "%RETRY%" + "g" * 248, "%DLQ%" + "g" * 250])
def test_a_name_that_a_broker_takes_is_a_topic(topic: str) -> None:
    assert names.check_topic_name(topic) == topic


@pytest.mark.parametrize(
    "topic", ["a b", "a.b", "ä", "x" * 128, "%RETRY%" + "g" * 249, "a\n", "a@b", "😀", "\ud800", "a" * 100_000]
)
def test_a_name_that_no_broker_takes_is_refused_with_what_is_accepted(topic: str) -> None:
    with pytest.raises(OptionError, match=r"accepted are the characters .* at most 127") as caught:
        names.check_topic_name(topic)
    assert len(str(caught.value)) < 500


def test_a_group_leaves_room_for_its_retry_topic() -> None:
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
def test_a_topic_of_the_broker_or_of_a_group_is_a_system_topic(topic: str) -> None:
    assert names.is_system_topic(topic)


@pytest.mark.parametrize("topic", ["orders", "TBW1020", "SCHEDULE_TOPIC", "RETRY", "rmqsys", "my_RMQ_SYS_", "%x%", ""])
def test_any_other_topic_is_a_users(topic: str) -> None:
    assert not names.is_system_topic(topic)


@pytest.mark.parametrize("name", ["", "2026112105503176", "202611210550317640", "2026112105503176x", ".DS_Store"])
def test_another_file_in_the_index_folder_is_no_index_file(name: str) -> None:
    assert not names.is_index_name(name)
    assert names.is_index_name("20261121055031764")
