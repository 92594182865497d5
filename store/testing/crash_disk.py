"""A disk that remembers what was done to it, and shows what a crash at any moment could have left.

    disk = CrashDisk(folder)
    ... work with it, note `disk.effect_count` wherever something was acknowledged ...
    for point in range(disk.effect_count + 1):
        for image in disk.images(point, seed=7):
            image.write_to(empty_folder)
            ... recover there, and look for everything that was acknowledged at or before `point` ...

A sync can fail (`fail_syncs`), as when a disk is full or broken at write-back: a power cut may take what it should have
written, for ever, and the next sync of the same file succeeds.

Work can also be cut off at an effect (`die_at`) and be taken up again on the same disk (`revive`): so a power cut in
the second life of a writer can take what its first life did not sync.

What a crash may leave is said in `crash_image.py`.
"""

import errno
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.system_calls import SystemCalls
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

_TORN_WRITES = 3  # images of a process that died while it wrote, at most, for each write


class ProcessDeathError(BaseException):
    """The process died at this effect. Like the real thing, no `except Exception` outlives it."""


class CrashDisk(Disk):
    """The real disk, for one folder that nothing else changes meanwhile. For one thread.

    What is in the folder when recording begins counts as synced.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = os.path.abspath(root)
        self._base = read_contents(self.root)
        self._recorder = Recorder(self.root, self._base)
        self._state, self._applied = DiskState(self._base), 0
        super().__init__(self._recorder)

    @property
    def effects(self) -> tuple[Effect, ...]:
        """Return what happened so far, in order."""
        return tuple(self._recorder.effects)

    @property
    def effect_count(self) -> int:
        """Return how many effects there were so far: the point of a crash now."""
        return len(self._recorder.effects)

    def die_at(self, point: int) -> None:
        """Have effect number `point` and all after it raise ProcessDeathError, and do nothing, until `revive`."""
        assert point >= self.effect_count, point
        self._recorder.dies_at = point

    def revive(self) -> None:
        """Let effects happen again: the next process begins its life. Unsynced ones of the last stay unsynced."""
        self._recorder.dies_at = None

    @property
    def sync_count(self) -> int:
        """Return how many syncs there were so far, of files, folders and new files, failed ones included."""
        return self._recorder.sync_count

    def fail_syncs(self, numbers: Collection[int]) -> None:
        """Have the syncs of these numbers raise EIO; counting starts at 0."""
        self._recorder.failing_syncs = numbers

    def images(self, point: int, seed: int, *, subset_count: int = 4) -> Iterator[Image]:
        """Yield the images of a crash after the first `point` effects, no two alike; the same for the same seed.

        First those of a process that died: one as things stood, and up to three in the middle of the next effect, if
        that is a write. Then those of a power cut: only what was synced, that with all other names, that with all
        other bytes, and `subset_count` in which anything unsynced may be lost or torn. Ascending points are cheapest.
        """
        assert 0 <= point <= self.effect_count, point
        seen: set[tuple[tuple[str, bytes | None], ...]] = set()
        # All at once, as the state moves on with the next point. Images share what they have in common.
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
    """The real system calls; each that changed something is noted in `effects`."""

    def __init__(self, root: str, base: Contents) -> None:
        self.effects: list[Effect] = []
        self.dies_at: int | None = None
        self.sync_count = 0
        self.failing_syncs: Collection[int] = ()
        self._root = root
        self._numbers = number_files(base)  # by path, of the files that are there now
        self._next_number = len(self._numbers)
        self._open: dict[int, tuple[str, int]] = {}  # descriptor -> path and number of what was opened last under it

    def make_folder(self, path: str, *, is_own: bool = False) -> None:
        self._live()
        super().make_folder(path, is_own=is_own)
        self.effects.append(MakeFolder(self._inside(path)))

    def create(self, path: str, size_bytes: int, **owner: Any) -> None:
        self._live()
        super().create(path, size_bytes, **owner)
        self._note_new(path, size_bytes, 0, b"")

    def create_filled(self, path: str, size_bytes: int, position: int, data: memoryview) -> None:
        self._live()
        super().create_filled(path, size_bytes, position, data)
        self._note_new(path, size_bytes, position, bytes(data))

    def open(self, path: str) -> int:
        descriptor = super().open(path)
        inside = self._inside(path)
        assert inside in self._numbers, f"{path} was made by somebody else than this disk"
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
        # Not synced for real: the machine that runs the test stays on, and waiting for its disk costs most of the time.
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
        """Wait for no disk, as in `sync`."""
        self._count_sync("a new file")

    def _note_new(self, path: str, size_bytes: int, position: int, data: bytes) -> None:
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
        assert not inside.startswith(".."), f"{path} lies outside {self._root}"
        return inside


def _cuts(effect: Write, random: Random) -> list[int]:
    """Return up to three positions inside a write at which a sector ends: the first, the last and one between."""
    end = effect.position + len(effect.data)
    cuts = list(range(effect.position // SECTOR_BYTES * SECTOR_BYTES + SECTOR_BYTES, end, SECTOR_BYTES))
    if len(cuts) <= _TORN_WRITES:
        return cuts
    return [cuts[0], random.choice(cuts[1:-1]), cuts[-1]]
