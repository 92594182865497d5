"""Requests for what a broker has counted: its state, the groups of a topic, and statistics that a test has set.

Source: AdminBrokerProcessor#getBrokerRuntimeInfo, #queryTopicConsumeByWho, #viewBrokerStatsData (4.9, 5.3).
"""

from typing import TYPE_CHECKING

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.testing.brokers.server import HandlerTable
from rmq_spark.store.testing.brokers.wire import Answer, Call, Refusal, loose_json

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

HANDLERS = HandlerTable()
_NO_MESSAGE_MS = (1 << 63) - 1  # the time of the first message of an empty store


@HANDLERS.on(RequestCode.GET_BROKER_RUNTIME_INFO)
def get_runtime_info(broker: "Broker", call: Call) -> Answer:
    """Tell the state of the broker. The rate of pulls has a name of its own in each release."""
    pulls = "getTransferredTps" if broker.release.is_5 else "getTransferedTps"
    table = {
        "bootTimestamp": "1700000000000",
        "brokerVersionDesc": "V5_3_3" if broker.release.is_5 else "V4_9_7",
        "commitLogDiskRatio": "0.25",
        "earliestMessageTimeStamp": str(_NO_MESSAGE_MS),
        "msgPutTotalTodayMorning": "40",
        "msgPutTotalTodayNow": "100",
        "putTps": "12.5 3.0 1.0",
        pulls: "4.0 2.0 1.0",
        **({"brokerActive": "true"} if broker.release.is_5 else {}),
    }
    return Answer(body=loose_json({"table": table}).encode())


@HANDLERS.on(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO)
def get_groups_of_topic(broker: "Broker", call: Call) -> Answer:
    """Tell the groups that have offsets in a topic, or members that subscribe to it."""
    topic = call.text("topic")
    names = {key.partition("@")[2] for key in broker.offsets.table() if key.partition("@")[0] == topic}
    names |= {name for name, group in broker.members.groups.items() if topic in group.subscriptions}
    return Answer(body=loose_json({"groupList": sorted(names)}).encode())


@HANDLERS.on(RequestCode.VIEW_BROKER_STATS_DATA)
def view_statistic(broker: "Broker", call: Call) -> Answer:
    """Tell a statistic of the settings, as rate of the last minute and sum of the last day."""
    name, key = call.text("statsName"), call.text("statsKey")
    if (name, key) not in broker.settings.statistics:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"The stats <{name}> <{key}> not exist")
    rate, day = broker.settings.statistics[name, key]
    body = {
        "statsDay": {"avgpt": 0.0, "sum": day, "tps": 0.0},
        "statsHour": {"avgpt": 0.0, "sum": 0, "tps": 0.0},
        "statsMinute": {"avgpt": 0.0, "sum": 0, "tps": rate},
    }
    return Answer(body=loose_json(body).encode())
