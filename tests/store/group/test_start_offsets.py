"""Start offsets of a group, compared with RocketMQ's rules."""

import pytest

from rmq_spark.store.errors import OptionError
from rmq_spark.store.group.start_offsets import (
    ConsumeFrom,
    correct_offset,
    is_young,
    parse_consume_from,
    start_offset,
)
from rmq_spark.store.model import QueueBounds

GIB = 1 << 30
FORTY_PERCENT = 429_496_729  # of 1 GiB, rounded down


@pytest.mark.parametrize(
    ("min_offset", "first_position", "log_end", "young"),
    [
        (0, 0, FORTY_PERCENT, True),
        (0, 0, FORTY_PERCENT + 1, False),
        (0, 1000, FORTY_PERCENT + 1000, True),
        (0, 1000, FORTY_PERCENT + 1001, False),
        (0, None, 100 * GIB, True),
        (-1, None, 100 * GIB, True),
        (1, 0, 0, False),
        (20, None, 0, False),
    ],
)
def test_is_young_while_the_first_message_is_near_the_end_of_the_log(
    min_offset: int, first_position: int | None, log_end: int, young: bool
) -> None:
    assert is_young(min_offset, first_position, log_end, GIB) is young


def test_is_young_uses_memory_percent() -> None:
    assert is_young(0, 0, GIB, GIB, memory_percent=100)
    assert not is_young(0, 0, 1, GIB, memory_percent=0)


NORMAL, RETRY = "t", "%RETRY%g"


@pytest.mark.parametrize(
    ("topic", "bounds", "stored", "young", "latest", "earliest", "by_time"),
    [
        (NORMAL, (0, 100), None, True, 0, 0, 0),
        (NORMAL, (0, 100), None, False, 100, 0, 40),
        (NORMAL, (20, 100), None, False, 100, 0, 40),
        (NORMAL, (20, 100), 70, False, 70, 70, 70),
        (NORMAL, (0, 100), 70, True, 70, 70, 70),
        (NORMAL, (0, 100), 0, False, 0, 0, 0),
        (NORMAL, (0, 100), -1, False, 100, 0, 40),
        (RETRY, (0, 5), None, False, 0, 0, 5),
        (RETRY, (0, 5), 3, False, 3, 3, 3),
        (RETRY, (0, 0), None, True, 0, 0, 0),
    ],
)
def test_start_offset_follows_committed_offset_choice_and_age(
    topic: str,
    bounds: tuple[int, int],
    stored: int | None,
    young: bool,
    latest: int,
    earliest: int,
    by_time: int,
) -> None:
    begins = [
        start_offset(topic, QueueBounds(*bounds), stored, is_young=young, consume_from=wish, offset_by_time=lambda: 40)
        for wish in (ConsumeFrom.LATEST, ConsumeFrom.EARLIEST, ConsumeFrom.TIMESTAMP)
    ]
    assert begins == [latest, earliest, by_time]


@pytest.mark.parametrize(
    ("topic", "stored", "young", "wish"),
    [
        (NORMAL, 7, False, ConsumeFrom.TIMESTAMP),
        (NORMAL, None, True, ConsumeFrom.TIMESTAMP),
        (NORMAL, None, False, ConsumeFrom.LATEST),
        (RETRY, None, False, ConsumeFrom.TIMESTAMP),
    ],
)
def test_start_offset_searches_the_time_only_if_needed(
    topic: str, stored: int | None, young: bool, wish: ConsumeFrom
) -> None:
    start_offset(
        topic,
        QueueBounds(0, 9),
        stored,
        is_young=young,
        consume_from=wish,
        offset_by_time=lambda: pytest.fail("searched"),
    )


@pytest.mark.parametrize(
    ("offset", "bounds", "corrected"),
    [
        (0, (20, 100), 20),
        (20, (20, 100), 20),
        (100, (20, 100), 100),
        (101, (20, 100), 100),
        (-1, (5, 10), 5),
        (7, (0, 0), 0),
        (7, (9, 9), 9),
    ],
)
def test_correct_offset_returns_the_nearer_bound(offset: int, bounds: tuple[int, int], corrected: int) -> None:
    assert correct_offset(offset, QueueBounds(*bounds)) == corrected


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("latest", ConsumeFrom.LATEST),
        (" Earliest ", ConsumeFrom.EARLIEST),
        ("timestamp", ConsumeFrom.TIMESTAMP),
        ("CONSUME_FROM_LAST_OFFSET", ConsumeFrom.LATEST),
        ("CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST", ConsumeFrom.LATEST),
        ("CONSUME_FROM_MIN_OFFSET", ConsumeFrom.LATEST),
        ("CONSUME_FROM_MAX_OFFSET", ConsumeFrom.LATEST),
        ("CONSUME_FROM_FIRST_OFFSET", ConsumeFrom.EARLIEST),
        ("consume_from_timestamp", ConsumeFrom.TIMESTAMP),
    ],
)
def test_parse_consume_from_accepts_our_names_and_rocketmqs(text: str, wish: ConsumeFrom) -> None:
    assert parse_consume_from(text) is wish


@pytest.mark.parametrize("text", ["", "newest", "0"])
def test_parse_consume_from_lists_the_accepted_names(text: str) -> None:
    with pytest.raises(OptionError, match=f"found '{text}'.*latest, earliest, timestamp, CONSUME_FROM_LAST_OFFSET,"):
        parse_consume_from(text)
