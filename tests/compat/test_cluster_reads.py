"""We read two brokers of a live cluster: every row equals what a Java pull consumer gets, and the brokers' own files.

The queries run beside the brokers, with a restart between two rounds of messages.
"""

import time
from pathlib import Path

import pytest
from compat_kit import kinds
from compat_kit.clusters import NAMES, TwoBrokers, pull_all, with_broker
from compat_kit.rocketmq import Java
from compat_kit.rows import Row, Rows, count, differences, our_rows, table_rows
from compat_kit.their_lives import CONF

from rmq_spark.store.model import QueueKey

pytestmark = pytest.mark.compat


class Rounds:
    """A cluster that was read while two rounds of messages of all kinds were written."""

    def __init__(self, java: Java, folder: Path) -> None:
        self.java, self.folder = java, folder
        is_written = [kind for kind in kinds.KINDS.values() if kind.why_not(java.version) is None]
        self.topics = [kinds.topic_of(kind.name) for kind in is_written if kind.name not in _NO_RECORDS]
        self.topics += [f"%RETRY%{kinds.PATIENT}", f"%RETRY%{kinds.STRICT}", f"%DLQ%{kinds.STRICT}"]
        with TwoBrokers(java, folder, **CONF) as cluster, cluster.client() as client:
            kinds.create_topics(client, java.version)
            # Otherwise the name servers would learn it half a minute later.
            client("create-topic", topic=f"%DLQ%{kinds.STRICT}", queues=1)
            kinds.write_round(client, java.version, 1)
            kinds.write_returned(client)
            time.sleep(4)  # delayed and undecided messages arrive
            self.first = self._stream(cluster)
            kinds.write_round(client, java.version, 2)
            time.sleep(4)
            self.second = self._stream(cluster)
            self.batch = of_cluster(cluster.read("read_batch", topics=self.topics, options={"minPartitions": "5"}))
            self.backend = of_cluster(cluster.read("read_backend", topics=self.topics))
            self.theirs = pull_all(client, self.topics)
        self.files: Rows = {}
        for name in NAMES:
            self.files |= with_broker(our_rows(folder / name), name)

    def _stream(self, cluster: TwoBrokers) -> Rows:
        options = {"maxOffsetsPerTrigger": "40"}
        checkpoint = str(self.folder / "checkpoint")
        return of_cluster(cluster.read("read_stream", topics=self.topics, options=options, checkpoint=checkpoint))


_NO_RECORDS = {"inner batch"}  # a topic of batch queues, which a cluster refuses


def of_cluster(table: list[Row]) -> Rows:
    """Return rows of ours by queue, with the names of their brokers."""
    found: Rows = {}
    for name in NAMES:
        found |= with_broker(table_rows(row for row in table if row["brokerName"] == name), name)
    assert count(found) == len(table)
    return found


def has_rows(rows: Rows) -> Rows:
    """Return the queues that have rows."""
    return {queue: held for queue, held in rows.items() if held}


def joined(first: Rows, second: Rows) -> Rows:
    """Return the rows of two runs of a query, in the order in which it delivered them."""
    return {queue: first.get(queue, []) + second.get(queue, []) for queue in {*first, *second}}


@pytest.fixture(scope="module")
def rounds(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    return Rounds(java, tmp_path_factory.mktemp(f"cluster-{java.version}"))


def test_rows_of_a_batch_query_equal_those_of_a_pull_consumer(rounds: Rounds) -> None:
    assert differences(rounds.batch, rounds.theirs) == []
    assert {queue.broker for queue in has_rows(rounds.batch)} == set(NAMES)


def test_rows_of_the_backend_equal_those_of_a_pull_consumer(rounds: Rounds) -> None:
    assert differences(rounds.backend, rounds.theirs) == []


def test_rows_of_a_stream_that_was_restarted_equal_those_of_a_pull_consumer(rounds: Rounds) -> None:
    assert count(rounds.first) > 100
    assert count(rounds.second) > 100
    assert differences(joined(rounds.first, rounds.second), rounds.theirs) == []


def test_rows_of_the_cluster_equal_those_of_the_brokers_files(rounds: Rounds) -> None:
    files: dict[QueueKey, list[Row]] = {queue: rounds.files.get(queue, []) for queue in rounds.theirs}
    assert differences(rounds.batch, files) == []
