"""Inner batches: `decode_items` for one body, `item_positions` for many, cut and damaged bodies."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rmq_spark.store.format.consume_queue_entry import (
    ITEM_HEAD,
    Item,
    ItemPositions,
    decode_items,
    encode_items,
    item_positions,
)

ITEMS = [Item(0, b"body", b"K\x01v\x02"), Item(-7, b"", b""), Item(1 << 30, b"\0" * 30, b"TAGS\x01t")]
BATCH = encode_items(ITEMS)
Rows = list[tuple[int, Item]]


def lay(bodies: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Put bodies into a buffer with other bytes before each: buffer, begins, ends."""
    data, begins = b"", []
    for body in bodies:
        data += b"\xff" * 3
        begins.append(len(data))
        data += body
    sizes = [len(body) for body in bodies]
    first = np.array(begins, np.int64)
    return np.frombuffer(data, np.uint8), first, first + np.array(sizes, np.int64)


def rows(buffer: NDArray[np.uint8], found: ItemPositions) -> Rows:
    columns = (found.flags, found.body_begins, found.body_ends, found.properties_begins, found.properties_ends)
    items = [
        Item(flag, buffer[begin:end].tobytes(), buffer[properties:last].tobytes())
        for flag, begin, end, properties, last in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return list(zip(found.rows.tolist(), items, strict=True))


def check(bodies: list[bytes]) -> None:
    """Compare the fast reader with the slow one."""
    buffer, begins, ends = lay(bodies)
    found = item_positions(buffer, begins, ends)
    slow = [decode_items(body) for body in bodies]
    assert rows(buffer, found) == [(row, item) for row, (items, _) in enumerate(slow) for item in items]
    faults = [(row, fault) for row, (_, fault) in enumerate(slow) if fault is not None]
    if not faults:
        assert found.fault is None
        return
    row, fault = faults[0]
    assert found.fault is not None
    assert (found.fault.row, found.fault.what) == (row, fault.what)
    assert found.fault.position == begins[row] + fault.position


def test_decode_items_returns_the_encoded_items() -> None:
    assert decode_items(BATCH) == (ITEMS, None)
    assert encode_items([]) == b""
    assert decode_items(b"") == ([], None)


def test_encode_items_follows_the_dtype() -> None:
    head = np.frombuffer(BATCH, ITEM_HEAD, 1)[0]
    assert head.tolist() == (30, 0, 0, 0, 4)
    assert BATCH[20:30] == b"body\x00\x04K\x01v\x02"


def test_decode_items_reads_golden_batches(golden: Path) -> None:
    log = (golden / "batchcq-cqext/commitlog/00000000000000000000").read_bytes()
    begins, sizes = [], []
    for position in (0, 247, 545):
        sizes.append(int.from_bytes(log[position + 84 : position + 88], "big"))
        begins.append(position + 88)
    bodies = [log[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
    check(bodies)
    assert [len(decode_items(body)[0]) for body in bodies] == [2, 3, 4]
    assert b"".join(encode_items(decode_items(body)[0]) for body in bodies) == b"".join(bodies)
    buffer = np.frombuffer(log, np.uint8)
    found = item_positions(buffer, np.array(begins), np.array(begins) + np.array(sizes))
    assert found.rows.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert found.fault is None


@pytest.mark.parametrize("batches", [1, 7, 8, 9, 40])
def test_item_positions_equals_decode_items(batches: int) -> None:
    check([encode_items(ITEMS * (number % 4)) for number in range(batches)])


@pytest.mark.parametrize("size", range(len(BATCH) + 1))
@pytest.mark.parametrize("others", [0, 20])
def test_item_positions_of_a_batch_cut_anywhere_has_complete_items_and_a_fault(size: int, others: int) -> None:
    ends = [0, 30, 52, len(BATCH)]
    items, fault = decode_items(BATCH[:size])
    assert len(items) == sum(end <= size for end in ends[1:])
    assert (fault is None) == (size in ends)
    if fault is not None:
        assert fault.position == max(end for end in ends if end < size)
    check([*[BATCH] * others, BATCH[:size], *[BATCH] * others])
    check([*[BATCH] * others, BATCH[:size]])  # at the end of the buffer: reading further would leave it


@pytest.mark.parametrize("others", [0, 20])
@pytest.mark.parametrize("position", range(16, 32))
@pytest.mark.parametrize("value", [0x7F, 0x80, 0xFF])
def test_decode_items_returns_a_fault_for_a_damaged_length(others: int, position: int, value: int) -> None:
    data = bytearray(BATCH)
    data[position] = value
    check([*[BATCH] * others, bytes(data), *[BATCH] * others])


def test_item_positions_returns_the_first_fault_by_batch() -> None:
    late, soon = BATCH[:-1], BATCH[:5]
    bodies = [BATCH] * 4 + [late] + [BATCH] * 4 + [soon] + [BATCH] * 4
    buffer, begins, ends = lay(bodies)
    found = item_positions(buffer, begins, ends)
    assert found.fault is not None
    assert found.fault.row == 4
    check(bodies)


def test_decode_items_ignores_the_length_of_an_item() -> None:
    data = bytearray(BATCH)
    data[0:4] = b"\xff" * 4
    assert decode_items(bytes(data)) == (ITEMS, None)
    check([bytes(data)] * 9)


def test_encode_items_refuses_properties_that_are_too_long() -> None:
    with pytest.raises(ValueError, match="take 32768 bytes; expected at most 32767"):
        encode_items([Item(0, b"", b"x" * 32768)])


@given(
    st.lists(
        st.lists(
            st.builds(Item, st.integers(-(1 << 31), (1 << 31) - 1), st.binary(max_size=9), st.binary(max_size=5)),
            max_size=5,
        ),
        max_size=20,
    ),
    st.integers(0, 400),
    st.integers(0, 255),
)
def test_item_positions_equals_decode_items_after_a_byte_changed(
    batches: list[list[Item]], place: int, value: int
) -> None:
    bodies = [encode_items(items) for items in batches]
    check(bodies)
    if bodies:
        data = bytearray(bodies[place % len(bodies)])
        if data:
            data[place % len(data)] = value
            bodies[place % len(bodies)] = bytes(data)
            check(bodies)
