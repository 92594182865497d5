"""Accounts of a broker: signatures, and rights on topics and groups.

The rule of signatures is written here a second time, so that a fault of the client's does not go unnoticed.
Source: AclUtils, PlainPermissionManager (4.9), DefaultAuthenticationBuilder, DefaultAuthorizationContextBuilder (5.3).
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rmq_spark.store.cluster.codes import BrokerRequestCode, RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.names import RETRY_TOPIC_PREFIX
from rmq_spark.store.testing.brokers.relay_requests import INVOKE_BROKER_TO_GET_CONSUMER_STATUS
from rmq_spark.store.testing.brokers.releases import LITE_PULL_MESSAGE
from rmq_spark.store.testing.brokers.sent_message import SEND_BATCH_MESSAGE, SEND_MESSAGE, SEND_MESSAGE_V2
from rmq_spark.store.testing.brokers.wire import Call, Refusal

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

_UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"
_V4_9_3 = 401  # MQVersion: 5.3 leaves the field out of the content of clients up to this version
TOPIC, GROUP, CLUSTER = "Topic", "Group", "Cluster"
SUB, PUB, GET, CREATE, UPDATE, DELETE = "SUB", "PUB", "GET", "CREATE", "UPDATE", "DELETE"

_R, _B = RequestCode, BrokerRequestCode
# The fields of topic and group in a send.
_SENDS = {SEND_MESSAGE: ("topic", "producerGroup"), SEND_MESSAGE_V2: ("b", "a"), SEND_BATCH_MESSAGE: ("b", "a")}
_SEND_BACK = 36  # CONSUMER_SEND_MSG_BACK
_TOPIC_SUB, _GROUP_SUB = ("topic", TOPIC, SUB), ("consumerGroup", GROUP, SUB)
_TOPIC_GET, _GROUP_GET = ("topic", TOPIC, GET), ("consumerGroup", GROUP, GET)
# Request code -> field, kind and right of each resource that the request needs (PlainAccessResource#parse, 4.9).
_NEEDED_BY_4: dict[int, tuple[tuple[str, str, str], ...]] = {
    _R.PULL_MESSAGE: (_TOPIC_SUB, _GROUP_SUB),
    _R.QUERY_MESSAGE: (_TOPIC_SUB,),
    _SEND_BACK: (("group", GROUP, SUB),),
    _R.UPDATE_CONSUMER_OFFSET: (_GROUP_SUB,),
    _R.GET_CONSUMER_LIST_BY_GROUP: (_GROUP_SUB,),
}
# The same for 5.3 (DefaultAuthorizationContextBuilder#build).
_NEEDED_BY_5: dict[int, tuple[tuple[str, str, str], ...]] = {
    _R.PULL_MESSAGE: (_TOPIC_SUB, _GROUP_SUB),
    LITE_PULL_MESSAGE: (_TOPIC_SUB, _GROUP_SUB),
    _R.QUERY_CONSUMER_OFFSET: (_TOPIC_SUB, _GROUP_SUB),
    _R.UPDATE_CONSUMER_OFFSET: (_TOPIC_SUB, _GROUP_SUB),
    _R.QUERY_MESSAGE: (_TOPIC_SUB,),
    _R.VIEW_MESSAGE_BY_ID: (_TOPIC_SUB,),
    _SEND_BACK: (("group", GROUP, SUB),),
    _R.GET_CONSUMER_LIST_BY_GROUP: (_GROUP_SUB,),
    _R.GET_MAX_OFFSET: (_TOPIC_GET,),
    _R.GET_MIN_OFFSET: (_TOPIC_GET,),
    _R.SEARCH_OFFSET_BY_TIMESTAMP: (_TOPIC_GET,),
    _R.GET_EARLIEST_MSG_STORETIME: (_TOPIC_GET,),
    _R.GET_TOPIC_STATS_INFO: (_TOPIC_GET,),
    _R.GET_TOPIC_CONFIG: (_TOPIC_GET,),
    _R.GET_CONSUMER_CONNECTION_LIST: (_GROUP_GET,),
    _R.GET_CONSUME_STATS: (_GROUP_GET,),
    _R.UPDATE_AND_CREATE_TOPIC: (("topic", TOPIC, CREATE),),
    _R.DELETE_TOPIC_IN_BROKER: (("topic", TOPIC, DELETE),),
    _R.GET_ALL_CONSUMER_OFFSET: (("", CLUSTER, GET),),
    _R.GET_PRODUCER_CONNECTION_LIST: (("", CLUSTER, GET),),
    _R.GET_BROKER_CONFIG: (("", CLUSTER, GET),),
    _R.VIEW_BROKER_STATS_DATA: (("", CLUSTER, GET),),
    _R.QUERY_TOPIC_CONSUME_BY_WHO: (_TOPIC_GET,),
    _B.GET_CONSUMER_RUNNING_INFO: (_GROUP_GET,),
    _B.CONSUME_MESSAGE_DIRECTLY: (_TOPIC_SUB, _GROUP_SUB),
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS: (_TOPIC_GET, ("group", GROUP, GET)),
    _R.INVOKE_BROKER_TO_RESET_OFFSET: (("topic", TOPIC, UPDATE), ("group", GROUP, UPDATE)),
}
_ADMIN_OF_4 = (_R.UPDATE_AND_CREATE_TOPIC, _R.DELETE_TOPIC_IN_BROKER, _R.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP)


@dataclass(frozen=True, slots=True)
class Account:
    """One account. `topics` and `groups` map names, or `*` for all, to rights joined by `|`, such as "SUB|GET".

    The rights are SUB and PUB, and for 5.3 also GET, CREATE, UPDATE and DELETE. An administrator needs none.
    """

    access_key: str
    secret_key: str
    is_admin: bool = False
    topics: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    security_token: str | None = None

    def has(self, kind: str, name: str, right: str) -> bool:
        """Return whether the account has a right on a topic or a group."""
        rights = {TOPIC: self.topics, GROUP: self.groups}.get(kind, {})
        return self.is_admin or right in rights.get(name, rights.get("*", "")).split("|")


def sign(command: Command, secret_key: str, *, without: Iterable[str] = ()) -> str:
    """Return the signature of a request (AclUtils#calSignature). Fields in `without` do not count."""
    left_out = {"Signature", *without}
    values = [value for name, value in sorted(command.fields.items()) if name not in left_out]
    content = "".join(values).encode() + bytes(command.body)
    return base64.b64encode(hmac.new(secret_key.encode(), content, hashlib.sha1).digest()).decode()


class AccountTable:
    """The accounts of a broker. Name servers check none."""

    def __init__(self, *accounts: Account) -> None:
        self._accounts = {account.access_key: account for account in accounts}

    def check(self, broker: "Broker", call: Call) -> None:
        """Refuse a call without a valid signature, or whose account lacks a right."""
        account = self._check_signature(broker, call)
        for kind, name, right in _needed(broker, call):
            if account.has(kind, name, right):
                continue
            if not broker.release.is_5:
                raise _refuse_4(f"No default permission for {kind.lower()}: {name}")
            raise _refuse_5(
                f"User:{account.access_key} has no permission to access {kind}:{name} from "
                f"{call.connection.peer.rpartition(':')[0]}, no matched policies."
            )
        if not broker.release.is_5 and call.command.code in _ADMIN_OF_4 and not account.is_admin:
            raise _refuse_4(f"Need admin permission for request code={call.command.code}, but accessKey is not")

    def _check_signature(self, broker: "Broker", call: Call) -> Account:
        key, signature = (call.command.fields.get(name, "") for name in ("AccessKey", "Signature"))
        is_5 = broker.release.is_5
        if not key:
            raise _refuse_5("username cannot be null.") if is_5 else _refuse_4("No accessKey is configured")
        account = self._accounts.get(key)
        if account is None:
            raise _refuse_5(f"User:{key} is not found.") if is_5 else _refuse_4(f"No acl config for {key}")
        without = [] if is_5 and call.command.version > _V4_9_3 else [_UNIQUE_KEY_QUERY]
        is_right = hmac.compare_digest(sign(call.command, account.secret_key, without=without), signature)
        if not is_right or call.command.fields.get("SecurityToken") != account.security_token:
            wrong = f"Check signature failed for accessKey={key}"
            raise _refuse_5("check signature failed.") if is_5 else _refuse_4(wrong)
        return account


def _refuse_4(text: str) -> Refusal:
    remark = (
        f"org.apache.rocketmq.acl.common.AclException: {text}, org.apache.rocketmq.acl.plain.PlainPermissionManager"
    )
    return Refusal(ResponseCode.SYSTEM_ERROR, remark)


def _refuse_5(text: str) -> Refusal:
    return Refusal(ResponseCode.NO_PERMISSION, text)


def _needed(broker: "Broker", call: Call) -> Iterator[tuple[str, str, str]]:
    """Yield kind and name of each resource that a request uses, and the right that it needs."""
    code, fields = call.command.code, call.command.fields
    if code in _SENDS:
        yield from _needed_to_send(broker, code, fields)
    elif code == _R.CHECK_CLIENT_CONFIG and broker.release.is_5:
        body = json.loads(call.body or b"{}")
        yield TOPIC, body.get("subscriptionData", {}).get("topic", ""), SUB
        yield GROUP, body.get("group", ""), SUB
    elif code in (_R.HEART_BEAT, _R.UNREGISTER_CLIENT, _R.LOCK_BATCH_MQ, _R.UNLOCK_BATCH_MQ):
        yield from _needed_by_member(broker, call)
    for name, kind, right in (_NEEDED_BY_5 if broker.release.is_5 else _NEEDED_BY_4).get(code, ()):
        if kind == CLUSTER:
            yield CLUSTER, broker.cluster, right
        elif code != _R.VIEW_MESSAGE_BY_ID or name in fields:
            yield kind, call.text(name), right


def _needed_by_member(broker: "Broker", call: Call) -> Iterator[tuple[str, str, str]]:
    """Yield what a member needs: SUB on its group and its topics. 4.9 does not check locks."""
    code, body = call.command.code, json.loads(call.body or b"{}")
    if code == _R.HEART_BEAT:
        for data in body.get("consumerDataSet", ()):
            yield GROUP, data["groupName"], SUB
            for topic in (one["topic"] for one in data["subscriptionDataSet"]):
                if topic.startswith(RETRY_TOPIC_PREFIX):
                    yield GROUP, topic.removeprefix(RETRY_TOPIC_PREFIX), SUB
                else:
                    yield TOPIC, topic, SUB
    elif code == _R.UNREGISTER_CLIENT:
        if "consumerGroup" in call.command.fields:
            yield GROUP, call.text("consumerGroup"), SUB
    elif broker.release.is_5:
        yield GROUP, body["consumerGroup"], SUB
        yield from ((TOPIC, one["topic"], SUB) for one in body["mqSet"])


def _needed_to_send(broker: "Broker", code: int, fields: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield what a send needs: PUB on the topic, or SUB on the group whose retry topic it is.

    4.9 does not check batches.
    """
    topic, group = (fields.get(name, "") for name in _SENDS[code])
    if topic.startswith(RETRY_TOPIC_PREFIX):
        resource = GROUP, group or topic.removeprefix(RETRY_TOPIC_PREFIX), SUB
    else:
        resource = TOPIC, topic, PUB
    if broker.release.is_5 or code != SEND_BATCH_MESSAGE:
        yield resource
