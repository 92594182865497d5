"""The topics to which an exactly-once sink writes: which are refused, and their queues.

| refused | why |
| --- | --- |
| compression | an item of a batch has no flag for it |
| retry topics, system topics, the stage and the ledger | a broker or the sink itself acts on their messages |
| static, BatchCQ and compacted topics | their queue offsets do not show how many rows of a batch are stored |

What the options say is refused on the driver, before any task runs. A topic in a row is refused by the task that meets
it first, before it sends anything.
"""

import json
import logging
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass

from rmq_spark.store.backend import SinkTerms
from rmq_spark.store.cluster.client import monotonic_ms
from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.cluster.namespace import unwrap_name, wrap_name
from rmq_spark.store.cluster.requests import TopicConfigRequest
from rmq_spark.store.cluster.responses import TopicConfigResponse
from rmq_spark.store.cluster.routes import refuse_config
from rmq_spark.store.cluster.sink import ClusterSink, TaskRoutes
from rmq_spark.store.errors import BackendUnavailableError, BrokerError, NotFoundError, OptionError, RmqError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import (
    LEDGER_TOPIC,
    RETRY_TOPIC_PREFIX,
    SINK_TOPICS,
    STAGE_TOPIC,
    check_sent_topic,
    check_topic_name,
    is_system_topic,
)

_LOG = logging.getLogger("rmq_spark")
AT_LEAST_ONCE = "set delivery=atLeastOnce"
_PAUSE_MS = 200.0
_UNCHECKED = "isUnchecked"  # in a token


@dataclass(frozen=True, slots=True)
class OwnTopics:
    """The topics of the sink itself, without the namespace: for staged rows, and for the ledger."""

    stage: str = STAGE_TOPIC
    ledger: str = LEDGER_TOPIC


def check_write(terms: SinkTerms, own: OwnTopics, namespace: str) -> None:
    """Raise OptionError if the options alone show that rows cannot be written exactly once."""
    for option, topic in (("stageTopic", own.stage), ("ledgerTopic", own.ledger)):
        if is_system_topic(check_topic_name(topic)) and unwrap_name(namespace, topic) not in SINK_TOPICS:
            raise OptionError(
                f"{option}={topic} is a topic of RocketMQ itself; expected a topic of its own. Leave the option out, "
                "or name another topic."
            )
    if wrap_name(namespace, own.stage) == wrap_name(namespace, own.ledger):
        raise OptionError(
            f"stageTopic and ledgerTopic are the same topic {own.stage}; expected two. Leave one of the options out."
        )
    if terms.compression is not None:
        raise OptionError(
            f"compression={terms.compression} cannot be used with exactly-once delivery, because a message of a batch "
            f"cannot say how it is compressed; expected compression=none. Compress the column body itself, or "
            f"{AT_LEAST_ONCE}."
        )
    if terms.topic is not None:
        check_target_name(terms.topic, own, namespace)


def check_target_name(topic: str, own: OwnTopics, namespace: str) -> None:
    """Raise OptionError if rows must not be written to a topic exactly once, as its name shows."""
    check_sent_topic(topic)
    what, advice = "", f", or {AT_LEAST_ONCE}"
    if wrap_name(namespace, topic) == wrap_name(namespace, own.stage):
        what, advice = "the topic in which the sink itself stages rows (stageTopic)", ""
    elif wrap_name(namespace, topic) == wrap_name(namespace, own.ledger):
        what, advice = "the ledger of the sink itself (ledgerTopic)", ""
    elif topic.startswith(RETRY_TOPIC_PREFIX):
        what = "the retry topic of a group"
    elif unwrap_name(namespace, topic) in SINK_TOPICS:
        what, advice = "the stage or the ledger of other queries", ""
    elif is_system_topic(topic):
        what = "a topic of RocketMQ itself"
    if what:
        raise OptionError(
            f"topic {topic} is {what}; expected an ordinary topic for exactly-once delivery. Use another topic{advice}."
        )


