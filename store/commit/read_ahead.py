"""An iterator that works one item ahead, in a thread: what is read overlaps with what is done with it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items of an iterator, none of them None, while a thread is at work on the next one.

    So two items are in memory at a time. What the iterator raises is raised in the place of its item. Nobody else may
    use `items` meanwhile; closing the result, or letting it go, waits for the item that the thread is at work on.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="rmq-read-ahead") as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
