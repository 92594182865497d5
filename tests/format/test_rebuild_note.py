"""The note of a rebuild: what is written is read again, and damage names nothing."""

import pytest

from rmq_spark.store.format.rebuild_note import Rebuild, decode_rebuild, encode_rebuild
from rmq_spark.store.units import QueueKey

NOTES = [
    Rebuild(),
    Rebuild(has_index=True),
    Rebuild(frozenset(QueueKey(topic, number) for topic in ("a", "%RETRY%b", "ü") for number in (0, 7)), True),
]


@pytest.mark.parametrize("note", NOTES)
def test_note_is_read_as_it_was_written(note: Rebuild) -> None:
    assert decode_rebuild(encode_rebuild(note)) == note


@pytest.mark.parametrize("note", NOTES)
def test_damaged_note_is_noticed(note: Rebuild) -> None:
    data = encode_rebuild(note)
    for position in range(len(data) - 1):
        assert decode_rebuild(data[:position]) is None
        assert decode_rebuild(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]) is None
    assert decode_rebuild(b"") is None
