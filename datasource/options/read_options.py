"""The options of a query, checked against each other. `option_table` parses their texts.

`parse_options` makes every check that does not need the store. A batch query ignores options that are only for streams,
and a stream those that are only for batch queries, as with Kafka's source. The exceptions are options without which the
user would get other rows than expected; they are errors (`ReadOptions.check_batch`, `ReadOptions.check_stream`).
`ReadSettings` are the options that tasks need.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rmq_spark.datasource.options.cluster_options import check_place
from rmq_spark.datasource.options.filters import NO_FILTERS, Filters, make_filters
from rmq_spark.datasource.options.group_options import (
    GroupOptions,
    build_group_options,
    check_batch_start,
    check_start,
    check_stream_start,
)
from rmq_spark.datasource.options.option_parsers import EARLIEST, GROUP, LATEST, Positions, Times
from rmq_spark.datasource.options.option_table import (
    OPTIONS,
    SINK_OPTIONS,
    Locate,
    field_values,
    index_options,
    option_field,
    parse_given,
    refuse_unsupported,
    require,
    strip_spark_options,
)
from rmq_spark.datasource.options.subscription import Assignment, Pattern, Subscription, Topics, WithRetry
from rmq_spark.store.backend import Capability, Location
from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.row_filter import TAG
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import RETRY_TOPIC_PREFIX, retry_topic

# Advice for names that are unknown in a load() because they are options of a write.
_HINTS = dict.fromkeys(
    index_options(SINK_OPTIONS).keys() - index_options(OPTIONS).keys(), "It is for writing. Leave it out."
)
COMPLETE_WAIT_MS = 300_000  # brokerDownTimeout of batch queries and of the trigger AvailableNow, if it is not given


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one micro-batch; None means no limit.

    A micro-batch has at most `max_offsets` messages, `max_bytes` bytes, and `max_offsets_per_queue` messages of each
    queue. It waits for `min_offsets` messages, but not longer than `max_delay_ms`.
    """

    max_offsets: int | None = option_field("maxOffsetsPerTrigger")
    max_bytes: int | None = option_field("maxBytesPerTrigger")
    max_offsets_per_queue: int | None = option_field("maxOffsetsPerQueue")
    min_offsets: int | None = option_field("minOffsetsPerTrigger")
    max_delay_ms: int = option_field("maxTriggerDelay")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of one query, checked against each other. `location` and `subscription` must not be None to read."""

    location: Location | None = None
    subscription: Subscription | None = None
    starting_offsets: Positions | None = option_field("startingOffsets")
    starting_times: Times | None = option_field("startingTimestamp")
    strategy: str = option_field("startingOffsetsByTimestampStrategy")
    ending_offsets: Positions | None = option_field("endingOffsets")
    ending_times: Times | None = option_field("endingTimestamp")
    fail_on_data_loss: bool = option_field("failOnDataLoss")
    limits: Limits = Limits()
    min_partitions: int | None = option_field("minPartitions")
    max_records_per_partition: int | None = option_field("maxRecordsPerPartition")
    hand_over_bytes: int = option_field("handOverBytes")
    columns: tuple[str, ...] | None = option_field("columns")
    check_crc: bool = option_field("checkCrc")
    max_decompressed_bytes: int = option_field("maxDecompressedBytes")
    keys: tuple[str, ...] | None = option_field("keys")
    message_ids: tuple[str, ...] | None = option_field("msgId")
    group: GroupOptions | None = None
    long_polling_ms: int = option_field("longPollingMs")
    query_name: str = ""
    filters: Filters = NO_FILTERS
    broker_down_timeout_ms: int | None = option_field("brokerDownTimeout")
    retired_brokers: tuple[str, ...] | None = option_field("retiredBrokers")

    def named_queues(self) -> Iterator[tuple[str, QueueKey]]:
        """Yield the queues that options name, each with the name of the option."""
        read = self.subscription.chosen if isinstance(self.subscription, WithRetry) else self.subscription
        yield from (("assign", queue) for queue in (read.queues if isinstance(read, Assignment) else ()))
        for name, wanted in (
            ("startingOffsets", self.starting_offsets),
            ("endingOffsets", self.ending_offsets),
            ("startingTimestamp", self.starting_times),
            ("endingTimestamp", self.ending_times),
        ):
            yield from ((name, queue) for queue in (wanted.queues if wanted else ()))

    def wait_ms(self) -> int:
        """Return how long a read that must be complete waits for a broker that is away, in ms. 0 means for ever."""
        return COMPLETE_WAIT_MS if self.broker_down_timeout_ms is None else self.broker_down_timeout_ms

    @property
    def names_group_as_start(self) -> bool:
        """Whether startingOffsets is the word group, which is valid in batch queries and streams."""
        return self.starting_offsets is not None and self.starting_offsets.default == GROUP

    @property
    def is_member(self) -> bool:
        """Whether a stream with these options joins its consumer group."""
        return self.group is not None and self.group.is_member

    @property
    def begins_at_group(self) -> bool:
        """Whether a stream with these options begins at the consumer group's offsets."""
        return self.group is not None and (self.group.begins_at_group or self.names_group_as_start)

    def starting_times_of(self, queues: Iterable[QueueKey]) -> dict[QueueKey, int]:
        """Return the startingTimestamp of each of `queues` that has one, in ms since the epoch."""
        return {} if self.starting_times is None else self.starting_times.of_each(queues)

    def check_complete(self) -> "tuple[Location, Subscription]":
        """Return (location, subscription). Raises OptionError if one of them is missing."""
        if self.location is None:
            raise OptionError(
                'path or nameServer is required. Give the folder of the store, as in .option("path", "/data/store") or '
                '.load("/data/store"), or the name server of a cluster, as in .option("nameServer", "ns1:9876"). '
                "(A table in Spark's catalog cannot pass options to a Python source; use a temporary view.)"
            )
        if self.subscription is None:
            raise OptionError(
                "exactly one of subscribe, subscribePattern and assign is required: found none. Give one, such as "
                'subscribe=orders,payments, subscribePattern=orders-.* or assign={"orders": [0, 1]}.'
            )
        return self.location, self.subscription

    def for_stream(self) -> "ReadOptions":
        """Return the options for a stream: if it must read the group's retry topic, the subscription includes it."""
        retry_topic, chosen = self.retry_topic, self.subscription
        if retry_topic is None or chosen is None or isinstance(chosen, WithRetry):
            return self
        return replace(self, subscription=WithRetry(chosen, retry_topic))

    @property
    def retry_topic(self) -> str | None:
        """The group's retry topic, or None if a stream with these options does not read it.

        A stream that does not join reads it if it begins at the group's offsets and messages can be sent back.
        """
        if self.group is None or not (self.is_member or self._retries_without_group):
            return None
        return self.group.retry_topic

    @property
    def _retries_without_group(self) -> bool:
        can_send_back = self.location is not None and Capability.SEND_BACK in self.location.capabilities
        return can_send_back and not self.is_member and self.begins_at_group

    def begins_as_retry(self, queue: QueueKey) -> bool:
        """Return whether the queue is in the group's retry topic, so that a stream begins there at the group's offset.

        A queue that startingOffsets names begins at that offset instead.
        """
        if not queue.topic.startswith(RETRY_TOPIC_PREFIX) or queue.topic != self.retry_topic:
            return False
        return self.starting_offsets is None or queue not in self.starting_offsets.queues

    def check_batch(self) -> None:
        """Raise OptionError for options that are invalid in a batch query, such as startingOffsets=latest."""
        start = self.starting_offsets
        if start is not None and (start.default == LATEST or LATEST in start.queues.values()):
            raise OptionError(
                "startingOffsets: found latest (-1), where a batch query ends, so it would be empty; expected "
                'earliest (-2) or {"TopicA": {"0": 42}}.'
            )
        check_batch_start(self.group, start)

    def check_stream(self) -> None:
        """Raise OptionError for options that are invalid in a stream.

        Among them are keys and msgId: a stream would ignore them and read all messages.
        """
        for name, value in (("keys", self.keys), ("msgId", self.message_ids)):
            if value is not None:
                raise OptionError(
                    f'{name} works in batch queries only (spark.read). In a stream, read the column "{name}" and '
                    "filter it."
                )
        if self.group is not None and not self.names_group_as_start:
            require(self.location, Capability.GROUPS, "consumerGroup in a stream without startingOffsets=group")
        in_cluster = self.location is not None and Capability.LEASES not in self.location.capabilities
        has_time = self.starting_times is not None
        check_stream_start(self.group, self.starting_offsets, has_time=has_time, in_cluster=in_cluster)
        if self.is_member and in_cluster:
            _check_whole_share(self)


