"""Members of a group, each a process of its own, and RocketMQ's own admin tool.

`JavaMember` is a push consumer, `QueryMember` a streaming query of ours. Each writes a ledger of what it consumes. The
ledger of a member that was killed is complete too.
"""

import json
import os
import re
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from compat_kit.rocketmq import Java, Line, Program, option_text
from compat_kit.sessions import kill_session, processes_of, signal_all

_KIT = Path(__file__).parent
_MQ_DETAIL = re.compile(r"^(\S+) +(\S+) +(\d+) +ProcessQueueInfo", re.MULTILINE)


class Place(NamedTuple):
    """A queue: the name of its broker, and its id there."""

    broker: str
    queue_id: int


@dataclass(frozen=True, slots=True)
class Consumed:
    """A message that a member consumed, between two times in ms since 1970.

    A query reads it between these times, with its batch. A Java consumer begins with it at both.
    """

    place: Place
    offset: int
    body: str
    from_ms: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class Owned:
    """The queues that a Java member has from a time on, in ms since 1970; orderly ones while they are locked."""

    at_ms: int
    places: frozenset[Place]


class Member(ABC):
    """A member of a group. Entered: it was started. Left: it left the group in order, or was killed.

    It may start again, with the same ledger.
    """

    def __init__(self, name: str, ledger: Path) -> None:
        self.name, self.ledger = name, ledger

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    @abstractmethod
    def start(self) -> None:
        """Start it, and wait until it runs."""

    @abstractmethod
    def stop(self) -> None:
        """Have it leave in order."""

    @abstractmethod
    def kill(self) -> None:
        """kill -9, whatever its state."""

    @abstractmethod
    def freeze(self) -> None:
        """Stop its processes. Their connections stay."""

    @abstractmethod
    def thaw(self) -> None:
        """Let its processes continue."""

    @abstractmethod
    def consumed(self) -> list[Consumed]:
        """Return the messages that it consumed so far, in order, those of earlier processes too."""

    @abstractmethod
    def exit_status(self) -> int | None:
        """Return the exit status of its process, None while it runs or before it was started."""

    def lines(self) -> list[Line]:
        """Return the complete lines of the ledger: see `read_lines`."""
        return read_lines(self.ledger)


class JavaMember(Member):
    """A push consumer. `address` is the value of namesrvAddr, and `client_id` its id since it was started.

    `options` are those of `java/src/Member.java`: expr, exprType, orderly, sleepMs, threads, from, failMark,
    maxReconsumeTimes, pop.
    """

    def __init__(
        self, java: Java, address: str, ledger: Path, *, group: str, topic: str, name: str, **options: object
    ) -> None:
        super().__init__(name, ledger)
        given = {"namesrv": address, "group": group, "topic": topic, "name": name, "ledger": ledger, **options}
        self._java, self._topic = java, topic
        self._options = [part for key, value in given.items() for part in (f"--{key}", option_text(value))]
        self._program: Program | None = None
        self.client_id = ""

    def start(self) -> None:
        """Start it, and wait until it runs: it is registered at the brokers that it knows."""
        end_line(self.ledger)
        self._program = self._java.start("member", self._options)
        ready = self._program.read()
        self.client_id, self._pid = ready["clientId"], ready["pid"]

    def stop(self) -> None:
        """Have it leave in order: it commits its offsets and tells the brokers."""
        assert self._program
        self._program.end()

    def kill(self) -> None:
        """kill -9, whatever its state."""
        if self._program is not None and self._program.process.poll() is None:
            self._program.kill()

    def freeze(self) -> None:
        """Stop its process. Its connections stay."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let its process continue."""
        os.kill(self._pid, signal.SIGCONT)

    def exit_status(self) -> int | None:
        """Return the exit status of its process, None while it runs or before it was started."""
        return None if self._program is None else self._program.process.poll()

    def consumed(self) -> list[Consumed]:
        """Return the messages of its topic that it consumed so far, in order, those of earlier processes too."""
        return _consumed_of(self.lines(), self._topic)

    def owned(self) -> list[Owned]:
        """Return the queues of its topic that it had, in the order of the times from which it had them."""
        return _owned_of(self.lines(), self._topic)


