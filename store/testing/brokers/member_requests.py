"""Requests of and about the members of consumer groups, and producers: heartbeats, farewells, and lists of them.

Source: ClientManageProcessor, ConsumerManageProcessor#getConsumerListByGroup,
AdminBrokerProcessor#getConsumerConnectionList, #getProducerConnectionList (4.9, 5.3). Heartbeats with a fingerprint
(5.x) are read like others.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.testing.brokers.group_members import ConsumerData, Member
from rmq_spark.store.testing.brokers.server import HandlerTable
from rmq_spark.store.testing.brokers.wire import Answer, Call, Refusal, loose_json

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

HANDLERS = HandlerTable()


@HANDLERS.on(RequestCode.HEART_BEAT)
def heart_beat(broker: "Broker", call: Call) -> Answer:
    """Register the connection as a member and as a producer of the groups in a heartbeat."""
    try:
        body = json.loads(call.body)
        client_id, consumers = body["clientID"], list(map(ConsumerData.read, body.get("consumerDataSet", [])))
        producer_groups = [one["groupName"] for one in body.get("producerDataSet", [])]
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"com.alibaba.fastjson.JSONException: {error!r}, com") from None
    command, connection = call.command, call.connection
    member = Member(client_id, connection, connection.peer, command.language, command.version, broker.now_s())
    for data in consumers:
        broker.members.heartbeat(replace(member), data)
    for group in producer_groups:
        broker.producers.register(group, replace(member))
    return Answer(fields={"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"} if broker.release.is_5 else {})


@HANDLERS.on(RequestCode.UNREGISTER_CLIENT)
def unregister_client(broker: "Broker", call: Call) -> Answer:
    """Remove the connection from a group's members or producers. The client id in the request does not count."""
    call.text("clientID")
    group, producer_group = (call.command.fields.get(name) for name in ("consumerGroup", "producerGroup"))
    if group is not None:
        broker.members.unregister(group, call.connection)
    if producer_group is not None:
        broker.producers.unregister(producer_group, call.connection)
    return Answer()


@HANDLERS.on(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
def get_members(broker: "Broker", call: Call) -> Answer:
    """Answer with the client ids of a group's members. They are not sorted."""
    name = call.text("consumerGroup")
    group = broker.members.groups.get(name)
    if group is None:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {name}")
    ids = [member.client_id for member in reversed(group.members.values())]
    return Answer(body=loose_json({"consumerIdList": ids}).encode())


@HANDLERS.on(RequestCode.GET_CONSUMER_CONNECTION_LIST)
def get_connections(broker: "Broker", call: Call) -> Answer:
    """Answer with the connections of a group's members, and with what the last heartbeat said."""
    name = call.text("consumerGroup")
    group = broker.members.groups.get(name)
    if group is None:
        raise Refusal(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
    body = {
        "connectionSet": _connection_set(reversed(group.members.values())),
        "consumeFromWhere": group.consume_from_where,
        "consumeType": group.consume_type,
        "messageModel": group.message_model,
        "subscriptionTable": group.subscriptions,
    }
    return Answer(body=loose_json(body).encode())


@HANDLERS.on(RequestCode.GET_PRODUCER_CONNECTION_LIST)
def get_producers(broker: "Broker", call: Call) -> Answer:
    """Answer with the connections of a group's producers."""
    name = call.text("producerGroup")
    producers = broker.producers.of(name)
    if producers is None:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
    return Answer(body=loose_json({"connectionSet": _connection_set(reversed(producers))}).encode())


def _connection_set(members: Iterable[Member]) -> list[dict[str, Any]]:
    return [
        {
            "clientAddr": member.address,
            "clientId": member.client_id,
            "language": member.language,
            "version": member.version,
        }
        for member in members
    ]
