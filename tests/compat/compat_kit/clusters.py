"""Two brokers of a real RocketMQ that register at two name servers, and a reader of ours that reads from them.

`TwoBrokers` has a name server in the process of each broker. `FourServers` has four processes, which can be killed and
frozen one by one.

RocketMQ may run in a network namespace (`network`), so our reader is a program in that namespace too:
`cluster_reader.py`. It returns rows as pickles.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from compat_kit.rocketmq import Broker, Client, Java, Line, NameServer, free_port
from compat_kit.rows import Rows, their_rows
from rmq_spark.store.model import QueueKey

NAMES = ("broker-a", "broker-b")
_READER = Path(__file__).with_name("cluster_reader.py")
_WRITER = Path(__file__).with_name("cluster_writer.py")
_STARTS = 5  # attempts
_LIMIT_S = 120  # a registration that is lost comes again after 10 s
_LOWER = 10  # a name server listens on the port of its broker minus this


class TwoBrokers:
    """Two masters with a name server each. Entered: both serve and are registered at both. Left: they were stopped.

    `conf` is for both brokers. `address` is the value of the option nameServer.
    """

    def __init__(self, java: Java, folder: Path, **conf: object) -> None:
        self.java, self.folder = java, folder
        ports = _free_ports()
        self.address = ";".join(f"127.0.0.1:{port - _LOWER}" for port in ports)
        self.brokers = {
            name: Broker(
                java,
                folder / name,
                port=port,
                **{"registerNameServerPeriod": 10_000, **conf, "brokerName": name, "namesrvAddr": self.address},
            )
            for name, port in zip(NAMES, ports, strict=True)
        }
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for broker in self.brokers.values():
                stack.enter_context(broker)
            await_registrations(self.java, self.address)
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)

    def client(self) -> Client:
        """Return a Java client of the cluster."""
        return Client(self.brokers[NAMES[0]])

    def read(self, how: str, **arguments: object) -> Any:
        """Return what a function of `cluster_reader.py` returns, called in a process of its own."""
        return run_reader(self.java, self.address, self.folder, how, **arguments)

    def write(self, how: str, **arguments: object) -> Any:
        """Return what a function of `cluster_writer.py` returns, called in a process of its own."""
        return run_reader(self.java, self.address, self.folder, how, program=_WRITER, **arguments)


def run_reader(
    java: Java, address: str, folder: Path, how: str, *, program: Path | None = None, **arguments: object
) -> Any:
    """Return what a function of a program, by default `cluster_reader.py`, returns for a cluster.

    It is called in a process of its own.
    """
    target = folder / "read.pickle"
    command = [*java.network.prefix, sys.executable, "-P", str(program or _READER), how, address, str(target)]
    done = subprocess.run(command, input=pickle.dumps(arguments), capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace")[-6000:])
    return pickle.loads(target.read_bytes())


def run_doctor(java: Java, address: str, *words: str, **variables: str) -> tuple[int, list[str]]:
    """Return the exit status of `rmq doctor` for a cluster, and the lines that it prints.

    `words` are further options, and `variables` those of the environment.
    """
    command = [*java.network.prefix, sys.executable, "-P", "-m", "rmq_spark.command", "doctor", "-n", address, *words]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    return done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()]


def await_registrations(java: Java, address: str) -> None:
    """Wait until each of two name servers lists both brokers. Raises RuntimeError when that takes too long."""
    give_up = time.monotonic() + _LIMIT_S
    while True:
        _, lines = run_doctor(java, address)
        if sum(line.endswith(f"lists the brokers {', '.join(NAMES)}.") for line in lines) == len(NAMES):
            return
        if time.monotonic() > give_up:
            raise RuntimeError(f"the brokers of {address} are not registered: {lines}")


class FourServers:
    """Two name servers and two masters, each in a process of its own.

    Entered: they serve, and the brokers are registered. Left: they were killed. `conf` is for both brokers. `address`
    is the value of the option nameServer.
    """

    def __init__(self, java: Java, folder: Path, **conf: object) -> None:
        self.java = java
        ports = _free_ports()
        self.address = ";".join(f"127.0.0.1:{port - _LOWER}" for port in ports)
        self.name_servers = [NameServer(java, port - _LOWER) for port in ports]
        self.brokers = {
            name: Broker(
                java,
                folder / name,
                port=port,
                is_alone=True,
                **{**conf, "brokerName": name, "namesrvAddr": self.address},
            )
            for name, port in zip(NAMES, ports, strict=True)
        }
        self._running: list[Broker | NameServer] = []

    def __enter__(self) -> Self:
        try:
            for servers in (self.name_servers, [*self.brokers.values()]):
                with ThreadPoolExecutor() as pool:
                    for started in [pool.submit(self._start, server) for server in servers]:
                        started.result()
            await_registrations(self.java, self.address)
        except BaseException:
            self._kill_all()
            raise
        return self

    def _start(self, server: Broker | NameServer) -> None:
        self.start(server)
        self._running.append(server)

    def start(self, server: Broker | NameServer) -> None:
        """Start a server. Its port may be in use for a moment, by a connection that another program makes."""
        for left in range(_STARTS - 1, -1, -1):
            try:
                server.start()
            except RuntimeError as error:
                if not left or "Address already in use" not in str(error):
                    raise
                time.sleep(1)
            else:
                return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill_all()

    def _kill_all(self) -> None:
        for server in self._running:
            server.kill()  # frozen ones too

    def freeze(self, *servers: Broker | NameServer) -> None:
        """Stop the processes of servers; their connections stay."""
        for server in servers:
            os.kill(server.pid, signal.SIGSTOP)

    def thaw(self, *servers: Broker | NameServer) -> None:
        """Let the processes of servers continue."""
        for server in servers:
            os.kill(server.pid, signal.SIGCONT)

    def client(self) -> Client:
        """Return a Java client of the cluster."""
        return Client(self.brokers[NAMES[0]])


def _free_ports() -> list[int]:
    """Return a port for each broker; the name server of each listens on the port that is 10 lower."""
    ports = [free_port() for _ in NAMES]
    while abs(ports[0] - ports[1]) <= 2 * _LOWER:
        ports[1] = free_port()
    return ports


def pull_all(client: Client, topics: list[str]) -> Rows:
    """Return all messages of topics as a Java pull consumer gets them from both brokers."""
    return by_broker(line for line in client("pull", topic=topics, group="compat_pull") if line["event"] == "message")


def by_broker(lines: Any) -> Rows:
    """Return rows of messages that were pulled, by queues that have the names of their brokers."""
    found: Rows = {}
    lines = list(lines)
    for name in NAMES:
        own: list[Line] = [line for line in lines if line["brokerName"] == name]
        found |= with_broker(their_rows(own), name)
    return found


def with_broker(rows: Mapping[QueueKey, Any], broker: str) -> dict[QueueKey, Any]:
    """Return rows of a broker's own directory by queues that have its name."""
    return {QueueKey(queue.topic, queue.queue_id, broker): held for queue, held in rows.items()}
