"""The frames in tests/golden/remoting, and one request of each kind that a client of ours sends."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rmq_spark.store.cluster.admin_requests import ResetOffsetRequest
from rmq_spark.store.cluster.config_requests import BrokerConfigRequest
from rmq_spark.store.cluster.frame import Command, FrameReader
from rmq_spark.store.cluster.group_requests import (
    AllGroupOffsetsRequest,
    CommitOffsetRequest,
    CommittedOffsetRequest,
    CreateGroupRequest,
    GroupConnectionsRequest,
    GroupMembersRequest,
    GroupStatsRequest,
)
from rmq_spark.store.cluster.member_requests import (
    AssignmentRequest,
    HeartbeatRequest,
    LockRequest,
    UnlockRequest,
    UnregisterRequest,
)
from rmq_spark.store.cluster.producer_requests import (
    ProducerHeartbeatRequest,
    ProducersRequest,
    UnregisterProducerRequest,
)
from rmq_spark.store.cluster.requests import (
    CheckFilterRequest,
    ClusterInfoRequest,
    CreateTopicRequest,
    DeleteRouteRequest,
    DeleteTopicRequest,
    EarliestTimeRequest,
    KeySearchRequest,
    MaxOffsetRequest,
    MinOffsetRequest,
    OffsetAtRequest,
    PullRequest,
    RecordAtRequest,
    Request,
    RouteRequest,
    TopicConfigRequest,
    TopicListRequest,
    TopicStatsRequest,
)
from rmq_spark.store.cluster.responses import Subscription
from rmq_spark.store.cluster.send_requests import SendBackRequest, SendBatchRequest, SendRequest
from rmq_spark.store.cluster.statistics_requests import BrokerRuntimeRequest, StatisticRequest, TopicGroupsRequest
from rmq_spark.store.format.config_json import GroupConfig, TopicConfig
from rmq_spark.store.model import QueueKey

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "remoting"
QUEUE = QueueKey("orders", 3, "broker-a")
SUBSCRIPTIONS = (Subscription("%RETRY%billing", "*"), Subscription("orders", "A || B"))
# One request of each kind, in the order of the codes. Of two kinds with a code that of consumers is the first.
SAMPLES: tuple[Request[Any], ...] = (
    PullRequest(QUEUE, 40, 32, "readers"),
    KeySearchRequest("orders", "broker-a", "key"),
    CommittedOffsetRequest("billing", QUEUE),
    CommitOffsetRequest("billing", QUEUE, 41),
    CreateTopicRequest(TopicConfig("orders", 4, 4)),
    BrokerConfigRequest("broker-a"),
    BrokerRuntimeRequest("broker-a"),
    OffsetAtRequest(QUEUE, 1_800_000_000_000),
    MaxOffsetRequest(QUEUE),
    MinOffsetRequest(QUEUE),
    EarliestTimeRequest(QUEUE),
    RecordAtRequest(1234, "orders", "broker-a"),
    HeartbeatRequest("one", "billing", SUBSCRIPTIONS, 1_800_000_000_000),
    ProducerHeartbeatRequest("one", "billing"),
    UnregisterRequest("one", "billing"),
    UnregisterProducerRequest("one", "billing"),
    SendBackRequest(QUEUE, 1234, "billing", 0, "7F00000100002A9F0000000000000000", 16),
    GroupMembersRequest("billing", "broker-a"),
    LockRequest("one", "billing", (QUEUE,)),
    UnlockRequest("one", "billing", (QUEUE,)),
    AllGroupOffsetsRequest("broker-a"),
    CheckFilterRequest("orders", "readers", "a > 1"),
    RouteRequest("orders"),
    ClusterInfoRequest(),
    CreateGroupRequest(GroupConfig("billing")),
    TopicStatsRequest("orders", "broker-a"),
    GroupConnectionsRequest("billing", "broker-a"),
    ProducersRequest("billing", "broker-a"),
    TopicListRequest(),
    GroupStatsRequest("billing", "broker-a", "orders"),
    DeleteTopicRequest("orders"),
    DeleteRouteRequest("orders"),
    ResetOffsetRequest("billing", QUEUE, 41),
    TopicGroupsRequest("orders", "broker-a"),
    SendRequest(QUEUE, b"body", "UNIQ_KEY\x01id\x02", 1_800_000_000_000),
    StatisticRequest("TOPIC_PUT_NUMS", "orders", "broker-a"),
    SendBatchRequest(QUEUE, bytes(44), 2, 1_800_000_000_000),
    TopicConfigRequest("orders", "broker-a"),
    AssignmentRequest("one", "billing", "orders", "broker-a"),
)
SAMPLE_OF = {request.code: request for request in reversed(SAMPLES)}


@dataclass(frozen=True)
class RecordedFrame:
    """One line of a golden file: its fields as recorded, the whole frame, and the request that it is or answers."""

    file: str
    line: Mapping[str, Any]
    data: bytes
    request: Mapping[str, Any] | None

    @property
    def header_size(self) -> int:
        return int.from_bytes(self.data[5:8], "big")

    @property
    def header(self) -> bytes:
        return self.data[8 : 8 + self.header_size]

    @property
    def is_json(self) -> bool:
        return self.data[4] == 0

    def command(self) -> Command:
        (command,) = FrameReader().feed(self.data)
        return command

    def __str__(self) -> str:
        return f"{self.file} frame {self.line['frame']}"


@cache
def read_frames() -> tuple[RecordedFrame, ...]:
    """Return all golden frames."""
    return tuple(frame for path in sorted(GOLDEN.glob("*.jsonl")) for frame in _read_file(path))


def _read_file(path: Path) -> Iterator[RecordedFrame]:
    requests: dict[int, Mapping[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["kind"] != "response":
            requests[line["frame"]] = line
        yield RecordedFrame(path.stem, line, bytes.fromhex(line["hex"]), requests.get(line["request"]))


def frame_of(header: bytes, body: bytes = b"", kind: int = 0) -> bytes:
    """Return a frame with any header."""
    return (
        (4 + len(header) + len(body)).to_bytes(4, "big")
        + bytes([kind])
        + len(header).to_bytes(3, "big")
        + header
        + body
    )
