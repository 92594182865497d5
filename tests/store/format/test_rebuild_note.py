"""Rebuild file: restored by the decoder, which returns None for damage."""

import pytest

from rmq_spark.store.format.own_files import Rebuild, decode_rebuild, encode_rebuild
from rmq_spark.store.model import QueueKey

NOTES = [
    Rebuild(),
    Rebuild(has_index=True),
    Rebuild(frozenset(QueueKey(topic, number) for topic in ("a", "%RETRY%b", "ü") for number in (0, 7)), True),
]


@pytest.mark.parametrize("note", NOTES)
def test_decode_rebuild_restores_a_rebuild(note: Rebuild) -> None:
    assert decode_rebuild(encode_rebuild(note)) == note


@pytest.mark.parametrize("note", NOTES)
def test_decode_rebuild_returns_none_for_damage(note: Rebuild) -> None:
    data = encode_rebuild(note)
    for position in range(len(data) - 1):
        assert decode_rebuild(data[:position]) is None
        assert decode_rebuild(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]) is None
    assert decode_rebuild(b"") is None
