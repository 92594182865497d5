"""The offset text: canonical, versioned, and never two texts for one thing."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.datasource.offsets import (
    StreamOffset,
    decode_offset,
    encode_offset,
    encode_queues,
    initial_offset,
)
from rmq_spark.datasource.values import parse_positions
from rmq_spark.store.errors import OptionError
from rmq_spark.store.units import QueueKey

# No deadline: a busy machine is no bug. The same examples every time.
usual = settings(deadline=None, derandomize=True)

GOLDEN = Path(__file__).parent / "golden_offsets"
LINES = (GOLDEN / "version-1.jsonl").read_text().splitlines()

queue_keys = st.builds(QueueKey, st.from_regex(r"[%|a-zA-Z0-9_-]{1,12}", fullmatch=True), st.integers(0, 300))
numbers = st.dictionaries(queue_keys, st.integers(0, 2**63 - 1), max_size=8)
offsets = st.builds(
    StreamOffset, numbers, st.none() | numbers, st.booleans(), st.booleans(), numbers, st.none() | queue_keys
)


@pytest.mark.parametrize("line", LINES)
def test_what_version_1_wrote_is_read_and_written_again_to_the_letter(line) -> None:
    offset = decode_offset(json.loads(line))
    if line != json.dumps(initial_offset()):
        assert json.dumps(encode_offset(offset)) == line


def test_the_golden_lines_mean_what_they_say() -> None:
    offset = decode_offset(json.loads(LINES[5]))
    assert offset == StreamOffset(
        {QueueKey("orders", 0): 5, QueueKey("payments", 3): 4},
        {QueueKey("payments", 3): 2},
        ending=True,
        ended=True,
        lost={QueueKey("orders", 0): 12},
        turn=QueueKey("orders", 0),
    )


def test_the_initial_offset_is_constant_and_names_no_queue() -> None:
    assert json.dumps(initial_offset()) == LINES[0]
    assert decode_offset(initial_offset()).is_initial()


@usual
@given(offsets)
def test_an_offset_comes_back_and_is_never_the_initial_one(offset) -> None:
    encoded = encode_offset(offset)
    assert encoded != initial_offset()
    decoded = decode_offset(json.loads(json.dumps(encoded)))
    assert not decoded.is_initial()
    assert decoded.positions == offset.positions
    assert decoded.starts == (offset.starts or (None if offset.positions else {}))
    assert (decoded.ending, decoded.ended, decoded.lost, decoded.turn) == (
        offset.ending,
        offset.ended,
        offset.lost,
        offset.turn,
    )


@usual
@given(numbers, st.randoms(use_true_random=False))
def test_the_text_does_not_depend_on_the_order_in_which_queues_came(positions, shuffle: random.Random) -> None:
    shuffled = list(positions.items())
    shuffle.shuffle(shuffled)
    assert json.dumps(encode_offset(StreamOffset(positions))) == json.dumps(encode_offset(StreamOffset(dict(shuffled))))


def test_queues_are_sorted_by_number_and_the_mark_is_last() -> None:
    positions = {QueueKey("b", 10): 1, QueueKey("b", 9): 2, QueueKey("a", 0): 3, QueueKey("Z", 0): 4}
    assert json.dumps(encode_offset(StreamOffset(positions))) == (
        '{"Z": {"0": 4}, "a": {"0": 3}, "b": {"9": 2, "10": 1}, "@": {"v": 1}}'
    )


@usual
@given(offsets)
def test_an_offset_can_be_pasted_into_starting_offsets(offset) -> None:
    assert parse_positions(json.dumps(encode_offset(offset))).queues == offset.positions


@pytest.mark.parametrize("mark", [{"v": 2}, {"v": "1"}, {}, None, 7])
def test_another_version_is_refused_with_what_to_do(mark) -> None:
    with pytest.raises(OptionError, match="this release reads version 1") as caught:
        decode_offset({"orders": {"0": 1}, "@": mark})
    assert "checkpointLocation" in str(caught.value)


def test_an_offset_without_mark_is_of_no_version() -> None:
    with pytest.raises(OptionError, match="version None"):
        decode_offset({"orders": {"0": 1}})


@pytest.mark.parametrize(
    "value",
    [
        {"orders": 5, "@": {"v": 1}},
        {"orders": {"x": 5}, "@": {"v": 1}},
        {"orders": {"0": None}, "@": {"v": 1}},
        {"@": {"v": 1, "start": 5}},
        {"@": {"v": 1, "turn": "orders"}},
        5,
        "5",
        [{"@": {"v": 1}}],
        None,
    ],
)
def test_an_offset_of_another_shape_is_refused(value) -> None:
    with pytest.raises(OptionError, match="none of ours"):
        decode_offset(value)


def test_what_a_later_release_adds_to_version_1_is_passed_over() -> None:
    assert decode_offset({"orders": {"0": 1}, "@": {"v": 1, "later": "g"}}).positions == {QueueKey("orders", 0): 1}


def test_numbers_by_queue_are_nested_by_topic() -> None:
    assert encode_queues({QueueKey("a", 1): 2, QueueKey("a", 0): 1}) == {"a": {"0": 1, "1": 2}}
    assert encode_queues({}) == {}
