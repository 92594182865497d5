"""Group names that `check_consumer_group` accepts or refuses, like RocketMQ's consumers."""

import pytest

from rmq_spark.store.errors import OptionError
from rmq_spark.store.names import check_consumer_group


@pytest.mark.parametrize("name", ["billing", "a", "A-b_9", "%RETRY%x", "a|b", "TOOLS_CONSUMER", "x" * 248, "-", "0"])
def test_check_consumer_group_returns_a_valid_name(name: str) -> None:
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
def test_check_consumer_group_names_an_invalid_name(name: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        check_consumer_group(name)


@pytest.mark.parametrize("name", [None, 7, b"billing"])
def test_check_consumer_group_refuses_other_types(name: object) -> None:
    with pytest.raises(OptionError, match="is a text, found"):
        check_consumer_group(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["default_consumer", "DEFAULT_CONSUMER2", "xCID_RMQ_SYS_"])
def test_check_consumer_group_accepts_similar_names(name: str) -> None:
    assert check_consumer_group(name) == name
