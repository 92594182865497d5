"""offsets: the text of an offset is canonical and versioned."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.datasource.options.option_parsers import parse_positions
from rmq_spark.datasource.plan.offsets import (
    StreamOffset,
    decode_offset,
    encode_offset,
    encode_queues,
    initial_offset,
)
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey, RecordProof

# No deadline, as the machine may be busy. The same examples every time.
usual = settings(deadline=None, derandomize=True)

GOLDEN = Path(__file__).parent / "golden_offsets"
LINES = (GOLDEN / "version-1.jsonl").read_text().splitlines()

queue_keys = st.builds(QueueKey, st.from_regex(r"[%|a-zA-Z0-9_-]{1,12}", fullmatch=True), st.integers(0, 300))
numbers = st.dictionaries(queue_keys, st.integers(0, 2**63 - 1), max_size=8)
offsets = st.builds(
    StreamOffset, numbers, st.none() | numbers, st.booleans(), st.booleans(), numbers, st.none() | queue_keys
)


@pytest.mark.parametrize("line", LINES)
def test_decode_and_encode_offset_repeat_version_1_byte_for_byte(line) -> None:
    offset = decode_offset(json.loads(line))
    if line != json.dumps(initial_offset()):
        assert json.dumps(encode_offset(offset)) == line


def test_decode_offset_reads_every_key_of_a_golden_line() -> None:
    offset = decode_offset(json.loads(LINES[5]))
    assert offset == StreamOffset(
        {QueueKey("orders", 0): 5, QueueKey("payments", 3): 4},
        {QueueKey("payments", 3): 2},
        ending=True,
        ended=True,
        lost={QueueKey("orders", 0): 12},
        cursor=QueueKey("orders", 0),
    )


def test_encode_offset_puts_broker_names_before_queue_ids_in_version_2() -> None:
    a, b = QueueKey("orders", 0, "broker-a"), QueueKey("orders", 0, "dc/1:b")
    positions = '{"orders": {"broker-a:0": 5, "dc/1:b:0": 7}'
    text = positions + ', "@": {"v": 2, "start": {"orders": {"dc/1:b:0": 3}}, "turn": "orders/dc/1:b:0"}}'
    offset = StreamOffset({b: 7, a: 5}, {b: 3}, cursor=b)
    assert json.dumps(encode_offset(offset)) == text
    assert decode_offset(json.loads(text), has_brokers=True) == offset


def test_encode_offset_keeps_the_time_from_which_later_queues_are_read() -> None:
    text = '{"orders": {"broker-a:0": 5}, "@": {"v": 2, "since": 1700000000000}}'
    offset = StreamOffset({QueueKey("orders", 0, "broker-a"): 5}, since_ms=1_700_000_000_000)
    assert json.dumps(encode_offset(offset)) == text
    assert decode_offset(json.loads(text), has_brokers=True) == offset


def test_encode_offset_keeps_records_that_were_read() -> None:
    a, b = QueueKey("orders", 1, "broker-a"), QueueKey("orders", 0, "broker-b")
    positions = '{"orders": {"broker-a:1": 5, "broker-b:0": 9}'
    read = '{"orders": {"broker-a:1": [4, 123456, 1700000000000], "broker-b:0": [8, 0, 1700000000001]}}'
    text = f'{positions}, "@": {{"v": 2, "turn": "orders/broker-a:1", "read": {read}}}}}'
    records = {(b, 8): RecordProof(0, 1_700_000_000_001), (a, 4): RecordProof(123_456, 1_700_000_000_000)}
    offset = StreamOffset({a: 5, b: 9}, cursor=a, records=records)
    assert json.dumps(encode_offset(offset)) == text
    assert decode_offset(json.loads(text), has_brokers=True) == offset
    assert parse_positions(text).queues == offset.positions
    without = positions + ', "@": {"v": 2}}'
    assert decode_offset(json.loads(without), has_brokers=True).records == {}, "as earlier releases wrote it"


def test_encode_offset_keeps_where_the_group_may_be() -> None:
    a, b, c = (QueueKey("orders", number, "broker-a") for number in (0, 1, 10))
    positions = '{"orders": {"broker-a:0": 70, "broker-a:1": 9, "broker-a:10": 5}'
    published = '"published": {"orders": {"broker-a:0": [40, 55], "broker-a:1": 7}}'
    text = f'{positions}, "@": {{"v": 2, "group": "billing", "reset": 3, {published}, "turn": "orders/broker-a:1"}}}}'
    offset = StreamOffset({a: 70, b: 9, c: 5}, cursor=b, group="billing", reset=3, published={b: (7,), a: (40, 55)})
    assert json.dumps(encode_offset(offset)) == text
    assert decode_offset(json.loads(text), has_brokers=True) == offset
    assert parse_positions(text).queues == offset.positions


@pytest.mark.parametrize("published", ["40", {"orders": 4}, {"orders": {"broker-a:0": [None]}}])
def test_decode_offset_refuses_what_is_no_offset_of_a_group(published) -> None:
    with pytest.raises(OptionError, match=r"^the checkpoint is not one of rmq: "):
        decode_offset({"orders": {"broker-a:0": 5}, "@": {"v": 2, "published": published}}, has_brokers=True)


def test_encode_offset_without_queues_has_version_2_if_there_is_a_time() -> None:
    encoded = encode_offset(StreamOffset({}, since_ms=5))
    assert encoded == {"@": {"v": 2, "start": {}, "since": 5}}
    assert not decode_offset(encoded, has_brokers=True).is_initial()


OTHER_PLACES = {  # the offset, has_brokers, what the error names, startingOffsets
    "a directory's in a cluster": ({"a": {"0": 5}, "@": {"v": 1}}, True, "a store directory", '{"a":{"0":5}}'),
    "a cluster's of one broker in a directory": (
        {"a": {"b:0": 5, "b:1": 6}, "@": {"v": 2}},
        False,
        "a cluster",
        '{"a":{"0":5,"1":6}}',
    ),
    "a cluster's of two brokers in a directory": (
        {"a": {"b:0": 5, "c:0": 6}, "@": {"v": 2}},
        False,
        "a cluster",
        '{"a":{"b:0":5,"c:0":6}}',
    ),
}


@pytest.mark.parametrize(("value", "has_brokers", "found", "starts"), OTHER_PLACES.values(), ids=OTHER_PLACES)
def test_decode_offset_refuses_the_checkpoint_of_another_kind_of_place(value, has_brokers, found, starts) -> None:
    with pytest.raises(OptionError, match=f"^the checkpoint is one of {found}; expected one of ") as caught:
        decode_offset(value, has_brokers=has_brokers)
    assert f"startingOffsets={starts} " in str(caught.value)
    assert parse_positions(starts).queues


def test_initial_offset_is_constant_and_has_no_queue() -> None:
    assert json.dumps(initial_offset()) == LINES[0]
    assert decode_offset(initial_offset()).is_initial()


@usual
@given(offsets)
def test_decode_offset_returns_what_was_encoded_and_never_the_initial_one(offset) -> None:
    encoded = encode_offset(offset)
    assert encoded != initial_offset()
    decoded = decode_offset(json.loads(json.dumps(encoded)))
    assert not decoded.is_initial()
    assert decoded.positions == offset.positions
    assert decoded.starts == (offset.starts or (None if offset.positions else {}))
    assert (decoded.ending, decoded.ended, decoded.lost, decoded.cursor) == (
        offset.ending,
        offset.ended,
        offset.lost,
        offset.cursor,
    )


@usual
@given(numbers, st.randoms(use_true_random=False))
def test_encode_offset_does_not_depend_on_the_order_of_queues(positions, shuffle: random.Random) -> None:
    shuffled = list(positions.items())
    shuffle.shuffle(shuffled)
    assert json.dumps(encode_offset(StreamOffset(positions))) == json.dumps(encode_offset(StreamOffset(dict(shuffled))))


def test_encode_offset_sorts_queues_by_number_and_puts_metadata_last() -> None:
    positions = {QueueKey("b", 10): 1, QueueKey("b", 9): 2, QueueKey("a", 0): 3, QueueKey("Z", 0): 4}
    assert json.dumps(encode_offset(StreamOffset(positions))) == (
        '{"Z": {"0": 4}, "a": {"0": 3}, "b": {"9": 2, "10": 1}, "@": {"v": 1}}'
    )


@usual
@given(offsets)
def test_encode_offset_is_valid_as_startingOffsets(offset) -> None:
    assert parse_positions(json.dumps(encode_offset(offset))).queues == offset.positions


@pytest.mark.parametrize("metadata", [{"v": 2}, {"v": 3}, {"v": "1"}, {}, None, 7])
def test_decode_offset_refuses_another_version_with_a_next_step(metadata) -> None:
    with pytest.raises(OptionError, match="expected version 1") as caught:
        decode_offset({"orders": {"0": 1}, "@": metadata})
    assert "checkpointLocation" in str(caught.value)


def test_decode_offset_refuses_an_offset_without_metadata() -> None:
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
        {"orders": {"b:0": 5}, "@": {"v": 2, "read": {"orders": {"b:0": [4, 100]}}}},
        {"orders": {"b:0": 5}, "@": {"v": 2, "read": {"orders": {"b:0": 4}}}},
        {"orders": {"b:0": 5}, "@": {"v": 2, "read": [4, 100, 5]}},
        5,
        "5",
        [{"@": {"v": 1}}],
        None,
    ],
)
def test_decode_offset_refuses_another_shape(value) -> None:
    with pytest.raises(OptionError, match="the checkpoint is not one of rmq: found"):
        decode_offset(value)


def test_decode_offset_ignores_keys_that_a_later_release_adds() -> None:
    assert decode_offset({"orders": {"0": 1}, "@": {"v": 1, "later": "g"}}).positions == {QueueKey("orders", 0): 1}


def test_encode_queues_nests_queues_by_topic() -> None:
    assert encode_queues({QueueKey("a", 1): 2, QueueKey("a", 0): 1}) == {"a": {"0": 1, "1": 2}}
    assert encode_queues({}) == {}
