"""A listener in a group of a live cluster fails one message in ten: retries, dead letters, and deaths of its driver."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from compat_kit.clusters import TwoBrokers
from compat_kit.deliveries import begin_push, finish_push
from compat_kit.group_query import DEAD, FAILURES, MENDED
from compat_kit.members import QueryMember
from compat_kit.rocketmq import Client, Java

pytestmark = pytest.mark.compat

MESSAGES, FAILING = 1000, 100  # half of those that fail become dead letters
QUEUES = 4  # of each broker
DEATHS = int(os.environ.get("RMQ_SPARK_DEATHS", "3"))  # ten take nine minutes
LIMIT_S = 600.0
DELAYS_S = range(1, 19)  # of the levels; a message that has failed n times waits for that of level 3 + n
CONF: dict[str, object] = {"messageDelayLevel": " ".join(f"{delay}s" for delay in DELAYS_S)}
IDS = ("UNIQ_KEY", "ORIGIN_MESSAGE_ID")
Row = dict[str, Any]


def bodies() -> list[str]:
    """Return the bodies of messages, of which one in ten fails, and half of these always."""
    step = MESSAGES // FAILING
    kinds = {0: DEAD, step: MENDED}
    return [f"{kinds.get(number % (2 * step), 'good')}-{number}" for number in range(MESSAGES)]


class Retries:
    """Two brokers with messages in a topic, and a query with a listener that fails some of them."""

    def __init__(self, brokers: TwoBrokers, folder: Path, topic: str, bodies: list[str], **options: str) -> None:
        self.brokers, self.topic, self.group, self.bodies = brokers, topic, f"{topic}-group", bodies
        self.failing = {body for body in self.bodies if not body.startswith("good")}
        self.dead = {body for body in self.failing if body.startswith(DEAD)}
        given = {"subscribe": topic, "consumerGroup": self.group, "groupFallback": "earliest", "columns": "*"}
        folder = folder / topic
        folder.mkdir()
        self.query = QueryMember(
            brokers.java, brokers.address, folder, {**given, **options}, name="listener", kind="listening"
        )

    def send(self, client: Client) -> None:
        """Create the topics, and send the messages."""
        client("create-topic", topic=self.topic, queues=QUEUES)
        client("create-topic", topic=f"%RETRY%{self.group}", queues=1)
        rows = [
            {"body": body.encode(), "tags": "A", "keys": f"key-{body}", "properties": [("x", "y")], "flag": 3}
            for body in self.bodies
        ]
        self.brokers.write("send_table", topic=self.topic, rows=rows, settings={})

    def rows(self, topic: str) -> list[Row]:
        """Return the rows of a topic."""
        rows: list[Row] = self.brokers.read("read_backend", topics=[topic])
        return rows

    def is_over(self) -> bool:
        """Whether each message was consumed, each that fails as often as it can."""
        return all(self.wanted(body) <= times.keys() for body, times in self.tries().items())

    def wanted(self, body: str) -> set[int]:
        """Return the numbers of retries with which a message is consumed, 0 for the message itself."""
        return set(range(FAILURES + 1 if body in self.failing else 1))

    def tries(self) -> dict[str, dict[int, list[int]]]:
        """Return the times of the calls for each body, by reconsumeTimes."""
        found: dict[str, dict[int, list[int]]] = {body: {} for body in self.bodies}
        for call in self.query.calls():
            found[call["body"]].setdefault(call["reconsumeTimes"], []).append(call["atMs"])
        return found

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds. A query that has failed ends the wait."""
        give_up = time.monotonic() + LIMIT_S
        while not holds():
            self.query.check()
            assert time.monotonic() < give_up, "does not happen"
            time.sleep(0.5)

    def await_calls(self, count: int) -> None:
        """Wait for this many more calls, or until it is over."""
        wanted = len(self.query.calls()) + count
        self.until(lambda: len(self.query.calls()) >= wanted or self.is_over())

    def check_times(self) -> list[float]:
        """See that no retry came before its time. Return how late each was, in seconds."""
        late = []
        for tries in self.tries().values():
            for times, at_ms in tries.items():
                if times:
                    waited_s = (min(at_ms) - min(tries[times - 1])) / 1000
                    late.append(waited_s - DELAYS_S[2 + times - 1])
        assert min(late) >= 0
        return sorted(late)


@pytest.fixture(scope="module")
def brokers(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoBrokers]:
    with TwoBrokers(java, tmp_path_factory.mktemp("retries"), **CONF) as brokers:
        yield brokers


