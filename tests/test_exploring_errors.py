"""Walks the table of docs/ERRORS.md about looking, checking and moving: every row, with its class and its message."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rmq_spark

ROOT = Path(__file__).resolve().parent.parent
HEAD = "## Errors of inspection, check, repair, export and import\n"
HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "r+b")
fcntl.lockf(lock, fcntl.LOCK_EX, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""


def read_table() -> dict[str, tuple[str, list[str]]]:
    """Return the class and the pieces of the message of each situation."""
    section = (ROOT / "docs" / "ERRORS.md").read_text().split(HEAD)[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
    return {situation: (name, re.findall(r"`([^`]+)`", says)) for situation, name, says in rows}


class Case:
    """A store with a topic `orders` of 4 queues, a message in each, and room beside it."""

    def __init__(self, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self.monkeypatch = room, monkeypatch
        self.store = room / "store"
        self.file = room / "file.parquet"
        with rmq_spark.open_store(self.store, segment_bytes=1 << 20) as messages:
            messages.send_many(pa.table({"body": ["x" * 100] * 4}), topic="orders")

    def with_a_spoilt_body(self) -> "Case":
        """Spoil the body of the second message, where only a cut helps."""
        (log,) = (self.store / "commitlog").iterdir()
        data = bytearray(log.read_bytes())
        second = data.index(b"x" * 100, data.index(b"x" * 100) + 100)
        data[second : second + 4] = b"spoi"
        log.write_bytes(data)
        return self

    def planned_too_early(self) -> None:
        shutil.rmtree(self.store / "consumequeue" / "orders" / "0")
        plan = rmq_spark.plan_repair(self.store)
        with rmq_spark.open_store(self.store) as messages:
            messages.send("payments", "to another topic")
        rmq_spark.repair(plan)

    def send(self) -> None:
        with rmq_spark.open_store(self.store) as messages:
            messages.send("orders", "one more")

    def exported(self) -> Path:
        rmq_spark.export_parquet(self.store, self.file)
        return self.file

    def import_table(self, table: pa.Table, name: str | None = None) -> None:
        pq.write_table(table, self.room / "table.parquet")
        rmq_spark.import_parquet(self.store, self.room / "table.parquet", name=name)

    def import_into_fewer_queues(self) -> None:
        rmq_spark.create_store(self.room / "small", topics={"orders": 1}, segment_bytes=1 << 20)
        rmq_spark.import_parquet(self.room / "small", self.exported())

    def import_twice_by_one_name(self) -> None:
        self.import_table(pa.table({"body": ["one", "two"], "topic": ["a", "a"]}), "nightly")
        self.import_table(pa.table({"body": ["one"], "topic": ["a"]}), "nightly")

    def import_beside_another(self) -> None:
        source = self.exported()
        lock = [sys.executable, "-c", HOLDER, str(self.store / "lock")]
        with subprocess.Popen(lock, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            try:
                rmq_spark.import_parquet(self.store, source, lock_timeout_ms=100)
            finally:
                holder.stdin.close()

    def lacking(self, module: str) -> "Case":
        self.monkeypatch.setitem(sys.modules, module, None)
        return self

    def reader(self) -> "rmq_spark.StoreReader":
        opened = rmq_spark.open_reader(self.store)
        opened.refresh()
        return opened

    def unknown_file(self) -> Path:
        (self.room / "what").write_bytes(b"?")
        return self.room / "what"


PROVOKE: dict[str, Callable[[Case], object]] = {
    "a check of a folder that is not a store": lambda case: rmq_spark.check(case.room),
    "a repair that costs messages": lambda case: rmq_spark.repair(
        rmq_spark.plan_repair(case.with_a_spoilt_body().store, cut_log=True)
    ),
    "an outdated plan": Case.planned_too_early,
    "a dump of a folder": lambda case: rmq_spark.dump(case.store),
    "a dump of a file of an unknown name": lambda case: rmq_spark.dump(case.unknown_file()),
    "a dump of an unknown kind": lambda case: rmq_spark.dump(case.unknown_file(), kind="log"),
    "an export to an existing file": lambda case: rmq_spark.export_parquet(case.store, case.exported()),
    "an export to a missing folder": lambda case: rmq_spark.export_parquet(case.store, case.room / "no/f"),
    "an export of a missing topic": lambda case: rmq_spark.export_parquet(case.store, case.file, topics=["order"]),
    "an export of an unknown column": lambda case: rmq_spark.export_parquet(case.store, case.file, columns=["bodi"]),
    "an import of a file that is not Parquet": lambda case: rmq_spark.import_parquet(case.store, case.unknown_file()),
    "an import without bodies": lambda case: case.import_table(pa.table({"topic": ["a"]})),
    "an import into a topic of fewer queues": Case.import_into_fewer_queues,
    "an import of another file under the same name": Case.import_twice_by_one_name,
    "an import into a locked store": Case.import_beside_another,
    "a message at a missing offset": lambda case: case.reader().message(case.reader().queues("orders")[0], 9),
    "the lag of a missing group": lambda case: case.reader().lag("billing"),
    "a plot of a position after the log's end": lambda case: rmq_spark.plot_segment(case.store, 1 << 40),
    "a plot of an unknown value": lambda case: rmq_spark.plot_over_time(case.store, what="size"),
    "a plot without matplotlib": lambda case: rmq_spark.plot_delay(case.lacking("matplotlib").store),
    "a table without pandas": lambda case: case.lacking("pandas").reader().summary().to_pandas(),
}


def test_the_table_and_this_test_name_the_same_situations() -> None:
    assert list(read_table()) == list(PROVOKE)


@pytest.mark.parametrize("situation", PROVOKE)
def test_an_error_is_as_the_table_says(situation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if situation.startswith("a plot of"):
        pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    name, pieces = read_table()[situation]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        PROVOKE[situation](Case(tmp_path, monkeypatch))
    assert type(caught.value).__name__ == name, repr(caught.value)
    for piece in pieces:
        assert piece in str(caught.value), f"{piece!r} is not in: {caught.value}"
