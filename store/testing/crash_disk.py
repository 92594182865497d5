"""A disk that records its effects, and returns the states that a crash at any point could leave.

    disk = CrashDisk(folder)
    ... work with the disk, and record `disk.effect_count` after each acknowledged call ...
    for point in range(disk.effect_count + 1):
        for image in disk.images(point, seed=7):
            image.write_to(empty_folder)
            ... recover in that folder, and check everything that was acknowledged at or before `point` ...

An effect is one change of the disk, such as a write, a sync or a rename. An image is the state of the folder after a
crash. `crash_image.py` describes which states a crash can leave.

To test failed syncs, as on a full or broken disk, call `fail_syncs`. Then a power cut at any later time may lose the
data of the failed sync, even if the next sync of the same file succeeds.

To test several processes on one disk, call `die_at`, so that the process dies at an effect, and then `revive`, so that
the next process continues. A power cut during the second process can lose unsynced data of the first process.
"""

import errno
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.testing.crash_image import (
    SECTOR_BYTES,
    Contents,
    DiskState,
    Image,
    number_files,
    read_contents,
)
from rmq_spark.store.testing.disk_effects import (
    Create,
    Effect,
    FailedSync,
    MakeFolder,
    Remove,
    RemoveFolder,
    Rename,
    Sync,
    SyncFolder,
    Write,
)

_TORN_WRITES = 3  # the maximum number of images of a process that dies within one write


class ProcessDeathError(BaseException):
    """Raised at the effect at which the process dies. `except Exception` does not catch it, as with a real death."""


