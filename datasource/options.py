"""The options of one query, parsed by the table in `option_table` and checked against each other.

`parse_options` turns what Spark hands over into a frozen ReadOptions; everything that can be refused without
looking at a store is refused there. Names do not depend on case. Options that only one kind of query has are
passed over by the other kind, as Kafka's source does, unless that would give other rows than the user asked
for: see ReadOptions.check_batch and check_stream.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rmq_spark.datasource.filters import NO_FILTERS, Filters, make_filters
from rmq_spark.datasource.group_options import (
    GroupOptions,
    build_group_options,
    check_batch_start,
    check_start,
    check_stream_start,
)
from rmq_spark.datasource.option_parsing import parse_given, strip_spark_options
from rmq_spark.datasource.option_table import OPTIONS
from rmq_spark.datasource.subscription import Assignment, Pattern, Subscription, Topics, WithRetry
from rmq_spark.datasource.values import EARLIEST, GROUP, LATEST, Positions, Times
from rmq_spark.store import TAG
from rmq_spark.store.errors import OptionError
from rmq_spark.store.options import MAX_DECOMPRESSED_BYTES
from rmq_spark.store.units import QueueKey

MAX_TRIGGER_DELAY_MS = 15 * 60_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What one micro-batch may take: messages, bytes, messages a queue; and what it waits for."""

    max_offsets: int | None = None
    max_bytes: int | None = None
    max_offsets_per_queue: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = MAX_TRIGGER_DELAY_MS


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of one query, checked against each other. Without `path` or `subscription` it cannot read."""

    path: str | None = None
    commit_log_path: tuple[str, ...] | None = None
    subscription: Subscription | None = None
    starting_offsets: Positions | None = None
    starting_times: Times | None = None
    strategy: str = "error"
    ending_offsets: Positions | None = None
    ending_times: Times | None = None
    fail_on_data_loss: bool = True
    limits: Limits = Limits()
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    columns: tuple[str, ...] | None = None
    check_crc: bool = False
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES
    read_mode: str = "auto"
    keys: tuple[str, ...] | None = None
    message_ids: tuple[str, ...] | None = None
    group: GroupOptions | None = None
    long_polling_ms: int = 0
    query_name: str = ""
    filters: Filters = NO_FILTERS

    @property
    def names_group_as_start(self) -> bool:
        """Say whether startingOffsets is the word group: then a query of any kind begins at the group's offsets."""
        return self.starting_offsets is not None and self.starting_offsets.default == GROUP

    @property
    def begins_at_group(self) -> bool:
        """Say whether the consumer group's offsets say where a stream begins."""
        return self.group is not None and (self.group.is_shared or self.names_group_as_start)

    def starting_time_of(self, queue: QueueKey) -> int | None:
        """Return the time at which the queue is to begin, in ms since the epoch, None for none."""
        return None if self.starting_times is None else self.starting_times.of(queue)

    def check_complete(self) -> "tuple[str, Subscription]":
        """Return path and subscription; raises OptionError where one was not given."""
        if self.path is None:
            raise OptionError(
                'path is required: the store\'s folder, as in .option("path", "/data/store") or .load("/data/store"). '
                "(A table in Spark's catalog hands a Python source no options; use a temporary view.)"
            )
        if self.subscription is None:
            raise OptionError(
                "exactly one of subscribe, subscribePattern and assign is required, none was given. Examples: "
                'subscribe=orders,payments; subscribePattern=orders-.*; assign={"orders": [0, 1]}.'
            )
        return self.path, self.subscription

    def for_stream(self) -> "ReadOptions":
        """Return the options of a stream: as a member of a group it reads the group's retry topic too."""
        retry_topic, chosen = self.retry_topic, self.subscription
        if retry_topic is None or chosen is None or isinstance(chosen, WithRetry):
            return self
        return replace(self, subscription=WithRetry(chosen, retry_topic))

    @property
    def retry_topic(self) -> str | None:
        """The group's retry topic, None where a stream does not read it."""
        return None if self.group is None else self.group.retry_topic

    def begins_as_retry(self, queue: QueueKey) -> bool:
        """Say whether a stream begins in a queue as groups do in their retry topics, whatever it says of others."""
        named = () if self.starting_offsets is None else self.starting_offsets.queues
        return queue.topic == self.retry_topic and queue not in named

    def check_batch(self) -> None:
        """Raise OptionError for what a batch query cannot have: a start at latest, as in Kafka's source, for one."""
        start = self.starting_offsets
        if start is not None and (start.default == LATEST or LATEST in start.queues.values()):
            raise OptionError(
                "startingOffsets: latest (-1) is where a batch query ends, so it would be empty. Accepted in a batch "
                'query: earliest (-2), {"TopicA": {"0": 42}}.'
            )
        check_batch_start(self.group, start)

    def check_stream(self) -> None:
        """Raise OptionError for what a stream cannot have: keys and msgId, without which it would read all, for two."""
        for name, value in (("keys", self.keys), ("msgId", self.message_ids)):
            if value is not None:
                raise OptionError(
                    f"{name} works in batch queries only (spark.read), not in a stream. In a stream, read the column "
                    f'"{name}" and filter it.'
                )
        check_stream_start(self.group, self.starting_offsets, has_time=self.starting_times is not None)


