"""`rmq cat --format` and `--output`: contents of the file, and when it appears."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rmq_spark

Rmq = Callable[..., Any]


def test_parquet_and_arrow_have_the_columns_of_the_source(rmq: Rmq, demo: Path, tmp_path: Path) -> None:
    for form, read in (("parquet", pq.read_table), ("arrow", lambda path: pa.ipc.open_stream(path).read_all())):
        path = tmp_path / f"orders.{form}"
        ran = rmq("cat", demo, "orders", "--columns", "*", "--format", form, "--output", path)
        assert (ran.status, ran.err) == (0, f"1,170 messages written to {path}.\n")
        table = read(path)
        assert table.num_rows == 1170
        assert dict(zip(table.schema.names, table.schema.types, strict=True)) == rmq_spark.COLUMNS


@pytest.mark.parametrize("form", ["parquet", "arrow", "json", "text"])
def test_a_file_without_a_message_is_a_whole_file(rmq: Rmq, demo: Path, tmp_path: Path, form: str) -> None:
    path = tmp_path / "none"
    assert rmq("cat", demo, "orders", "--last", 0, "--format", form, "-o", path).status == 0
    if form == "parquet":
        assert pq.read_table(path).num_rows == 0
    elif form == "arrow":
        assert pa.ipc.open_stream(path).read_all().num_rows == 0
    else:
        assert path.read_text() == {"json": "[]\n", "text": ""}[form]


def test_a_file_stays_as_it_was_until_the_new_one_is_whole(
    rmq: Rmq, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "orders.json"
    path.write_text("before")
    wanted = "rmq_spark.command.message_output.rows_of"
    with monkeypatch.context() as patch:
        patch.setattr(wanted, lambda table: (_ for _ in ()).throw(KeyboardInterrupt))
        assert rmq("cat", demo, "orders", "--json", "-o", path).status == 130
    assert path.read_text() == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["orders.json"]
    assert rmq("cat", demo, "orders", "--json", "-o", path).status == 0
    assert len(json.loads(path.read_text())) == 1170
    assert [one.name for one in tmp_path.iterdir()] == ["orders.json"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Events in their order: calls of the progress bar, its end, and lines written."""
    told: list[Any] = []

    @contextmanager
    def progress(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: told.append((done, total))
        told.append("end")

    monkeypatch.setattr("rmq_spark.command.messages.progress", progress)
    monkeypatch.setattr("rmq_spark.command.message_output._Text.put", lambda out, table: told.append("lines"))
    return told


@pytest.mark.parametrize(
    ("words", "total"),
    [((), 1170), (("--tags", "nothing-has-it"), 1170), (("--tags", "paid", "--last", 9), None)],
)
def test_the_bar_of_a_file_goes_to_its_end(
    rmq: Rmq, demo: Path, tmp_path: Path, events: list[Any], words: tuple[object, ...], total: int | None
) -> None:
    assert rmq("cat", demo, "orders", "-o", tmp_path / "f", *words).status == 0
    told = [event for event in events if isinstance(event, tuple)]
    assert told == sorted(told)
    assert {of for _, of in told} == {total or told[0][1]}
    assert told[-1][0] == told[-1][1]
    assert events[-1] == "end"


def test_the_bar_of_a_file_ends_at_the_limit(rmq: Rmq, demo: Path, tmp_path: Path, events: list[Any]) -> None:
    assert rmq("cat", demo, "orders", "-o", tmp_path / "f", "--limit", 1000).status == 0
    told = [event for event in events if isinstance(event, tuple)]
    assert {of for _, of in told} == {1000}
    assert 0 < told[-1][0] <= 1000


def test_the_bar_is_gone_when_there_is_something_to_read(rmq: Rmq, demo: Path, events: list[Any]) -> None:
    assert rmq("cat", demo, "orders", "--tags", "paid").status == 0
    assert events.index("end") < events.index("lines")
    assert events.count("end") == 1
    events.clear()
    rmq("cat", demo, "orders", "--follow", "--limit", 1)
    assert events == ["lines"]


def test_a_folder_that_is_not_there_or_a_device_is_refused(rmq: Rmq, demo: Path, tmp_path: Path) -> None:
    for path, text in (
        (tmp_path / "a" / "b", "does not exist"),
        ("/dev/null", "not a regular"),
        (tmp_path, "not a regular"),
    ):
        ran = rmq("cat", demo, "orders", "-o", path)
        assert ran.status == 2
        assert text in ran.err


def test_a_dash_is_standard_output(rmq: Rmq, demo: Path) -> None:
    assert len(rmq("cat", demo, "orders", "--json", "-o", "-").rows) == 1170


def test_a_time_that_no_date_can_say_is_its_number(rmq: Rmq) -> None:
    from rmq_spark.command.output import json_line, rows_of

    table = pa.table({"t": pa.array([0, 2**62, None], pa.timestamp("us", tz="UTC"))})
    assert [json_line(row) for row in rows_of(table)] == [
        '{"t": "1970-01-01T00:00:00.000Z"}',
        '{"t": "4611686018427387 ms"}',
        '{"t": null}',
    ]


@pytest.mark.parametrize("target", ["commitlog/00000000000000000000", "checkpoint", "abort"])
def test_what_is_read_is_not_written_over(rmq: Rmq, store: Path, target: str) -> None:
    before = {one: one.read_bytes() for one in store.rglob("*") if one.is_file()}
    ran = rmq("cat", store, "orders", "-o", store / target)
    assert ran.status == 1
    assert "is inside the store" in ran.err
    assert {one: one.read_bytes() for one in store.rglob("*") if one.is_file()} == before


def test_an_error_of_a_file_names_the_file_of_the_user(
    rmq: Rmq, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(out: Any, table: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "orders.txt"
    with monkeypatch.context() as patch:
        patch.setattr("rmq_spark.command.message_output._Text.put", fail)
        ran = rmq("cat", demo, "orders", "-o", path)
    expected = f"rmq cat: {path}: cannot be written: No space left on device. An existing file is unchanged\n"
    assert (ran.status, ran.err) == (1, expected)

    def refuse(source: str, target: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), source, None, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", refuse)
        ran = rmq("cat", demo, "orders", "-o", path)
    assert ran.err == f"rmq cat: {path}: cannot be written: Permission denied. An existing file is unchanged\n"


@pytest.mark.parametrize("option", ["--tags", "--sql92"])
@pytest.mark.parametrize("command", ["cat", "count"])
def test_an_empty_filter_is_refused(rmq: Rmq, demo: Path, command: str, option: str) -> None:
    ran = rmq(command, demo, "orders", option, " ")
    assert ran.status == 2
    assert f"'{option}': found an empty text; expected" in ran.err
    assert ran.out == ""
