"""A broker writes, we write, a broker writes: five rounds on one store, with deaths on both sides."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from compat_kit import our_stores
from compat_kit.lookups import key_differences
from compat_kit.rocketmq import Broker, Client, Java, Request, Verifier
from compat_kit.rows import bound_differences, differences, our_bounds, our_rows, their_rows
from compat_kit.writers import QUEUES, TOPIC, Notes, Writer

import rmq_spark

pytestmark = pytest.mark.compat

# How each round ends: the broker stops in order or dies, then our process closes the store or dies.
ENDS = (("stop", "close"), ("kill", "kill"), ("stop", "kill"), ("kill", "close"), ("kill", "kill"))
# After a crash IndexService#load removes the index files that are newer than the checkpoint. Without this
# option CommitLog#recoverAbnormally rebuilds keys only from the last segment or two; all others are lost.
CONF = our_stores.broker_conf() | {"messageIndexSafe": True}
SENT_BY_BROKER = 40  # in a round; of ours a few hundred
CALLS = 12


def broker_writes(client: Client, name: str, notes: Notes) -> None:
    """Append by the broker; note where it went."""
    for number in range(SENT_BY_BROKER):
        text = f"{name}-{number}".ljust(1500)
        (sent,) = client("produce", topic=TOPIC, text=text, keys=text.strip(), queueId=number % QUEUES)
        notes.add(sent["queueId"], sent["queueOffset"], text.strip())


def we_write(store: Path, name: str, notes: Notes, end: str) -> None:
    """Append by a process of ours that dies in the middle; then, where that is the end, close the store in order."""
    with Writer(store, name, notes) as writer:
        writer.wait_for(CALLS)
        writer.kill()
        assert not writer.said
    if end == "close":
        rmq_spark.close(str(store))
        assert not (store / "abort").exists()


def side_files(store: Path) -> dict[str, bytes]:
    """Return the contents of our own files, in rmq/."""
    return {str(path.relative_to(store)): path.read_bytes() for path in (store / "rmq").rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def played(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Notes, Client]]:
    """The store after five rounds, with a last broker that uses it, and the acknowledged messages."""
    store, notes = tmp_path_factory.mktemp(f"ping-pong-{java.version}") / "store", Notes()
    with our_stores.open_small(store) as writer:
        writer.create_topic(TOPIC, QUEUES)
    for number, (their_end, our_end) in enumerate(ENDS):
        before = side_files(store)
        broker = Broker(java, store, **CONF)
        broker.start()
        with Client(broker) as client:
            broker_writes(client, f"theirs{number}", notes)
        broker.stop() if their_end == "stop" else broker.kill()
        assert side_files(store) == before
        assert notes.problems(store) == [], f"round {number}, after the broker"
        we_write(store, f"ours{number}", notes, our_end)
        assert notes.problems(store) == [], f"round {number}, after us"
    with Broker(java, store, **CONF) as broker, Client(broker) as client:
        yield store, notes, client
        client.program.kill()  # their stores are not used again, and a clean stop takes ten seconds
        broker.kill()


def test_every_message_is_there_once_in_order_for_all_readers(
    played: tuple[Path, Notes, Client], verifier: Verifier, copied: Callable[[Path], Path]
) -> None:
    store, notes, client = played
    ours = {queue: rows for queue, rows in our_rows(store).items() if queue.topic == TOPIC}
    assert notes.problems(store) == []
    assert len(notes.places) > len(ENDS) * (SENT_BY_BROKER + CALLS)
    assert differences(ours, their_rows(client("pull", topic=TOPIC, group="compat_pull"))) == []
    assert len(list((store / "commitlog").iterdir())) >= 3
    (report,) = verifier.verify([Request(copied(store), CONF, keys=100)])
    theirs = {queue: rows for queue, rows in their_rows(report["messages"]).items() if queue.topic == TOPIC}
    assert differences(ours, theirs) == []
    assert bound_differences(our_bounds(store), report["queues"]) == []
    assert key_differences(store, report["keys"]) == []
    print(f"{verifier.java.version}: {len(notes.places)} acknowledged, {sum(map(len, ours.values()))} there")


def test_keys_are_found_in_both_index_files_by_both(played: tuple[Path, Notes, Client]) -> None:
    store, notes, client = played
    assert len(list((store / "index").iterdir())) >= 2
    with rmq_spark.open_reader(str(store)) as reader:
        reader.refresh()
        for (queue_id, offset), text in list(notes.places.items())[::23]:
            assert [(queue.queue_id, place) for queue, place in reader.find_key(TOPIC, text)] == [(queue_id, offset)]
            found = client("find", topic=TOPIC, key=text)
            assert [(one["queueId"], one["queueOffset"]) for one in found] == [(queue_id, offset)], json.dumps(found)
