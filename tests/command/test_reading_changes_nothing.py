"""Read-only commands leave a store unchanged: bytes, times of files, and the list of files."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LOOKING = [
    ("topics",),
    ("topics", "--all", "--json"),
    ("queues",),
    ("groups",),
    ("lag",),
    ("lag", "billing", "--json"),
    ("cat", "orders", "payments"),
    ("cat", "orders", "--last", "3", "--tags", "paid", "--json"),
    ("get", "--key", "O-1010"),
    ("get", "--topic", "orders", "--queue", "0", "--offset", "1", "--json"),
    ("dlq", "list"),
    ("dlq", "list", "audit", "--json"),
    ("export", "{tmp}/m.parquet"),
    ("check",),
    ("check", "--json"),
    ("repair", "--dry-run"),
]


def state(path: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for one in [path, *path.rglob("*")]:
        status = os.stat(one)
        found[str(one)] = (status.st_mtime_ns, status.st_ctime_ns, status.st_size)
    return found


@pytest.mark.parametrize("name", ["demo", "crashed", "livekill533"])
def test_a_command_that_looks_writes_nothing(
    rmq: Callable[..., Any], tmp_store: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    path = tmp_store(name)
    before = state(path)
    for first, *words in LOOKING:
        at = 1 if first == "dlq" else 0
        words.insert(at, str(path))
        ran = rmq(first, *(word.format(tmp=tmp_path / "..") for word in words))
        assert ran.status in (0, 1, 3), (first, ran.err)
        assert state(path) == before, f"rmq {first} {words}"
        (tmp_path / ".." / "m.parquet").unlink(missing_ok=True)
    for file in [one for one in path.rglob("*") if one.is_file()]:
        assert rmq("dump", file).status in (0, 1)
    assert state(path) == before
