"""The lock of a store: one writer at a time, among processes of ours and brokers.

It is the lock on byte [0, 1) of the file `lock` that a broker takes when it starts and keeps while it lives
(DefaultMessageStore#start, 4.9 and 5.3). Against brokers ours is a shared one, with a lease, so that none looks at the
store meanwhile; writers of ours exclude each other by a lock on byte 1 of `rmq/turn`. Two files of ours in `rmq/` make
waiting bearable:

- `turn`, on its byte 0, belongs to whoever is next. Who wants the store takes the turn first and passes it on once it
  has the store. So who releases and wants again comes behind whoever already waits, and cannot barge in.
- `holder.json` says who holds the store, since when and how far it came. The holder writes it while it still has the
  turn and takes it away before it releases. A change of it is progress, and waiting times out only without progress.

Everything of this is given up by the kernel when a process dies; `holder.json` then names somebody dead.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.file_lock import BrokerLock, FileLock
from rmq_spark.store.disk.lock_probe import is_locked, is_open_to_write
from rmq_spark.store.disk.mounts import file_system, is_remote
from rmq_spark.store.disk.ownership import refuse_foreign
from rmq_spark.store.errors import DiskFullError, LockTimeoutError, StoreChangedError, StoreError, StorePathError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.abort_file import decode_abort
from rmq_spark.store.format.holder_file import Holder, decode_holder, encode_holder
from rmq_spark.store.log.lock_wait import LockWait, refuse_broker, refuse_holder, refuse_opener, refuse_waiters
from rmq_spark.store.log.watermark_file import SIDE_FOLDER

TURN = "turn"
HOLDER = "holder.json"
_OURS_AT = 1  # the byte of `turn` that the holder locks
_LOCK_CONTENT = b"lock"  # what a broker writes into it
_BROKER_COMMAND = "java"
_PROGRESS_EVERY_MS = 500  # nobody who waits looks at more
_MARGIN_S = 10.0  # for one write of a section, at most MAX_SECTION_BYTES with its units; the kernel gives 45 s
_LOOKS = 4  # at a lock that may be a broker's
_LOOK_S = 0.005
_JUMP_MS = 1_000  # more than that in one short sleep is a clock that was set or a machine that slept


class LockSettings(Protocol):
    """What of a writer's settings the lock needs."""

    @property
    def application(self) -> str:
        """Return the name by which others shall know this writer."""

    @property
    def lock_timeout_ms(self) -> int:
        """Return how long to wait for a holder that makes no progress."""

    @property
    def allow_network_store(self) -> bool:
        """Say whether the user vouches that one machine only writes to this network file system."""


