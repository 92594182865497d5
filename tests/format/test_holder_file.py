"""The note of who holds the store's lock: read back as written, and nothing else is taken for one."""

import json
from dataclasses import replace

import pytest

from rmq_spark.store.format.holder_file import Holder, decode_holder, encode_holder

HOLDER = Holder("h", "boot", "pid:[1]", 123, 456, 'nightly "load" ü', 1_700_000_000_000, 7)


def test_a_holder_comes_back_as_it_was() -> None:
    assert decode_holder(encode_holder(HOLDER)) == HOLDER


@pytest.mark.parametrize("size", range(len(encode_holder(HOLDER))))
def test_a_note_cut_anywhere_names_nobody(size: int) -> None:
    assert decode_holder(encode_holder(HOLDER)[:size]) is None


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"1", b"{}", b"\xff\xfe", b"[" * 100_000, b"\0" * 200, encode_holder(HOLDER) + b"}"],
    ids=lambda data: repr(data[:9]),
)
def test_anything_else_names_nobody(data: bytes) -> None:
    assert decode_holder(data) is None


def test_another_version_or_type_or_field_names_nobody() -> None:
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


def test_progress_is_a_change_of_the_bytes() -> None:
    assert encode_holder(HOLDER) != encode_holder(replace(HOLDER, progress=8))