def parse_options(given: Mapping[str, str], now_ms: int, locate: Locate) -> ReadOptions:
    """Parse and check the options that a user gives for a query. Upper and lower case of their names do not matter.

    Relative times such as "-10m" are before `now_ms` (ms since the epoch). `locate` returns the location that the
    parsed options name, or None. Raises OptionError for an unknown name, an invalid value, values that contradict each
    other, and an option that the place cannot serve. A missing location or subscription is not an error here;
    `check_complete` checks them.
    """
    found = parse_given(strip_spark_options(given), OPTIONS, now_ms, _HINTS)
    check_place(found)
    location = locate(found)
    refuse_unsupported(found, OPTIONS, location)
    # Spark does not pass the query's name to sources. Messages of other members of a group name the query by the option
    # queryName, if it was given.
    names = [text for name, text in given.items() if name.lower() == "queryname"]
    options = ReadOptions(
        location=location,
        subscription=_subscription(found),
        limits=Limits(**field_values(Limits, found)),
        group=build_group_options(found, location),
        filters=make_filters(found.get("tags"), found.get("sql92")),
        query_name=names[0] if names and "consumerGroup" in found else "",
        **field_values(ReadOptions, found),
    )
    _check_together(options)
    for name, queue in options.named_queues():
        if queue.broker:
            require(location, Capability.BROKERS, f"the queue {queue} in {name}")
    return options


