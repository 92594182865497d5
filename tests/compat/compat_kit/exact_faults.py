"""Processes of `exact_program.py`, what they print, a judge of what is stored, and the end of a log that is written.

writer = Program(servers, folder, "write_batch", topic="T", batch=0, rows=100)
assert not writer.result()["error"]
"""

import json
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from compat_kit.clusters import FourServers
from compat_kit.rocketmq import Broker
from compat_kit.sessions import kill_session
from rmq_spark.store.format.record import Blank, Record, decode_record

Event = dict[str, Any]
_PROGRAM = Path(__file__).with_name("exact_program.py")
_LIMIT_S = 300.0  # the end of a hang
_CHUNK_BYTES = 2 << 20  # more than the largest record
_numbers = count()


class Program:
    """A function of `exact_program.py` in a process of its own. Left: it was killed."""

    def __init__(self, servers: FourServers, folder: Path, how: str, **arguments: object) -> None:
        place = folder / f"{next(_numbers):03}-{how}"
        self._log, self._errors, self._target = (place.with_suffix(end) for end in (".log", ".errors", ".pickle"))
        command = [*servers.java.network.prefix, sys.executable, "-P", str(_PROGRAM), how]
        with self._log.open("wb") as output, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, servers.address, str(self._target)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        self._write(pickle.dumps(arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kill_session(self.process)
        assert self.process.stdin
        self.process.stdin.close()

    def _write(self, data: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def go_on(self) -> None:
        """Let a process continue that waits at its moment."""
        self._write(b"\n")

    def events(self, name: str = "") -> list[Event]:
        """Return what was printed so far: all events, or those of one name."""
        lines = self._log.read_bytes().split(b"\n")[:-1]  # the last one may be incomplete
        return [one for one in map(json.loads, lines) if name in ("", one["event"])]

    def await_event(self, name: str) -> Event:
        """Return the first event of a name. Raises RuntimeError if the process ends without it, or hangs."""
        until = time.monotonic() + _LIMIT_S
        while True:
            has_ended = self.process.poll() is not None
            if found := self.events(name):
                return found[0]
            if has_ended or time.monotonic() > until:
                raise RuntimeError(f"no event {name!r} of {self._log}: {self.events()} {self._complaint()}")
            time.sleep(0.005)

    def await_death(self) -> Event:
        """Return the moment at which the process has killed itself, when it has ended."""
        found = self.await_event("moment")
        self.process.wait(_LIMIT_S)
        return found

    def result(self) -> Any:
        """Return what the function returned. Raises RuntimeError if it has failed."""
        self.process.wait(_LIMIT_S)
        if self.process.returncode:
            raise RuntimeError(f"{self._log}: {self._complaint()}")
        return pickle.loads(self._target.read_bytes())

    def _complaint(self) -> str:
        return self._errors.read_text(errors="replace")[-6000:]


def run(servers: FourServers, folder: Path, how: str, **arguments: object) -> Any:
    """Return what a function of `exact_program.py` returns."""
    with Program(servers, folder, how, **arguments) as program:
        return program.result()


def run_command(servers: FourServers, *words: str) -> tuple[int, str]:
    """Return the exit status of a command of `rmq` for the cluster, and what it printed."""
    command = [*servers.java.network.prefix, sys.executable, "-P", "-m", "rmq_spark.command", *words]
    done = subprocess.run(
        [*command, "-n", servers.address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


Found = Mapping[tuple[str, int], list[tuple[int, str]]]


def find_faults(
    found: Found, batches: Mapping[int, int], damaged: Mapping[tuple[str, int], set[int]] | None = None
) -> list[str]:
    """Return what is wrong with the messages of a topic, in which each row of each batch must be once and in order.

    `found` is what `read_texts` returns, `batches` has the number of rows of each batch. `damaged` has the queue
    offsets of copies of rows that do not count, by broker and queue id.
    """
    faults = []
    counts: Counter[str] = Counter()
    for place, rows in found.items():
        texts = [text for offset, text in rows if offset not in (damaged or {}).get(place, ())]
        counts.update(texts)
        faults += [f"{place}: {later} after {text}" for text, later in pairwise(texts) if later <= text]
    wanted = Counter(f"{batch:03}-{number:07}" for batch, rows in batches.items() for number in range(rows))
    for name, rest in (("missing", wanted - counts), ("doubled or foreign", counts - wanted)):
        if rest:
            faults.append(f"{rest.total()} {name}: {sorted(rest)[:3]}")
    return faults


class LogEnd:
    """The end of the commit log of a broker, while the broker writes it. Records that it has now are skipped."""

    def __init__(self, broker: Broker) -> None:
        self._folder = broker.store / "commitlog"
        self._at = min(self._files(), default=0)
        self.find_cut("")

    def find_cut(self, topic: str) -> Record | None:
        """Return the last record if it is of a topic and its properties end in the middle. Else return None.

        Stop the broker meanwhile: then this is what a kill would leave.
        """
        last = None
        for at, record in self._records(self._at):
            self._at, last = at, record
        if last is None or not last.properties.endswith(b"\0") or last.topic != topic.encode():
            return None
        return last if last.crc_matches else None

    def _files(self) -> list[int]:
        return [int(path.name) for path in self._folder.iterdir() if path.name.isdigit()]

    def _records(self, at: int) -> Iterator[tuple[int, Record]]:
        """Yield all records from a physical offset on, with their offsets."""
        while True:
            begin = max((file for file in self._files() if file <= at), default=None)
            if begin is None:
                return  # the broker has stored nothing yet
            with (self._folder / f"{begin:020}").open("rb") as file:
                file.seek(at - begin)
                data = memoryview(file.read(_CHUNK_BYTES))
                size = os.fstat(file.fileno()).st_size
            first = at
            while isinstance(found := decode_record(data[at - first :]), Record):
                yield at, found
                at += found.total_size
            if isinstance(found, Blank):
                at = begin + size
            if at == first:
                return


def stop_all_threads(pid: int) -> None:
    """Wait until all threads of a process that got SIGSTOP have stopped."""
    until = time.monotonic() + _LIMIT_S
    while time.monotonic() < until:
        states = [_state(thread) for thread in Path(f"/proc/{pid}/task").iterdir()]
        if all(state in "tTZX" for state in states):
            return
    raise RuntimeError(f"process {pid} does not stop: {states}")


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "X"  # it has ended


def milliseconds(begin: float, end: float) -> str:
    """Return the time between two times in s, for people."""
    return f"{(end - begin) * 1000:.0f} ms"
