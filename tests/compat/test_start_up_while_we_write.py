"""A broker starts while our process appends, and our process starts while a broker starts.

A broker opens its lock file, loads the store, and locks the file only then. The first one owns the store: a broker
delays loading while a section of ours is open, and we refuse as soon as it has begun to load.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from compat_kit import our_stores
from compat_kit.rocketmq import Broker, Client, Java
from compat_kit.rows import differences, our_rows, their_rows
from compat_kit.writers import QUEUES, TOPIC, Notes, Writer
from support.encoded_samples import encode_samples

import rmq_spark
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.testing.sample_message import SampleMessage

pytestmark = pytest.mark.compat


@dataclass
class Meeting:
    """A store, a broker for it, and where every acknowledged message is."""

    store: Path
    broker: Broker
    notes: Notes = field(default_factory=Notes)

    def go_on_and_check(self) -> None:
        """Have the broker append; check that its pull consumer and our reader get all messages once and in order."""
        with Client(self.broker) as client:
            for number in range(2 * QUEUES):
                (sent,) = client("produce", topic=TOPIC, text=f"broker {number}", queueId=number % QUEUES)
                self.notes.add(sent["queueId"], sent["queueOffset"], f"broker {number}")
            theirs = their_rows(client("pull", topic=TOPIC, group="compat_pull"))
        ours = {queue: rows for queue, rows in our_rows(self.store).items() if queue.topic == TOPIC}
        assert differences(ours, theirs) == []
        assert self.notes.problems(self.store) == []

    def send(self, text: str, lock_timeout_ms: int = 60_000) -> None:
        """Send a message of ours to the first queue."""
        with our_stores.open_small(self.store, lock_timeout_ms=lock_timeout_ms) as writer:
            self.notes.add(0, writer.send(TOPIC, text, queue_id=0).queue_offset, text)


@pytest.fixture
def meeting(java: Java, tmp_path: Path) -> Iterator[Meeting]:
    store = tmp_path / "store"
    with our_stores.open_small(store) as writer:
        writer.create_topic(TOPIC, QUEUES)
    found = Meeting(store, Broker(java, store, **our_stores.broker_conf()))
    found.send("first")
    yield found
    found.broker.kill()


def test_we_refuse_while_a_broker_loads(meeting: Meeting) -> None:
    meeting.broker.load()
    with pytest.raises(rmq_spark.LockTimeoutError, match="by a broker that is starting"):
        meeting.send("into what the broker has looked at", 3_000)
    meeting.broker.serve()
    meeting.go_on_and_check()
    meeting.broker.kill()
    meeting.send("last")
    assert meeting.notes.problems(meeting.store) == []


def test_a_broker_waits_while_a_section_of_ours_is_open(meeting: Meeting) -> None:
    writer = StoreWriter(str(meeting.store), Disk(), WriterSettings(sizes=our_stores.SMALL), wall_clock_ms, time.sleep)
    starting = threading.Thread(target=meeting.broker.start)
    with writer.section() as section:
        starting.start()
        while not broker_is_waiting(meeting.store / "lock"):
            assert starting.is_alive()
            time.sleep(0.01)
        offsets = section.append(encode_samples([SampleMessage(TOPIC, 1, b"meanwhile")])).queue_offsets.tolist()
        meeting.notes.add(1, offsets[0], "meanwhile")
    starting.join()
    meeting.go_on_and_check()


def broker_is_waiting(path: Path) -> bool:
    """Return whether a process waits for the release of the lease on the file."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(line[1:3] == ["LEASE", "BREAKING"] and line[5].endswith(f":{path.stat().st_ino}") for line in locks)


def test_a_broker_starts_beside_a_process_that_appends_on_and_on(meeting: Meeting) -> None:
    with Writer(meeting.store, "ours", meeting.notes, settle_every=5) as writer:
        writer.wait_for(5)
        meeting.broker.start()
        assert "belongs to a broker" in writer.end()
    meeting.go_on_and_check()
    print(f"{meeting.broker.java.version}: the process had appended {writer.count} times and was refused")
