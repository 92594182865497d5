"""A disk on which one effect fails, as if the disk were full or broken. Tests check the state after the error."""

import errno
import os
from collections.abc import Sequence
from typing import Any

from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.testing.crash_image import SECTOR_BYTES


class FailingDisk(Disk):
    """A disk on which `times` consecutive effects fail with the errno `error`, beginning with number `fail_at`.

    The first effect has number 0. If a write fails, its first half is written, as on a full disk. `calls` makes the
    other effects. By default, these are the real system calls. To record the effects around the error, give those of a
    CrashDisk (`CrashDisk(root).calls`).
    """

    def __init__(
        self, fail_at: int, error: int = errno.ENOSPC, *, times: int = 1, calls: SystemCalls | None = None
    ) -> None:
        self._failing = FailingCalls(range(fail_at, fail_at + times), error, calls or SystemCalls())
        super().__init__(self._failing)

    @property
    def effect_count(self) -> int:
        """The number of effects that were tried so far."""
        return self._failing.count

    @property
    def has_failed(self) -> bool:
        """Whether an effect has failed."""
        return self._failing.has_failed


class FailingCalls(SystemCalls):
    """System calls of which those with a number in `numbers` raise OSError(error). The first one has number 0."""

    def __init__(self, numbers: range, error: int, inner: SystemCalls) -> None:
        self.count, self.has_failed = 0, False
        self._numbers, self._error, self._inner = numbers, error, inner

    def make_folder(self, path: str, *, is_own: bool = False) -> None:
        self._count(path)
        self._inner.make_folder(path, is_own=is_own)

    def create(self, path: str, size_bytes: int, **owner: Any) -> None:
        self._count(path)
        self._inner.create(path, size_bytes, **owner)

    def create_filled(self, path: str, size_bytes: int, position: int, data: memoryview) -> None:
        self._count(path)
        self._inner.create_filled(path, size_bytes, position, data)

    def open(self, path: str) -> int:
        return self._inner.open(path)

    def write(self, descriptor: int, position: int, data: memoryview) -> int:
        try:
            self._count("")
        except OSError:
            half = len(data) // 2 // SECTOR_BYTES * SECTOR_BYTES
            if half:
                self._inner.write(descriptor, position, data[:half])
            raise
        return self._inner.write(descriptor, position, data)

    def write_again(self, path: str, descriptor: int, parts: Sequence[tuple[int, memoryview]]) -> None:
        self._count(path)
        self._inner.write_again(path, descriptor, parts)

    def sync(self, descriptor: int) -> None:
        self._count("")
        self._inner.sync(descriptor)

    def sync_folder(self, path: str) -> None:
        self._count(path)
        self._inner.sync_folder(path)

    def rename(self, source: str, target: str) -> None:
        self._count(source)
        self._inner.rename(source, target)

    def remove(self, path: str) -> None:
        self._count(path)
        self._inner.remove(path)

    def remove_folder(self, path: str) -> None:
        self._count(path)
        self._inner.remove_folder(path)

    def _count(self, path: str) -> None:
        number, self.count = self.count, self.count + 1
        if number in self._numbers:
            self.has_failed = True
            raise OSError(self._error, os.strerror(self._error), path)
