"""Checkpoint file: golden pages, cut pages, and the begin of recovery."""

from pathlib import Path

import pytest

from rmq_spark.store.format.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint

STORES = ["basic", "propcrc", "crashed", "preblank", "truncated-stale", "batchcq-cqext", "timer"]


@pytest.mark.parametrize("store", STORES)
def test_encode_checkpoint_restores_golden_pages(golden: Path, store: str) -> None:
    page = (golden / store / "checkpoint").read_bytes()
    assert len(page) == 4096
    assert encode_checkpoint(decode_checkpoint(page)) == page


def test_decode_checkpoint_reads_golden_pages(golden: Path) -> None:
    found = decode_checkpoint((golden / "truncated-stale/checkpoint").read_bytes())
    assert found == Checkpoint(0x1A1FBB1F411, 0x1A1FBB1F411, 0, 0, 0xC366)


def test_decode_checkpoint_reads_each_field() -> None:
    # No two bytes are alike, and golden pages leave replication and index at zero.
    page = bytes(range(1, 41)).ljust(4096, b"\0")
    found = Checkpoint(
        0x0102030405060708, 0x090A0B0C0D0E0F10, 0x1112131415161718, 0x191A1B1C1D1E1F20, 0x2122232425262728
    )
    assert decode_checkpoint(page) == found
    assert encode_checkpoint(found) == page


@pytest.mark.parametrize("size", range(49))
def test_decode_checkpoint_reads_missing_fields_as_zero(size: int) -> None:
    whole = Checkpoint(1, 2, 3, 4, 5)
    page = encode_checkpoint(whole)
    found = decode_checkpoint(page[:size])
    padded = page[:size].ljust(4096, b"\0")
    assert encode_checkpoint(found)[:40] == padded[:40]
    assert decode_checkpoint(page + b"more") == whole


@pytest.mark.parametrize(
    ("physic", "logics", "index", "expected"),
    [(0, 0, 0, 0), (2999, 9000, 0, 0), (5000, 4000, 9000, 1000), (4000, 5000, 7, 1000)],
)
def test_min_timestamp_is_three_seconds_before_the_older_time(
    physic: int, logics: int, index: int, expected: int
) -> None:
    assert Checkpoint(physic, logics, index).min_timestamp == expected