class QueryMember(Member):
    """A streaming query, in a process of its own with all that Spark starts.

    `options` are those of the source. `kind` is one of `group_query.py`.
    """

    def __init__(
        self, java: Java, address: str, folder: Path, options: Mapping[str, str], *, name: str, kind: str = "spark"
    ) -> None:
        super().__init__(name, folder / f"{name}.ledger")
        self._folder = folder
        arguments = [str(self.ledger), address, str(folder / f"{name}.checkpoint")]
        arguments += [json.dumps({"queryName": name, **options}), kind]
        program = [sys.executable, "-P", "-m", f"{_KIT.name}.group_query"]
        self._command = [*java.network.prefix, "env", f"PYTHONPATH={_KIT.parent}", *program, *arguments]
        self._process: subprocess.Popen[str] | None = None
        self._lives = 0

    @property
    def log(self) -> Path:
        """What Spark and the product have logged in its last life."""
        return self._folder / f"{self.name}-{self._lives}.log"

    def start(self) -> None:
        """Start it, from its checkpoint if it has one, and wait until the query runs."""
        end_line(self.ledger)
        self._lives += 1
        self._said = ""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._await("ready")

    def stop(self) -> None:
        """Stop the query. Raises RuntimeError with its error if it has failed."""
        assert self._process
        assert self._process.stdin
        self._process.stdin.close()
        self._await("left")
        self.kill()

    def _await(self, event: str) -> None:
        assert self._process
        assert self._process.stdout
        line = self._process.stdout.readline()
        said = json.loads(line) if line else {"event": "ended"}
        if said["event"] != event:
            raise RuntimeError(f"query {self.name}: {said}\n{self.log.read_text(errors='replace')[-4000:]}")

    def kill(self) -> None:
        """Kill all of its processes, whatever their state."""
        if self._process is not None:
            kill_session(self._process)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe
                pipe.close()

    def freeze(self) -> None:
        """Stop all of its processes."""
        assert self._process
        signal_all(processes_of(self._process.pid), signal.SIGSTOP)

    def thaw(self) -> None:
        """Let all of its processes continue."""
        assert self._process
        signal_all(processes_of(self._process.pid), signal.SIGCONT)

    def check(self) -> None:
        """Raise RuntimeError with its error if the query has ended by itself."""
        if (error := self.error()) is not None:
            raise RuntimeError(f"query {self.name} failed: {error}")

    def error(self) -> str | None:
        """Return the error with which the query has ended by itself, with the end of its log. None if it has not."""
        if self._process is None or self._process.poll() in (None, -signal.SIGKILL, 0):
            return None
        if not self._said:
            assert self._process.stdout
            self._said = self._process.stdout.readline()
        return f"{self._said}\n{self.log.read_text(errors='replace')[-4000:]}"

    def exit_status(self) -> int | None:
        """Return the exit status of its first process, None while it runs or before it was started."""
        return None if self._process is None else self._process.poll()

    def consumed(self) -> list[Consumed]:
        """Return the messages of its batches so far, in order, those of earlier processes too."""
        return _batches_of(self.lines())

    def calls(self) -> list[Line]:
        """Return the calls of the listener of a query of the kind `listening`, in order."""
        return [line for line in self.lines() if line["event"] == "call"]

    def said(self) -> list[str]:
        """Return what the product has logged in all lives."""
        logs = [self._folder / f"{self.name}-{life}.log" for life in range(1, self._lives + 1)]
        return [
            line for log in logs for line in log.read_text(errors="replace").splitlines() if line.startswith("rmq:")
        ]


def read_lines(ledger: Path) -> list[Line]:
    """Return the complete lines of a ledger; no lines without a file.

    A process that was killed may leave a part of a line: the last one, or one that `end_line` has ended with an empty
    line after it. Raises ValueError for other lines that are damaged.
    """
    lines = ledger.read_text().split("\n")[:-1] if ledger.exists() else []
    found = []
    for number, line in enumerate(lines):
        try:
            found += [json.loads(line)] if line else []
        except ValueError:
            if lines[number + 1 : number + 2] != [""]:
                raise ValueError(f"line {number + 1} of {ledger} is damaged: {line[:200]}") from None
    return found