# Option -> where its value goes. What was not given keeps the default that stands above.
_LIMIT_FIELDS = {
    "maxOffsetsPerTrigger": "max_offsets",
    "maxBytesPerTrigger": "max_bytes",
    "maxOffsetsPerQueue": "max_offsets_per_queue",
    "minOffsetsPerTrigger": "min_offsets",
    "maxTriggerDelay": "max_delay_ms",
}
_FIELDS = {
    "path": "path",
    "commitLogPath": "commit_log_path",
    "startingOffsets": "starting_offsets",
    "startingTimestamp": "starting_times",
    "startingOffsetsByTimestampStrategy": "strategy",
    "endingOffsets": "ending_offsets",
    "endingTimestamp": "ending_times",
    "failOnDataLoss": "fail_on_data_loss",
    "minPartitions": "min_partitions",
    "maxRecordsPerPartition": "max_records_per_partition",
    "columns": "columns",
    "checkCrc": "check_crc",
    "maxDecompressedBytes": "max_decompressed_bytes",
    "readMode": "read_mode",
    "keys": "keys",
    "msgId": "message_ids",
    "longPollingMs": "long_polling_ms",
}


def parse_options(given: Mapping[str, str], now_ms: int) -> ReadOptions:
    """Return the options that were given, in whatever case; relative times count back from `now_ms`.

    Raises OptionError for an unknown name, a value that is not acceptable, and values that contradict each
    other. That path and subscription are there is left to `check_complete`: a writer has neither.
    """
    found = parse_given(strip_spark_options(given), OPTIONS, now_ms)
    limits = Limits(**{field: found[name] for name, field in _LIMIT_FIELDS.items() if name in found})
    fields = {field: found[name] for name, field in _FIELDS.items() if name in found}
    options = ReadOptions(
        subscription=_subscription(found),
        limits=limits,
        group=build_group_options(found),
        filters=make_filters(found.get("tags"), found.get("sql92")),
        query_name=_query_name(given) if "consumerGroup" in found else "",
        **fields,
    )
    _check_together(options)
    return options


def _query_name(given: Mapping[str, str]) -> str:
    """Return the name by which other members of a group shall know the query: Spark does not hand it to sources."""
    return next((text for name, text in given.items() if name.lower() == "queryname"), "")


def _subscription(found: Mapping[str, Any]) -> Subscription | None:
    kinds: dict[str, Callable[[Any], Subscription]] = {
        "subscribe": Topics,
        "subscribePattern": Pattern,
        "assign": Assignment,
    }
    given = [name for name in kinds if name in found]
    if len(given) > 1:
        raise OptionError(
            f"exactly one of subscribe, subscribePattern and assign is required, found {' and '.join(given)}. Keep one."
        )
    return kinds[given[0]](found[given[0]]) if given else None


