"""Requests that lock queues for a member of a group, and free them.

Source: AdminBrokerProcessor#lockBatchMQ, #unlockBatchMQ (4.9, 5.3). `onlyThisBroker` does not count, because a broker
without lockInStrictMode asks no replica.
"""

import json
from typing import TYPE_CHECKING

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.testing.brokers.server import HandlerTable
from rmq_spark.store.testing.brokers.wire import Answer, Call, QueueId, Refusal, loose_json

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

HANDLERS = HandlerTable()


@HANDLERS.on(RequestCode.LOCK_BATCH_MQ)
def lock_queues(broker: "Broker", call: Call) -> Answer:
    """Answer with those of the queues that the client holds from now on. Their order is not that of the request."""
    group, client_id, queues = _read(call)
    held = broker.locks.lock(group, queues, client_id)
    return Answer(body=loose_json({"lockOKMQSet": held[::-1]}).encode())


@HANDLERS.on(RequestCode.UNLOCK_BATCH_MQ)
def unlock_queues(broker: "Broker", call: Call) -> Answer:
    """Free those of the queues that the client holds."""
    group, client_id, queues = _read(call)
    broker.locks.unlock(group, queues, client_id)
    return Answer()


def _read(call: Call) -> tuple[str, str, list[QueueId]]:
    """Return group, client id and queues of a request (LockBatchRequestBody)."""
    try:
        body = json.loads(call.body)
        queues = [QueueId(one["topic"], one["brokerName"], one["queueId"]) for one in body["mqSet"]]
        return body["consumerGroup"], body["clientId"], queues
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"java.lang.NullPointerException: {error!r}, java") from None
