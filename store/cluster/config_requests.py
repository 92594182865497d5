"""The request for the settings of a broker, in the manner of `requests`, and its response.

Source: AdminBrokerProcessor#getBrokerConfig, Configuration#getAllConfigsFormatString, MixAll#string2Properties
(4.9, 5.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rmq_spark.store.cluster.answer_fields import Question
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.cluster.responses import Response


@dataclass(frozen=True, slots=True)
class BrokerConfigResponse(Response):
    """The settings of a broker as texts, by name: those of BrokerConfig and MessageStoreConfig, and more.

    A line of the body that is not a setting is left out, as Java does.
    """

    settings: Mapping[str, str]

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        pairs = (line.partition("=") for line in str(command.body, "utf-8", "replace").splitlines())
        return cls({name.strip(): value.strip() for name, equals, value in pairs if equals})


@dataclass(frozen=True, slots=True)
class BrokerConfigRequest(Request[BrokerConfigResponse]):
    """The settings of a broker. The request has no header, so it does not check the broker's name."""

    broker: str
    code = RequestCode.GET_BROKER_CONFIG
    response = BrokerConfigResponse

    @property
    def purpose(self) -> str:
        return f"get the settings of broker {self.broker}"