def prepare_targets(sink: ClusterSink, own: OwnTopics) -> str | None:
    """Check the option topic on the driver, before any task runs. Return the token for the tasks, as `ClusterSink`.

    Call `check_write` first. A broker that does not answer is left to the tasks, which wait for it. Raises the errors
    of `ClusterSink.prepare` and of `TargetTopics.queues`.
    """
    token = sink.prepare()
    if token is not None and sink.terms.topic is not None:
        with ExitStack() as held:
            targets = TargetTopics(sink.open_routes(held, token), own, (), 0)
            try:
                targets.queues(sink.terms.topic)
            except BackendUnavailableError as error:
                _LOG.warning("rmq: the tasks of this batch will wait: %s", error)
                return json.dumps({**json.loads(token), _UNCHECKED: True}, sort_keys=True)
    return token


def checked_topics(sink: ClusterSink, token: str | None) -> tuple[str, ...]:
    """Return the topics whose settings `prepare_targets` has checked, which has returned `token`."""
    if token is None or sink.terms.topic is None or _UNCHECKED in json.loads(token):
        return ()
    return (sink.terms.topic,)


class TargetTopics:
    """The queues of the topics to which one task writes. For one thread.

    `checked` are the topics whose settings were checked on the driver. Brokers that are away are waited for, for
    `wait_ms`. `used` has the topics that were asked for, and their queues in the order of the list of write queues.
    """

    def __init__(
        self,
        opened: TaskRoutes,
        own: OwnTopics,
        checked: Collection[str],
        wait_ms: float,
    ) -> None:
        self.used: dict[str, tuple[QueueKey, ...]] = {}
        self._client, self._routes = opened
        self._own, self._checked, self._wait_ms = own, checked, wait_ms

    def queues(self, topic: str) -> tuple[QueueKey, ...]:
        """Return the queues to which messages of a topic are sent.

        Raises OptionError for a topic that is refused, the errors of `WriteRoutes.queues`, BackendUnavailableError if
        a broker does not tell the settings of the topic in time, and NoPermissionError if it refuses to.
        """
        if topic not in self.used:
            check_target_name(topic, self._own, self._client.address.namespace)
            queues = self._routes.queues(topic)
            if topic not in self._checked:
                self._check_settings(topic, {queue.broker for queue in queues})
            self.used[topic] = queues
        return self.used[topic]

    def _check_settings(self, topic: str, brokers: Collection[str]) -> None:
        """Refuse a topic for its settings. Brokers of 4.9 do not tell them, and have no such topics."""
        late_ms, has_logged = monotonic_ms() + self._wait_ms, False
        while True:
            away: dict[str, RmqError] = {}
            for broker, outcome in self._ask(topic, sorted(brokers)).items():
                if isinstance(outcome, TopicConfigResponse):
                    refuse_config(topic, outcome.config)
                elif isinstance(outcome, BackendUnavailableError):
                    away[broker] = outcome
                elif not _knows_no_settings(outcome):
                    raise outcome
            if not away:
                return
            if monotonic_ms() >= late_ms:
                raise next(iter(away.values()))
            if not has_logged:
                has_logged = True
                _LOG.warning("rmq: a task waits for the settings of topic %s: %s", topic, next(iter(away.values())))
            brokers = away
            self._routes.renew(topic)
            self._client.take_done([], _PAUSE_MS)

    def _ask(self, topic: str, brokers: Collection[str]) -> dict[str, TopicConfigResponse | RmqError]:
        stored, found = self._routes.topic_of(topic), dict[str, TopicConfigResponse | RmqError]()
        addresses: dict[str, str] = {}
        for broker in brokers:
            try:
                addresses[broker] = self._routes.address(broker)
            except BackendUnavailableError as error:  # a broker in orderTopicConf that no name server lists
                found[broker] = error
        calls = [(to, TopicConfigRequest(stored, broker)) for broker, to in addresses.items()]
        return found | dict(zip(addresses, self._client.call_all(calls), strict=True))


def _knows_no_settings(error: RmqError) -> bool:
    """Return whether a broker is of 4.9, or does not have the topic any more, which the commit finds out."""
    is_old = isinstance(error, BrokerError) and error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    return is_old or isinstance(error, NotFoundError)
