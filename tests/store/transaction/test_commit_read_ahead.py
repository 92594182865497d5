"""Reading ahead: the same items in the same order, one of them early, errors in their place."""

import threading
from collections.abc import Iterator

import pytest

from rmq_spark.store.transaction.commit import read_ahead


class Counting:
    """Counts upwards, and how often it was asked."""

    def __init__(self, fails_at: int = 1000) -> None:
        self.asked, self.fails_at = threading.Semaphore(0), fails_at
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.asked.release()
        if self.given == self.fails_at:
            raise ValueError("the third is broken")
        self.given += 1
        return self.given - 1


def test_read_ahead_yields_all_items_in_order() -> None:
    assert list(read_ahead(iter(range(100)))) == list(range(100))
    assert list(read_ahead(iter(()))) == []


def test_read_ahead_reads_one_item_ahead_and_no_more() -> None:
    counting = Counting()
    items = read_ahead(counting)
    assert next(items) == 0
    for _ in range(2):
        assert counting.asked.acquire(timeout=60), "nobody asks for the next one"
    assert not counting.asked.acquire(timeout=0.2), "more than one item is read ahead"
    items.close()
    assert counting.given == 2


def test_read_ahead_raises_an_error_in_place_of_its_item() -> None:
    items = read_ahead(Counting(fails_at=2))
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError, match="the third is broken"):
        next(items)
