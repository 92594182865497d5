"""Member files, leases and failure detection of a consumer group.

Each member describes itself in the file `members/<member id>.json`, with these fields: host, boot_id, pid_space, pid
and start_ticks (these five identify the process), application, query_name, assignment, strategy, subscription,
since_ms, beat, lease_timeout_ms, lease_heartbeat_ms. The file is written without a sync. A power cut may damage it, but
also ends the process, and the next member removes the files that remain.

A lease shows that its member is alive. It consists of a kernel lock on `members/<member id>.lock` and of heartbeats.
The kernel releases the lock when the process ends, so other members need not wait for a timeout. The heartbeats are for
machines that do not see the lock: the member increments the counter `beat` in its file again and again. A separate
thread does this, because a query may process one batch for hours.

The failure detector finds out whether other members are alive:

- On the same machine, a member whose lock is free is dead at once. A member that holds its lock but sends no heartbeat
  for `leaseTimeout` is treated as dead too, because its process is stopped (SIGSTOP, a frozen container).
- On a file system that several machines use, a member may not see the locks of other machines. There another member is
  alive if its file has changed within `leaseTimeout`, by the observer's monotonic clock. If the two members have
  different timeouts, the longer one is used, so that a slow heartbeat is not mistaken for a death. Clocks of different
  machines, and wall clocks, are never compared.
"""

import contextlib
import re
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from rmq_spark.store.disk import files
from rmq_spark.store.disk.host import Process, this_process
from rmq_spark.store.disk.locks import FileLock, is_locked
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format.side_file import encode_side_file, number_of, text_of
from rmq_spark.store.group.group_files import GroupPaths
from rmq_spark.store.log.store_state import read_side_file

Kind = Literal["all", "shared", "broadcasting"]
KINDS: tuple[Kind, ...] = ("all", "shared", "broadcasting")
_WHAT = "the file of a member of a consumer group"
_NEXT_STEP = (
    "A living member writes the file again within leaseHeartbeat (30 s by default). If the process has ended, remove "
    "the file."
)
_NOT_IN_HOSTS, _HOST_CHARS = re.compile(r"[^0-9A-Za-z.-]"), 64


@dataclass(frozen=True, slots=True)
class Member:
    """The properties of one query as a member of a group. The member's id is not a field, but the name of its file."""

    process: Process
    application: str  # the name of the user's program
    query_name: str  # "" if the query has no name
    assignment: Kind
    strategy: str  # the option allocateStrategy as the user gave it
    subscription: str  # topics and filters in a canonical form, so that equal subscriptions have equal texts
    since_ms: int  # when the query joined the group, in ms since the epoch; only for display
    beat: int = 0  # the number of heartbeats so far
    lease_timeout_ms: int = 120_000  # a member without a heartbeat for this long is dead
    lease_heartbeat_ms: int = 30_000  # the interval of its heartbeats

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_ms / 1000, UTC).isoformat(timespec="seconds")
        query = f'query "{self.query_name}"' if self.query_name else "a query without a name"
        return (
            f'{query} of the application "{self.application}" (process {self.process.pid} on host '
            f"{self.process.host}, a member since {since})"
        )


def new_member_id(process: Process, unique: str) -> str:
    """Return the id of a new member: `<host>@<pid>#<unique>`.

    This is similar to the id of a RocketMQ client (ClientConfig#buildMQClientId, 5.3). `unique` must be different for
    every member, past or present; use a uuid, for example. Ids are compared and sorted as plain text.
    """
    assert unique, "members of one process need different ids"
    host = _NOT_IN_HOSTS.sub("_", process.host)[:_HOST_CHARS]  # the id is also a file name
    return f"{host}@{process.pid}#{unique}"


def encode_member(member: Member) -> bytes:
    """Encode a member as JSON."""
    fields = asdict(member)
    process = fields.pop("process")
    return encode_side_file({**process, **fields})


def read_member(path: str) -> Member | None:
    """Return the member that the file at `path` describes, or None if the file does not exist.

    Raises DamageError if the file is damaged, and StoreError if a newer version of rmq-spark wrote it.
    """
    return read_side_file(path, _WHAT, _NEXT_STEP, _build)


