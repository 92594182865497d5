"""The ledger: verdicts on a batch after the last one, and reading of its files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rmq_spark.store.batch_order import BatchRules, Verdict, judge_batch
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import BatchConflictError, DamageError, StoreError
from rmq_spark.store.model import CommitKey
from rmq_spark.store.transaction.ledger import Ledger, LedgerRow, make_folders

LAST = LedgerRow("q", 7, 10, 999, 0xABC, 5)
SAME = (10, 0xABC)
OTHER = (10, 0xABD)
FAIL, SKIP, GO_ON = BatchRules(), BatchRules(on_conflict="skip"), BatchRules(on_gap="continue")
TXN, TXN_SKIP = BatchRules(is_transaction=True), BatchRules(on_conflict="skip", is_transaction=True)


@pytest.mark.parametrize(
    ("batch_id", "rows", "rules", "verdict"),
    [
        (8, OTHER, FAIL, Verdict.APPEND),
        (7, SAME, FAIL, Verdict.REPEATED),
        (7, SAME, SKIP, Verdict.REPEATED),
        (7, OTHER, SKIP, Verdict.OVERRULED),
        (7, (11, 0xABC), SKIP, Verdict.OVERRULED),
        (6, SAME, SKIP, Verdict.OVERRULED),
        (9, OTHER, GO_ON, Verdict.APPEND),
        (99, OTHER, GO_ON, Verdict.APPEND),
        (8, OTHER, TXN, Verdict.APPEND),
        (99, OTHER, TXN, Verdict.APPEND),
        (7, SAME, TXN, Verdict.REPEATED),
        (6, OTHER, TXN, Verdict.PASSED),
        (0, OTHER, TXN, Verdict.PASSED),
        (7, OTHER, TXN_SKIP, Verdict.OVERRULED),
    ],
)
def test_judge_batch_after_batch_seven(
    batch_id: int, rows: tuple[int, int], rules: BatchRules, verdict: Verdict
) -> None:
    assert judge_batch(LAST, CommitKey("q", batch_id), *rows, rules) is verdict


@pytest.mark.parametrize("batch_id", [0, 1, 123456])
def test_judge_batch_accepts_any_number_without_a_row(batch_id: int) -> None:
    assert judge_batch(None, CommitKey("q", batch_id), *SAME, FAIL) is Verdict.APPEND


def test_judge_batch_appends_a_write_without_a_batch_id() -> None:
    assert judge_batch(LAST, CommitKey("q"), *SAME, FAIL) is Verdict.APPEND


@pytest.mark.parametrize(
    ("batch_id", "rows", "rules", "words"),
    [
        (7, OTHER, FAIL, ["batch 7 of query q", "0000000000000abc", "0000000000000abd", "onBatchConflict=skip"]),
        (6, SAME, FAIL, ["batch 6 of query q", "the last batch in the store is 7", "checkpoint"]),
        (6, SAME, GO_ON, ["batch 6 of query q"]),
        (9, OTHER, FAIL, ["batch 9 of query q", "the last one in the store is 7, so 8 would be missing", "onBatchGap"]),
        (12, OTHER, SKIP, ["so 8 to 11 would be missing", "onBatchGap=continue"]),
        (7, OTHER, TXN, ["txnVersion", "0000000000000abc"]),
    ],
)
def test_judge_batch_raises_for_a_batch_that_does_not_follow(
    batch_id: int, rows: tuple[int, int], rules: BatchRules, words: list[str]
) -> None:
    with pytest.raises(BatchConflictError) as caught:
        judge_batch(LAST, CommitKey("q", batch_id), *rows, rules)
    assert [word for word in [*words, "Nothing was written"] if word not in str(caught.value)] == []


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    make_folders(str(tmp_path), Disk())
    return Ledger(str(tmp_path), Disk())


@pytest.mark.parametrize("is_durable", [True, False])
def test_ledger_reads_a_row_as_it_was_written(ledger: Ledger, is_durable: bool) -> None:
    assert ledger.read("txn:ä/b") is None
    for digest, note in ((0, {}), ((1 << 64) - 1, {"level.3": 1 << 50, "timer.read": -1})):
        row = LedgerRow("txn:ä/b", 3, 10, 1 << 50, digest, 1_700_000_000_000, note)
        ledger.write(row, is_durable=is_durable)
        assert ledger.read("txn:ä/b") == row
    assert ledger.read("txn:ä") is None


def test_ledger_reads_a_row_without_a_note(ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "rmq/ledger/q.json"
    path.write_bytes(b'{"v":1,"queryId":"q","batchId":7,"rows":10,"bytes":999,"digest":"abc","timeMs":5}')
    assert ledger.read("q") == LAST


def test_ledger_returns_the_later_of_a_synced_and_an_unsynced_row(ledger: Ledger) -> None:
    for batch_id, is_durable in ((3, True), (4, False), (5, True), (6, True), (7, False), (8, False)):
        row = replace(LAST, batch_id=batch_id)
        ledger.write(row, is_durable=is_durable)
        assert ledger.read("q") == row


@pytest.mark.parametrize("torn", [b"", b"{", bytes(100)])
def test_ledger_ignores_a_torn_unsynced_row(
    ledger: Ledger, tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rmq/ledger/q.unsynced").write_bytes(torn)
    assert ledger.read("q") is None
    ledger.write(LAST, is_durable=True)
    assert ledger.read("q") == LAST
    assert "q.unsynced" in caplog.text


def test_ledger_refuses_a_newer_version(ledger: Ledger, tmp_path: Path) -> None:
    ledger.write(LAST, is_durable=True)
    path = tmp_path / "rmq/ledger/q.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "v": 2}))
    with pytest.raises(StoreError, match=r"q\.json has version 2, and this rmq-spark supports version 1"):
        ledger.read("q")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"v": 1}',
        b"\xff\xfe",
        b'{"v":1,"queryId":"q","batchId":"7","rows":1,"bytes":1,"digest":"0","timeMs":1}',
        b'{"v":1,"queryId":"q","batchId":true,"rows":1,"bytes":1,"digest":"0","timeMs":1}',
        b'{"v":1,"queryId":"q","batchId":-7,"rows":1,"bytes":1,"digest":"0","timeMs":1}',
        b'{"v":1,"queryId":"q","batchId":7,"rows":1,"bytes":1,"digest":"xyz","timeMs":1}',
        b'{"v":1,"queryId":"q","batchId":7,"rows":1,"bytes":1,"digest":"0","timeMs":1,"note":[1]}',
        b'{"v":1,"queryId":"q","batchId":7,"rows":1,"bytes":1,"digest":"0","timeMs":1,"note":{"a":"1"}}',
        b'{"v":1,"queryId":"other","batchId":7,"rows":1,"bytes":1,"digest":"0","timeMs":1}',
    ],
)
def test_ledger_names_a_damaged_file(ledger: Ledger, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rmq/ledger/q.json"
    path.write_bytes(content)
    with pytest.raises(DamageError) as caught:
        ledger.read("q")
    assert caught.value.path == str(path)