class StoreLock:
    """The lock of the store in the folder `root`, which is made if it is missing. For one thread.

    `now_ms` is the clock (ms since the epoch), `sleep` takes seconds. Do not fork while it is held.
    """

    def __init__(
        self,
        root: str,
        disk: Disk,
        settings: LockSettings,
        now_ms: Callable[[], int],
        sleep: Callable[[float], None],
    ) -> None:
        self._root, self._disk, self._settings, self._now_ms, self._sleep = root, disk, settings, now_ms, sleep
        self._lock: FileLock = BrokerLock(files.join(root, filenames.LOCK))
        self._is_remote: bool | None = None
        self._turn = FileLock(files.join(root, SIDE_FOLDER, TURN), only_writers=True)
        self._ours = FileLock(self._turn.path, _OURS_AT)
        self._holder_path = files.join(root, SIDE_FOLDER, HOLDER)
        self._holder: Holder | None = None
        self._noted_ms = 0
        self._is_checked = False

    @property
    def is_held(self) -> bool:
        """Say whether this object holds the lock. In a forked child it never does."""
        return self._lock.is_held

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the store's lock in the body of `with`; waits for it, in turn with others.

        Raises LockTimeoutError when a broker has the store, or a writer that makes no progress for `lock_timeout_ms`,
        StorePathError for a network file system and for folders that cannot be written. Nothing is held after an error.
        """
        if not self._is_checked:
            refuse_network(self._root, allowed=self._settings.allow_network_store)
            self._refuse_foreign()
        self._make_files()
        if not self._is_checked and self._has_no_leases():
            self._lock = FileLock(self._lock.path)
        self._is_checked = True
        try:
            self._wait()
            self._name_holder()
            self._turn.release()
            yield
        finally:
            self._turn.release()
            self._release()

    def has_broker(self) -> bool:
        """Say whether a broker holds the store, or is about to. Takes no lock, and waits for nobody.

        Writers of ours do not count. Who of them makes the file of a new store has it open for a moment, as a broker
        that starts has, and who releases it lets go of two locks: so a yes takes a few looks, 15 ms.
        """
        for attempt in range(_LOOKS):
            if not self._is_brokers():
                return False
            if attempt < _LOOKS - 1:
                self._sleep(_LOOK_S)
        return True

    def _is_brokers(self) -> bool:
        # On a network file system writers of ours lock as exclusively as a broker does. But they hold the second lock
        # as long as this one, and a broker knows of none; who wants to write has it for a moment only.
        if is_locked(self._lock.path, exclusively=True):
            return not is_locked(self._ours.path, _OURS_AT)
        return not self._has_no_leases() and is_open_to_write(self._lock.path)

    def _has_no_leases(self) -> bool:
        """Say whether the store lies where a lease means nothing.

        NFS and SMB answer a request for one as if somebody had the file open for writing.
        """
        if self._is_remote is None:
            self._is_remote = is_remote(self._root)
        return self._is_remote

    def note_progress(self) -> None:
        """Tell those who wait that the holder is at work, before it goes on. Cheap: call it wherever work got done.

        Raises StoreError if the lock is not held: this process was forked from the one that holds it. LockTimeoutError
        where a broker that starts has waited for so long that a write that begins now might not end before it looks.
        """
        if not self._lock.is_held or self._holder is None:
            raise StoreError(
                f"{self._lock.path} is not held by this process, which was forked from the one that writes to "
                f"{self._root}. Open a writer of its own in the child."
            )
        self.refuse_broker(_MARGIN_S)
        if not self._ours.is_in_place():
            raise StoreChangedError(
                f"{self._ours.path} was removed or replaced while this process writes to {self._root}; expected the "
                "file that it locked, without which another writer may write at the same time. Leave the files in "
                f"{SIDE_FOLDER}/ where they are, and write again: the next writer recovers what was begun."
            )
        now_ms = self._now_ms()
        if abs(now_ms - self._noted_ms) >= _PROGRESS_EVERY_MS:
            self._holder = replace(self._holder, progress=self._holder.progress + 1)
            self._write_holder(now_ms)

    @property
    def is_waited_for(self) -> bool:
        """Say whether a broker that starts waits for the release: whoever holds the lock should end soon."""
        return self._lock.is_waited_for

    def refuse_broker(self, needed_s: float = 0) -> None:
        """Raise LockTimeoutError unless for `needed_s` seconds more no broker looks at the store. Cheap.

        What a broker has loaded it does not look at again: it would append over what is written now. So nothing more
        may be said to be in the store, and `abort` must stay.
        """
        if self._lock.safe_s() <= needed_s:
            raise LockTimeoutError(
                f"a broker is starting in {self._root}: it has waited for {self._lock.path} about as long as the "
                "system lets it (fs.lease-break-time), and what is written from now on it might not see and write "
                "over. So this write was given up on the way. What was reported as written is there, of the rest "
                "maybe a part; the store is left as after a crash, which the broker, or the next writer, mends. Send "
                "the messages to the broker, or stop it and write again."
            )

    def _refuse_foreign(self) -> None:
        """Raise StorePathError if what is written here could not be written again by the user who owns the store."""
        folders = ("", SIDE_FOLDER, filenames.CONFIG, filenames.CONSUME_QUEUE, filenames.COMMIT_LOG, filenames.INDEX)
        for folder in folders:
            try:
                refuse_foreign(files.join(self._root, folder))
            except OSError as error:
                raise StorePathError(f"{self._root} cannot be written: {error}") from error

    def _make_files(self) -> None:
        """Make the files that are locked where they are missing. Needs no lock: whoever comes second finds them."""
        if files.file_size(self._turn.path) < 0:
            side = files.join(self._root, SIDE_FOLDER)
            self._disk.make_folder(side)
            # What the folder is to hold must not be lost with its name. `turn` comes after this: where it is, the name
            # is safe. A crash before leaves none, and the next writer does both again.
            self._disk.sync_folder(self._root)
            with contextlib.suppress(FileExistsError):
                self._disk.create_lock(self._turn.path)
        if files.file_size(self._lock.path) < len(_LOCK_CONTENT):
            with contextlib.suppress(FileExistsError):
                self._disk.create(self._lock.path, len(_LOCK_CONTENT))
            with self._disk.open(self._lock.path) as file:
                file.write(0, _LOCK_CONTENT)  # the same as anybody else writes, so it needs no lock

    def _wait(self) -> None:
        """Return with both the turn and the lock, or with the lock alone if whoever has the turn was stopped."""
        wait, slept_ms = LockWait(self._settings.lock_timeout_ms), 0
        while True:
            has_turn = self._turn.is_held or self._turn.try_take()
            if (has_turn or wait.is_turn_abandoned) and self._try_take():
                return
            note = files.read_small(self._holder_path)
            locked = has_turn or is_locked(self._lock.path)
            wait.look(slept_ms, note, is_locked=locked)
            if wait.is_nameless(has_turn=has_turn) and _living(note) is None and is_locked(self._lock.path):
                raise self._refuse_broker()
            if wait.is_over:
                # Whoever has the turn may be stopped. Better to barge in once than to fail beside a free lock.
                if not locked and self._try_take():
                    return
                raise self._refuse(note)
            slept_ms = self._pause(wait.pause_ms(has_turn=has_turn))

    def _try_take(self) -> bool:
        """Take the lock: first against others of ours, then against brokers."""
        if not self._ours.try_take():
            return False
        try:
            # Writers of ours lock `lock` together, so one whose `turn` was removed shows only by its note there.
            if not self._has_holder() and self._lock.try_take():
                return True
        finally:
            if not self._lock.is_held:
                self._ours.release()
        return False

    def _has_holder(self) -> bool:
        """Say whether a living process says that it holds the store, and somebody does hold it."""
        note = files.read_small(self._holder_path)
        return note is not None and _living(note) is not None and is_locked(self._lock.path)

    def _pause(self, pause_ms: int) -> int:
        """Sleep; return for how long, in ms. Clocks that are set while it sleeps count for little."""
        before_ms = self._now_ms()
        self._sleep(pause_ms / 1000)
        return min(max(self._now_ms() - before_ms, pause_ms), pause_ms + _JUMP_MS)

    def _refuse(self, note: bytes | None) -> LockTimeoutError:
        holder, timeout_ms = _living(note), self._settings.lock_timeout_ms
        if holder is None:
            # Not locked, and not to be had: somebody has it open for writing, which is in the way of a lease.
            refuse = refuse_waiters if is_locked(self._lock.path) else refuse_opener
            return refuse(self._root, self._lock.path, timeout_ms)
        return refuse_holder(self._root, holder, timeout_ms)

    def _refuse_broker(self) -> LockTimeoutError:
        """Name the broker by the process id in `abort`, if that is a living Java process: ours stand there too."""
        pid = decode_abort(files.read_small(files.join(self._root, filenames.ABORT)) or b"")
        is_broker = pid is not None and host.command_name(pid) == _BROKER_COMMAND
        return refuse_broker(self._root, self._lock.path, pid if is_broker else None)

    def _name_holder(self) -> None:
        process, now_ms = host.this_process(), self._now_ms()
        self._holder = Holder(
            host=process.host,
            boot_id=process.boot_id,
            pid_space=process.pid_space,
            pid=process.pid,
            start_ticks=process.start_ticks,
            application=self._settings.application,
            since_ms=now_ms,
        )
        self._write_holder(now_ms)

    def _write_holder(self, now_ms: int) -> None:
        assert self._holder is not None
        # On a full disk the lock is taken without a name: it may be retention that wants it, to make room.
        with contextlib.suppress(DiskFullError):
            self._disk.replace_unsynced(self._holder_path, encode_holder(self._holder))
        self._noted_ms = now_ms

    def _release(self) -> None:
        if self._lock.is_held:  # else it was never taken, or this is a forked child: the note is the parent's
            try:
                if self._holder is not None and self._ours.is_in_place():
                    # What was done is done: a name that stays behind misleads those who wait, but does no harm.
                    with contextlib.suppress(StoreError):
                        self._disk.remove(self._holder_path)
            finally:
                self._lock.release()
                self._ours.release()
        self._holder = None


def refuse_network(path: str, *, allowed: bool) -> None:
    """Raise StorePathError if `path`, or the folder it is to be made in, lies on a network or FUSE file system."""
    while not files.is_folder(path) and files.parent(path) != path:
        path = files.parent(path) or "."
    if not allowed and is_remote(path):
        raise StorePathError(
            f"{path} lies on a network file system ({file_system(path)}). There locks and the order of writes depend "
            "on the server and on mount options, and two machines that append at once destroy the store. Append on a "
            "local disk, or, if one machine at a time writes here, set allowNetworkStore=true."
        )


def _living(note: bytes | None) -> Holder | None:
    """Return whom the note names, None if nobody or one who is known to be dead."""
    holder = decode_holder(note or b"")
    if holder is None:
        return None
    process = host.Process(holder.host, holder.boot_id, holder.pid_space, holder.pid, holder.start_ticks)
    return None if host.is_alive(process) is False else holder
