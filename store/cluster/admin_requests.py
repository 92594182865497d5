"""The request by which an administrator moves the offset of a group, and the broker's answer to it.

Brokers of two kinds treat the request differently:

| broker | what it does |
| --- | --- |
| 5.x with useServerSideResetOffset (5.3's default) | sets the offset in one queue; the group's next pull takes it |
| 4.9, and 5.x without it | sets nothing. It sends the group's present offsets in the whole topic to all members |

The second kind ignores queue and offset. The request therefore asks for the end of each queue without force, which
such a broker uses only where the group's offset is beyond it. So an offset that was committed before is what it sends.

Source: DefaultMQAdminExtImpl#resetOffsetByQueueId (5.3), AdminBrokerProcessor#resetOffset, #resetOffsetInner,
Broker2Client#resetOffset (4.9, 5.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from rmq_spark.store.cluster.answer_fields import Answer, Question
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.cluster.requests import Request, queue_fields
from rmq_spark.store.cluster.responses import Response
from rmq_spark.store.model import QueueKey

_AT_THE_END = "-1"  # a time: the end of each queue


@dataclass(frozen=True, slots=True)
class ResetResponse(Response):
    """The effect of a reset at a broker (ResetOffsetBody).

    `offsets` are the offsets that it set or sent to the members, by queue. They are empty if it sent none: nobody
    `is_online`, or the group `lacks_offsets` in a queue of the topic, so the broker does not know what to send.
    """

    offsets: Mapping[QueueKey, int] = field(default_factory=dict)
    is_online: bool = True
    lacks_offsets: bool = False

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        if command.code == ResponseCode.CONSUMER_NOT_ONLINE:
            return cls(is_online=False)
        if command.code != ResponseCode.SUCCESS:
            return cls(lacks_offsets=True)
        answer = Answer(command, request)
        table = answer.object(answer.json().get("offsetTable", {}), "offsetTable")
        return cls({answer.queue(text): answer.integer(table, text) for text in table})


@dataclass(frozen=True, slots=True)
class ResetOffsetRequest(Request[ResetResponse]):
    """Move the offset of a group in a queue, also for its members (ResetOffsetRequestHeader).

    Commit the offset before: brokers of the second kind send what is committed.
    """

    group: str
    queue: QueueKey
    offset: int
    code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    response = ResetResponse

    @property
    def purpose(self) -> str:
        return f"reset group {self.group} to offset {self.offset} in queue {self.queue}"

    def fields(self) -> dict[str, str]:
        return {
            "group": self.group,
            **queue_fields(self.queue),
            "offset": str(self.offset),
            "timestamp": _AT_THE_END,
            "isForce": "false",
        }
