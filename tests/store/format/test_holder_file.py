"""Holder file: restored by the decoder, which returns None for any other content."""

import json
from dataclasses import replace

import pytest

from rmq_spark.store.format.own_files import Holder, decode_holder, encode_holder

HOLDER = Holder("h", "boot", "pid:[1]", 123, 456, 'nightly "load" ü', 1_700_000_000_000, 7)


def test_decode_holder_restores_a_holder() -> None:
    assert decode_holder(encode_holder(HOLDER)) == HOLDER


@pytest.mark.parametrize("size", range(len(encode_holder(HOLDER))))
def test_decode_holder_returns_none_for_a_file_cut_anywhere(size: int) -> None:
    assert decode_holder(encode_holder(HOLDER)[:size]) is None


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"1", b"{}", b"\xff\xfe", b"[" * 100_000, b"\0" * 200, encode_holder(HOLDER) + b"}"],
    ids=lambda data: repr(data[:9]),
)
def test_decode_holder_returns_none_for_other_content(data: bytes) -> None:
    assert decode_holder(data) is None


def test_decode_holder_returns_none_for_another_version_type_or_field() -> None:
    value = json.loads(encode_holder(HOLDER))
    for changed in (
        {**value, "v": 2},
        {**value, "pid": "123"},
        {**value, "pid": True},
        {**value, "host": None},
        {**value, "more": 1},
        {name: value[name] for name in value if name != "progress"},
    ):
        assert decode_holder(json.dumps(changed).encode()) is None, changed


def test_encode_holder_changes_with_progress() -> None:
    assert encode_holder(HOLDER) != encode_holder(replace(HOLDER, progress=8))
