"""Membership: which queries may share a group, and which members are alive.

Members of one process exclude each other like those of several processes.
"""

import errno
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, GroupConflictError, StoreError
from rmq_spark.store.group.group_files import GroupPaths
from rmq_spark.store.group.member_lease import encode_member, read_member
from rmq_spark.store.group.membership import Clocks, Membership, MemberTerms

ALL = MemberTerms("app", "one", "all", "avg", "orders:*")
SHARED = replace(ALL, assignment="shared")
DAY_MS = 86_400_000


class Time:
    """Clocks that advance only by sleeping; `on_sleep` is the work of others meanwhile."""

    def __init__(self) -> None:
        self.seconds, self.now_ms = 0.0, 1_700_000_000_000
        self.on_sleep: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.on_sleep()

    def clocks(self) -> Clocks:
        return Clocks(lambda: self.now_ms, lambda: self.seconds, self.sleep)


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def make(tmp_path: Path, clock: Time) -> Callable[..., Membership]:
    """A function that makes a membership of the group `g`; ids sort by the given names."""

    def make(unique: str, terms: MemberTerms = SHARED, *, is_shared: bool = False) -> Membership:
        return Membership(GroupPaths(str(tmp_path), "g"), Disk(), terms, clock.clocks(), unique, is_shared=is_shared)

    return make


def die(member: Membership) -> None:
    """End as a process does that is killed: the lock is free, the files stay."""
    member.lease._end_thread()
    member.lease._lock.release()


def move_away(member: Membership) -> None:
    """Change a living member's file as if the member were on another machine."""
    path = Path(member.paths.member(member.id))
    there = read_member(str(path))
    assert there is not None
    away = replace(there, process=replace(there.process, host="far", boot_id="another"))
    path.write_bytes(encode_member(away))
    member.lease._member = away


def living(member: Membership) -> list[str]:
    with member.lock.hold():
        return [member_id.rpartition("#")[2] for member_id in member.living()]


def files_of(member: Membership) -> list[str]:
    return sorted(os.listdir(member.paths.members))


def test_sharing_lists_compatible_members_by_id(make) -> None:
    members = [make(name) for name in ("c", "a", "b")]
    for member in members:
        member.join()
    assert [living(member) for member in members] == [["a", "b", "c"]] * 3
    assert members[0].sharing() == sorted(member.id for member in members)


@pytest.mark.parametrize(("first", "second"), [("all", "all"), ("all", "shared"), ("shared", "all")])
def test_join_refuses_a_second_query_beside_assignment_all(make, clock, first: str, second: str) -> None:
    make_first = make("a", replace(ALL, assignment=first, query_name="the first"))
    make_first.join()
    other = make("b", replace(ALL, assignment=second, query_name="the second"))
    with pytest.raises(GroupConflictError) as caught:
        other.join()
    pid = f"process {os.getpid()} on host"
    words = ['"the first"', '"the second"', "group g", "2023-11-14T22:13:20", "consumerGroup of its own"]
    assert [word for word in words if word not in str(caught.value)] == []
    assert str(caught.value).count(pid) == 2
    assert 5 <= clock.seconds < 5.2, "one that is just dying is waited for"
    assert living(make_first) == ["a"]
    make_first.leave()
    other.join()
    assert living(other) == ["b"]


def test_join_replaces_a_member_that_dies_meanwhile(make, clock) -> None:
    first, second = make("a", ALL), make("b", ALL)
    first.join()
    clock.on_sleep = lambda: die(first) if clock.seconds > 3 else None
    second.join()
    assert 3 < clock.seconds < 3.2
    assert living(second) == ["b"]
    assert len(files_of(second)) == 2, "the dead one's files are gone"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"assignment": "all"}, ["Stop the other one", "assignment=shared in both", "Two loads in one query are two"]),
        ({"subscription": "orders:TagA"}, ["orders:TagA", "orders:*", "subscribe to the same"]),
        ({"strategy": "circle"}, ["allocateStrategy=circle", "allocateStrategy=avg"]),
    ],
)
def test_join_refuses_incompatible_members_by_name(make, change: dict[str, str], words: list[str]) -> None:
    make_first = make("a", replace(SHARED, query_name="the first"))
    make_first.join()
    with pytest.raises(GroupConflictError) as caught:
        make("b", replace(SHARED, query_name="the second", **change)).join()
    words = [*words, '"the first"', '"the second"', make_first.paths.member(make_first.id)]
    assert [word for word in words if word not in str(caught.value)] == []
    make("c").join()


def test_join_accepts_broadcasting_members_which_share_nothing(make) -> None:
    loud = replace(ALL, assignment="broadcasting", subscription="other")
    first, loud_one, loud_two = make("a", ALL), make("b", loud), make("c", loud)
    for member in (loud_one, first, loud_two):
        member.join()
    assert living(first) == ["a", "b", "c"]
    assert first.sharing() == [first.id]