def _build(fields: dict[str, Any]) -> Member:
    kind = fields["assignment"]
    if kind not in KINDS:
        raise ValueError(f"assignment: expected one of {', '.join(KINDS)}, found {kind!r}")
    process = Process(
        text_of(fields, "host"),
        _any_text(fields, "boot_id"),  # "" if the system does not provide it
        _any_text(fields, "pid_space"),
        number_of(fields, "pid"),
        number_of(fields, "start_ticks"),
    )
    return Member(
        process,
        _any_text(fields, "application"),
        _any_text(fields, "query_name"),
        kind,
        _any_text(fields, "strategy"),
        _any_text(fields, "subscription"),
        number_of(fields, "since_ms"),
        number_of(fields, "beat"),
        number_of(fields, "lease_timeout_ms", least=1),
        number_of(fields, "lease_heartbeat_ms", least=1),
    )


def _any_text(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    if type(value) is not str:
        raise TypeError(f"{name}: expected a text, found {value!r}")
    return value


class Lease:
    """The lease of one member, which `take` acquires and `release` ends.

    For one thread at a time, apart from the heartbeat thread that the object starts itself. The lease is also released
    when the object is garbage-collected, for example if a notebook cell runs again. A forked child does not hold the
    lease: in the child, `is_held` is False and `release` does nothing.
    """

    def __init__(self, paths: GroupPaths, disk: Disk, member_id: str, member: Member, heartbeat_ms: int) -> None:
        assert heartbeat_ms > 0, heartbeat_ms
        self._disk, self._member, self._heartbeat_ms = disk, member, heartbeat_ms
        self._folder = paths.members
        self._file, self._lock_path = paths.member(member_id), paths.member_lock(member_id)
        self._batches = paths.finished_batch(member_id), paths.planned_batch(member_id)
        self._lock = FileLock(self._lock_path)
        self._writing = threading.Lock()  # held while the member's file is written
        self._stop = threading.Event()

    @property
    def is_held(self) -> bool:
        """Say whether this process holds the lease, and no other member has removed this member's files."""
        return self._lock.is_held and files.file_size(self._lock_path) >= 0

    def take(self) -> None:
        """Acquire the lease. The caller must hold the group's lock.

        This also works if others presumed this member dead and removed its files. After an error the lease is not held,
        and files that remain are treated as those of a dead member.
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
                    f"{self._lock_path} is locked by another process; expected a file of this member alone. Remove the "
                    "file if you created it by hand, and start the query again."
                )
            # The lock file is locked before the member's file is written, because a member whose lock is free is dead.
            self._write(self._member)
            self._stop = threading.Event()
            arguments = weakref.ref(self), self._stop, self._heartbeat_ms / 1000
            threading.Thread(target=_send_heartbeats, args=arguments, name="rmq-spark lease", daemon=True).start()
        except BaseException:
            self._end_thread()
            self._lock.release()
            raise

    def beat(self) -> bool:
        """Send a heartbeat: increment the counter in the member's file. Return whether the lease is still held.

        Any thread may call this. If the file cannot be written, for example on a full disk, the counter in the file is
        updated only by the next heartbeat. Then at least the time of the file is changed, because members on the same
        host presume that a member is stopped if its file does not change.
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
        """Release the lease and remove the member's files. Does nothing if this process does not hold the lease."""
        if not self._lock.is_held:
            return
        try:
            self._end_thread()
            with self._writing:  # so that no heartbeat creates the member's file again
                for path in self._batches:
                    self._disk.remove(path)
                self._disk.remove(self._file)
                self._disk.remove(self._lock_path)
        finally:
            self._lock.release()

    def __del__(self) -> None:
        # Not while the interpreter ends, because the thread may have been stopped while it held the event's own lock.
        if hasattr(self, "_stop") and not sys.is_finalizing():
            self._end_thread()

    def _end_thread(self) -> None:
        self._stop.set()

    def _write(self, member: Member) -> None:
        # A sync is not needed, because a power cut ends this process too.
        self._disk.replace_unsynced(self._file, encode_member(member))


def _send_heartbeats(lease: "weakref.ref[Lease]", stop: threading.Event, seconds: float) -> None:
    while not stop.wait(seconds):
        alive = lease()
        if alive is None or not alive.beat():
            return
        del alive  # a strong reference would keep the lease alive while the thread waits


# The prefix of `host.boot_id()` if a container hides the kernel's boot id. The rest is then the time of the boot in
# seconds, which may be the same on two machines.
_WEAK_BOOT_ID = "btime"

# The share of `leaseTimeout` that one poll may add to the time of a silence. The limit is necessary because an observer
# may have been stopped together with the member. When both continue, the observer may poll before the member has had
# time to send a heartbeat.
_SILENCE_PER_POLL = 0.25


@dataclass(slots=True)
class _Silence:
    """How long the file of a member has not changed, although the member holds its lock."""

    stamp: tuple[int, int, int] | None  # the stamp of the file
    seen: float  # when it was last polled, in s by the observer's clock
    lasted: float = 0.0  # the time without a change, in s


@dataclass(slots=True)
class _Beat:
    data: bytes  # the content of the member's file
    seen: float  # when this content was first seen, in s by the observer's clock
    has_changed: bool  # whether the content has changed since the first poll


class FailureDetector:
    """The failure detector of one observer for the other members of its group. For one thread at a time.

    `lease_timeout_ms` is the observer's timeout. `monotonic` is a clock in seconds that never runs backwards.
    `is_shared` says whether other machines may use the same file system but not see the locks of this machine.
    """

    def __init__(
        self, paths: GroupPaths, lease_timeout_ms: int, monotonic: Callable[[], float], *, is_shared: bool
    ) -> None:
        self._paths, self._timeout_ms, self._monotonic = paths, lease_timeout_ms, monotonic
        self._is_shared, self._here = is_shared, this_process()
        self._members: dict[str, Member] = {}
        self._beats: dict[str, _Beat] = {}
        self._silences: dict[str, _Silence] = {}

    def member(self, member_id: str) -> Member | None:
        """Return the properties of a member, or None if its file is missing or damaged.

        The result is cached, so its `beat` may be old.
        """
        known = self._members.get(member_id)
        if known is None:
            try:
                known = read_member(self._paths.member(member_id))
            except DamageError:
                return None  # if the member is alive, it writes the file again; if it is dead, the file is removed
            if known is not None:
                self._members[member_id] = known
        return known

    def is_by_lock(self, member_id: str) -> bool:
        """Say whether this machine sees the member's lock. If it does, it detects the member's death at once."""
        member = self.member(member_id)
        if not self._is_shared:
            # If both the host name and the boot are different, the member runs on another machine, whatever the kind of
            # file system is. After a reboot of this machine the old locks do not exist.
            if member is None or self._here.host == member.process.host:
                return True
            return not member.process.boot_id or member.process.boot_id == self._here.boot_id
        if member is None or not member.process.boot_id or member.process.boot_id != self._here.boot_id:
            return False
        # Containers on the same machine have different host names, but share the kernel, which knows all their locks.
        return member.process.host == self._here.host or not self._here.boot_id.startswith(_WEAK_BOOT_ID)

    def is_alive(self, member_id: str) -> bool:
        """Say whether a member is alive.

        If this machine sees the member's lock, a member is alive if it holds the lock and its process is not stopped.
        Otherwise it is alive while its file changes. At the first poll it is assumed to be alive if its file exists.
        """
        if self.is_by_lock(member_id):
            # Only exclusive locks matter, because any user who may read the file could hold a shared lock on it, and
            # the dead member would seem alive.
            is_taken = is_locked(self._paths.member_lock(member_id), exclusively=True)
            return is_taken and not self._is_stopped(member_id)
        data = files.read_small(self._paths.member(member_id))
        now = self._monotonic()  # read after the file, so that a pause in between is not mistaken for silence
        if data is None:
            return False
        beat = self._beats.get(member_id)
        if beat is None or beat.data != data:
            self._beats[member_id] = _Beat(data, now, beat is not None)
            return True
        return now - beat.seen < self._timeout_s(member_id)

    def has_beaten(self, member_id: str) -> bool:
        """Say whether the member has sent a heartbeat since the first poll. Only for members whose lock is not seen."""
        return member_id in self._beats and self._beats[member_id].has_changed

    def forget(self, member_id: str) -> None:
        """Remove a dead member from the caches."""
        self._members.pop(member_id, None)
        self._beats.pop(member_id, None)
        self._silences.pop(member_id, None)

    def _timeout_s(self, member_id: str) -> float:
        member = self.member(member_id)
        return max(self._timeout_ms, member.lease_timeout_ms if member is not None else 0) / 1000

    def _is_stopped(self, member_id: str) -> bool:
        """Say whether a member that holds its lock has sent no heartbeat for the timeout.

        Only the times between the polls of this observer are known.
        """
        stamp = files.stamp(self._paths.member(member_id))
        now = self._monotonic()  # read after the stamp, as in `is_alive`
        silence = self._silences.get(member_id)
        if silence is None or silence.stamp != stamp:
            self._silences[member_id] = _Silence(stamp, now)
            return False
        timeout_s = self._timeout_s(member_id)
        silence.lasted += min(now - silence.seen, timeout_s * _SILENCE_PER_POLL)
        silence.seen = now
        return silence.lasted >= timeout_s
