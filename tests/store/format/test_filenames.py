"""File names: paths are built and parsed, and invalid names are refused."""

import pytest

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format import file_names as names
from rmq_spark.store.names import check_group_name, check_topic_name


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
        check_topic_name(topic)
    with pytest.raises(OptionError, match="is not a group's name"):
        check_group_name(topic)


@pytest.mark.parametrize("name", ["", "2026112105503176", "202611210550317640", "2026112105503176x", ".DS_Store"])
def test_is_index_name_is_false_for_other_names(name: str) -> None:
    assert not names.is_index_name(name)
    assert names.is_index_name("20261121055031764")