def test_join_removes_files_of_dead_members(make) -> None:
    first, second = make("a"), make("b", ALL)
    first.join()
    die(first)
    path = Path(first.paths.member(first.id))
    path.write_text("{")
    Path(f"{path}.tmp").touch()
    (path.parent / "lonely.lock").touch()
    (path.parent / "odd.json").touch()
    second.join()
    assert [name.rpartition(".")[0] for name in files_of(second)] == [Path(second.paths.member(second.id)).stem] * 2


def test_join_keeps_a_member_whose_lock_cannot_be_probed(make, monkeypatch) -> None:
    first, second = make("a"), make("b")
    first.join()
    real = os.open

    def refuse(path: str, flags: int, *rest: int, **more: int) -> int:
        if str(path).endswith(".lock"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError, match="Too many open files"):
        second.join()
    monkeypatch.undo()
    assert first.lease.is_held
    assert living(first) == ["a"]


def test_join_names_a_damaged_file_of_a_living_member(make, clock) -> None:
    first, second = make("a"), make("b")
    first.join()
    path = Path(first.paths.member(first.id))
    path.write_text("{")
    with pytest.raises(DamageError, match=path.name):
        second.join()
    assert living(first) == ["a"]
    clock.on_sleep = first.lease.beat
    second.join()
    assert living(second) == ["a", "b"]


def test_living_keeps_a_remote_member_while_it_sends_heartbeats(make, clock) -> None:
    first, second = make("a", is_shared=True), make("b", is_shared=True)
    first.join()
    move_away(first)
    second.join()
    first.lease._lock._forget()  # its lock cannot be seen from here
    for _ in range(5):
        assert living(second) == ["a", "b"]
        clock.seconds += 100
        raised = replace(first.lease._member, beat=first.lease._member.beat + 1)
        first.lease._member = raised
        Path(first.paths.member(first.id)).write_bytes(encode_member(raised))
    assert living(second) == ["a", "b"]
    clock.seconds += 119.9
    assert living(second) == ["a", "b"]
    clock.seconds += 0.2
    assert living(second) == ["b"]
    assert len(files_of(second)) == 2


@pytest.mark.parametrize(("own", "its"), [(10_000, 120_000), (120_000, 10_000)])
def test_living_uses_the_longer_of_two_timeouts(make, clock, own: int, its: int) -> None:
    first = make("a", replace(SHARED, lease_timeout_ms=its), is_shared=True)
    second = make("b", replace(SHARED, lease_timeout_ms=own), is_shared=True)
    first.join()
    move_away(first)
    second.join()
    first.lease._lock._forget()
    assert living(second) == ["a", "b"]
    clock.seconds += 119.9
    assert living(second) == ["a", "b"]
    clock.seconds += 0.2
    assert living(second) == ["b"]


@pytest.mark.parametrize(
    ("host", "boot_id", "lives"), [("far", "another", True), ("far", None, False), (None, "another", False)]
)
def test_living_detects_another_machine_on_an_unshared_file_system(
    make, host: str | None, boot_id: str | None, lives: bool
) -> None:
    first, second = make("a"), make("b")
    first.join()
    path, here = Path(first.paths.member(first.id)), first.member.process
    there = replace(here, host=host or here.host, boot_id=boot_id or here.boot_id)
    path.write_bytes(encode_member(replace(first.member, process=there)))
    first.lease._lock._forget()  # its lock is not seen from here, or gone
    second.join()
    assert living(second) == (["a", "b"] if lives else ["b"])


@pytest.mark.parametrize("jump_ms", [DAY_MS, -DAY_MS])
def test_living_ignores_jumps_of_the_wall_clock(make, clock, jump_ms: int) -> None:
    first, second = make("a", is_shared=True), make("b", is_shared=True)
    first.join()
    move_away(first)
    second.join()
    assert living(second) == ["a", "b"]
    clock.now_ms += jump_ms
    path = Path(first.paths.member(first.id))
    os.utime(path, (clock.now_ms / 1000, clock.now_ms / 1000))
    assert living(second) == ["a", "b"]
    clock.seconds += 121
    assert living(second) == ["b"]


def test_join_waits_for_a_heartbeat_of_a_remote_member(make, clock) -> None:
    first = make("a", ALL, is_shared=True)
    first.join()
    move_away(first)
    clock.on_sleep = lambda: first.lease.beat() if clock.seconds > 29 else None
    with pytest.raises(GroupConflictError, match="on host far"):
        make("b", ALL, is_shared=True).join()
    assert 29 < clock.seconds < 30
    clock.on_sleep, clock.seconds = (lambda: None), 0
    third = make("c", ALL, is_shared=True)
    third.join()
    assert 120 <= clock.seconds < 121
    assert living(third) == ["c"]