class CrashDisk(Disk):
    """A disk that makes and records all changes in one folder. No other program may change this folder.

    Not thread-safe. The content that the folder has at the beginning is treated as synced.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = os.path.abspath(root)
        self._base = read_contents(self.root)
        self._recorder = Recorder(self.root, self._base)
        self._state, self._applied = DiskState(self._base), 0
        super().__init__(self._recorder)

    @property
    def effects(self) -> tuple[Effect, ...]:
        """The effects so far, in their order."""
        return tuple(self._recorder.effects)

    @property
    def effect_count(self) -> int:
        """The number of effects so far. If the process crashed now, this would be the `point` of the crash."""
        return len(self._recorder.effects)

    def die_at(self, point: int) -> None:
        """Let the process die at effect number `point`.

        This effect and all later ones raise ProcessDeathError and change nothing, until `revive` is called.
        """
        assert point >= self.effect_count, point
        self._recorder.dies_at = point

    def revive(self) -> None:
        """Let effects work again, for the next process. Unsynced effects of the dead process stay unsynced."""
        self._recorder.dies_at = None

    @property
    def sync_count(self) -> int:
        """The number of syncs so far: of files, of folders and of new files. Failed syncs are included."""
        return self._recorder.sync_count

    def fail_syncs(self, numbers: Collection[int]) -> None:
        """Let the syncs with these numbers raise EIO. The first sync of the disk has number 0."""
        self._recorder.failing_syncs = numbers

    def images(self, point: int, seed: int, *, subset_count: int = 4) -> Iterator[Image]:
        """Yield the distinct images of a crash after the first `point` effects. The same seed gives the same images.

        1. The process is killed before the next effect: one image.
        2. The process is killed within the next effect, if that is a write: up to three images.
        3. The power is cut: one image with only synced data, one with all names as well, one with all bytes as well,
           and `subset_count` images in which any part of the unsynced data is lost or torn.

        It is fastest to call this with ascending points.
        """
        assert 0 <= point <= self.effect_count, point
        seen: set[tuple[tuple[str, bytes | None], ...]] = set()
        # Make all images now, because another call changes the state. They need little memory: equal bytes are shared.
        for how, contents in list(self._contents(point, seed, subset_count)):
            key = tuple(sorted(contents.items()))
            if key not in seen:
                seen.add(key)
                yield Image(f"{how}, before effect {point} (seed {seed}): {self._next(point)}", contents)

    def _contents(self, point: int, seed: int, subset_count: int) -> Iterator[tuple[str, Contents]]:
        state, random = self._at(point), Random(f"{seed}/{point}")
        yield "killed", state.killed()
        effect = self._recorder.effects[point] if point < self.effect_count else None
        if isinstance(effect, Write):
            for reached in _cuts(effect, random):
                yield f"killed, written up to position {reached}", state.killed_while(effect, reached)
        yield "power cut, only what was synced", state.cut(names=False, data=False)
        yield "power cut, all names and no bytes", state.cut(names=True, data=False)
        yield "power cut, all bytes and no names", state.cut(names=False, data=True)
        for number in range(subset_count):
            yield f"power cut, subset {number}", state.cut_anyhow(random)

    def _at(self, point: int) -> DiskState:
        if point < self._applied:
            self._state, self._applied = DiskState(self._base), 0
        for effect in self._recorder.effects[self._applied : point]:
            self._state.apply(effect)
        self._applied = point
        return self._state

    def _next(self, point: int) -> str:
        return repr(self._recorder.effects[point]) if point < self.effect_count else "the last one was over"


class Recorder(SystemCalls):
    """The real system calls, except that nothing is synced. Each change is recorded in `effects`."""

    def __init__(self, root: str, base: Contents) -> None:
        self.effects: list[Effect] = []
        self.dies_at: int | None = None
        self.sync_count = 0
        self.failing_syncs: Collection[int] = ()
        self._root = root
        self._numbers = number_files(base)  # path -> number of the existing file
        self._next_number = len(self._numbers)
        self._open: dict[int, tuple[str, int]] = {}  # descriptor -> path and number of the file last opened as it

    def make_folder(self, path: str, *, is_own: bool = False) -> None:
        self._live()
        super().make_folder(path, is_own=is_own)
        self.effects.append(MakeFolder(self._inside(path)))

    def create(self, path: str, size_bytes: int, **owner: Any) -> None:
        self._live()
        super().create(path, size_bytes, **owner)
        self._record_new(path, size_bytes, 0, b"")

    def create_filled(self, path: str, size_bytes: int, position: int, data: memoryview) -> None:
        self._live()
        super().create_filled(path, size_bytes, position, data)
        self._record_new(path, size_bytes, position, bytes(data))

    def open(self, path: str) -> int:
        descriptor = super().open(path)
        inside = self._inside(path)
        assert inside in self._numbers, f"{path} was not created by this disk"
        self._open[descriptor] = inside, self._numbers[inside]
        return descriptor

    def write(self, descriptor: int, position: int, data: memoryview) -> int:
        self._live()
        count = super().write(descriptor, position, data)
        self.effects.append(Write(*self._open[descriptor], position, bytes(data[:count])))
        return count

    def write_again(self, path: str, descriptor: int, parts: Sequence[tuple[int, memoryview]]) -> None:
        for position, data in parts:
            while data:
                done = self.write(descriptor, position, data)
                position, data = position + done, data[done:]

    def sync(self, descriptor: int) -> None:
        self._live()
        # Do not really sync: the machine that runs the test stays on, and waiting for its disk would be slow.
        file = self._open[descriptor]
        try:
            self._count_sync(file[0])
        except OSError:
            self.effects.append(FailedSync(*file))
            raise
        self.effects.append(Sync(*file))

    def sync_folder(self, path: str) -> None:
        self._live()
        assert os.path.isdir(path), path
        self._count_sync(path)
        self.effects.append(SyncFolder(self._inside(path)))

    def rename(self, source: str, target: str) -> None:
        self._live()
        super().rename(source, target)
        before, after = self._inside(source), self._inside(target)
        self._numbers[after] = self._numbers.pop(before)
        self.effects.append(Rename(before, after))

    def remove(self, path: str) -> None:
        self._live()
        super().remove(path)
        inside = self._inside(path)
        del self._numbers[inside]
        self.effects.append(Remove(inside))

    def remove_folder(self, path: str) -> None:
        self._live()
        super().remove_folder(path)
        self.effects.append(RemoveFolder(self._inside(path)))

    def _sync_new(self, descriptor: int) -> None:
        """Count a sync of a new file. As in `sync`, do not wait for the disk."""
        self._count_sync("a new file")

    def _record_new(self, path: str, size_bytes: int, position: int, data: bytes) -> None:
        inside = self._inside(path)
        self._numbers[inside] = self._next_number
        self.effects.append(Create(inside, self._next_number, size_bytes, position, data))
        self._next_number += 1

    def _count_sync(self, path: str) -> None:
        number, self.sync_count = self.sync_count, self.sync_count + 1
        if number in self.failing_syncs:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def _live(self) -> None:
        if self.dies_at is not None and len(self.effects) >= self.dies_at:
            raise ProcessDeathError(f"died at effect {self.dies_at}")

    def _inside(self, path: str) -> str:
        inside = os.path.relpath(os.path.abspath(path), self._root)
        assert not inside.startswith(".."), f"{path} is outside {self._root}"
        return inside


def _cuts(effect: Write, random: Random) -> list[int]:
    """Return up to three positions at which a write may be cut off: ends of sectors within the write.

    If there are more than three, returns the first, the last and a random one between them.
    """
    end = effect.position + len(effect.data)
    cuts = list(range(effect.position // SECTOR_BYTES * SECTOR_BYTES + SECTOR_BYTES, end, SECTOR_BYTES))
    if len(cuts) <= _TORN_WRITES:
        return cuts
    return [cuts[0], random.choice(cuts[1:-1]), cuts[-1]]
