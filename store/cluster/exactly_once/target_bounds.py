"""Bounds of queues. The answer that has them also proves that a connection leads to its broker."""

from collections.abc import Collection, Sequence

from rmq_spark.store.cluster.exactly_once.sink_place import SinkPlace
from rmq_spark.store.cluster.exactly_once.target_calls import TargetCalls, call_all
from rmq_spark.store.cluster.requests import TopicStatsRequest
from rmq_spark.store.cluster.responses import QueueStats, TopicStatsResponse
from rmq_spark.store.errors import BackendUnavailableError, RmqError
from rmq_spark.store.model import QueueKey


def ask_bounds(calls: TargetCalls, place: SinkPlace, asked: Sequence[tuple[str, str]]) -> dict[QueueKey, QueueStats]:
    """Return the bounds of all queues of topics, given as pairs of a topic and a broker, as the brokers tell.

    Raises BackendUnavailableError if another broker answers, SessionOverError, and the errors of brokers.
    """
    requests = [(broker, TopicStatsRequest(place.routes.topic_of(topic), broker)) for topic, broker in asked]
    bounds: dict[QueueKey, QueueStats] = {}
    for (topic, broker), outcome in zip(asked, call_all(calls, requests), strict=True):
        if isinstance(outcome, RmqError):
            raise outcome
        bounds |= bounds_of(outcome, topic, broker)
    return bounds


def prove_brokers(calls: TargetCalls, place: SinkPlace, brokers: Collection[str]) -> None:
    """Let brokers tell their names on the connections of a session. Raises the errors of `ask_bounds`.

    An old route may lead to another broker, whose queues are not those of the batch.
    """
    ask_bounds(calls, place, [(place.terms.stage_topic, broker) for broker in sorted(brokers)])


def bounds_of(answer: TopicStatsResponse, topic: str, broker: str) -> dict[QueueKey, QueueStats]:
    """Return the bounds of a topic's queues by the answer of `broker`, with the topic's name without the namespace.

    Raises BackendUnavailableError if another broker has answered, which an old route leads to.
    """
    others = sorted({queue.broker for queue in answer.queues} - {broker})
    if others:
        raise BackendUnavailableError(
            f"broker {', '.join(others)} has answered at the address of broker {broker}; expected {broker}. Wait until "
            "the name servers have the new address. If it stays so, correct brokerIP1 of the broker, or the option "
            "brokerAddresses."
        )
    return {QueueKey(topic, queue.queue_id, broker): stats for queue, stats in answer.queues.items()}
