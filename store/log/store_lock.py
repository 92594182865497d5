"""The lock of a store: among our processes and brokers, only one writer at a time may write. Also the wait for it.

The lock is on byte 0 of the file `lock`. A broker takes it when it starts, and keeps it as long as it runs
(DefaultMessageStore#start, 4.9 and 5.3). Our writers take a shared lock together with a lease, which prevents a
starting broker from reading the store. Our writers exclude each other by a lock on byte 1 of `rmq/turn`. Two files in
`rmq/` make waiting fair:

- `turn`: byte 0 of this file is locked by the process that is next. A process takes this lock before it waits for the
  store, and releases it once it has the store. Processes that wait for this lock stand in a line (`waiting_line.py`).
  So a process that releases the store and wants it again must wait after all others.
- `holder.json`: contains the name of the process that holds the store, the time when it took the lock, and its
  progress. The holder writes this file while it still has the lock on byte 0 of `turn`, and removes it before it
  releases the store. A change of the file shows progress. Waiting times out only if there is no progress.

When a process dies, the kernel releases all of its locks. `holder.json` then names a dead process.

`LockWait` determines how often to poll, and when to stop. Its caller polls and sleeps.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from rmq_spark.store.disk import files, host
from rmq_spark.store.disk.host import file_system, is_remote
from rmq_spark.store.disk.locks import BrokerLock, FileLock, is_locked, is_open_to_write
from rmq_spark.store.disk.ownership import refuse_foreign
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DiskFullError, LockTimeoutError, StoreChangedError, StoreError, StorePathError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.checkpoint import decode_abort
from rmq_spark.store.format.own_files import Holder, decode_holder, encode_holder
from rmq_spark.store.log.store_state import SIDE_FOLDER
from rmq_spark.store.log.waiting_line import WaitingLine

MAX_SESSION_BYTES = 64 << 20  # maximum size of records per hold of the lock, to limit how long others wait
# Pauses of the process with the lock of `turn`. Only the holder is before it. In the line pauses are longer.
_NEXT_POLL_MS, _LONG_POLL_MS = 2, 20
_LONG_AFTER_MS = 1_000
# Pauses of processes that wait until the line has room. The longest waiters poll most often, so they get it first.
_NEW_POLL_MS, _OLD_POLL_MS = 40, 4
_OLD_AFTER_MS = 4_000
# One of our holders has its name in `holder.json` from before it releases `turn` until it releases the store. So a
# process with the lock of `turn` soon sees that a holder is not one of ours. A process without that lock cannot
# distinguish such a holder from one of ours that is about to write its name on a slow disk.
_NAMELESS_MS = 1_000
_NAMELESS_WITHOUT_TURN_MS = 10_000
# A process with the lock of `turn` polls often. If the store's lock stays free for this long, that process is stopped.
_ABANDONED_MS = 2_000
_STOPPED_MS = 200  # if `turn` stays free for this long, a process in the line is stopped: those behind it go past it
_LEAST_WAIT_MS = 25  # a holder that sends single messages needs a few ms to notice that somebody waits


class LockWait:
    """One wait for the lock. All times are in ms.

    Idle and free times start at 0 again whenever the content of `holder.json` changes.
    """

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._content: bytes | None = None
        self._waited_ms = self._idle_ms = self._free_ms = 0

    def refresh(self, slept_ms: int, content: bytes | None, *, is_locked: bool) -> None:
        """Record the result of a poll. The process slept `slept_ms` before the poll.

        `content` is the content of `holder.json`, None if it does not exist. `is_locked` means that `lock` is locked.
        """
        self._waited_ms += slept_ms
        self._idle_ms = self._idle_ms + slept_ms if content == self._content else 0
        self._free_ms = self._free_ms + slept_ms if content == self._content and not is_locked else 0
        self._content = content

    @property
    def is_turn_abandoned(self) -> bool:
        """Say whether the lock was free for so long that the process with the lock of `turn` must be stopped."""
        return self._free_ms >= _ABANDONED_MS

    @property
    def is_over(self) -> bool:
        """Say whether the holder has made no progress for as long as the user's timeout."""
        return self._idle_ms >= self._timeout_ms

    def is_nameless(self, *, has_turn: bool) -> bool:
        """Say whether `holder.json` has been unchanged for so long that one of our holders would have changed it.

        If so, and if it names no process or a dead one, the holder is not one of ours. `has_turn` means that this
        process has the lock of `turn`.
        """
        return self._idle_ms >= (_NAMELESS_MS if has_turn else _NAMELESS_WITHOUT_TURN_MS)

    def pause_ms(self, *, has_turn: bool, place: int | None = None) -> int:
        """Return how long to sleep before the next poll (ms).

        `has_turn` means that this process has the lock of `turn`. Otherwise `place` is its place in the line, or None.
        """
        if has_turn or place is not None:
            pause = _NEXT_POLL_MS if self._idle_ms < _LONG_AFTER_MS else _LONG_POLL_MS
            pause *= 1 if has_turn or place is None else place + 2
        else:
            pause = _NEW_POLL_MS - (_NEW_POLL_MS - _OLD_POLL_MS) * min(self._waited_ms, _OLD_AFTER_MS) // _OLD_AFTER_MS
        return max(1, min(pause, self._timeout_ms - self._idle_ms))