def end_line(ledger: Path) -> None:
    """End a part of a line that a killed process left, with an empty line after it."""
    if ledger.exists() and not ledger.read_bytes().endswith(b"\n"):
        with ledger.open("ab") as file:
            file.write(b"\n\n")


def read_member(ledger: Path) -> tuple[list[Consumed], list[Owned]]:
    """Return what a member of a drill consumed by its ledger, and the queues that it had, if it is a Java consumer."""
    lines = read_lines(ledger)
    topics = {line["topic"] for line in lines if line["event"] == "message" and not line["topic"].startswith("%")}
    if any(line["event"] == "batch" for line in lines) or not topics:
        return _batches_of(lines), []
    (topic,) = topics
    return _consumed_of(lines, topic), _owned_of(lines, topic)


def _consumed_of(lines: Iterable[Line], topic: str) -> list[Consumed]:
    return [
        Consumed(
            Place(line["broker"], line["queueId"]),
            line["offset"],
            line["body"].partition(" ")[0],
            line["atMs"],
            line["atMs"],
        )
        for line in lines
        if line["event"] == "message" and line["topic"] == topic
    ]


def _owned_of(lines: Iterable[Line], topic: str) -> list[Owned]:
    return [
        Owned(
            line["atMs"],
            frozenset(
                Place(broker, int(queue_id))
                for name, broker, queue_id in (text.rsplit(":", 2) for text in line["queues"])
                if name == topic
            ),
        )
        for line in lines
        if line["event"] == "queues"
    ]


def _batches_of(lines: Iterable[Line]) -> list[Consumed]:
    return [
        Consumed(Place(broker, queue_id), offset, body, line["fromMs"], line["atMs"])
        for line in lines
        for broker, queue_id, offset, body in line["rows"]
    ]


@dataclass(frozen=True, slots=True)
class Connection:
    """A member as mqadmin consumerConnection shows it."""

    client_id: str
    language: str
    version: str


class AdminTool:
    """mqadmin in one process, for the cluster of a name server: call it with the words of a command."""

    def __init__(self, java: Java, address: str) -> None:
        self._address = address
        self._program = replace(java, files={"conf/logback_tools.xml": "<configuration/>"}).start("mqadmin", [])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._program.end()

    def __call__(self, *words: str) -> str:
        """Return what the command prints. Raises RuntimeError with its stack trace if it failed."""
        self._program.write({"words": [*words, "-n", self._address]})
        printed: dict[str, Any] = self._program.read()
        if "SubCommandException" in printed["errors"]:
            raise RuntimeError(printed["errors"])
        return str(printed["text"])

    def connections(self, group: str) -> list[Connection]:
        """Return the members of a group that consumerConnection shows, none if it says that nobody is online."""
        try:
            text = self("consumerConnection", "-g", group)
        except RuntimeError as error:
            if "not online" not in str(error):
                raise
            return []
        rows = [line.split() for line in text.partition("Below is subscription")[0].splitlines()[1:] if line.strip()]
        return [Connection(client_id, language, version) for client_id, _, language, version in rows]

    def queues(self, group: str, client_id: str, topic: str) -> frozenset[Place]:
        """Return the queues of a topic that a member says it has, by consumerStatus."""
        text = self("consumerStatus", "-g", group, "-i", client_id)
        rows = _MQ_DETAIL.findall(text.partition("#Consumer MQ Detail#")[2])
        return frozenset(Place(broker, int(queue_id)) for name, broker, queue_id in rows if name == topic)

    def reset(self, group: str, topic: str, time_ms: int) -> dict[Place, int]:
        """Reset a group to a time, by resetOffsetByTime. Return the offsets that it shows."""
        text = self("resetOffsetByTime", "-g", group, "-t", topic, "-s", str(time_ms))
        rows = [line.split() for line in text.splitlines() if line.split()[1:2] and line.split()[1].isdigit()]
        return {Place(row[0], int(row[1])): int(row[-1]) for row in rows}
