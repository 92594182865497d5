"""Names of brokers for the queues that options name by their id alone. Pure.

In a place with broker names `"0"` is clear only if one broker has the whole topic.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from rmq_spark.datasource.options.option_parsers import Positions, Times
from rmq_spark.datasource.options.read_options import ReadOptions
from rmq_spark.datasource.options.subscription import Assignment, WithRetry
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey

Given = TypeVar("Given", Positions, Times)


def unnamed_topics(options: ReadOptions, *, is_new: bool) -> set[str]:
    """Return the topics of which options name a queue without a broker.

    The options for the start matter only if the query `is_new`, because a restarted query begins at its checkpoint.
    """
    queues = [queue for name, queue in options.named_queues() if is_new or not name.startswith("starting")]
    return {queue.topic for queue in queues if not queue.broker}


def with_brokers(options: ReadOptions, queues: Mapping[str, Collection[QueueKey]]) -> ReadOptions:
    """Return the options with the broker's name in each queue that they name.

    `queues` are all queues of the topics in `unnamed_topics`. Raises OptionError if several brokers have the topic.
    Queues of other topics, and of topics that do not exist, stay as they are.
    """
    read = options.subscription
    if isinstance(read, WithRetry) and isinstance(read.chosen, Assignment):
        read = replace(read, chosen=_assigned(read.chosen, queues))
    elif isinstance(read, Assignment):
        read = _assigned(read, queues)
    return replace(
        options,
        subscription=read,
        starting_offsets=_renamed("startingOffsets", options.starting_offsets, queues),
        ending_offsets=_renamed("endingOffsets", options.ending_offsets, queues),
        starting_times=_renamed("startingTimestamp", options.starting_times, queues),
        ending_times=_renamed("endingTimestamp", options.ending_times, queues),
    )


def _assigned(read: Assignment, queues: Mapping[str, Collection[QueueKey]]) -> Assignment:
    return Assignment(tuple(sorted({_named("assign", queue, queues) for queue in read.queues})))


def _renamed(name: str, given: Given | None, queues: Mapping[str, Collection[QueueKey]]) -> Given | None:
    if given is None:
        return None
    return replace(given, queues={_named(name, queue, queues): value for queue, value in given.queues.items()})


def _named(name: str, queue: QueueKey, queues: Mapping[str, Collection[QueueKey]]) -> QueueKey:
    brokers = _brokers(queues.get(queue.topic, ()))
    if queue.broker or not brokers:
        return queue
    if len(brokers) > 1:
        raise OptionError(
            f'{name}: found the queue id {queue.queue_id} of topic "{queue.topic}" without a broker; expected one of '
            f'the brokers {", ".join(brokers)} before it, as in "{brokers[0]}:{queue.queue_id}".'
        )
    return QueueKey(queue.topic, queue.queue_id, brokers[0])


def _brokers(queues: Iterable[QueueKey]) -> list[str]:
    return sorted({queue.broker for queue in queues})
