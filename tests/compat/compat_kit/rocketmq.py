"""A real RocketMQ as objects: a broker, a client, and the store classes. Each is a process of Java that reads lines
of JSON and answers with lines of JSON.

    with Broker(java, store) as broker, Client(java, broker) as client:
        client("create-topic", topic="T", queues=1)
        client("produce", topic="T", text="hello", queueId=0)
        assert client("pull", topic="T", group="g")[0]["queueOffset"] == 0
"""

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from compat_kit.build import class_path, java_program
from compat_kit.network import Network

Line = dict[str, Any]
_OPENED = (
    "--add-opens=java.base/java.nio",
    "--add-opens=java.base/sun.nio.ch",
    "--add-opens=java.base/jdk.internal.ref",
)
_SMALL = ("-Xms64m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_FLAGS = (
    *(f"{option}=ALL-UNNAMED" for option in (*_OPENED, "--add-exports=java.base/jdk.internal.ref")),
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Duser.timezone=UTC",
)
_FOLLOWED = {"message", "queue", "group"}  # events that another line follows
_PORTS = 16  # a broker takes its port, the one above, and some below
_RANGE = 1024  # ports of one process
_LOWEST_PORT, _FIRST_EPHEMERAL_PORT = 10240, 32768  # Linux gives the ports from 32768 on to connections
_runs = count()  # of ports, handed out by this process


@dataclass(frozen=True, slots=True)
class Java:
    """How programs of one RocketMQ are run. `home` is where each leaves its logs, in a folder of its own.

    `flags` are those of the JVM for memory and compilation. By default programs are small and start fast.
    `files` are texts by the path in this folder, and `properties` those of the virtual machine.
    """

    version: str
    network: Network
    home: Path
    flags: tuple[str, ...] = _SMALL
    files: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_5(self) -> bool:
        """Say whether it is a 5.x."""
        return self.version.startswith("5.")

    def start(self, program: str, options: Iterable[str]) -> "Program":
        """Start one of the programs in tests/compat/java."""
        home = Path(tempfile.mkdtemp(prefix=f"{program}-{self.version}-", dir=self.home))
        for path, text in self.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        properties = [f"-D{name}={value}" for name, value in self.properties.items()]
        java = [java_program("java"), *self.flags, *_FLAGS, *properties, "-cp", class_path(self.version)]
        command = [*self.network.prefix, *java, "Harness", program, "--home", str(home), *options]
        return Program(command, home)


