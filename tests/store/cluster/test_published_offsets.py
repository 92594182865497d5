"""The offsets that a member publishes, and those of its group that are its own."""

import pytest

from rmq_spark.store.cluster.published_offsets import INTERVAL_MS, PublishedOffsets
from rmq_spark.store.model import QueueKey

ONE, TWO = QueueKey("orders", 0, "broker-a"), QueueKey("orders", 1, "broker-a")


def test_only_offsets_that_moved_are_published() -> None:
    published = PublishedOffsets()
    published.want({ONE: 5, TWO: 7})
    assert published.unpublished([]) == {ONE: 5, TWO: 7}
    published.note_acknowledged(ONE, 5)
    assert published.unpublished([]) == {TWO: 7}
    assert published.unpublished([TWO]) == {}
    published.want({ONE: 4})
    assert published.unpublished([]) == {ONE: 4}, "a seek goes back; the other queue has no offset"
    assert published.last() == {ONE: 5}


def test_publishing_is_due_every_5_s() -> None:
    published = PublishedOffsets()
    assert published.is_due(-1e9)
    published.note_published(100.0)
    assert not published.is_due(100.0 + INTERVAL_MS - 1)
    assert published.is_due(100.0 + INTERVAL_MS)


@pytest.mark.parametrize(("offset", "is_own"), [(None, True), (2, True), (5, True), (8, True), (6, False), (9, False)])
def test_own_offsets_are_those_that_were_published_or_are_to_be(offset: int | None, is_own: bool) -> None:
    published = PublishedOffsets()
    published.note_acknowledged(ONE, 2)
    published.note_acknowledged(ONE, 5)
    published.want({ONE: 8})
    assert published.is_own(ONE, offset) == is_own


def test_an_unknown_queue_has_no_own_offset() -> None:
    published = PublishedOffsets()
    assert not published.is_own(ONE, 0)
    published.note_acknowledged(ONE, 0)
    published.want({ONE: 0, TWO: 3})
    published.forget([ONE])
    assert not published.is_own(ONE, 0)
    assert published.is_own(TWO, 3)
    assert published.last() == {}
    assert published.unpublished([]) == {TWO: 3}


def test_old_offsets_are_forgotten() -> None:
    published = PublishedOffsets()
    for offset in range(100):
        published.note_acknowledged(ONE, offset)
        published.note_acknowledged(ONE, offset)
    assert not published.is_own(ONE, 10)
    assert all(published.is_own(ONE, offset) for offset in range(84, 100))
    assert published.last() == {ONE: 99}


def test_an_offset_that_was_wanted_is_own_until_a_smaller_one_is_wanted() -> None:
    published = PublishedOffsets()
    for offset in (3, 5, 8):
        published.want({ONE: offset})
    assert [published.is_own(ONE, offset) for offset in (3, 4, 5, 8)] == [True, False, True, True]
    published.want({ONE: 4})
    assert [published.is_own(ONE, offset) for offset in (3, 4, 5, 8)] == [False, True, False, False]
    for offset in range(4, 1000):
        published.want({ONE: offset})
    assert not published.is_own(ONE, 871)
    assert published.is_own(ONE, 872)
