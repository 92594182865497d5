"""A group's name is taken or refused as RocketMQ's own consumers do it."""

import pytest

from rmq_spark.store.errors import OptionError
from rmq_spark.store.group.group_name import check_consumer_group


@pytest.mark.parametrize("name", ["billing", "a", "A-b_9", "%RETRY%x", "a|b", "TOOLS_CONSUMER", "x" * 248, "-", "0"])
def test_a_name_that_rocketmq_takes_is_taken_as_it_is(name: str) -> None:
    assert check_consumer_group(name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "blank"),
        (" \t", "blank"),
        ("a b", "'a b' is not a group's name: accepted are the characters"),
        ("a.b", "not a group's name"),
        ("t@g", "not a group's name"),
        ("g\n", "not a group's name"),
        ("über", "not a group's name"),
        ("x" * 249, "of 249 characters is not a group's name"),
        ("DEFAULT_CONSUMER", "which RocketMQ refuses"),
        ("CID_RMQ_SYS_TRANS", "a broker's own"),
        ("CID_RMQ_SYS_", "a broker's own"),
    ],
)
def test_any_other_is_refused_and_the_error_says_what_was_found(name: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        check_consumer_group(name)


@pytest.mark.parametrize("name", [None, 7, b"billing"])
def test_what_is_no_text_is_refused(name: object) -> None:
    with pytest.raises(OptionError, match="is a text, found"):
        check_consumer_group(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["default_consumer", "DEFAULT_CONSUMER2", "xCID_RMQ_SYS_"])
def test_only_the_very_names_are_reserved(name: str) -> None:
    assert check_consumer_group(name) == name
