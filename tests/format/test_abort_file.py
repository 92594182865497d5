"""The abort file: a process id, or nothing."""

from pathlib import Path

import pytest

from rmq_spark.store.format.abort_file import decode_abort, encode_abort


def test_a_golden_abort_file_names_the_process(golden: Path) -> None:
    content = (golden / "crashed/abort").read_bytes()
    assert decode_abort(content) == 5433
    assert encode_abort(5433) == content


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"\xff\x00", b"1" * 5000, b"1 2", "٣".encode()])
def test_a_file_that_names_no_process_is_still_an_abort_file(content: bytes) -> None:
    assert decode_abort(content) is None


def test_a_file_of_4_9_is_empty() -> None:
    assert encode_abort(None) == b""
    assert decode_abort(b"12\n") == 12