def _subscription(found: Mapping[str, Any]) -> Subscription | None:
    kinds: dict[str, Callable[[Any], Subscription]] = {
        "subscribe": Topics,
        "subscribePattern": Pattern,
        "assign": Assignment,
    }
    given = [name for name in kinds if name in found]
    if len(given) > 1:
        raise OptionError(
            f"exactly one of subscribe, subscribePattern and assign is required: found {' and '.join(given)}. Keep one."
        )
    return kinds[given[0]](found[given[0]]) if given else None


def _check_together(options: ReadOptions) -> None:
    """Raise OptionError if options contradict each other. These checks apply to batch queries and streams."""
    check_start(options.group, options.starting_offsets, has_time=options.starting_times is not None)
    if not options.names_group_as_start:
        _check_not_both("starting", options.starting_offsets, options.starting_times)
    _check_whole_queues(options)
    _check_not_both("ending", options.ending_offsets, options.ending_times)
    start, end = options.starting_offsets, options.ending_offsets
    if end is not None and (end.default == EARLIEST or EARLIEST in end.queues.values()):
        raise OptionError(
            "endingOffsets: found earliest (-2), where a query begins, so it would be empty; expected latest (-1) or "
            '{"TopicA": {"0": 100}}.'
        )
    for queue, begin in start.queues.items() if start else ():
        last = end.queues.get(queue, LATEST) if end else LATEST
        if 0 <= last < begin:
            raise OptionError(f"queue {queue}: startingOffsets={begin} is after endingOffsets={last}. Swap them.")
    start_ms = options.starting_times.default_ms if options.starting_times else None
    end_ms = options.ending_times.default_ms if options.ending_times else None
    if start_ms is not None and end_ms is not None and start_ms > end_ms:
        raise OptionError(f"startingTimestamp={start_ms} is after endingTimestamp={end_ms} (ms). Swap them.")
    limits = options.limits
    if limits.min_offsets is not None and limits.min_offsets > (limits.max_offsets or limits.min_offsets):
        raise OptionError(
            f"minOffsetsPerTrigger={limits.min_offsets} is more than maxOffsetsPerTrigger={limits.max_offsets}. "
            "Lower the first, or raise the second."
        )
    if options.keys is not None and options.message_ids is not None:
        raise OptionError(
            "keys and msgId are both given. Give one of them; each may list several, separated by blanks."
        )
    _check_covered(options)


