"""Paths of a group's files, and the group's lock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import LockTimeoutError, StorePathError
from rmq_spark.store.group.group_files import GroupLock, GroupPaths, list_group_names

HOLDER = """
import sys
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.group.group_files import GroupPaths, GroupLock
with GroupLock(GroupPaths(sys.argv[1], sys.argv[2]), Disk(), print).hold():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def make_turn(root: Path, group: str = "g", timeout_ms: int = 60_000) -> tuple[GroupLock, list[float]]:
    slept: list[float] = []
    return GroupLock(GroupPaths(str(root), group), Disk(), slept.append, timeout_ms), slept


def test_group_lock_is_released_after_the_body_and_after_an_error(root: Path) -> None:
    turn, slept = make_turn(root)
    with turn.hold():
        assert turn.is_held
    with pytest.raises(ZeroDivisionError), turn.hold():
        raise ZeroDivisionError
    with make_turn(root)[0].hold():
        assert not turn.is_held
    assert slept == []
    assert sorted(path.name for path in root.rglob("*")) == ["g", "groups", "rmq", "turn"]


def test_group_lock_timeout_names_the_group(root: Path) -> None:
    first, _ = make_turn(root)
    second, slept = make_turn(root, timeout_ms=1_500)
    with first.hold():
        with pytest.raises(LockTimeoutError, match=r'group "g".*turn.*1\.5 s'), second.hold():
            pytest.fail("has the turn")
        assert round(sum(slept), 3) == 1.5
        assert not second.is_held
        with make_turn(root, "another")[0].hold():
            assert first.is_held, "groups do not wait for each other"
    with second.hold():
        assert second.is_held


def test_group_lock_of_a_killed_process_is_free(root: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(root), "g"]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(LockTimeoutError), make_turn(root, timeout_ms=20)[0].hold():
            pytest.fail("has the turn")
        child.kill()
        child.wait()
        with make_turn(root)[0].hold():
            pass


@pytest.mark.parametrize("group", ["g", "%RETRY%g", "a|b", "x" * 150, "..", "y" * 200])
def test_list_group_names_reads_the_names_from_the_folders(root: Path, group: str) -> None:
    for name in ("other", group):
        with make_turn(root, name)[0].hold():
            pass
    paths = GroupPaths(str(root), group)
    assert os.path.dirname(paths.folder) == str(root / "rmq" / "groups")
    named = [group] if len(group) <= 150 else []
    assert list_group_names(str(root)) == sorted(["other", *named])
    assert len({paths.turn, paths.members, paths.claims, paths.resets, paths.published}) == 5
    assert os.path.dirname(paths.member_lock("host@1#../x")) == paths.members
    assert paths.member_lock("m")[:-5] == paths.member("m")[:-5]


def test_group_lock_names_a_file_in_place_of_a_folder(root: Path) -> None:
    (root / "rmq").mkdir()
    (root / "rmq" / "groups").write_bytes(b"")
    with pytest.raises(StorePathError, match="groups"), make_turn(root)[0].hold():
        pytest.fail("has the turn")