def test_rejoin_returns_unless_a_conflicting_query_has_joined(make) -> None:
    first, second = make("a"), make("b")
    first.join()
    second.join()
    for suffix in ("member", "member_lock"):
        os.remove(getattr(first.paths, suffix)(first.id))
    assert not first.lease.is_held
    assert not first.lease.beat()
    assert living(second) == ["b"]
    with first.lock.hold():
        assert first.rejoin()
        assert not first.rejoin()
    assert living(second) == ["a", "b"]
    os.remove(first.paths.member_lock(first.id))
    second.leave()
    alone = make("c", ALL)
    alone.join()
    with first.lock.hold(), pytest.raises(GroupConflictError, match="assignment=all"):
        first.rejoin()


def test_beat_continues_after_an_error_of_the_lock_file(make, monkeypatch) -> None:
    """Else the thread ends, and other machines take the member for dead."""
    member = make("a")
    member.join()
    path, real = member.paths.member(member.id), os.stat

    def refuse(path: str, **more: object) -> os.stat_result:
        if str(path).endswith(".lock"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, **more)

    before = read_member(path).beat
    monkeypatch.setattr(os, "stat", refuse)
    assert member.lease.beat()
    assert read_member(path).beat == before
    monkeypatch.undo()
    assert member.lease.beat()
    assert read_member(path).beat == before + 1


def test_lease_thread_sends_heartbeats_until_the_release(make) -> None:
    member = make("a", replace(SHARED, lease_heartbeat_ms=1))
    gc.collect()  # ends the threads of earlier tests' members, which would be counted
    while any(thread.name == "rmq-spark lease" for thread in threading.enumerate()):
        time.sleep(0.001)
    before = threading.active_count()
    member.join()
    path = member.paths.member(member.id)
    while read_member(path).beat < 3:
        time.sleep(0.001)
    assert threading.active_count() == before + 1
    member.leave()
    member.leave()
    while threading.active_count() > before:
        time.sleep(0.001)
    assert files_of(member) == []


def test_lease_ends_with_its_object(make) -> None:
    member = make("a", ALL)
    member.join()
    del member
    gc.collect()
    make("b", ALL).join()


def test_lease_is_not_held_by_a_forked_child(make) -> None:
    member = make("a", ALL)
    member.join()
    child = os.fork()
    if not child:
        code = 1
        try:
            member.leave()
            with member.lock.hold():
                member.rejoin()
        except StoreError as error:
            code = 0 if "forked" in str(error) and not member.lease.is_held else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert member.lease.is_held
    assert living(member) == ["a"]
    assert json.loads(Path(member.paths.member(member.id)).read_text())["pid"] == os.getpid()


def test_is_alive_ends_for_a_stopped_process_after_its_timeout(make, clock) -> None:
    first, second = make("a"), make("b")
    first.join()
    second.join()
    for _ in range(10):
        assert living(second) == ["a", "b"]
        clock.seconds += 29
        first.lease.beat()
    for _ in range(4):
        assert living(second) == ["a", "b"]
        clock.seconds += 29.9
    assert living(second) == ["a", "b"]
    clock.seconds += 0.5
    assert living(second) == ["b"]
    assert first.lease._lock.is_held
    assert not first.lease.is_held, "the member notices the loss when it resumes"


def test_is_alive_ignores_pauses_of_the_observer(make, clock) -> None:
    first, second = make("a"), make("b")
    first.join()
    second.join()
    assert living(second) == ["a", "b"]
    clock.seconds += 100_000  # both were stopped, as in a container that was frozen
    assert living(second) == ["a", "b"]
    first.lease.beat()
    for _ in range(4):
        assert living(second) == ["a", "b"]
        clock.seconds += 29.9


def test_beat_on_a_full_disk_keeps_the_member_alive(make, clock, tmp_path: Path) -> None:
    first = Membership(GroupPaths(str(tmp_path), "g"), Disk(FullDisk()), SHARED, clock.clocks(), "a", is_shared=False)
    first.join()
    second = make("b")
    second.join()
    FullDisk.is_full = True
    for _ in range(20):
        assert living(second) == ["a", "b"]
        time.sleep(0.002)  # the kernel's clock for files is a coarse one
        assert first.lease.beat()
        clock.seconds += 29.9
    FullDisk.is_full = False


class FullDisk(SystemCalls):
    """A disk that may be full: then no file can be made."""

    is_full = False

    def create(self, path: str, size_bytes: int, **owner: Any) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        super().create(path, size_bytes, **owner)


ENDS_WHILE_ITS_THREAD_WAKES = """
import sys, threading, time
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.group.group_files import GroupPaths
from rmq_spark.store.group.membership import Clocks, Membership, MemberTerms

terms = MemberTerms("app", "q", "shared", "avg", "T")
me = Membership(GroupPaths(sys.argv[1], "g"), Disk(), terms, Clocks(wall_clock_ms, time.monotonic, time.sleep), "m")
me.join()
# Like the heartbeat thread when it wakes up just before the interpreter ends.
threading.Thread(target=me.lease._stop._cond.acquire, daemon=True).start()
time.sleep(0.1)
"""


def test_lease_does_not_keep_a_process_from_ending(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", ENDS_WHILE_ITS_THREAD_WAKES, str(tmp_path)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
