"""An iterator that works one item ahead, in a thread: what is read overlaps with what is done with it."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def read_ahead(items: Iterator[T]) -> Generator[T]:
    """Yield the items of an iterator, none of them None, while a thread is at work on the next one.

    So two items are in memory at a time, if the caller lets go of one before it asks for the next. What the iterator
    raises is raised in the place of its item. Nobody else may use `items` meanwhile; closing the result, or letting it
    go, waits for the item that the thread is at work on.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="rmq-read-ahead") as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
