"""The abort file: a process id, or nothing."""

from pathlib import Path

import pytest

from rmq_spark.store.format.checkpoint import decode_abort, encode_abort


def test_decode_abort_reads_the_process_id_of_golden_files(golden: Path) -> None:
    content = (golden / "crashed/abort").read_bytes()
    assert decode_abort(content) == 5433
    assert encode_abort(5433) == content


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"\xff\x00", b"1" * 5000, b"1 2", "٣".encode()])
def test_decode_abort_returns_none_without_a_process_id(content: bytes) -> None:
    assert decode_abort(content) is None


def test_encode_abort_is_empty_for_4_9() -> None:
    assert encode_abort(None) == b""
    assert decode_abort(b"12\n") == 12
