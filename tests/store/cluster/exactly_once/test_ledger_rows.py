"""The rows of the ledger: their bytes, and what the rows of a query mean together."""

import base64
import json
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.store.cluster.exactly_once import ledger_rows
from rmq_spark.store.cluster.exactly_once.ledger_rows import (
    Done,
    Intent,
    LastBatch,
    LedgerRow,
    LedgerState,
    OpenIntent,
    Take,
    decode_row,
    encode_row,
    tag_of,
)
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.errors import OptionError, StoreError
from rmq_spark.store.model import CommitKey, QueueKey

QUERY = "5b2c1f6e-3f0e-4c57-9d0a-2f0f6b3d8e11"
TARGETS = [QueueKey("orders", 0, "broker-a"), QueueKey("orders", 7, "broker-b"), QueueKey("bills", 1, "broker-a")]


def run(queue: QueueKey, offset: int = 5, *, rows: int = 2) -> StagedRun:
    stage = QueueKey("RMQ_SPARK_STAGE", 3, queue.broker)
    return StagedRun(queue, stage, offset, 17, 400, 0xFFFFFFFF, "7F0000010A2B" + "0" * 20, rows)


def intent(batch: int | None, session: str = "e1", rows: int = 4, digest: int = 99) -> Intent:
    floors = tuple((queue, 10 * number) for number, queue in enumerate(TARGETS))
    runs = tuple(run(queue, 100 + number) for number, queue in enumerate(TARGETS[::-1]))
    return Intent(CommitKey(QUERY, batch), session, 1_700_000_000_000, rows, digest, floors, runs)


def take(batch: int, session: str) -> Take:
    return Take(CommitKey(QUERY, batch), session, 0)


def done(batch: int, session: str = "e1", rows: int = 4, digest: int | None = 99) -> Done:
    return Done(CommitKey(QUERY, batch), session, 0, rows, digest)


def read(*rows: LedgerRow) -> LedgerState:
    state = LedgerState()
    for offset, row in enumerate(rows):
        state = state.apply(row, offset)
    return state


def change(row: LedgerRow, **fields: Any) -> bytes:
    """Return the body of a row with other fields."""
    return json.dumps(json.loads(encode_row(row)) | fields).encode()


ROWS = [
    intent(3),
    intent(None),
    Intent(CommitKey("txn:a b\x01\x02\ud800ä", 0), "e1", 5, 0, 0),
    take(3, "e2"),
    Done(CommitKey(QUERY, 3), "e2", 6, 10, 2**64 - 1),
    Done(CommitKey(QUERY, 3), "e2", 6, 10, 0, written=7, missing=3),
    Done(CommitKey(QUERY, 3), "e2", 6, 0, None),
]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_read_as_it_was_written(row: LedgerRow) -> None:
    assert decode_row(encode_row(row)) == row
    assert encode_row(row) == encode_row(row)


def test_the_bytes_of_an_intent_are_those_of_the_format() -> None:
    fields = json.loads(encode_row(intent(3)))
    packed = zlib.decompress(base64.b64decode(fields.pop("runs")))
    assert fields == {
        "v": 1,
        "kind": "intent",
        "query": QUERY,
        "batch": 3,
        "session": "e1",
        "made": 1_700_000_000_000,
        "rows": 4,
        "digest": "0000000000000063",
        "stage": "RMQ_SPARK_STAGE",
        "queues": [["orders", "broker-a", 0, 0], ["orders", "broker-b", 7, 10], ["bills", "broker-a", 1, 20]],
    }
    first_id = "7F0000010A2B" + "0" * 20
    assert json.loads(packed)[0] == [2, "broker-a", 3, 100, 17, 400, 0xFFFFFFFF, first_id, 2]
    assert [one[0] for one in json.loads(packed)] == [2, 1, 0]  # publishing order


def test_the_keys_of_a_row_are_sorted_and_the_bytes_are_ascii() -> None:
    body = encode_row(ROWS[2])
    assert list(json.loads(body)) == sorted(json.loads(body))
    assert body.isascii()


def test_a_row_of_another_query_is_left_out_whatever_its_version() -> None:
    assert decode_row(encode_row(take(1, "e1")), QUERY) == take(1, "e1")
    assert decode_row(change(take(1, "e1"), query="other", v=9), QUERY) is None


@pytest.mark.parametrize("fields", [{"v": 2}, {"kind": "epoch"}, {"v": None}])
def test_a_row_of_a_newer_version_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="newer rmq-spark") as error:
        decode_row(change(take(1, "e1"), **fields), QUERY, "the message at ledger offset 4")
    assert "the message at ledger offset 4" in str(error.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"query": 5}',
        change(intent(1), rows=-1),
        change(intent(1), digest="x"),
        change(intent(1), batch="1"),
        change(intent(1), queues=[["orders", "a", 0]]),
        change(intent(1), queues=[]),
        change(intent(1), stage=None),
        change(intent(1), runs="***"),
        change(intent(1), runs=base64.b64encode(zlib.compress(b"[]" * 9)[:-3]).decode()),
        change(intent(1), runs=base64.b64encode(zlib.compress(b"{}")).decode()),
        change(intent(1), runs=base64.b64encode(zlib.compress(b"[[0]]")).decode()),
        change(done(1), rows=None),
    ],
)
def test_a_body_that_is_no_row_is_an_error(body: bytes) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        decode_row(body, None if body[:1] != b"{" else QUERY)


