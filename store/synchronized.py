"""Objects that several threads may share, because their methods run one at a time.

A method with the decorator `synchronized` waits until no other thread runs such a method of the same object. It raises
StoreError if its own thread is already inside such a method. This happens if a signal handler or a callback calls the
object, and the object may be only half changed at that moment. When a method ends, `_release_locks` is called. It
releases file locks that were left held because an interrupt (Ctrl-C) came during their release, since otherwise they
would stay held until the process ends.
"""

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from rmq_spark.store.argument_checks import refuse_unknown
from rmq_spark.store.errors import StoreError

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")
_Self = TypeVar("_Self", bound="Synchronized")


class Synchronized:
    """The base class of objects whose `synchronized` methods run one at a time, whatever thread calls them."""

    def __init__(self) -> None:
        # C code alone acquires and releases both locks, so an interrupt cannot come in between. A thread can acquire
        # `_mutex` a second time without waiting for itself. Then it finds `_inside` locked, and raises the error.
        self._mutex = threading.RLock()
        self._inside = threading.Lock()
        _all.add(self)

    def _release_locks(self) -> None:
        """Release the file locks that are still held because of an interrupt.

        Called at the end of each synchronized method. Subclasses with file locks override it.
        """

    def _after_fork(self) -> None:
        """Replace what a forked child must not share with its parent. Called in the child, which has no other thread.

        Subclasses that make ids override it.
        """


def synchronized(
    method: Callable[Concatenate[_Self, _Given], _Returned],
) -> Callable[Concatenate[_Self, _Given], _Returned]:
    """Make a method wait until no other thread runs a synchronized method of the same object.

    The method raises StoreError if its own thread is already inside such a method, and OptionError with a hint for a
    keyword argument that it does not have.
    """

    @functools.wraps(method)
    def call(self: _Self, *args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        with self._mutex:
            if self._inside.locked():
                raise StoreError(
                    f"{type(self).__name__}.{method.__name__}: this thread is inside another call of the same object, "
                    "which has not returned; expected no call from a signal handler or a callback. Call it after the "
                    "other call has returned, or use another object."
                )
            with self._inside:
                try:
                    return method(self, *args, **kwargs)
                except TypeError:
                    refuse_unknown(f"{type(self).__name__}.{method.__name__}", method, kwargs)
                    raise
                finally:
                    self._release_locks()

    return cast(Callable[Concatenate[_Self, _Given], _Returned], call)


def start_thread(function: Callable[_Given, object], *args: _Given.args, **kwargs: _Given.kwargs) -> bool:
    """Call a function in a thread that does not keep the process alive.

    Return False if no thread can start, as while the interpreter ends.
    """
    try:
        threading.Thread(target=function, args=args, kwargs=kwargs, daemon=True).start()
    except RuntimeError:
        return False
    return True


_all: "weakref.WeakSet[Synchronized]" = weakref.WeakSet()


def _renew_all() -> None:
    for one in _all:
        # A thread of the parent may have held the locks. That thread does not exist in the child.
        one._mutex, one._inside = threading.RLock(), threading.Lock()
        one._after_fork()


os.register_at_fork(after_in_child=_renew_all)
