"""The requests about the producers of a group, in the manner of `requests`: heartbeats, and the list of producers.

A heartbeat registers the producer at one broker, on the connection that it comes on. The broker lists the producer
until the connection ends, until the producer unregisters on it, or until there was no heartbeat for 120 s; then the
broker closes the connection. The groups of producers have nothing to do with consumer groups of the same name.

Source: ProducerManager, HeartbeatData, UnregisterClientRequestHeader, AdminBrokerProcessor#getProducerConnectionList
(4.9, 5.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rmq_spark.store.cluster.answer_fields import Answer, Question
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.cluster.member_requests import HeartbeatResponse
from rmq_spark.store.cluster.requests import Request, write_json
from rmq_spark.store.cluster.responses import DoneResponse, Response


@dataclass(frozen=True, slots=True)
class ProducerHeartbeatRequest(Request[HeartbeatResponse]):
    """Register a producer at one broker, or show that it lives (HeartbeatData, version 1)."""

    client_id: str
    group: str
    code = RequestCode.HEART_BEAT
    response = HeartbeatResponse

    @property
    def purpose(self) -> str:
        return f"register {self.client_id} as a producer of group {self.group}"

    @property
    def body(self) -> bytes:
        return write_json(
            {"clientID": self.client_id, "consumerDataSet": [], "producerDataSet": [{"groupName": self.group}]}
        )


@dataclass(frozen=True, slots=True)
class UnregisterProducerRequest(Request[DoneResponse]):
    """Remove a producer at one broker (UnregisterClientRequestHeader). It concerns the connection that it comes on.

    When the broker has answered, it does not list the producer any more.
    """

    client_id: str
    group: str
    code = RequestCode.UNREGISTER_CLIENT
    response = DoneResponse

    @property
    def purpose(self) -> str:
        return f"remove the producer {self.client_id} from group {self.group}"

    def fields(self) -> dict[str, str]:
        return {"clientID": self.client_id, "producerGroup": self.group}


@dataclass(frozen=True, slots=True)
class ProducersResponse(Response):
    """The producers of a group: the addresses of their connections as the broker sees them, by client id."""

    addresses: Mapping[str, str]

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        if command.code != ResponseCode.SUCCESS:
            return cls({})
        answer = Answer(command, request)
        return cls(
            {
                answer.text(one, "clientId"): answer.text(one, "clientAddr", "")
                for one in answer.objects(answer.json(), "connectionSet")
            }
        )


@dataclass(frozen=True, slots=True)
class ProducersRequest(Request[ProducersResponse]):
    """The producers of a group at one broker (GetProducerConnectionListRequestHeader). A proxy does not know them."""

    group: str
    broker: str
    code = RequestCode.GET_PRODUCER_CONNECTION_LIST
    response = ProducersResponse

    @property
    def purpose(self) -> str:
        return f"list the producers of group {self.group} at broker {self.broker}"

    def fields(self) -> dict[str, str]:
        return {"producerGroup": self.group, "bname": self.broker}
