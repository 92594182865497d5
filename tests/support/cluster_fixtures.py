"""The fixtures of the tests of a backend (`rmq_spark.store.testing.backend_suite`), for a cluster in this process."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from rmq_spark.store.backend import Guarantee
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.codes import BrokerRequestCode, RequestCode
from rmq_spark.store.cluster.membership import Membership
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.backend_fixtures import Append, Expire, FailNextCall, GrowTopic, Message, Reset, Switch
from rmq_spark.store.testing.backend_groups import eventually
from rmq_spark.store.testing.brokers import Broker, RunningCluster, faults
from rmq_spark.store.testing.brokers.wire import QueueId, loose_json

BROKER = "broker-a"


def append_messages(cluster: RunningCluster, topic: str, queue_id: int, messages: Sequence[Message]) -> list[int]:
    """Append messages to a queue of a broker. Return their queue offsets."""
    rows = [
        {
            "topic": topic,
            "queueId": queue_id,
            "body": message.body,
            "tags": message.tags,
            "keys": message.keys,
            "properties": dict(message.properties),
        }
        for message in messages
    ]
    return [offset for _, offset in cluster.brokers[BROKER].send_rows(rows)]


def address_of(cluster: RunningCluster) -> ClusterAddress:
    """Return the location of a cluster."""
    return ClusterAddress(parse_name_servers(cluster.address))


def reset_offset(broker: Broker, group: str, queue: QueueKey, offset: int) -> None:
    """Reset a group's offset in a queue as a broker of its version does at the demand of an administrator.

    5.3 stores the offset. 4.9 tells the members, and they commit it; without members the administrator's tool does.
    """
    stored = QueueKey(queue.topic, queue.queue_id)
    if broker.release.is_5:
        broker.loop.run(broker.offsets.reset, group, stored, offset)
        return
    members = broker.loop.run(
        lambda: list(broker.members.groups[group].members.values()) if broker.members.ids(group) else []
    )
    if not members:
        broker.loop.run(broker.offsets.commit, group, stored, offset)
        return
    body = loose_json({"offsetTable": {QueueId(queue.topic, broker.name, queue.queue_id): offset}}).encode()
    fields = {"topic": queue.topic, "group": group, "timestamp": "0", "isForce": "false"}
    for member in members:
        code = BrokerRequestCode.RESET_CONSUMER_CLIENT_OFFSET
        broker.loop.run(broker.calls.tell, member.connection, code, fields, body)
    assert eventually(lambda: broker.offsets.find(group, stored) == offset)


def await_quiet(member: Membership) -> None:
    """Wait until no heartbeat is in flight, because one that is in flight fails if the member's clock jumps."""
    beats = member._schedule._beats
    assert eventually(lambda: all(beat.due_s != math.inf for beat in list(beats.values())))


class ClusterFixtures:
    """A cluster of two brokers. The messages are on the first one."""

    RELEASE = "5.3"
    GUARANTEE = Guarantee.AT_LEAST_ONCE

    @pytest.fixture(autouse=True)
    def _no_wait(self, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
        """Wait no longer than needed: a queue that is too short stays so, and a server that is back is found soon.

        Each rebalance looks for resets. But a member that may look at any time always says that something may have
        changed, so tests of that keep the pause between two looks.
        """
        monkeypatch.setattr("rmq_spark.store.cluster.catalog._AWAY_ROUTES_MS", 50)
        monkeypatch.setattr("rmq_spark.store.cluster.catalog._ROUTES_MIN_MS", 50)
        monkeypatch.setattr("rmq_spark.store.cluster.puller.LOSS_AFTER_S", 0.0)
        if "has_changed" not in request.node.name:
            monkeypatch.setattr("rmq_spark.store.cluster.member_progress.RESET_LOOK_MS", 0.0)
        monkeypatch.setattr("rmq_spark.store.cluster.puller._LOOK_AGAIN_S", 0.01)

    @pytest.fixture
    def cluster(self, tmp_path: Path) -> Iterator[RunningCluster]:
        """A cluster without messages."""
        with RunningCluster(tmp_path / "cluster", release=self.RELEASE, brokers=2) as cluster:
            yield cluster

    @pytest.fixture
    def location(self, cluster: RunningCluster) -> ClusterAddress:
        """The address of the cluster."""
        return address_of(cluster)

    @pytest.fixture
    def other_location(self, tmp_path: Path) -> Iterator[ClusterAddress]:
        """Another cluster."""
        with RunningCluster(tmp_path / "other") as cluster:
            append_messages(cluster, "orders", 0, [Message(b"x")])
            yield address_of(cluster)

    @pytest.fixture
    def append(self, cluster: RunningCluster) -> Append:
        """A function that appends messages at the first broker."""

        def append(topic: str, queue_id: int, messages: Sequence[Message]) -> list[int]:
            if topic not in cluster.brokers[BROKER].topics:
                cluster.create_topic(topic, queues=4, brokers=[BROKER])
            return append_messages(cluster, topic, queue_id, messages)

        return append

    @pytest.fixture
    def expire(self, cluster: RunningCluster) -> Expire:
        """A function that removes the messages below an offset."""

        def expire(queue: QueueKey, before: int) -> int:
            cluster.brokers[queue.broker].expire(queue.topic, queue.queue_id, before)
            return before

        return expire

    @pytest.fixture
    def fail_next_call(self, cluster: RunningCluster) -> FailNextCall:
        """A function that makes the name server refuse the next request for a route."""

        def fail_next_call() -> None:
            fault = faults.with_code(1, "a planted fault")
            cluster.name_servers[0].fail(RequestCode.GET_ROUTEINFO_BY_TOPIC, fault, times=1)

        return fail_next_call

    @pytest.fixture
    def reset(self, cluster: RunningCluster) -> Reset:
        """A function that resets offsets, and returns when members that are told of it have committed them."""

        def reset(group: str, offsets: Mapping[QueueKey, int]) -> None:
            for queue, offset in offsets.items():
                reset_offset(cluster.brokers[queue.broker], group, queue, offset)

        return reset

    @pytest.fixture
    def take_away(self, cluster: RunningCluster) -> Switch:
        """A function that kills the broker of a queue."""
        return lambda queue: cluster.brokers[queue.broker].kill()

    @pytest.fixture
    def bring_back(self, cluster: RunningCluster) -> Switch:
        """A function that starts the broker of a queue again, at another port."""
        return lambda queue: cluster.brokers[queue.broker].restart(new_port=True)

    @pytest.fixture
    def grow_topic(self, cluster: RunningCluster) -> GrowTopic:
        """A function that gives a topic more queues on each broker."""
        return lambda topic, count: cluster.create_topic(topic, queues=count)