def refuse_holder(root: str, holder: Holder, timeout_ms: int) -> LockTimeoutError:
    """Return the error for a lock that one of our writers holds without making progress."""
    since = datetime.fromtimestamp(holder.since_ms / 1000, UTC).isoformat(timespec="seconds")
    return LockTimeoutError(
        f'{root} is being written by the application "{holder.application}" (process {holder.pid} on host '
        f"{holder.host}, since {since}), which has made no progress for {timeout_ms / 1000:g} s. Nothing was written. "
        "Stop that process if it hangs; the next writer completes its work. To wait longer set lockTimeout, now "
        f"{timeout_ms / 1000:g}s."
    )


def refuse_broker(root: str, lock_path: str, pid: int | None) -> LockTimeoutError:
    """Return the error for a lock that a broker holds. `pid` is the broker's process id, None if it is unknown."""
    who = "a broker" if pid is None else f"a broker (process {pid}, 5.x)"
    return LockTimeoutError(
        f"{root} belongs to {who}, which holds {lock_path} while it runs. Nothing was written. Reading works next to a "
        "broker. To append here stop it (mqshutdown broker), or send the messages to it."
    )


def refuse_waiters(root: str, lock_path: str, timeout_ms: int) -> LockTimeoutError:
    """Return the error for a lock whose holder is unknown, because the holder has not written its name.

    It may have had too little time, or no disk space. Or it may be a broker, which never writes its name.
    """
    return LockTimeoutError(
        f"{lock_path} was not released within {timeout_ms / 1000:g} s: an unknown process holds it, a broker or a "
        f"writer. Nothing was written to {root}. To wait longer set lockTimeout, now {timeout_ms / 1000:g}s."
    )


def refuse_opener(root: str, lock_path: str, timeout_ms: int) -> LockTimeoutError:
    """Return the error for a lock that is free, but cannot be taken because its file is open for writing."""
    return LockTimeoutError(
        f"{lock_path} is not locked, but was open for writing for {timeout_ms / 1000:g} s: by a broker that is "
        f"starting, or by another process. Meanwhile a broker may be reading the store. Nothing was written to {root}. "
        f"See which process it is with `fuser -v {lock_path}` (as root if it belongs to another user). Let a starting "
        "broker come up, and send the messages to it; have any other process close the file. To wait longer set "
        f"lockTimeout, now {timeout_ms / 1000:g}s."
    )


TURN = "turn"
HOLDER = "holder.json"
_TURN_AT = 0  # the byte of `turn` that the process that is next locks
_OURS_AT = 1  # the byte of `turn` that one of our writers locks while it holds the store
_LOCK_CONTENT = b"lock"  # a broker writes the same
_BROKER_COMMAND = "java"
_PROGRESS_EVERY_MS = 500  # waiting processes need progress no more often
_MARGIN_S = 10.0  # time for one write of a session, MAX_SESSION_BYTES with their entries; the kernel allows 45 s
_LOOKS = 4  # number of polls of a lock that may be a broker's
_LOOK_S = 0.005
_JUMP_MS = 1_000  # if a short sleep takes longer than this, the clock was set or the machine slept


