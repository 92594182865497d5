"""Tries what a write with exactly-once delivery needs of a cluster, and returns what is missing.

Nothing that a consumer sees is stored in the target topic. Unlike the doctor of queries this one leaves traces:

| what is tried | by | what stays |
| --- | --- | --- |
| the right to publish to the target | a message for a queue that does not exist, which each broker refuses | nothing |
| to pull from the target | a pull at the end of a queue | the sink's reading group |
| to stage and to settle | a barrier message to the stage topic | the message, which expires |
| to write and to read the ledger | a row that no rule applies to, read back | the row, which expires |
| marks | offsets of a group of the doctor's own, read back | the group |
| registration | a producer with a random id | nothing |
| settings of a broker that break the promise | a look at them | nothing |

Source: SendMessageProcessor, AbstractSendMessageProcessor#msgCheck (4.9, 5.3).
"""

import uuid
from collections.abc import Callable, Collection, Iterator
from functools import partial

from rmq_spark.store.backend import CommitTerms
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.client import ClusterClient, monotonic_ms, now_ms
from rmq_spark.store.cluster.config_requests import BrokerConfigRequest
from rmq_spark.store.cluster.diagnosis import ClusterFinding, State, of_error
from rmq_spark.store.cluster.exactly_once.barrier import Barriers
from rmq_spark.store.cluster.exactly_once.ledger import Ledger
from rmq_spark.store.cluster.exactly_once.ledger_rows import Take, encode_row
from rmq_spark.store.cluster.exactly_once.marks import Mark, marks_group
from rmq_spark.store.cluster.exactly_once.registration import Registration
from rmq_spark.store.cluster.exactly_once.sink_place import SinkPlace
from rmq_spark.store.cluster.exactly_once.target_topics import OwnTopics, TargetTopics
from rmq_spark.store.cluster.requests import PullRequest, TopicStatsRequest
from rmq_spark.store.cluster.send_requests import SendRequest
from rmq_spark.store.cluster.sink import TaskRoutes
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes
from rmq_spark.store.errors import BrokerError, NotFoundError, OptionError, RmqError
from rmq_spark.store.model import CommitKey, QueueKey

_DOCTOR = "rmq-spark-doctor"  # the id of the query of the doctor's ledger rows and marks
_NO_QUEUE = (1 << 31) - 1  # an id that no queue has
_BODY = b"rmq doctor"  # brokers of 5.x fail at requests without a body before they look at the queue
_LEDGER_STEP = "Create it: rmq prepare-sink -n NAMESERVER --ledger-broker BROKER."
# Settings of a broker that must be false, the conditions in docs/EXACTLY_ONCE.md that they violate, and the reasons.
_BREAKING = {
    "transientStorePoolEnable": ("C1", "a kill of the broker loses rows that it has acknowledged"),
    "enableControllerMode": ("C2", "a new master may lack rows; this mode is not tested"),
    "enableDLegerCommitLog": ("C2", "a new leader may lack rows; this mode is not tested"),
    "enableBuildConsumeQueueConcurrently": ("C3", "a take-over may overlook rows, and store them twice"),
}
_SETTING_STEP = "Set it to false, or set delivery=atLeastOnce. docs/EXACTLY_ONCE.md has the conditions."
_STAGE_STEP = "Create it on each master: rmq prepare-sink -n NAMESERVER --ledger-broker BROKER."


def examine_sink(client: ClusterClient, topic: str, own: OwnTopics) -> list[ClusterFinding]:
    """Return the findings about writes to `topic`, and about the topics of the sink itself."""
    return list(_Examination(client, topic, own).findings())