def by_tries(one: Retries, prefix: str) -> dict[int, Mapping[str, Any]]:
    """Return what the copies of a message have, by the number of its retries, without names and ids."""

    def general(text: str) -> str:
        return text.replace(one.group, "G").replace(one.topic, "T")

    found = {}
    for row in one.rows(prefix + one.group):
        properties = {name: "an id" if name in IDS else general(value) for name, value in row["properties"]}
        kept = {name: row[name] for name in ("body", "tags", "keys", "flag", "sysFlag", "queueId")}
        assert row["reconsumeTimes"] not in found
        found[row["reconsumeTimes"]] = {"properties": properties, "topic": general(row["topic"]), **kept}
    return found


def test_copies_of_messages_that_a_listener_fails_are_those_of_a_java_consumer(
    brokers: TwoBrokers, tmp_path: Path
) -> None:
    theirs, ours = (Retries(brokers, tmp_path, name, [f"{DEAD}-0"]) for name in ("theirs", "ours"))
    with brokers.client() as client:
        for one in (theirs, ours):
            one.send(client)
        # It counts each try, and the last one is sent to the dead letters.
        fails = {"fail_keys": [f"key-{DEAD}-0"], "fail_times": FAILURES + 1, "maxReconsumeTimes": FAILURES}
        begin_push(client, theirs.topic, theirs.group, FAILURES + 1, **fails, countFailed=True, timeout_ms=120_000)
        assert len(finish_push(client)) == FAILURES + 1
    with ours.query:
        ours.until(ours.is_over)
        ours.until(lambda: len(ours.rows(f"%DLQ%{ours.group}")) > 0)
    for prefix, count in (("%RETRY%", FAILURES), ("%DLQ%", 1)):
        copies = by_tries(theirs, prefix)
        assert len(copies) == count
        assert by_tries(ours, prefix) == copies


@pytest.mark.release("4.9.7")
def test_one_message_in_ten_fails_and_comes_again_at_the_brokers_times_until_it_is_a_dead_letter(
    brokers: TwoBrokers, tmp_path: Path
) -> None:
    one = Retries(brokers, tmp_path, "failing", bodies())
    with brokers.client() as client:
        one.send(client)
    with one.query:
        one.until(one.is_over)
        one.until(lambda: len(one.rows(f"%DLQ%{one.group}")) >= len(one.dead))
    tries = one.tries()
    assert {body: {n: len(at) for n, at in tries[body].items()} for body in one.bodies} == {
        body: dict.fromkeys(one.wanted(body), 1) for body in one.bodies
    }
    late = one.check_times()
    print(f"retries were late by {late[0]:.2f} to {late[-1]:.2f} s")
    letters = Counter(row["body"].decode() for row in one.rows(f"%DLQ%{one.group}"))
    assert letters == Counter(one.dead)
    copies = Counter(row["body"].decode() for row in one.rows(f"%RETRY%{one.group}"))
    assert copies == Counter({body: FAILURES for body in one.failing})


@pytest.mark.release("5.3.3")
def test_no_message_is_lost_or_sent_back_twice_when_the_driver_of_a_listener_is_killed(
    brokers: TwoBrokers, tmp_path: Path
) -> None:
    random = Random(seed := Random().randrange(1_000_000))
    one = Retries(brokers, tmp_path, "killed", bodies(), maxOffsetsPerTrigger="40")
    with brokers.client() as client:
        one.send(client)
    for _ in range(DEATHS):
        one.query.start()
        one.await_calls(random.randint(1, 60))
        time.sleep(random.uniform(0, 1))
        one.query.kill()
    with one.query:
        one.until(one.is_over)
        one.until(lambda: {row["body"].decode() for row in one.rows(f"%DLQ%{one.group}")} == one.dead)
    one.check_times()
    calls = [sum(map(len, tries.values())) for tries in one.tries().values()]
    letters = Counter(row["body"].decode() for row in one.rows(f"%DLQ%{one.group}"))
    copies = Counter(row["body"].decode() for row in one.rows(f"%RETRY%{one.group}"))
    expected = MESSAGES + FAILURES * FAILING
    print(f"seed {seed}: {sum(calls)} calls, {expected} without deaths")
    print(f"{letters.total()} dead letters of {len(one.dead)}, {copies.total()} retries of {FAILURES * FAILING}")
    assert letters == Counter(one.dead)
    assert copies == Counter({body: FAILURES for body in one.failing})