class Program:
    """A running program that exchanges lines."""

    def __init__(self, command: list[str], home: Path) -> None:
        self.home = home
        with (home / "stderr").open("w") as errors:
            self.process = subprocess.Popen(
                command, cwd=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def write(self, line: Mapping[str, Any]) -> None:
        """Give it a line."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def read(self) -> Line:
        """Return its next line. Raises RuntimeError if it has ended."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            code, errors = self.process.wait(), (self.home / "stderr").read_text(errors="replace")
            raise RuntimeError(f"the program ended with {code}; its logs are in {self.home}\n{errors[-2000:]}")
        return dict(json.loads(line))

    def end(self) -> None:
        """Close its input, on which it shuts down cleanly, and wait for its end."""
        if self.process.poll() is None:
            self.process.communicate()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.communicate()


class Broker:
    """A broker on a store, and a name server for it. Entered: it serves. Left: it stopped in order.

    Without a `port` it takes a free one at each start. The name server listens on the port that is 10 lower. With
    `is_alone` there is none, and `conf` has the addresses of others.
    """

    def __init__(
        self,
        java: Java,
        store: Path,
        ip: str = "127.0.0.1",
        port: int | None = None,
        *,
        is_alone: bool = False,
        **conf: object,
    ) -> None:
        self.java, self.store, self.ip, self.port, self.is_alone, self.conf = java, store, ip, port, is_alone, conf
        self.namesrv = ""

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

    def start(self) -> None:
        """Start it and wait until it serves. Raises RuntimeError with its answer if it does not."""
        self._launch()
        self._await_ready()

    def load(self) -> None:
        """Start it and wait until it has loaded the store, which it has not locked yet."""
        self._launch("--stepwise", "true")
        loaded = self.program.read()
        assert loaded["event"] == "loaded", loaded
        self.pid = loaded["pid"]

    def serve(self) -> None:
        """Resume a broker that was loaded; wait until it serves. Raises RuntimeError with its answer if it does not."""
        self.program.write({"op": "serve"})
        self._await_ready()

    def _launch(self, *options: str) -> None:
        pairs = [part for name, value in self.conf.items() for part in ("--conf", f"{name}={option_text(value)}")]
        place = ["--store", str(self.store), "--port", str(self.port or free_port()), "--ip", self.ip]
        place += ["--alone", "true"] if self.is_alone else []
        self.program = self.java.start("broker", [*place, *pairs, *options])

    def _await_ready(self) -> None:
        ready = self.program.read()
        if ready["event"] != "ready":
            self.program.end()
            raise RuntimeError(f"{ready}; its logs are in {self.program.home}")
        self.namesrv, self.pid = ready["namesrv"], ready["pid"]

    def expire(self) -> int:
        """Have it delete expired files; return the physical offset at which its log begins."""
        self.program.write({"op": "expire"})
        return int(self.program.read()["minPhyOffset"])

    def stop(self) -> None:
        """Shut down cleanly: every file is closed, and `abort` is removed."""
        self.program.end()

    def kill(self) -> None:
        """kill -9: `abort` stays."""
        if self.program.process.poll() is None:
            os.kill(self.pid, 9)
            self.program.process.communicate()


class NameServer:
    """A name server in a process of its own, at the same port after each start."""

    def __init__(self, java: Java, port: int) -> None:
        self.java, self.port = java, port

    def start(self) -> None:
        """Start it and wait until it serves."""
        self.program = self.java.start("namesrv", ["--port", str(self.port)])
        self.pid = self.program.read()["pid"]

    def stop(self) -> None:
        """Shut down cleanly."""
        self.program.end()

    def kill(self) -> None:
        """kill -9."""
        self.program.kill()


class Client:
    """The Java client of a broker: producers, consumers, admin."""

    def __init__(self, broker: Broker) -> None:
        self.program = broker.java.start("client", ["--namesrv", broker.namesrv])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.program.end()
        else:
            self.program.kill()

    def __call__(self, op: str, **fields: object) -> list[Line]:
        """Return the lines that the operation printed, without the final "done".

        Raises RuntimeError with the exception that the client threw.
        """
        self.begin(op, **fields)
        return self.finish()

    def begin(self, op: str, **fields: object) -> None:
        """Begin an operation, such as a push consumer that runs while another client sends."""
        self.program.write({"op": op, **fields})

    def finish(self) -> list[Line]:
        """Wait for the end of the operation that was begun. Return and raise as a call does."""
        lines = [self.program.read()]
        while lines[-1]["event"] in _FOLLOWED:
            lines.append(self.program.read())
        if lines[-1]["event"] == "error":
            raise RuntimeError(lines[-1]["error"])
        return lines if lines[-1]["event"] in ("sent", "created", "slept") else lines[:-1]


@dataclass(frozen=True, slots=True)
class Request:
    """A store for the real store classes, which change it: give them a copy.

    `conf` has the values that are not in the files: index shapes. `times` and `keys`: about how many of the times of a
    queue and of the keys in the store are looked up; keys also by each of the `ranges` of store times, in ms.
    """

    store: Path
    conf: Mapping[str, object] = field(default_factory=dict)
    times: int = 0
    keys: int = 0
    ranges: Sequence[tuple[int, int]] = ()


class Verifier:
    """The store classes of one version, in one process for as many stores as there are. Entered and left."""

    def __init__(self, java: Java) -> None:
        self.java = java
        self._program: Program | None = None

    def close(self) -> None:
        """End the process."""
        if self._program is not None:
            self._program.end()

    def verify(self, requests: Iterable[Request]) -> list[Line]:
        """Return the output of the store classes for each store, in order. Raises RuntimeError if one does not open."""
        reports = self.try_verify(requests)
        failed = [f"{one['store']}: {one['why']}" for one in reports if one["event"] == "failed"]
        if failed:
            raise RuntimeError("; ".join(failed))
        return reports

    def try_verify(self, requests: Iterable[Request]) -> list[Line]:
        """Return the same, with a line of event `failed` and the reason for each store that does not open."""
        if self._program is None:
            self._program = self.java.start("verify", [])
        waiting = list(requests)
        for number, one in enumerate(waiting):
            conf = {name: option_text(value) for name, value in one.conf.items()}
            line = {"id": number, "store": str(one.store), "conf": conf, "times": one.times, "keys": one.keys}
            line["ranges"] = [list(times) for times in one.ranges]
            self._program.write(line)
        found = {}
        for _ in waiting:
            report = self._program.read()
            found[report["id"]] = report
        return [found[number] for number in range(len(waiting))]


def option_text(value: object) -> str:
    """Return a value as the Java programs read it: true and false are in small letters."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def free_port() -> int:
    """Return a port in the middle of a run of free ones. Raises RuntimeError if there is none.

    No other program takes them before a broker does. They lie below the ports that the system gives to connections, in
    a range that is this process's own.
    """
    first, _ = _own_range()
    runs = _RANGE // _PORTS - 1
    for _ in range(runs):
        start = first + 1 + next(_runs) % runs * _PORTS
        if all(map(_is_free, range(start, start + _PORTS))):
            return start + _PORTS - 4
    raise RuntimeError(f"no run of {_PORTS} free ports from {first} on")


@cache
def _own_range() -> tuple[int, socket.socket]:
    """Return the first port of this process's range, and the socket that is bound to it and so claims the range."""
    for first in range(_LOWEST_PORT, _FIRST_EPHEMERAL_PORT, _RANGE):
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", first))
        except OSError:
            claim.close()
        else:
            return first, claim
    raise RuntimeError(f"every range of {_RANGE} ports below {_FIRST_EPHEMERAL_PORT} has an owner")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