def _check_together(options: ReadOptions) -> None:
    """Raise OptionError where two options contradict each other, whatever kind of query it is."""
    check_start(options.group, options.starting_offsets, has_time=options.starting_times is not None)
    if not options.names_group_as_start:
        _check_one_kind("starting", options.starting_offsets, options.starting_times)
    _check_whole_queues(options)
    _check_one_kind("ending", options.ending_offsets, options.ending_times)
    start, end = options.starting_offsets, options.ending_offsets
    if end is not None and (end.default == EARLIEST or EARLIEST in end.queues.values()):
        raise OptionError(
            "endingOffsets: earliest (-2) is where a query begins, so it would read nothing. Accepted: latest (-1), "
            '{"TopicA": {"0": 100}}.'
        )
    for queue, begin in start.queues.items() if start else ():
        until = end.queues.get(queue, LATEST) if end else LATEST
        if 0 <= until < begin:
            raise OptionError(f"queue {queue}: startingOffsets={begin} lies after endingOffsets={until}. Swap them.")
    first, last = options.starting_times, options.ending_times
    if first and last and None not in (first.default_ms, last.default_ms) and first.default_ms > last.default_ms:  # type: ignore[operator]
        raise OptionError(
            f"startingTimestamp ({first.default_ms} ms) lies after endingTimestamp ({last.default_ms} ms). Swap them."
        )
    limits = options.limits
    if limits.min_offsets is not None and limits.min_offsets > (limits.max_offsets or limits.min_offsets):
        raise OptionError(
            f"minOffsetsPerTrigger={limits.min_offsets} is more than maxOffsetsPerTrigger={limits.max_offsets}. "
            "Accepted: at most as many."
        )
    if options.keys is not None and options.message_ids is not None:
        raise OptionError(
            "keys and msgId are both given. Give one of them; each may name several, with blanks between."
        )
    _check_covered(options)


def _check_whole_queues(options: ReadOptions) -> None:
    """Raise OptionError where queues are to be split and each to be read by one task, both."""
    splitting = {"minPartitions": options.min_partitions, "maxRecordsPerPartition": options.max_records_per_partition}
    for name, value in splitting.items():
        if value is not None and options.group is not None and options.group.is_orderly:
            raise OptionError(f"{name} splits queues, and orderly=true reads each in one task. Keep one of them.")


def _check_one_kind(side: str, offsets: Positions | None, times: Times | None) -> None:
    """Raise where offsets and times both speak of the same queues: a word beside times by topic does not."""
    if offsets is None or times is None:
        return
    if offsets.queues or times.default_ms is not None:
        raise OptionError(
            f"{side}Offsets and {side}Timestamp are both given. Give one of them. (A word such as latest may stand "
            f"beside a {side}Timestamp in JSON: it is for the queues that the JSON leaves out.)"
        )


def _check_covered(options: ReadOptions) -> None:
    """Raise where offsets or times are given for what the query does not read."""
    if options.subscription is None:
        return
    read = options.subscription
    topics = {queue.topic for queue in read.queues} if isinstance(read, Assignment) else None
    for name, wanted in (
        ("startingOffsets", options.starting_offsets),
        ("endingOffsets", options.ending_offsets),
        ("startingTimestamp", options.starting_times),
        ("endingTimestamp", options.ending_times),
    ):
        for queue in wanted.queues if wanted else ():
            if not read.covers(queue) and queue.topic != options.retry_topic:
                raise OptionError(f"{name} names the queue {queue}, which {read} does not cover.")
        for topic in wanted.topics if isinstance(wanted, Times) else ():
            if topic != options.retry_topic and not (
                topic in topics if topics is not None else read.covers(QueueKey(topic, 0))
            ):
                raise OptionError(f"{name} names the topic {topic}, which {read} does not cover.")
    for topic, expression in options.filters.topics:
        if topic != options.retry_topic and not (
            topic in topics if topics is not None else read.covers(QueueKey(topic, 0))
        ):
            name = "tags" if expression.kind == TAG else "sql92"
            raise OptionError(f"{name} names the topic {topic}, which {read} does not cover.")
