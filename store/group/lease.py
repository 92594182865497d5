"""A member's sign of life: a lock that goes with its process, and a counter for machines that do not see the lock.

The lock is the kernel's. However the process ends, the lock is free at once, and nobody has to wait for anything to
expire. The counter, `beat` in the member's file, is raised by a thread of its own, as a query may be busy with one
batch for hours.
"""

import contextlib
import sys
import threading
import weakref
from dataclasses import replace

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.file_lock import FileLock
from rmq_spark.store.errors import StoreError
from rmq_spark.store.group.group_paths import GroupPaths
from rmq_spark.store.group.member_file import Member, encode_member


class Lease:
    """The lease of one member, taken by `take`. For one thread, besides its own, which ends with it.

    An object that nobody refers to any more, such as that of a notebook cell that was run again, gives its lease up. A
    forked child has none: there `is_held` is False, and `release` does nothing.
    """

    def __init__(self, paths: GroupPaths, disk: Disk, member_id: str, member: Member, heartbeat_ms: int) -> None:
        assert heartbeat_ms > 0, heartbeat_ms
        self._disk, self._member, self._heartbeat_ms = disk, member, heartbeat_ms
        self._folder = paths.members
        self._file, self._lock_path = paths.member(member_id), paths.member_lock(member_id)
        self._batches = paths.finished_batch(member_id), paths.planned_batch(member_id)
        self._lock = FileLock(self._lock_path)
        self._writing = threading.Lock()  # of the member's file
        self._stop = threading.Event()

    @property
    def is_held(self) -> bool:
        """Say whether this process holds the lease, and nobody thought it dead and took its files away."""
        return self._lock.is_held and files.file_size(self._lock_path) >= 0

    def take(self) -> None:
        """Make this a living member; also one that others thought dead. For who has the group's turn.

        After an error it is none, and what it leaves behind is a dead member's.
        """
        assert not self.is_held, self._lock_path
        self._end_thread()
        self._lock.release()
        self._disk.make_folder(self._folder)
        with contextlib.suppress(FileExistsError):
            self._disk.create(self._lock_path, 0)
        try:
            if not self._lock.try_take():
                raise StoreError(
                    f"{self._lock_path} is locked by another process, though its name is this one's alone. Remove the "
                    "file if you made it by hand, and start the query again."
                )
            # The lock first: who sees the file without it takes it for a dead member's.
            self._write(self._member)
            self._stop = threading.Event()
            arguments = weakref.ref(self), self._stop, self._heartbeat_ms / 1000
            threading.Thread(target=_beat_on, args=arguments, name="rmq-spark lease", daemon=True).start()
        except BaseException:
            self._end_thread()
            self._lock.release()
            raise

    def beat(self) -> bool:
        """Raise the counter; say whether the lease is still held. For any thread.

        A file that cannot be written, on a full disk say, keeps its counter until the next beat. Its time changes all
        the same: members on this host take a file that never changes for that of a stopped process.
        """
        with self._writing, contextlib.suppress(StoreError):
            if not self.is_held:
                return False
            self._member = replace(self._member, beat=self._member.beat + 1)
            try:
                self._write(self._member)
            except StoreError:
                self._disk.touch(self._file)
        return True

    def release(self) -> None:
        """Give the lease up and take its files away; nothing happens if it is not held in this process."""
        if not self._lock.is_held:
            return
        try:
            self._end_thread()
            with self._writing:  # no beat puts the file back
                for path in self._batches:
                    self._disk.remove(path)
                self._disk.remove(self._file)
                self._disk.remove(self._lock_path)
        finally:
            self._lock.release()

    def __del__(self) -> None:
        # At the end of the interpreter the thread may have been ended while it had the event's own lock.
        if hasattr(self, "_stop") and not sys.is_finalizing():
            self._end_thread()

    def _end_thread(self) -> None:
        self._stop.set()

    def _write(self, member: Member) -> None:
        # Not synced: a power cut ends this process as well.
        self._disk.replace_unsynced(self._file, encode_member(member))


def _beat_on(lease: "weakref.ref[Lease]", stop: threading.Event, seconds: float) -> None:
    while not stop.wait(seconds):
        held = lease()
        if held is None or not held.beat():
            return
        del held  # while it waits, it must not keep the lease alive
