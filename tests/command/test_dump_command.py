"""`rmq dump`: any file of a store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Rmq = Callable[..., Any]


def test_every_file_of_a_store_is_shown_with_positions(rmq: Rmq, demo: Path) -> None:
    for path in sorted(demo.rglob("*")):
        if path.is_file():
            ran = rmq("dump", path, "-n", 3, "--json")
            assert ran.status == 0, (path, ran.err)
            assert all(list(row)[:2] == ["position", "entry"] for row in ran.rows), path
            assert rmq("dump", path, "-n", 3).status == 0


def test_as_text_it_says_where_to_go_on(rmq: Rmq, demo: Path) -> None:
    log = demo / "commitlog" / "00000000000000000000"
    ran = rmq("dump", log, "-n", 2)
    assert [line.split()[0] for line in ran.out.splitlines()[1:]] == ["0", "377"]
    assert "--position 752" in ran.err
    assert rmq("dump", log, "-n", 1, "--position", 752, "--json").rows[0]["physicalOffset"] == 752


def test_a_position_within_a_record_is_not_just_called_damage(rmq: Rmq, demo: Path) -> None:
    log = demo / "commitlog" / "00000000000000000000"
    first, second = rmq("dump", log, "--position", 100, "-n", 2, "--json").rows
    assert (first["entry"], first["size"]) == ("damage", 277)
    assert first["found"].startswith("position 100 may be within a record; ")
    assert (second["entry"], second["position"], second["found"]) == ("record", 377, None)


def test_an_empty_file_is_called_empty(rmq: Rmq, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "abort").touch()
    assert rmq("dump", tmp_path / "abort").err == "The file is empty.\n"
    assert "No entries at or after position 1048576" in rmq("dump", demo / "checkpoint", "--position", 1 << 20).err


def test_a_kind_that_is_none_is_answered_with_those_that_are(rmq: Rmq, demo: Path) -> None:
    ran = rmq("dump", demo / "checkpoint", "--kind", "x")
    assert ran.status == 1
    assert "commitlog, consumequeue" in ran.err


def test_a_folder_is_answered_with_files_of_a_store(rmq: Rmq, demo: Path) -> None:
    ran = rmq("dump", demo)
    assert ran.status == 2
    assert f"{demo} is a folder; expected one file, such as STORE/commitlog/00000000000000000000" in ran.err
    assert "`rmq check STORE` reads all files of a store." in ran.err
