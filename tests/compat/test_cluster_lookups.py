"""We ask two brokers of a live cluster for messages by key and id, and for the offsets of a consumer group."""

import time
from collections.abc import Iterator

import pytest
from compat_kit import kinds
from compat_kit.clusters import NAMES, TwoBrokers
from compat_kit.rocketmq import Client, Java, Line
from compat_kit.their_lives import CONF

pytestmark = pytest.mark.compat
TOPIC, EMPTY = "lookups", "empty"


class Sent:
    """A running cluster, and what was sent to it: 150 messages of one second, two seconds later 8 more."""

    def __init__(self, cluster: TwoBrokers, client: Client) -> None:
        self.cluster, self.client = cluster, client
        for topic in (TOPIC, EMPTY):
            client("create-topic", topic=topic, queues=1)
        for _ in range(3):
            batch = [{"topic": TOPIC, "text": "b", "keys": f"all n{number}"} for number in range(50)]
            kinds.produce(client, topic=TOPIC, batch=batch, queueId=0)
        time.sleep(2.5)
        self.singles: list[Line] = []
        for number in range(8):
            found = kinds.produce(client, topic=TOPIC, text="s", keys=f"all s{number} Aa", tags="t")
            self.singles += [line for line in found if line["event"] == "sent"]
        kinds.produce(client, topic=TOPIC, text="s", keys="BB")
        time.sleep(1)  # the brokers' indexes get the messages
        self.address = {name: f"127.0.0.1:{broker.port}" for name, broker in cluster.brokers.items()}


@pytest.fixture(scope="module")
def sent(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sent]:
    folder = tmp_path_factory.mktemp(f"lookups-{java.version}")
    with TwoBrokers(java, folder, **CONF) as cluster, cluster.client() as client:
        yield Sent(cluster, client)


def test_messages_are_found_by_key_and_id(sent: Sent) -> None:
    ids = [line[name] for line in sent.singles for name in ("msgId", "offsetMsgId")]
    keys = ["all", "n7", "s3", "Aa", "BB", "none"]
    found = sent.cluster.read("find_messages", topic=TOPIC, keys=keys, ids=ids)
    assert [len(found[key]) for key in keys] == [158, 3, 1, 8, 1, 0]
    assert len(set(found["all"])) == 158
    assert {broker for broker, _, _ in found["Aa"]} == set(NAMES)
    for number, line in enumerate(sent.singles):
        ((broker, queue_id, offset),) = found[line["msgId"]]
        assert (queue_id, offset) == (line["queueId"], line["queueOffset"])
        assert found[line["offsetMsgId"]] == [(broker, queue_id, offset)]
        assert (broker, queue_id, offset) in found["all"]
        if number == 3:
            assert found["s3"] == [(broker, queue_id, offset)]


def test_group_begins_at_its_offsets(sent: Sent, java: Java) -> None:
    commits = [("broker-a", sent.address["broker-a"], 0, 3)]
    arguments = {"topic": TOPIC, "group": "billing"}
    committed, begins, table = sent.cluster.read("begin_group", commits=commits, **arguments)
    unknown = {} if java.is_5 else {"broker-b:0": 0}
    assert committed == {"broker-a:0": 3} | unknown
    assert begins == {"broker-a:0": 3, "broker-b:0": 0}, "broker-b has a young queue"
    assert f"{TOPIC}@billing" in table


@pytest.mark.parametrize("topic", [TOPIC, EMPTY])
def test_new_group_is_not_created_by_a_question(sent: Sent, topic: str) -> None:
    _, begins, table = sent.cluster.read("begin_group", topic=topic, group="fresh", commits=[])
    assert begins == {"broker-a:0": 0, "broker-b:0": 0}
    assert not [entry for entry in table if entry.endswith("@fresh")]