class _Examination:
    """One examination. `topic` is without the namespace."""

    def __init__(self, client: ClusterClient, topic: str, own: OwnTopics) -> None:
        address: ClusterAddress = client.address
        routes = WriteRoutes(client, monotonic_ms, NewTopics(is_allowed=False))
        terms = CommitTerms(stage_topic=own.stage, ledger_topic=own.ledger)
        self._place = SinkPlace(address, terms, client, routes)
        self._topic, self._own = topic, own
        self._session = f"{_DOCTOR}#{uuid.uuid4().hex}"

    def findings(self) -> Iterator[ClusterFinding]:
        """Try everything, and yield the findings."""
        yield from self._examine_ledger()
        try:
            targets = TargetTopics(TaskRoutes(self._place.client, self._place.routes), self._own, (), 0)
            queues = targets.queues(self._topic)
        except RmqError as error:
            yield of_error(f"sink topic {self._topic}", error)
            return
        brokers = sorted({queue.broker for queue in queues})
        where = ", ".join(brokers)
        yield ClusterFinding(f"sink topic {self._topic}", State.OK, f"{len(queues)} queues on {where} accept messages.")
        for broker in brokers:
            yield from self._examine_broker(broker, [queue for queue in queues if queue.broker == broker])

    def _examine_ledger(self) -> Iterator[ClusterFinding]:
        what = f"ledger {self._own.ledger}"
        ledger = Ledger(self._place.client, self._own.ledger)
        key = CommitKey(_DOCTOR)
        try:
            broker = ledger.find().broker
        except RmqError as error:
            found = of_error(what, error)
            yield found if found.next_step else ClusterFinding(what, found.state, found.why, _LEDGER_STEP)
            return
        yield ClusterFinding(what, State.OK, f"it is on broker {broker}.")

        def write() -> str:
            view = ledger.read(key, ledger.end())
            row = Take(key, self._session, now_ms())
            ledger.append(row, encode_row(row))
            ledger.read_through(view, row)
            return "a row was stored and read."

        def mark() -> str:
            begun = ledger.read_marks(_DOCTOR).begun or 0
            ledger.store_mark(_DOCTOR, Mark.BEGUN, begun + 1)
            return f"group {marks_group(_DOCTOR)} keeps its offsets."

        yield _try(f"{what}: write and read", write)
        yield _try(f"{what}: marks", mark)

    def _examine_broker(self, broker: str, queues: Collection[QueueKey]) -> Iterator[ClusterFinding]:
        place, what = self._place, f"sink topic {self._topic} on {broker}"
        stage = self._own.stage
        at = {broker: place.routes.address(broker)}
        place.routes.renew(stage)
        has_stage = place.routes.is_listed(stage, broker)
        if not has_stage:
            why = "no name server lists the topic there; rows are staged on each master with target queues."
            yield ClusterFinding(f"stage {stage} on {broker}", State.MISSING, why, _STAGE_STEP)
        with Registration(place.address, marks_group(_DOCTOR), self._session) as calls:

            def register() -> str:
                calls.register(at)
                return f"the broker lists {len(calls.producers([broker])[broker])} producer, as it registered."

            registered = _try(f"{what}: registration", register)
            yield registered
            if registered.state is not State.OK:
                calls.reach(at)
            yield self._look_at_settings(calls, broker)
            topics = [self._topic, *([stage] if has_stage else ())]
            for topic in topics:
                yield _try(f"bounds of topic {topic} on {broker}", partial(self._ask_bounds, calls, topic, broker))
            yield _try(f"{what}: publish", lambda: self._publish_nowhere(calls, broker))
            yield _try(f"{what}: pull", lambda: self._pull(calls, min(queues)))
            if has_stage:
                yield _try(f"stage {stage} on {broker}: write and read", lambda: self._stage(calls, broker))
            calls.close(unregisters=registered.state is State.OK)

    def _ask_bounds(self, calls: Registration, topic: str, broker: str) -> str:
        stored = self._place.routes.topic_of(topic)
        count = len(calls.call(broker, TopicStatsRequest(stored, broker)).queues)
        return f"the broker tells those of {count} queues."

    def _look_at_settings(self, calls: Registration, broker: str) -> ClusterFinding:
        """Return the finding about settings that break the promise. A query runs nevertheless."""
        what = f"sink topic {self._topic} on {broker}: settings"
        try:
            settings = calls.call(broker, BrokerConfigRequest(broker)).settings
        except RmqError as error:
            return of_error(what, error, State.WARNING)
        found = [
            f"{name}=true (condition {condition}): {reason}"
            for name, (condition, reason) in _BREAKING.items()
            if settings.get(name, "").lower() == "true"
        ]
        if not found:
            is_async = settings.get("flushDiskType") == "ASYNC_FLUSH"
            power = " flushDiskType=ASYNC_FLUSH: a power cut may lose rows (condition C1)." if is_async else ""
            return ClusterFinding(what, State.OK, f"none of {', '.join(_BREAKING)} is on.{power}")
        return ClusterFinding(what, State.WARNING, f"{'; '.join(found)}.", _SETTING_STEP)

    def _publish_nowhere(self, calls: Registration, broker: str) -> str:
        """Send a message to a queue that does not exist. An account without the right is refused before that."""
        queue = QueueKey(self._place.routes.topic_of(self._topic), _NO_QUEUE, broker)
        try:
            calls.call(broker, SendRequest(queue, _BODY, "", now_ms()))
        except (OptionError, NotFoundError, BrokerError) as error:
            if "queueId" in str(error):
                return "the account may; nothing was stored."
            raise
        raise BrokerError(0, f"broker {broker} has stored a message in queue {queue}; expected that it refuses it.")

    def _pull(self, calls: Registration, queue: QueueKey) -> str:
        stored = self._place.pull_terms.stored_queue(queue)
        bounds = calls.call(queue.broker, TopicStatsRequest(stored.topic, queue.broker)).queues.get(stored)
        end = 0 if bounds is None else bounds.max_offset
        group = self._place.pull_terms.stored_group
        calls.call(queue.broker, PullRequest(stored, end, 1, group))
        return f"group {group} may pull."

    def _stage(self, calls: Registration, broker: str) -> str:
        place = self._place
        barriers = Barriers(calls, place.patience_ms, place.monotonic_ms, now_ms)
        (queue,) = place.barrier_queues([broker])
        barriers.send([queue])
        stats = calls.call(broker, TopicStatsRequest(queue.topic, broker)).queues[queue]
        calls.call(broker, PullRequest(queue, stats.max_offset - 1, 1, place.pull_terms.stored_group))
        return "a message was stored and pulled."


def _try(what: str, step: Callable[[], str]) -> ClusterFinding:
    """Return the finding about one step, which returns what was found, or raises what is missing."""
    try:
        return ClusterFinding(what, State.OK, step())
    except RmqError as error:
        return of_error(what, error)
