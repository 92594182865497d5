"""Checks of a batch before its intent, which find all that the intent relies on. A failure promises nothing."""

from collections.abc import Mapping

from rmq_spark.store.cluster.exactly_once.preparation import extend_stage
from rmq_spark.store.cluster.exactly_once.sink_place import SinkPlace
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedBatch
from rmq_spark.store.cluster.exactly_once.target_bounds import bounds_of
from rmq_spark.store.cluster.requests import PullRequest, TopicStatsRequest
from rmq_spark.store.cluster.responses import QueueStats
from rmq_spark.store.errors import BackendUnavailableError, NotFoundError, RmqError
from rmq_spark.store.model import QueueKey

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.005, 0.2
_TAG_OF_NO_BLOB = "none"  # blobs have no tags


def check_staged(place: SinkPlace, batch: StagedBatch) -> dict[str, str]:
    """Return the addresses of the target brokers, after what an intent of the batch would rely on was found.

    Every blob is visible and has not expired, and the account may pull it. Every target queue accepts messages; brokers
    do not check that. Every target broker has the stage topic, which barriers need; where it is missing, it is created.

    Raises NotFoundError if a blob has expired or a target queue is gone, NoPermissionError if a broker refuses pulls of
    blobs, BackendUnavailableError if a broker is away, and the errors of name servers and brokers.
    """
    _check_blobs(place, batch)
    _check_pulls(place, batch)
    _check_queues(place, batch)
    stage = place.terms.stage_topic
    place.routes.renew(stage)
    if not all(place.routes.is_listed(stage, one) for one in batch.brokers):
        place.routes.join(stage)
    lacking = [one for one in batch.brokers if not place.routes.is_listed(stage, one)]
    if lacking:
        extend_stage(place.client, place.routes, stage, lacking)
    return place.find_masters({broker: {stage} for broker in batch.brokers})


def lost_queue(queue: QueueKey) -> NotFoundError:
    """Return the error for a target queue that does not accept messages any more. Nothing was promised."""
    return NotFoundError(
        f"the batch cannot be committed: queue {queue} accepts no messages any more; expected the queues that the "
        "topic had when its tasks ran. Somebody has reduced writeQueueNums or withdrawn the permission. Nothing was "
        "written. Start the batch again."
    )


def _check_blobs(place: SinkPlace, batch: StagedBatch) -> None:
    until_ms, pause_s = place.monotonic_ms() + place.patience_ms, _FIRST_PAUSE_S
    left = batch.blob_ends()
    while left:
        hidden = {}
        bounds = _stage_bounds(place, left)
        for queue, (first, end) in left.items():
            found = bounds.get(queue, QueueStats(0, 0, 0))
            if found.min_offset > first:
                raise NotFoundError(
                    f"{batch.key} cannot be committed: the rows that its tasks have staged at offset {first} of queue "
                    f"{queue} have expired, and the queue begins at {found.min_offset}; expected all of them. Nothing "
                    "was written. Start the batch again; if that is slow, raise the retention (fileReservedTime)."
                )
            if found.max_offset < end:
                hidden[queue] = first, end
        if hidden and place.monotonic_ms() >= until_ms:
            queue, (_, end) = next(iter(hidden.items()))
            raise BackendUnavailableError(
                f"{batch.key} cannot be committed: broker {queue.broker} does not show the rows that its tasks have "
                f"staged in queue {queue}; expected the queue to reach offset {end} within {place.patience_ms} ms. "
                "If the topic was created again, start the batch again; otherwise check the log of the broker."
            )
        left = hidden
        if left:
            place.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _check_pulls(place: SinkPlace, batch: StagedBatch) -> None:
    """Raise the error of a broker that refuses pulls of blobs: after the intent it would leave the batch stuck.

    The pulls match no message, so that no blob is sent for them.
    """
    terms, addresses = place.pull_terms, place.find_blob_brokers(batch.runs)
    queues = {queue.broker: (queue, first) for queue, (first, _) in batch.blob_ends().items()}
    calls = [
        (addresses[broker], PullRequest(terms.stored_queue(queue), first, 1, terms.stored_group, _TAG_OF_NO_BLOB))
        for broker, (queue, first) in queues.items()
    ]
    for outcome in place.client.call_all(calls):
        if isinstance(outcome, RmqError):
            outcome.add_note(f"rmq: nothing of {batch.key} was written.")
            raise outcome


def _stage_bounds(place: SinkPlace, queues: Mapping[QueueKey, tuple[int, int]]) -> dict[QueueKey, QueueStats]:
    """Return the bounds of stage queues, by one request for each broker."""
    found: dict[QueueKey, QueueStats] = {}
    for topic, broker in sorted({(queue.topic, queue.broker) for queue in queues}):
        (address,) = place.find_masters({broker: {topic}}).values()
        answer = place.client.call(address, TopicStatsRequest(place.routes.topic_of(topic), broker))
        found |= bounds_of(answer, topic, broker)
    return found


def _check_queues(place: SinkPlace, batch: StagedBatch) -> None:
    """Raise NotFoundError if a target queue does not accept messages now, BackendUnavailableError if none is known."""
    place.routes.forget()
    for queue in batch.queues:
        try:
            accepting = place.routes.queues(queue.topic)
        except NotFoundError as error:
            # Tasks have just found the topic. So its brokers are away, or a name server has just started.
            raise BackendUnavailableError(
                f"no broker of topic {queue.topic} is known at present: {error} If it was deleted, nothing was written."
            ) from None
        if queue in accepting:
            continue
        place.routes.join(queue.topic)
        listing = place.routes.book.listing(queue.topic, queue.broker)
        if not place.routes.is_listed(queue.topic, queue.broker):
            raise BackendUnavailableError(
                f"broker {queue.broker} of queue {queue} has no master now; expected all brokers to which the batch "
                "goes. Start the master; after a restart of the name servers wait 30 s."
            )
        if queue.queue_id >= listing.write_count:
            raise lost_queue(queue)
