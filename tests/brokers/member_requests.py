"""Requests of and about the members of consumer groups: heartbeats, farewells, and lists of members.

Source: ClientManageProcessor, ConsumerManageProcessor#getConsumerListByGroup,
AdminBrokerProcessor#getConsumerConnectionList (4.9, 5.3). Heartbeats with a fingerprint (5.x) are read like others.
"""

import json
from typing import TYPE_CHECKING

from brokers.group_members import ConsumerData, Member
from brokers.server import HandlerTable
from brokers.wire import Answer, Call, Refusal, loose_json
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode

if TYPE_CHECKING:
    from brokers.broker import Broker

HANDLERS = HandlerTable()


@HANDLERS.on(RequestCode.HEART_BEAT)
def heart_beat(broker: "Broker", call: Call) -> Answer:
    """Register the connection as a member of the groups in a heartbeat."""
    try:
        body = json.loads(call.command.body)
        client_id, consumers = body["clientID"], list(map(ConsumerData.read, body.get("consumerDataSet", [])))
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"com.alibaba.fastjson.JSONException: {error!r}, com") from None
    for data in consumers:
        member = Member(
            client_id,
            call.connection,
            call.connection.peer,
            call.command.language,
            call.command.version,
            broker.now_s(),
        )
        broker.members.heartbeat(member, data)
    return Answer(fields={"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"} if broker.release.is_5 else {})


@HANDLERS.on(RequestCode.UNREGISTER_CLIENT)
def unregister_client(broker: "Broker", call: Call) -> Answer:
    """Remove the connection from a group. The client id in the request does not count."""
    call.text("clientID")
    group = call.command.fields.get("consumerGroup")
    if group is not None:
        broker.members.unregister(group, call.connection)
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
        "connectionSet": [
            {
                "clientAddr": member.address,
                "clientId": member.client_id,
                "language": member.language,
                "version": member.version,
            }
            for member in reversed(group.members.values())
        ],
        "consumeFromWhere": group.consume_from_where,
        "consumeType": group.consume_type,
        "messageModel": group.message_model,
        "subscriptionTable": group.subscriptions,
    }
    return Answer(body=loose_json(body).encode())