def test_runs_that_unpack_to_too_much_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_rows, "MAX_DECOMPRESSED_BYTES", 50)
    with pytest.raises(StoreError, match="more than 50 bytes"):
        decode_row(encode_row(intent(1)))


def test_an_intent_of_more_than_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(encode_row(intent(1)))
    monkeypatch.setattr(ledger_rows, "MAX_INTENT_BYTES", size - 1)
    with pytest.raises(OptionError, match=f"batch 1 of query {QUERY} is too large for one intent: its 3 runs take"):
        encode_row(intent(1))
    monkeypatch.setattr(ledger_rows, "MAX_INTENT_BYTES", size)
    encode_row(intent(1))


def test_a_tag_is_of_the_query_and_plain() -> None:
    assert tag_of("a") == "ca978112ca1bbdca"
    assert tag_of("\ud800") != tag_of("a")


def test_the_first_intent_for_a_batch_counts_and_later_ones_are_void() -> None:
    state = read(intent(0, "e1"), intent(0, "e2"), intent(1, "e3"))
    assert state == LedgerState(None, OpenIntent(intent(0, "e1"), ("e1",)), 0)
    state = read(intent(0, "e1"), done(0), intent(0, "e2"))
    assert state == LedgerState(LastBatch(0, 4, 99), None, 0)


def test_an_intent_for_a_later_batch_counts_also_after_a_gap() -> None:
    state = read(intent(0), done(0), intent(7, "e2"))
    assert state.open == OpenIntent(intent(7, "e2"), ("e2",))
    assert (state.last, state.counted) == (LastBatch(0, 4, 99), 2)


def test_a_take_adds_an_owner_of_the_open_batch_once() -> None:
    state = read(intent(1), take(1, "e2"), take(0, "e3"), take(1, "e2"), take(1, "e1"), take(1, "e4"))
    assert state.open is not None
    assert state.open.owners == ("e1", "e2", "e4")
    assert read(take(1, "e2")) == LedgerState()


def test_done_ends_the_open_batch_and_no_other() -> None:
    assert read(intent(3), done(2)).open is not None
    assert read(intent(3), done(4)).open is not None
    assert read(intent(3), done(3, rows=7)) == LedgerState(LastBatch(3, 7, 99), None, 0)


def test_a_skip_counts_only_while_its_session_is_the_newest_owner() -> None:
    skip = Done(CommitKey(QUERY, 3), "e2", 0, 4, 99, written=3, missing=1)
    assert read(intent(3), take(3, "e2"), skip).last == LastBatch(3, 4, 99)
    late = read(intent(3), take(3, "e2"), take(3, "e3"), skip)
    assert late.open is not None
    assert late.open.owners == ("e1", "e2", "e3")
    assert read(intent(3), take(3, "e2"), take(3, "e3"), done(3, "e2")).open is None  # it has found all rows


def test_done_without_an_open_intent_tells_the_last_batch_unless_it_is_older() -> None:
    assert read(done(5)).last == LastBatch(5, 4, 99)
    assert read(done(5), done(4, rows=1)).last == LastBatch(5, 4, 99)
    known = LedgerState(LastBatch(5)).apply(done(5), 0)  # a mark has no digest
    assert known.last == LastBatch(5, 4, 99)


def test_an_intent_without_rows_is_its_own_done() -> None:
    assert read(intent(2, rows=0, digest=0)) == LedgerState(LastBatch(2, 0, 0), None, 0)


def test_the_batch_of_a_plain_write_has_the_number_0() -> None:
    state = read(intent(None), Take(CommitKey(QUERY), "e2", 0))
    assert state.open is not None
    assert (state.open.batch, state.open.owners) == (0, ("e1", "e2"))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("itd"), st.integers(0, 2), st.sampled_from("ABC")), max_size=8), st.data())
def test_a_second_copy_of_a_row_is_void_where_batches_have_no_gaps(
    parts: list[tuple[str, int, str]], data: st.DataObject
) -> None:
    make = {"i": intent, "t": take, "d": done}
    rows: list[LedgerRow] = []
    state = LedgerState()
    for kind, batch, session in parts:
        last = -1 if state.last is None else state.last.batch_id
        is_owner = state.open is not None and state.open.batch == batch and session in state.open.owners
        if (kind == "i" and batch <= last + 1) or (kind != "i" and (batch <= last or is_owner)):
            rows.append(make[kind](batch, session))
            state = state.apply(rows[-1], len(rows))
    if rows:
        assert state.apply(data.draw(st.sampled_from(rows)), 99) == state
