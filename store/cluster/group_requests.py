"""The requests about consumer groups that reading a cluster needs, in the manner of `requests`.

Source: the classes *RequestHeader and MQClientAPIImpl (4.9, 5.3).
"""

from dataclasses import dataclass

from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.requests import Request, queue_fields, write_json
from rmq_spark.store.cluster.responses import (
    AllGroupOffsetsResponse,
    CommitResponse,
    CommittedOffsetResponse,
    DoneResponse,
    GroupConnectionsResponse,
    GroupMembersResponse,
    GroupStatsResponse,
)
from rmq_spark.store.format.config_json import GroupConfig
from rmq_spark.store.model import QueueKey


@dataclass(frozen=True, slots=True)
class CommittedOffsetRequest(Request[CommittedOffsetResponse]):
    """The committed offset of a group in a queue (QueryConsumerOffsetRequestHeader).

    If the group has none, a broker of 4.9 answers 0 in a *young* queue: one whose first message exists and is so new
    that it should be in memory. A broker of 5.3 does so only if `takes_zero`. In other queues there is no offset.
    """

    group: str
    queue: QueueKey
    takes_zero: bool = False
    code = RequestCode.QUERY_CONSUMER_OFFSET
    response = CommittedOffsetResponse

    @property
    def purpose(self) -> str:
        return f"get the offset of group {self.group} in queue {self.queue}"

    def fields(self) -> dict[str, str]:
        zero = "true" if self.takes_zero else "false"
        return {"consumerGroup": self.group, **queue_fields(self.queue), "setZeroIfNotFound": zero}


@dataclass(frozen=True, slots=True)
class CommitOffsetRequest(Request[CommitResponse]):
    """Commit the offset of a group in a queue (UpdateConsumerOffsetRequestHeader).

    The broker accepts any number, and executes requests in any order. Send one at a time for each queue.
    """

    group: str
    queue: QueueKey
    offset: int
    code = RequestCode.UPDATE_CONSUMER_OFFSET
    response = CommitResponse

    @property
    def purpose(self) -> str:
        return f"commit offset {self.offset} of group {self.group} in queue {self.queue}"

    def fields(self) -> dict[str, str]:
        return {"consumerGroup": self.group, **queue_fields(self.queue), "commitOffset": str(self.offset)}


@dataclass(frozen=True, slots=True)
class GroupStatsRequest(Request[GroupStatsResponse]):
    """The progress of a group on one broker (GetConsumeStatsRequestHeader). With a `topic` only in its queues."""

    group: str
    broker: str
    topic: str | None = None
    code = RequestCode.GET_CONSUME_STATS
    response = GroupStatsResponse

    @property
    def purpose(self) -> str:
        return f"get the progress of group {self.group} on broker {self.broker}"

    def fields(self) -> dict[str, str]:
        fields = {"consumerGroup": self.group, "bname": self.broker}
        return fields if self.topic is None else {**fields, "topic": self.topic}


@dataclass(frozen=True, slots=True)
class GroupMembersRequest(Request[GroupMembersResponse]):
    """The client ids of the members of a group on one broker (GetConsumerListByGroupRequestHeader)."""

    group: str
    broker: str
    code = RequestCode.GET_CONSUMER_LIST_BY_GROUP
    response = GroupMembersResponse

    @property
    def purpose(self) -> str:
        return f"list the members of group {self.group} on broker {self.broker}"

    def fields(self) -> dict[str, str]:
        return {"consumerGroup": self.group, "bname": self.broker}


@dataclass(frozen=True, slots=True)
class GroupConnectionsRequest(Request[GroupConnectionsResponse]):
    """The connections and subscriptions of a group on one broker (GetConsumerConnectionListRequestHeader)."""

    group: str
    broker: str
    code = RequestCode.GET_CONSUMER_CONNECTION_LIST
    response = GroupConnectionsResponse

    @property
    def purpose(self) -> str:
        return f"list the connections of group {self.group} on broker {self.broker}"

    def fields(self) -> dict[str, str]:
        return {"consumerGroup": self.group, "bname": self.broker}


@dataclass(frozen=True, slots=True)
class AllGroupOffsetsRequest(Request[AllGroupOffsetsResponse]):
    """The committed offsets of all groups on one broker (AdminBrokerProcessor#getAllConsumerOffset)."""

    broker: str
    code = RequestCode.GET_ALL_CONSUMER_OFFSET
    response = AllGroupOffsetsResponse

    @property
    def purpose(self) -> str:
        return f"get the offsets of all groups on broker {self.broker}"


@dataclass(frozen=True, slots=True)
class CreateGroupRequest(Request[DoneResponse]):
    """Create a consumer group on one broker, or replace its settings (SubscriptionGroupConfig). Send to each master."""

    config: GroupConfig
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    response = DoneResponse

    @property
    def purpose(self) -> str:
        return f"create group {self.config.name}"

    @property
    def body(self) -> bytes:
        config = self.config
        return write_json(
            {
                "groupName": config.name,
                "consumeEnable": config.consume_enable,
                "consumeFromMinEnable": config.consume_from_min_enable,
                "consumeBroadcastEnable": config.consume_broadcast_enable,
                "consumeMessageOrderly": config.consume_message_orderly,
                "retryQueueNums": config.retry_queue_count,
                "retryMaxTimes": config.retry_max_times,
                "brokerId": config.broker_id,
                "whichBrokerWhenConsumeSlowly": config.which_broker_when_consume_slowly,
                "notifyConsumerIdsChangedEnable": config.notify_consumer_ids_changed_enable,
            }
        )
