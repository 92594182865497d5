"""Statuses and next offsets of pulls, and what brokers and clients make of them: each row of RocketMQ's rules."""

import pytest

from rmq_spark.store.format.consume_queue_entry import entry_position
from rmq_spark.store.format.file_names import segment_name
from rmq_spark.store.group.pull import (
    Answer,
    ResponseCode,
    answer_by_bounds,
    answer_of_scan,
    answer_without_file,
    next_file_offset,
    pull_status,
    response_code,
)
from rmq_spark.store.model import QueueBounds
from rmq_spark.store.pull_result import GetMessageStatus, PullStatus

FILE_UNITS = 300_000  # mappedFileSizeConsumeQueue


@pytest.mark.parametrize(
    ("bounds", "offset", "status", "next_offset"),
    [
        ((0, 0), 0, "NO_MESSAGE_IN_QUEUE", 0),
        ((0, 0), 7, "NO_MESSAGE_IN_QUEUE", 0),
        ((0, 10), 10, "OFFSET_OVERFLOW_ONE", 10),
        ((0, 10), 11, "OFFSET_OVERFLOW_BADLY", 10),
        ((5, 10), 50, "OFFSET_OVERFLOW_BADLY", 10),
        ((5, 10), 4, "OFFSET_TOO_SMALL", 5),
        ((5, 10), -1, "OFFSET_TOO_SMALL", 5),
        ((10, 10), 10, "OFFSET_OVERFLOW_ONE", 10),
    ],
)
def test_bounds_alone_answer_a_pull_outside_them(
    bounds: tuple[int, int], offset: int, status: str, next_offset: int
) -> None:
    assert answer_by_bounds(QueueBounds(*bounds), offset) == Answer(GetMessageStatus(status), next_offset)


@pytest.mark.parametrize("offset", [5, 9])
def test_a_pull_inside_the_bounds_is_to_be_read(offset: int) -> None:
    assert answer_by_bounds(QueueBounds(5, 10), offset) is None


def test_where_the_queue_has_lost_a_file_the_next_pull_begins_with_the_file_after_it() -> None:
    assert answer_by_bounds(QueueBounds(0, 700_000), 10) is None
    assert answer_without_file(10, FILE_UNITS) == Answer(GetMessageStatus.OFFSET_FOUND_NULL, 300_000)


def test_where_a_batch_queue_has_lost_a_file_the_next_pull_begins_at_0_and_is_corrected() -> None:
    assert answer_without_file(10, None) == Answer(GetMessageStatus.OFFSET_FOUND_NULL, 0)
    assert answer_by_bounds(QueueBounds(5, 10), 0) == Answer(GetMessageStatus.OFFSET_TOO_SMALL, 5)


@pytest.mark.parametrize(
    ("found_count", "was_removed", "status"),
    [(1, False, "FOUND"), (1, True, "FOUND"), (0, True, "MESSAGE_WAS_REMOVING"), (0, False, "NO_MATCHED_MESSAGE")],
)
def test_after_a_scan_the_next_pull_begins_behind_it(found_count: int, was_removed: bool, status: str) -> None:
    answer = answer_of_scan(42, found_count=found_count, was_removed=was_removed)
    assert answer == Answer(GetMessageStatus(status), 42)


@pytest.mark.parametrize(
    ("offset", "position", "name", "position_in_file", "next_offset"),
    [
        (0, 0, "00000000000000000000", 0, 300_000),
        (299_999, 5_999_980, "00000000000000000000", 5_999_980, 300_000),
        (300_000, 6_000_000, "00000000000006000000", 0, 600_000),
        (300_001, 6_000_020, "00000000000006000000", 20, 600_000),
        (899_999, 17_999_980, "00000000000012000000", 5_999_980, 900_000),
    ],
)
def test_an_offset_names_a_file_a_position_in_it_and_where_the_next_one_begins(
    offset: int, position: int, name: str, position_in_file: int, next_offset: int
) -> None:
    file_bytes = entry_position(FILE_UNITS)
    assert entry_position(offset) == position
    assert segment_name(position // file_bytes * file_bytes) == name
    assert position % file_bytes == position_in_file
    assert next_file_offset(offset, FILE_UNITS) == next_offset


FROM_0, FROM_LATER = 0, 7
CODES = {
    "FOUND": (0, "FOUND", 0, "FOUND"),
    "MESSAGE_WAS_REMOVING": (20, "NO_MATCHED_MSG", 20, "NO_MATCHED_MSG"),
    "NO_MATCHED_MESSAGE": (20, "NO_MATCHED_MSG", 20, "NO_MATCHED_MSG"),
    "OFFSET_FOUND_NULL": (19, "NO_NEW_MSG", 19, "NO_NEW_MSG"),
    "OFFSET_OVERFLOW_ONE": (19, "NO_NEW_MSG", 19, "NO_NEW_MSG"),
    "NO_MESSAGE_IN_QUEUE": (19, "NO_NEW_MSG", 21, "OFFSET_ILLEGAL"),
    "OFFSET_OVERFLOW_BADLY": (21, "OFFSET_ILLEGAL", 21, "OFFSET_ILLEGAL"),
    "OFFSET_TOO_SMALL": (21, "OFFSET_ILLEGAL", 21, "OFFSET_ILLEGAL"),
    "OFFSET_RESET": (21, "OFFSET_ILLEGAL", 21, "OFFSET_ILLEGAL"),
}


@pytest.mark.parametrize("status", GetMessageStatus)
def test_every_status_has_a_code_of_the_broker_and_a_word_of_the_client(status: GetMessageStatus) -> None:
    code_from_0, word_from_0, code, word = CODES[status]
    assert (response_code(status, FROM_0), pull_status(status, FROM_0)) == (ResponseCode(code_from_0), word_from_0)
    assert (response_code(status, FROM_LATER), pull_status(status, FROM_LATER)) == (ResponseCode(code), word)
    assert PullStatus(word) == word
