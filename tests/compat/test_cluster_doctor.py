"""`rmq doctor` examines a real cluster of two brokers: healthy, then with one broker frozen, then with it killed."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from compat_kit import kinds
from compat_kit.clusters import NAMES, TwoBrokers, run_doctor
from compat_kit.rocketmq import Java
from compat_kit.their_lives import CONF

pytestmark = pytest.mark.compat
TOPIC, GROUP = "orders", "doctor-group"
CAN_RUN = "A query can run. Rights for writing were not tried."
WORDS = ("--topic", TOPIC, "--group", GROUP)
IN_TIME = ("--request-timeout", "20")  # the machine may be busy
LIMIT_SECONDS = 120
FEATURES = (
    "bounds of all queues in one request",
    "startingTimestamp, endingTimestamp",
    "search by key or id",
    "sql92",
    "committed offsets of a group",
    "be a member of a group",
)


@dataclass
class Examined:
    """What the doctor printed about a cluster, after its exit status. `addresses` are those of the brokers."""

    version: str
    name_servers: list[str]
    addresses: dict[str, str]
    healthy: tuple[int, list[str]]
    of_broker: tuple[int, list[str]]
    frozen: tuple[int, list[str]]
    killed: tuple[int, list[str]]

    def of_name_server(self, number: int, brokers: str) -> set[str]:
        """Return a line that is printed of a name server that answers."""
        return {
            f"ok       name server {self.name_servers[number]}: RocketMQ {self.version} lists the brokers {brokers}."
        }

    def of_brokers(self, names: Iterable[str]) -> set[str]:
        """Return the lines that are printed of healthy brokers and their topic."""
        pulled = f"read a topic: 2 queues; a query pulls in the name of the group {GROUP}-reader."
        lines = set()
        for name in names:
            of_topic = f"ok       topic {TOPIC} on {name}"
            lines |= {f"{of_topic}: {feature}: the broker answers it." for feature in FEATURES}
            lines.add(f"{of_topic}: {pulled} Whether the broker has this group, or creates it, was not tried.")
            lines.add(f"ok       broker {name} at {self.addresses[name]}: it answers as RocketMQ {self.version}.")
        return lines


@pytest.fixture(scope="module")
def folder(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the brokers."""
    return tmp_path_factory.mktemp(f"doctor-{java.version}")


def is_everywhere(lines: list[str]) -> bool:
    """Say whether both name servers list both brokers, and the topic on both."""
    has_brokers = sum(line.endswith("lists the brokers broker-a, broker-b.") for line in lines) == 2
    has_topic = sum(": read a topic: " in line for line in lines) == 2
    return has_brokers and has_topic and not any("name servers: " in line for line in lines)


def is_alone(lines: list[str]) -> bool:
    """Say whether nothing is printed of the second broker."""
    return not any("broker-b" in line for line in lines)


def examine_until(
    is_settled: Callable[[list[str]], bool], cluster: TwoBrokers, act: Callable[[], object] = lambda: None
) -> tuple[int, list[str]]:
    """Call `act` and the doctor until the name servers know what happened, and return what is printed then."""
    give_up = time.monotonic() + LIMIT_SECONDS
    while True:
        act()
        found = run_doctor(cluster.java, cluster.address, *WORDS, *IN_TIME)
        if is_settled(found[1]):
            return found
        assert time.monotonic() < give_up, found[1]


@pytest.fixture(scope="module")
def examined(java: Java, folder: Path) -> Examined:
    """A cluster that was examined and stopped."""
    with TwoBrokers(java, folder, **CONF) as cluster:
        with cluster.client() as client:
            # It creates the topic on the brokers that its name server lists.
            examine_until(is_everywhere, cluster, lambda: client("create-topic", topic=TOPIC, queues=2))
            kinds.produce(client, topic=TOPIC, text="hello", queueId=0)
        addresses = {name: f"127.0.0.1:{broker.port}" for name, broker in cluster.brokers.items()}
        healthy = run_doctor(java, cluster.address, *WORDS, *IN_TIME)
        of_broker = run_doctor(java, addresses["broker-a"], *IN_TIME)
        other = cluster.brokers["broker-b"]
        os.kill(other.pid, signal.SIGSTOP)  # its name server is in the same process
        frozen = run_doctor(java, cluster.address, *WORDS, "--request-timeout", "4")
        other.kill()
        killed = examine_until(is_alone, cluster)
    return Examined(java.version, cluster.address.split(";"), addresses, healthy, of_broker, frozen, killed)


def test_healthy_cluster_is_all_ok(examined: Examined) -> None:
    status, lines = examined.healthy
    assert (status, lines[-1]) == (0, CAN_RUN)
    assert [line for line in lines[:-1] if not line.startswith("ok  ")] == []
    assert {line for line in lines if "name server" not in line} == {*examined.of_brokers(NAMES), CAN_RUN}
    for number in range(2):
        assert examined.of_name_server(number, "broker-a, broker-b") <= set(lines)


def test_broker_is_no_name_server(examined: Examined) -> None:
    assert examined.of_broker == (
        1,
        [
            f"missing  name server {examined.addresses['broker-a']}: it does not answer for routes, so it is a broker.",
            "         Set nameServer to the name servers of the cluster (default port 9876).",
            "A query cannot run: 1 missing.",
        ],
    )


def test_frozen_broker_is_missing_while_a_name_server_lists_it(examined: Examined) -> None:
    status, lines = examined.frozen
    assert (status, lines[-1]) == (1, "A query cannot run: 1 missing.")
    assert examined.of_name_server(0, "broker-a, broker-b") | examined.of_brokers(["broker-a"]) <= set(lines)
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert warning.startswith(f"warning  name server {examined.name_servers[1]}: ")
    (at,) = [number for number, line in enumerate(lines) if line.startswith("missing")]
    address = examined.addresses["broker-b"]
    assert lines[at].startswith(f"missing  broker broker-b at {address}: ")
    assert f"broker broker-b at {address} did not answer within 4000 ms" in lines[at]
    assert "Check whether the broker runs." in lines[at + 1]
    assert "set the option brokerAddresses=broker-b=host:port" in lines[at + 1]


def test_killed_broker_is_not_examined(examined: Examined) -> None:
    status, lines = examined.killed
    assert (status, lines[-1]) == (0, CAN_RUN)
    assert examined.of_name_server(0, "broker-a") | examined.of_brokers(["broker-a"]) <= set(lines)
    assert is_alone(lines)
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert f"name server {examined.name_servers[1]} cannot be reached: connection refused" in warning


@pytest.mark.usefixtures("examined")
def test_doctor_leaves_no_group_in_the_files_of_a_broker(folder: Path) -> None:
    files = [file.read_bytes() for file in (folder / "broker-a" / "config").iterdir() if file.is_file()]
    assert any(TOPIC.encode() in data for data in files)
    assert not any(GROUP.encode() in data for data in files)
