"""The requests of a member of a consumer group, in the manner of `requests`: heartbeats, and locks of queues.

A heartbeat registers the member at one broker, on the connection that it comes on. The broker then sends its own
requests on this connection (`broker_requests`), and forgets the member when the connection is closed. Settings and
subscriptions of a group are those of its newest heartbeat, so all members must send the same ones. For a topic that is
not in the newest heartbeat the broker forgets the group's subscription.

Source: HeartbeatData, UnregisterClientRequestHeader, LockBatchRequestBody, UnlockBatchRequestBody, MQClientAPIImpl
(4.9, 5.3).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rmq_spark.store.cluster.answer_fields import Answer, Question
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.cluster.requests import Request, ResponseT, write_json
from rmq_spark.store.cluster.responses import DoneResponse, Response, Subscription
from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.row_filter import TAG, parse_tag_expression
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.model import QueueKey

PASSIVELY, CLUSTERING = "CONSUME_PASSIVELY", "CLUSTERING"  # ConsumeType, MessageModel: those of a push consumer
BROADCASTING = "BROADCASTING"
POP_MODE = "POP"  # MessageRequestMode
# ConsumeFromWhere, by the names of groupFallback.
CONSUME_FROM = {
    "latest": "CONSUME_FROM_LAST_OFFSET",
    "earliest": "CONSUME_FROM_FIRST_OFFSET",
    "timestamp": "CONSUME_FROM_TIMESTAMP",
}
_STRANGE = re.compile(r"[^A-Za-z0-9_.-]")


def make_client_id(ip: str, process: int, query_name: str, unique: str) -> str:
    """Return the id of a member, which is unique in each run of a query.

    It begins with the address of the machine and the number of the process, like a Java client's
    (ClientConfig#buildMQClientId).
    """
    return f"{ip}@{process}#rmq-spark#{_STRANGE.sub('_', query_name) or '-'}#{unique}"


@dataclass(frozen=True, slots=True)
class HeartbeatResponse(Response):
    """The member is registered, unless the broker does not know the group and creates none.

    `server_version` is the number of the broker's version (MQVersion).
    """

    server_version: int = field(default=0, compare=False)

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        return cls(command.version)


@dataclass(frozen=True, slots=True)
class LockResponse(Response):
    """Those of the asked queues that the member has locked now (LockBatchResponseBody#lockOKMQSet)."""

    locked: frozenset[QueueKey]

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        answer = Answer(command, request)
        return cls(
            frozenset(
                QueueKey(answer.text(one, "topic"), answer.integer(one, "queueId"), answer.text(one, "brokerName"))
                for one in answer.objects(answer.json(), "lockOKMQSet")
            )
        )


def describe_subscription(subscription: Subscription, version_ms: int) -> dict[str, Any]:
    """Return a subscription as JSON (SubscriptionData): with the tags of its expression, and their hashes.

    `version_ms` is when the client subscribed (ms since the epoch). A broker takes the newer of two subscriptions.
    """
    tags: Sequence[str] = ()
    if subscription.expression_type == TAG:
        try:
            tags = parse_tag_expression(subscription.expression).tags or ()
        except OptionError:
            tags = ()  # an expression of another client that we would not accept
    return {
        "classFilterMode": False,
        "codeSet": [string_hash(tag) for tag in tags],
        "expressionType": subscription.expression_type,
        "subString": subscription.expression,
        "subVersion": version_ms,
        "tagsSet": list(tags),
        "topic": subscription.topic,
    }


@dataclass(frozen=True, slots=True)
class HeartbeatRequest(Request[HeartbeatResponse]):
    """Register a member of a group at one broker, or show that it lives (HeartbeatData, version 1).

    `subscriptions` are all topics of the group with their expressions, its retry topic included. `version_ms` is when
    the member subscribed (ms since the epoch). `fallback` is where it begins without an offset of the group: latest,
    earliest or timestamp. Brokers only show it.
    """

    client_id: str
    group: str
    subscriptions: tuple[Subscription, ...]
    version_ms: int
    fallback: str = "latest"
    code = RequestCode.HEART_BEAT
    response = HeartbeatResponse

    @property
    def purpose(self) -> str:
        return f"register {self.client_id} as a member of group {self.group}"

    @property
    def body(self) -> bytes:
        consumer = {
            "consumeFromWhere": CONSUME_FROM[self.fallback],
            "consumeType": PASSIVELY,
            "groupName": self.group,
            "messageModel": CLUSTERING,
            "subscriptionDataSet": [describe_subscription(one, self.version_ms) for one in self.subscriptions],
            "unitMode": False,
        }
        return write_json({"clientID": self.client_id, "consumerDataSet": [consumer], "producerDataSet": []})


@dataclass(frozen=True, slots=True)
class AssignmentResponse(Response):
    """How a broker lets the members of a group consume a topic: PULL or POP (MessageRequestMode). Empty if unknown."""

    modes: frozenset[str]

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        answer = Answer(command, request)
        return cls(
            frozenset(answer.text(one, "mode") for one in answer.objects(answer.json(), "messageQueueAssignments"))
        )


@dataclass(frozen=True, slots=True)
class AssignmentRequest(Request[AssignmentResponse]):
    """The mode in which a group consumes a topic at one broker (QueryAssignmentRequestBody). Only 5.x knows it.

    The question for all queues of a broadcasting consumer is answered for any client.
    """

    client_id: str
    group: str
    topic: str
    broker: str
    code = RequestCode.QUERY_ASSIGNMENT
    response = AssignmentResponse

    @property
    def purpose(self) -> str:
        return f"get the mode in which group {self.group} consumes topic {self.topic} at broker {self.broker}"

    def fields(self) -> dict[str, str]:
        return {"bname": self.broker}

    @property
    def body(self) -> bytes:
        return write_json(
            {
                "clientId": self.client_id,
                "consumerGroup": self.group,
                "messageModel": BROADCASTING,
                "strategyName": "AVG",
                "topic": self.topic,
            }
        )


@dataclass(frozen=True, slots=True)
class UnregisterRequest(Request[DoneResponse]):
    """End the membership at one broker (UnregisterClientRequestHeader). It concerns the connection that it comes on."""

    client_id: str
    group: str
    code = RequestCode.UNREGISTER_CLIENT
    response = DoneResponse

    @property
    def purpose(self) -> str:
        return f"end the membership of {self.client_id} in group {self.group}"

    def fields(self) -> dict[str, str]:
        return {"clientID": self.client_id, "consumerGroup": self.group}


def _listed(queues: Sequence[QueueKey]) -> str:
    return f"queue {queues[0]}" if len(queues) == 1 else f"{len(queues)} queues, such as {queues[0]},"


@dataclass(frozen=True, slots=True)
class _LocksRequest(Request[ResponseT]):
    """A request of a member for locks on queues of one broker. Their bodies have the same fields."""

    client_id: str
    group: str
    queues: tuple[QueueKey, ...]

    def fields(self) -> dict[str, str]:
        return {"bname": self.queues[0].broker}

    @property
    def body(self) -> bytes:
        queues = [{"brokerName": one.broker, "queueId": one.queue_id, "topic": one.topic} for one in self.queues]
        return write_json(
            {"clientId": self.client_id, "consumerGroup": self.group, "mqSet": queues, "onlyThisBroker": False}
        )


@dataclass(frozen=True, slots=True)
class LockRequest(_LocksRequest[LockResponse]):
    """Lock queues of one broker for a member, or renew its locks (LockBatchRequestBody).

    A lock ends 60 s after it was renewed last. The broker keeps it in memory.
    """

    code = RequestCode.LOCK_BATCH_MQ
    response = LockResponse

    @property
    def purpose(self) -> str:
        return f"lock {_listed(self.queues)} for {self.client_id} of group {self.group}"


@dataclass(frozen=True, slots=True)
class UnlockRequest(_LocksRequest[DoneResponse]):
    """Release the locks of a member on queues of one broker (UnlockBatchRequestBody). Locks of others stay."""

    code = RequestCode.UNLOCK_BATCH_MQ
    response = DoneResponse

    @property
    def purpose(self) -> str:
        return f"unlock {_listed(self.queues)} of {self.client_id} of group {self.group}"