def _check_whole_queues(options: ReadOptions) -> None:
    """Raise OptionError if orderly=true is given together with the option that splits queues in any case."""
    if options.max_records_per_partition is not None and options.group is not None and options.group.is_orderly:
        raise OptionError(
            "maxRecordsPerPartition and orderly=true contradict each other: maxRecordsPerPartition splits queues, "
            "orderly reads each in one task. Keep one of them."
        )


def _check_whole_share(options: ReadOptions) -> None:
    """Raise OptionError if a member of a group with other consumers would not read every queue of its share.

    The others leave the whole share to it, and the group's retry topic is a part of what they share.
    """
    group = options.group
    if group is None:
        return
    if isinstance(options.subscription, Assignment):
        raise OptionError(
            f"assign: found a member of the consumer group {group.group} in a cluster, which gets its queues from the "
            "group; expected subscribe or subscribePattern. To read the queues without joining the group, set "
            "commitOffsets=off."
        )
    if not group.subscribes_retry:
        raise OptionError(
            f"subscribeRetry=false: found a member of the consumer group {group.group} in a cluster; expected true, "
            f"because the members share the queues of {retry_topic(group.group)}, and nobody else would read its part. "
            "Leave subscribeRetry out. To read without joining the group, set commitOffsets=off."
        )


def _check_not_both(side: str, offsets: Positions | None, times: Times | None) -> None:
    """Raise OptionError if offsets and times are given for the same queues.

    A word such as latest is valid together with times by topic or queue; it applies to all other queues. `side` is
    "starting" or "ending".
    """
    if offsets is None or times is None:
        return
    if offsets.queues or times.default_ms is not None:
        raise OptionError(
            f"{side}Offsets and {side}Timestamp are both given. Give one of them. (With a {side}Timestamp in JSON, "
            f"{side}Offsets may be a word such as latest: it applies to the queues that the JSON omits.)"
        )


def _check_covered(options: ReadOptions) -> None:
    """Raise OptionError if an offset, time or filter is given for a queue or topic that the query does not read."""
    read = options.subscription
    if read is None:
        return
    assigned = {queue.topic for queue in read.queues} if isinstance(read, Assignment) else None

    def check(name: str, topic: str, queue: QueueKey | None = None) -> None:
        is_covered = topic in assigned if assigned is not None else read.covers(QueueKey(topic, 0))
        if queue is not None:
            is_covered = read.covers(queue)
        if not is_covered and topic != options.retry_topic:
            what = f"topic {topic}" if queue is None else f"queue {queue}"
            raise OptionError(
                f"{name}: found {what}; expected one that {read} covers. Leave it out, or subscribe to it."
            )

    for name, wanted in (
        ("startingOffsets", options.starting_offsets),
        ("endingOffsets", options.ending_offsets),
        ("startingTimestamp", options.starting_times),
        ("endingTimestamp", options.ending_times),
    ):
        for queue in wanted.queues if wanted else ():
            check(name, queue.topic, queue)
        for topic in wanted.topics if isinstance(wanted, Times) else ():
            check(name, topic)
    for topic, expression in options.filters.topics:
        check("tags" if expression.kind == TAG else "sql92", topic)


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """The options that a task needs. Every task gets a pickled copy."""

    columns: tuple[str, ...]
    check_crc: bool
    max_decompressed_bytes: int
    fail_on_data_loss: bool
    filters: Filters = NO_FILTERS
    secrets: Location | None = None  # the location with its secrets, which partitions lack; None if it has none
