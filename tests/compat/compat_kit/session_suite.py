"""The group part of the backend suite (`rmq_spark.store.testing.backend_groups`) at a real cluster.

pytest runs this file in the network of the brokers. NAME_SERVERS in the environment is the value of the option
nameServer. Each test has a namespace of its own.
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.store.cluster import member_progress
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.group_requests import CreateGroupRequest
from rmq_spark.store.cluster.requests import (
    ClusterInfoRequest,
    CreateTopicRequest,
    Request,
    RouteRequest,
    TopicStatsRequest,
)
from rmq_spark.store.cluster.responses import ClusterInfoResponse, DoneResponse
from rmq_spark.store.cluster.write_routes import V5_0_0
from rmq_spark.store.errors import NotFoundError
from rmq_spark.store.format.config_json import GroupConfig, TopicConfig
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.backend_fixtures import Append, Expire, FailNextCall, Message, Reset
from rmq_spark.store.testing.backend_groups import GROUP, BackendGroupTests, eventually

NAME_SERVERS = os.environ["NAME_SERVERS"]
BROKER = "broker-a"
_SCHEMA = pa.schema([("body", pa.binary()), ("queueId", pa.int32()), ("brokerName", pa.string())])
_namespaces = itertools.count()


@dataclass(frozen=True)
class ResetRequest(Request[DoneResponse]):
    """Reset the offset of a group in a queue (ResetOffsetRequestHeader, 5.3)."""

    topic: str
    group: str
    queue_id: int
    offset: int
    code = 222  # INVOKE_BROKER_TO_RESET_OFFSET
    response = DoneResponse

    @property
    def purpose(self) -> str:
        return f"reset group {self.group}"

    def fields(self) -> dict[str, str]:
        numbers = {"timestamp": "-1", "queueId": str(self.queue_id), "offset": str(self.offset)}
        return {"topic": self.topic, "group": self.group, "isForce": "true", **numbers}


class Server:
    """The first broker, as an administrator sees it."""

    def __init__(self, client: ClusterClient) -> None:
        self.client = client
        info: ClusterInfoResponse = client.ask_name_server(ClusterInfoRequest())
        self.address, self.is_5 = info.brokers[BROKER].addresses[0], info.server_version >= V5_0_0

    def has_route(self, topic: str) -> bool:
        try:
            return bool(self.client.ask_name_server(RouteRequest(topic)).queues)
        except NotFoundError:
            return False

    def end(self, topic: str, queue_id: int) -> int:
        queues = self.client.call(self.address, TopicStatsRequest(topic, BROKER)).queues
        return queues[QueueKey(topic, queue_id, BROKER)].max_offset


class TestRealCluster(BackendGroupTests):
    @pytest.fixture(autouse=True)
    def _no_wait(self, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
        """Look for resets at each rebalance, but not in tests of `has_changed`: a look that is due is a change."""
        if "has_changed" not in request.node.name:
            monkeypatch.setattr(member_progress, "RESET_LOOK_MS", 0.0)

    @pytest.fixture
    def location(self) -> ClusterAddress:
        return ClusterAddress(parse_name_servers(NAME_SERVERS), namespace=f"test{next(_namespaces)}")

    @pytest.fixture
    def server(self, location: ClusterAddress, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
        client = ClusterClient(ClusterAddress(location.name_servers))
        server = Server(client)
        monkeypatch.setattr(type(self), "TELLS_ZERO_FROM_NONE", server.is_5)
        yield server
        client.close()

    @pytest.fixture
    def append(self, location: ClusterAddress, server: Server) -> Append:
        def append(topic: str, queue_id: int, messages: Sequence[Message]) -> list[int]:
            stored = f"{location.namespace}%{topic}"
            if not server.has_route(stored):
                server.client.call(server.address, CreateTopicRequest(TopicConfig(stored, 4, 4)))
                assert eventually(lambda: server.has_route(stored))
            rows = [{"body": one.body, "queueId": queue_id, "brokerName": BROKER} for one in messages]
            with rmq_spark.open_store(name_server=NAME_SERVERS, namespace=location.namespace) as producer:
                sent = producer.send_many(pa.Table.from_pylist(rows, schema=_SCHEMA), topic=topic)
            offsets: list[int] = sent.column("queueOffset").to_pylist()
            assert eventually(lambda: server.end(stored, queue_id) > max(offsets)), "acknowledged, and not visible"
            return offsets

        return append

    @pytest.fixture
    def expire(self) -> Expire:
        return pytest.skip("messages of a broker expire after hours")

    @pytest.fixture
    def fail_next_call(self) -> FailNextCall:
        return pytest.skip("the brokers have no faults")

    @pytest.fixture
    def group(self, location: ClusterAddress, server: Server) -> None:
        """The group of the suite, which has had no member yet."""
        server.client.call(server.address, CreateGroupRequest(GroupConfig(f"{location.namespace}%{GROUP}")))

    @pytest.fixture
    def reset(self, location: ClusterAddress, server: Server, group: None) -> Reset:
        if not server.is_5:
            pytest.skip("a broker of 4.9 resets offsets to times only")

        def reset(group: str, offsets: Mapping[QueueKey, int]) -> None:
            for queue, offset in offsets.items():
                names = [f"{location.namespace}%{name}" for name in (queue.topic, group)]
                server.client.call(server.address, ResetRequest(*names, queue.queue_id, offset))

        return reset
