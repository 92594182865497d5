"""Ctrl-C at any moment: the work is complete or was not done, and the next call continues."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.command.all_commands import keep_interrupts

Rmq = Callable[..., Any]
Process = Callable[..., "subprocess.Popen[bytes]"]
COUNT = 70_000  # more than one commit of an import


def interrupted_at(call: int) -> Callable[..., Any]:
    """Return a progress bar that raises KeyboardInterrupt at that call."""

    @contextmanager
    def progress(what: str, unit: str = "bytes") -> Iterator[Callable[[int, int], None]]:
        calls = iter(range(1, 1_000_000))

        def note(done: int, total: int) -> None:
            if next(calls) == call:
                raise KeyboardInterrupt

        yield note

    return progress


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one topic of many messages, and them as a file."""
    path = tmp_path_factory.mktemp("many")
    with rmq_spark.open_store(path / "store", segment_bytes=1 << 26) as store:
        store.send_many(pa.table({"body": [f"body {number}" for number in range(COUNT)]}), topic="orders")
    rmq_spark.export_parquet(path / "store", path / "m.parquet")
    return path


@pytest.mark.parametrize(("call", "count"), [(1, "0"), (2, "65,536"), (3, "70,000")])
def test_an_import_goes_on_where_ctrl_c_came(
    rmq: Rmq, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, count: str
) -> None:
    store = tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr("rmq_spark.command.export_import.progress", interrupted_at(call))
        ran = rmq("import", store, many / "m.parquet")
    assert ran.status == 130
    assert f"At least {count} of 70,000 messages are in the store. Repeat the command" in ran.err
    assert rmq("import", store, many / "m.parquet").status == 0
    bodies = [row["body"] for row in rmq("cat", store, "orders", "--columns", "body", "--json").rows]
    assert sorted(bodies) == sorted(f"body {number}" for number in range(COUNT))
    assert rmq("check", store).status == 0


def test_an_export_leaves_nothing_when_ctrl_c_comes(
    rmq: Rmq, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.command.export_import.progress", interrupted_at(1))
    file = tmp_path / "m.parquet"
    assert rmq("export", many / "store", file).status == 130
    assert list(tmp_path.iterdir()) == []
    file.write_text("before")
    assert rmq("export", many / "store", file, "--overwrite").status == 130
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", ["check", "repair"])
def test_a_check_is_stopped_and_nothing_was_changed(
    rmq: Rmq, store: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("rmq_spark.command.check_repair.progress", interrupted_at(1))
    ran = rmq(name, store)
    assert ran.status == 130
    assert ("stopped" in ran.err) is (name == "repair")
    assert not (store / "rmq").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["rmq/settings.json", "rmq/staging/*", "rmq/intents/*", "commitlog/*"])
def test_a_signal_in_the_middle_of_an_import_harms_nothing(
    rmq: Rmq, process: Process, many: Path, tmp_path: Path, mark: str
) -> None:
    store = tmp_path / "store"
    started = process("import", store, many / "m.parquet")
    wait(lambda: any(store.glob(mark)) or started.poll() is not None)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode in (0, 130, -signal.SIGINT), said  # -SIGINT: after the end of the command
    assert b"Traceback" not in said
    assert rmq("import", store, many / "m.parquet").status == 0
    assert messages(rmq, store) == COUNT
    assert rmq("check", store).status == 0


def test_lines_that_were_sent_stay_sent_and_are_counted(rmq: Rmq, process: Process, store: Path) -> None:
    started = process("send", store, "orders", "--lines")
    assert started.stdin is not None
    lines = b"".join(b"line %d\n" % number for number in range(500))
    for count in (1670, 2170):  # the first 500 have been acknowledged when the others arrive
        started.stdin.write(lines)
        started.stdin.flush()
        wait(lambda count=count: messages(rmq, store) >= count)
    started.stdin.write(b"no end yet")
    started.stdin.flush()
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130
    assert re.search(rb"^(500|1,000) messages were sent before\.$", said, re.MULTILINE), said
    assert b"Traceback" not in said
    assert messages(rmq, store) == 2170, "whole lines only"
    assert rmq("send", store, "orders", "one more").status == 0
    assert rmq("check", store).status == 0
    assert not (store / "abort").exists()


def messages(rmq: Rmq, store: Path) -> int:
    """Return how many messages the topic orders has."""
    return sum(row["messages"] for row in rmq("queues", store, "orders", "--json").rows)


def wait(until: Callable[[], bool]) -> None:
    """Wait until it is so."""
    end = time.monotonic() + 30
    while not until():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_keep_interrupts_ends_a_command_whose_interrupt_came_in_a_finalizer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropped:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    def drop_one_and_go_on() -> None:
        dropped = Dropped()
        del dropped
        time.sleep(60)  # ends a hang

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = signal.getsignal(signal.SIGALRM)
    keep_interrupts()
    try:
        with pytest.raises(KeyboardInterrupt):
            drop_one_and_go_on()
    finally:
        signal.signal(signal.SIGALRM, before)