class LockSettings(Protocol):
    """The settings of a writer that the lock needs."""

    @property
    def application(self) -> str:
        """Return the name of this writer, which is shown to waiting processes."""

    @property
    def lock_timeout_ms(self) -> int:
        """Return how long to wait (ms) for a holder that makes no progress."""

    @property
    def allow_network_store(self) -> bool:
        """Say whether the user guarantees that only one machine writes to a store on a network file system."""


class StoreLock:
    """The lock of the store in the folder `root`, which is created if it is missing. For one thread.

    `now_ms` is the clock (ms since the epoch). `sleep` takes seconds. Do not fork while the lock is held.
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
        self._turn = FileLock(files.join(root, SIDE_FOLDER, TURN), _TURN_AT, only_writers=True)
        self._writers_lock = FileLock(self._turn.path, _OURS_AT)
        self._line = WaitingLine(self._turn.path)
        self._holder_path = files.join(root, SIDE_FOLDER, HOLDER)
        self._holder: Holder | None = None
        self._written_ms = 0
        self._is_checked = False
        self._holds = 0  # how many times the lock was requested by `hold` so far

    @property
    def is_held(self) -> bool:
        """Say whether this object holds the lock. Always False in a forked child."""
        return self._lock.is_held

    @contextlib.contextmanager
    def hold(self) -> Iterator[int]:
        """Hold the store's lock in the body of `with`, after a fair wait. Yields the number of this hold (from 1).

        Raises LockTimeoutError if a broker has the store, or if a writer has it and makes no progress for
        `lock_timeout_ms`. Raises StorePathError if the store is on a network file system, or if its folders are not
        writable. If an error is raised, no lock is held.
        """
        if not self._is_checked:
            refuse_network(self._root, allowed=self._settings.allow_network_store)
            self._refuse_foreign()
        self._make_files()
        if not self._is_checked and self._has_no_leases():
            self._lock = FileLock(self._lock.path)
        self._is_checked = True
        self._holds += 1
        number = self._holds
        try:
            self._wait()
            self._name_holder()
            self._turn.release()
            self._line.leave()
            yield number
        finally:
            # An interrupted `with` may be finalized late, when the same object already holds the lock for another
            # `with`.
            if self.is_latest(number):
                self.release()

    def is_latest(self, number: int) -> bool:
        """Say whether `number` is the number of the latest hold."""
        return number == self._holds

    def release(self) -> None:
        """Release all locks of this object. Does nothing if it holds none.

        `hold` calls this at its end. An interrupt at that moment can prevent the call, so the owner of this object
        calls `release` once more when its work ends.
        """
        try:
            self._line.leave()
            if self._holder is not None and self._lock.is_held:  # in a forked child the file is the parent's
                # The session is complete. If the name stays, it misleads waiting processes, but does no harm.
                with contextlib.suppress(StoreError):
                    if self._writers_lock.is_in_place():  # otherwise the file may be another writer's
                        self._disk.remove(self._holder_path)
        finally:
            # The lock of `turn` is released last. Until then no other process can start to take the other two locks.
            try:
                self._lock.release()
            finally:
                try:
                    self._writers_lock.release()
                finally:
                    self._turn.release()
        self._holder = None

    def has_broker(self) -> bool:
        """Say whether a broker holds the store, or is starting. Takes no lock, and does not wait for a lock.

        False if one of our writers holds the store. A True takes several polls, 15 ms in all, because our writers can
        look like a starting broker for a moment: one that creates a new store has the file `lock` open, and a release
        affects two locks one after the other.
        """
        for attempt in range(_LOOKS):
            if not self._is_brokers():
                return False
            if attempt < _LOOKS - 1:
                self._sleep(_LOOK_S)
        return True

    def _is_brokers(self) -> bool:
        # On a network file system our writers lock as exclusively as a broker does. But our holder also has the lock on
        # byte 1 of `turn`, as long as the store's lock. A broker never takes that lock, and a waiting writer has it
        # only for a moment.
        if is_locked(self._lock.path, exclusively=True):
            return not is_locked(self._writers_lock.path, _OURS_AT)
        return not self._has_no_leases() and is_open_to_write(self._lock.path)

    def _has_no_leases(self) -> bool:
        """Say whether leases do not work on the store's file system, because it is a network file system.

        NFS and SMB answer every request for a lease as if the file were open for writing.
        """
        if self._is_remote is None:
            self._is_remote = is_remote(self._root)
        return self._is_remote

    def heartbeat(self) -> None:
        """Show waiting processes that the holder makes progress. Cheap, so call it after every piece of work.

        Raises StoreError if the lock is not held, because this process was forked from the holder. Raises
        LockTimeoutError if a starting broker has waited for so long that it could read the store before a write that
        begins now is complete. Raises StoreChangedError if a file of the lock was removed or replaced.
        """
        if not self._lock.is_held or self._holder is None:
            raise StoreError(
                f"cannot write to {self._root}: this process does not hold {self._lock.path}, because it was forked "
                "from the holder. Open a new writer in the child."
            )
        self.refuse_broker(_MARGIN_S)
        if not self._writers_lock.is_in_place():
            raise StoreChangedError(
                f"cannot write to {self._root}: {self._writers_lock.path} was removed or replaced during the write; "
                "expected the file that was locked, because without it another writer may write at the same time. "
                f"Leave the files in {SIDE_FOLDER}/ unchanged, and write again: the next writer recovers the store."
            )
        now_ms = self._now_ms()
        if abs(now_ms - self._written_ms) >= _PROGRESS_EVERY_MS:
            self._holder = replace(self._holder, progress=self._holder.progress + 1)
            self._write_holder(now_ms)

    @property
    def broker_is_waiting(self) -> bool:
        """Say whether a starting broker waits for the release. If so, end the session soon."""
        return self._lock.broker_is_waiting

    @property
    def is_wanted(self) -> bool:
        """Say whether one of our writers waits for the release, or a starting broker. Costs two system calls."""
        return self._lock.broker_is_waiting or self._writers_lock.is_other_locked(_TURN_AT)

    @property
    def lets_brokers_wait(self) -> bool:
        """Say whether the lock is held, and a starting broker waits for its release instead of failing."""
        return self._lock.lets_brokers_wait

    def refuse_broker(self, needed_s: float = 0) -> None:
        """Raise LockTimeoutError if a waiting broker could begin to read the store within `needed_s` seconds. Cheap.

        A broker does not read again what it has loaded, so it would overwrite what is written from now on. So after
        this error nothing may be reported as written, and `abort` must stay.
        """
        if self._lock.lease_seconds_left() <= needed_s:
            raise LockTimeoutError(
                f"a broker is starting in {self._root}: it has waited for {self._lock.path} almost as long as the "
                "system lets it (fs.lease-break-time), and could overwrite what is written from now on. This write "
                "was aborted. Messages that were reported as written are in the store, and maybe a part of the "
                "others; the store is left as after a crash, and the broker, or the next writer, recovers it. Send "
                "the messages to the broker, or stop it and write again."
            )

    def _refuse_foreign(self) -> None:
        """Raise StorePathError if the store's owner could not overwrite files that this process creates."""
        folders = ("", SIDE_FOLDER, filenames.CONFIG, filenames.CONSUME_QUEUE, filenames.COMMIT_LOG, filenames.INDEX)
        for folder in folders:
            try:
                refuse_foreign(files.join(self._root, folder))
            except OSError as error:
                raise StorePathError(f"{self._root} cannot be written: {error}") from error

    def _make_files(self) -> None:
        """Create the missing files to lock.

        This needs no lock, because a second process finds the files or creates the same.
        """
        if files.file_size(self._turn.path) < 0:
            side = files.join(self._root, SIDE_FOLDER)
            self._disk.make_folder(side)
            # The folder's name must be durable before its content. `turn` is created after this sync, so if `turn`
            # exists, the name is durable. If a crash happens before that, `turn` is missing, and the next writer
            # repeats both.
            self._disk.sync_folder(self._root)
            with contextlib.suppress(FileExistsError):
                self._disk.create_lock(self._turn.path)
        if files.file_size(self._lock.path) < 0:
            # The file is open for writing only before it has a name, because an open file keeps all others from a
            # lease.
            with contextlib.suppress(FileExistsError):
                self._disk.create_filled(self._lock.path, len(_LOCK_CONTENT), 0, _LOCK_CONTENT)
        if files.file_size(self._lock.path) < len(_LOCK_CONTENT):  # truncated, or a broker is about to write it
            with self._disk.open(self._lock.path) as file:
                file.write(0, _LOCK_CONTENT)  # needs no lock, because every process writes the same

    def _wait(self) -> None:
        """Wait until this process has the locks of the store and of `turn`.

        If the process with the lock of `turn` was stopped, return with the store's lock alone.
        """
        wait, slept_ms, free_ms = LockWait(max(self._settings.lock_timeout_ms, _LEAST_WAIT_MS)), 0, 0
        while True:
            has_turn = self._turn.is_held or (self._line.move_up() and self._turn.try_take())
            if not has_turn:
                free_ms = 0 if is_locked(self._turn.path, _TURN_AT) else free_ms + slept_ms
                has_turn = free_ms >= _STOPPED_MS and self._turn.try_take()
            if has_turn:
                self._line.leave()
            if (has_turn or wait.is_turn_abandoned) and self._try_take():
                return
            content = files.read_small(self._holder_path)
            locked = has_turn or is_locked(self._lock.path)
            wait.refresh(slept_ms, content, is_locked=locked)
            if wait.is_nameless(has_turn=has_turn) and _living(content) is None and is_locked(self._lock.path):
                raise self._refuse_broker()
            if wait.is_over:
                # The process with the lock of `turn` may be stopped. An unfair lock is better than an error next to a
                # free lock.
                if not locked and self._try_take():
                    return
                raise self._refuse(content)
            slept_ms = self._pause(wait.pause_ms(has_turn=has_turn, place=self._line.place))

    def _try_take(self) -> bool:
        """Try to take the store's lock. Return whether it was taken.

        First excludes our other writers, then brokers.
        """
        try:
            # Our writers share the lock on the file `lock`. If the file `turn` of a writer was removed, only its name
            # in `holder.json` shows that it holds the store.
            if not self._writers_lock.try_take():
                return False
            is_held = _living(files.read_small(self._holder_path)) is not None and is_locked(self._lock.path)
            return not is_held and self._lock.try_take()
        finally:
            if not self._lock.is_held:
                self._writers_lock.release()

    def _pause(self, pause_ms: int) -> int:
        """Sleep, and return how long it took (ms).

        If the clock is set meanwhile, at most _JUMP_MS are added to `pause_ms`.
        """
        before_ms = self._now_ms()
        self._sleep(pause_ms / 1000)
        return min(max(self._now_ms() - before_ms, pause_ms), pause_ms + _JUMP_MS)

    def _refuse(self, content: bytes | None) -> LockTimeoutError:
        holder, timeout_ms = _living(content), self._settings.lock_timeout_ms
        if holder is None:
            # If the lock is free and cannot be taken, a process has the file open for writing, which prevents a lease.
            refuse = refuse_waiters if is_locked(self._lock.path) else refuse_opener
            return refuse(self._root, self._lock.path, timeout_ms)
        return refuse_holder(self._root, holder, timeout_ms)

    def _refuse_broker(self) -> LockTimeoutError:
        """Return the error for a store that a broker holds.

        The error has the process id in `abort` only if that is a living Java process, because `abort` may be ours.
        """
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
        # On a full disk the lock is taken without a name, because this may be retention, which frees space.
        with contextlib.suppress(DiskFullError):
            self._disk.replace_unsynced(self._holder_path, encode_holder(self._holder))
        self._written_ms = now_ms


def refuse_network(path: str, *, allowed: bool) -> None:
    """Raise StorePathError if `path` is on a network or FUSE file system, unless `allowed`.

    If `path` does not exist, the folder in which it will be created is checked.
    """
    while not files.is_folder(path) and files.parent(path) != path:
        path = files.parent(path) or "."
    if not allowed and is_remote(path):
        raise StorePathError(
            f"{path} is on a network file system ({file_system(path)}); expected a local one. Its locks and order of "
            "writes depend on the server and on mount options, and two machines that append at the same time destroy "
            "the store. Append on a local disk, or, if only one machine at a time writes here, set "
            "allowNetworkStore=true."
        )


def _living(content: bytes | None) -> Holder | None:
    """Return the holder that the content of `holder.json` names.

    Return None if there is none, or if its process is known to be dead.
    """
    holder = decode_holder(content or b"")
    if holder is None:
        return None
    process = host.Process(holder.host, holder.boot_id, holder.pid_space, holder.pid, holder.start_ticks)
    return None if host.is_alive(process) is False else holder
