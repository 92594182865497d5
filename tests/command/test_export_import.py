"""`rmq export` and `rmq import`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Rmq = Callable[..., Any]


def test_what_is_exported_can_be_imported_each_once(rmq: Rmq, demo: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "m.parquet", tmp_path / "other"
    (row,) = rmq("export", demo, file, "--topic", "orders", "--topic", "payments", "--json").rows
    assert row == {"path": str(file), "messages": 1469, "bytes": file.stat().st_size, "topics": ["orders", "payments"]}
    rmq("create", other, "--segment-bytes", "1m")
    assert (
        "1,469 messages appended, 0 skipped as imported before. Topics: orders, payments."
        in rmq("import", other, file).err
    )
    (row,) = rmq("import", other, file, "--json").rows
    assert (row["messages"], row["skipped"]) == (0, 1469)
    one, two = (
        [(row["queueId"], row["tags"], row["keys"], row["body"]) for row in rmq("cat", at, "orders", "--json").rows]
        for at in (demo, other)
    )
    assert sorted(one) == sorted(two)
    assert rmq("import", other, file, "--topic", "all", "--name", "second", "--spread").status == 0
    assert len(rmq("cat", other, "all", "--json").rows) == 1469


def test_an_import_says_which_columns_of_an_export_the_file_lacks(rmq: Rmq, demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.parquet"
    rmq("cat", demo, "orders", "--last", 3, "--format", "parquet", "-o", file)
    ran = rmq("import", tmp_path / "new", file)
    assert "lacks columns that `rmq export` writes: physicalTopic, properties, flag. " in ran.err
    assert "3 messages appended" in ran.err
    rmq("cat", demo, "orders", "--format", "parquet", "-o", tmp_path / "n", "--columns", "body,flag,properties")
    assert "lacks" not in rmq("import", tmp_path / "new", tmp_path / "n", "--topic", "a", "--spread").err
    rmq("export", demo, tmp_path / "all", "--topic", "orders")
    assert "lacks" not in rmq("import", tmp_path / "new", tmp_path / "all").err


def test_times_and_columns_are_chosen(rmq: Rmq, demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.parquet"
    words = ("--topic", "payments", "--from", "2026-11-21T05:50:34Z", "--columns", "keys, body")
    assert "messages of payments written to" in rmq("export", demo, file, *words).err
    table = pq.read_table(file)
    assert table.column_names == ["keys", "body"]
    assert 0 < table.num_rows < 299


def test_a_file_that_is_there_is_kept_unless_it_is_said(rmq: Rmq, demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.parquet"
    file.write_text("mine")
    ran = rmq("export", demo, file)
    assert ran.status == 2
    assert "--overwrite" in ran.err
    assert file.read_text() == "mine"
    assert rmq("export", demo, file, "--overwrite").status == 0
    assert pq.read_table(file).num_rows == 1493


def test_a_folder_that_cannot_be_written_to_is_named(
    rmq: Rmq, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write everywhere
    ran = rmq("export", demo, tmp_path / "m.parquet")
    assert ran.status == 2
    assert f"the folder {tmp_path} is not writable" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_parquet_file_or_no_store_is_refused(rmq: Rmq, demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.parquet"
    file.write_text("mine")
    assert rmq("import", demo, file).status == 1
    assert rmq("import", demo, tmp_path / "none").status == 2
    assert rmq("export", tmp_path / "none", tmp_path / "x").status == 1
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "x").exists()


def test_errors_name_the_options_that_an_import_has(rmq: Rmq, demo: Path, tmp_path: Path) -> None:
    source, store = tmp_path / "a.parquet", tmp_path / "store"
    pq.write_table(pa.table({"body": ["x"], "topic": pa.array([None], pa.string())}), source)
    for words, says in (([], "Give --topic, or a file"), (["--name", ""], "--name '' must be a text")):
        ran = rmq("import", store, source, *words)
        assert ran.status == 1
        assert says in ran.err
        assert "None" not in ran.err
    pq.write_table(pa.table({"body": ["x"], "topic": ["t"], "queueId": pa.array([7], pa.int32())}), source)
    assert rmq("create", store, "t", "--queues", "1").status == 0
    assert "or a topic of its own (--topic)" in rmq("import", store, source).err
