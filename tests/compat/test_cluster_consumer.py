"""Our pull consumer at a live cluster: it gets what a Java pull consumer gets, and both read the other's offsets."""

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from compat_kit.clusters import TwoBrokers
from compat_kit.rocketmq import Client, Java
from compat_kit.their_lives import CONF

pytestmark = pytest.mark.compat

TOPIC, QUEUES, MESSAGES = "pulled", 2, 40
_UNTIL_HELD_S = 3  # how long our consumer may take to begin its pulls; later ones find the message at once


class Shared:
    """A cluster with messages, and a Java client of it."""

    def __init__(self, cluster: TwoBrokers, client: Client) -> None:
        self.cluster, self.client = cluster, client
        client("create-topic", topic=TOPIC, queues=QUEUES)
        for number in range(MESSAGES):
            client("produce", topic=TOPIC, text=f"m{number}", tags="ab"[number % 2], properties={"n": str(number)})

    def theirs(self, **terms: object) -> list[bytes]:
        """Return the bodies that a Java pull consumer gets."""
        lines = self.client("pull", topic=TOPIC, group="compat_pull", body=True, **terms)
        return sorted(base64.b64decode(line["body"]) for line in lines if line["event"] == "message")

    def ours(self, group: str, **terms: object) -> list[bytes]:
        """Return the bodies that our consumer gets."""
        return sorted(body for *_, body in self.cluster.read("pull_messages", topic=TOPIC, group=group, **terms))

    def offsets_by_java(self, group: str) -> list[tuple[int, int]]:
        """Return committed and max offset of each queue as a Java client reads them."""
        lines = self.client("offsets", topic=TOPIC, group=group)
        return [(int(line["committed"]), int(line["max"])) for line in lines if line["event"] == "group"]


@pytest.fixture(scope="module")
def shared(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp(f"consumed-{java.version}")
    with TwoBrokers(java, folder, **CONF, enablePropertyFilter=True) as cluster, cluster.client() as client:
        yield Shared(cluster, client)


def test_pulled_messages_equal_those_of_a_java_consumer(shared: Shared) -> None:
    ours = shared.ours("ours")
    assert len(ours) == MESSAGES
    assert ours == shared.theirs()


@pytest.mark.parametrize(
    ("ours", "theirs"), [({"tags": "a"}, ("TAG", "a")), ({"sql92": "n > 29"}, ("SQL92", "n > 29"))]
)
def test_filtered_messages_equal_those_of_a_java_consumer(
    shared: Shared, ours: dict[str, str], theirs: tuple[str, str]
) -> None:
    found = shared.ours("filtered", **ours)
    assert found == shared.theirs(exprType=theirs[0], expr=theirs[1])
    assert 0 < len(found) < MESSAGES


def test_committed_offsets_are_read_by_java(shared: Shared) -> None:
    shared.ours("committing")
    found = shared.offsets_by_java("committing")
    assert sum(end for _, end in found) == MESSAGES
    assert all(committed == end for committed, end in found)


def test_offsets_committed_by_java_are_read(shared: Shared) -> None:
    shared.client("pull", topic=TOPIC, group="theirs", commit=True)
    found = shared.cluster.read("committed_offsets", topic=TOPIC, group="theirs")
    assert found == [end for _, end in shared.offsets_by_java("theirs")]
    assert sum(found) >= MESSAGES


def test_waiting_pull_gets_a_message_of_a_java_producer(shared: Shared) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(shared.cluster.read, "wait_for_message", topic=TOPIC, group="waiting")
        sent = 0
        while not waiting.done():
            time.sleep(_UNTIL_HELD_S)
            shared.client("produce", topic=TOPIC, text=f"late {sent}")
            sent += 1
        (body,) = waiting.result()[:1]
    assert body in [b"late %d" % number for number in range(sent)]
