"""Objects that several threads may share: their methods run one at a time.

A method marked `synchronized` waits until no other thread is inside such a method of the same object. It raises
StoreError if its own thread is inside one: a signal handler, or a callback, that calls the object back finds it half
changed. When the method ends, `_release_locks` is called: an interrupt (Ctrl-C) that comes while a lock is being
released would leave it held for the life of the process.
"""

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from rmq_spark.store.errors import StoreError

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")
_Self = TypeVar("_Self", bound="Synchronized")


class Synchronized:
    """A base class for objects whose `synchronized` methods run one at a time, whatever thread calls them."""

    def __init__(self) -> None:
        # Both are taken and released by C code alone, between which no interrupt can come. A thread that takes the
        # first one again finds the second one taken, where it would wait for itself.
        self._mutex = threading.RLock()
        self._inside = threading.Lock()
        _all.add(self)

    def _release_locks(self) -> None:
        """Release every lock on a file that this object holds. Called at the end of each synchronized method."""


def synchronized(
    method: Callable[Concatenate[_Self, _Given], _Returned],
) -> Callable[Concatenate[_Self, _Given], _Returned]:
    """Have a method run while no other synchronized method of its object runs in another thread."""

    @functools.wraps(method)
    def call(self: _Self, *args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        with self._mutex:
            if self._inside.locked():
                raise StoreError(
                    f"{type(self).__name__}.{method.__name__}: this thread is inside another call of the same object, "
                    "which has not returned; expected no call from a signal handler or a callback. Make the call "
                    "after that one has returned, or use an object of its own for it."
                )
            with self._inside:
                try:
                    return method(self, *args, **kwargs)
                finally:
                    self._release_locks()

    return cast(Callable[Concatenate[_Self, _Given], _Returned], call)


_all: "weakref.WeakSet[Synchronized]" = weakref.WeakSet()


def _renew_all() -> None:
    for one in _all:
        # Another thread of the parent may have had them, and does not exist here.
        one._mutex, one._inside = threading.RLock(), threading.Lock()


os.register_at_fork(after_in_child=_renew_all)
