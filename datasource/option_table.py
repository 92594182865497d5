"""The one table of options: names, kinds, defaults and meanings, as documentation and `options` need them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rmq_spark.datasource import filters, values
from rmq_spark.store.options import MAX_DECOMPRESSED_BYTES, READ_MODES

BATCH, STREAM = "batch", "stream"
STRATEGIES = ("error", "latest", "earliest")
ASSIGNMENTS = ("all", "shared")
MODELS = ("clustering", "broadcasting")
COMMITS = ("auto", "required", "off")
CONFLICTS = ("checkpoint", "group", "fail")
FALLBACKS = ("latest", "earliest", "timestamp")


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table. `parse` takes the text, and the clock too where `timed`."""

    name: str
    kind: str
    parse: Callable[..., Any]
    default: str  # as documentation shows it; ReadOptions has the value
    meaning: str
    example: str
    where: tuple[str, ...] = (BATCH, STREAM)
    alias: str | None = None
    timed: bool = False


_OFFSETS = "earliest, latest or JSON"
_TIME = "time or JSON"
OPTIONS = (
    Option("path", "path", values.parse_path, "required", "the store's folder, a broker's storePathRootDir; "
           "a relative path counts from the folder in which the driver was started, ~ is the home of its user",
           "/data/store"),
    Option("commitLogPath", "paths", values.parse_paths, "in path", "folder or folders of the commit log where "
           "they lie elsewhere (a broker's storePathCommitLog)", "/disk1/log,/disk2/log"),
    Option("subscribe", "topics", values.parse_topics, "one of three", "topics to read, by name", "orders,payments",
           alias="topic"),
    Option("subscribePattern", "regular expression", values.parse_pattern, "one of three", "topics to read, by "
           "Python regular expression over the whole name; RocketMQ's own topics match only if the pattern, or one "
           "of its alternatives, is their full name", "orders-.*"),
    Option("assign", "JSON", values.parse_assignment, "one of three", "queues to read, by topic and queue id",
           '{"orders": [0, 1]}'),
    Option("startingOffsets", "earliest, latest, group or JSON", values.parse_starts, "batch earliest, stream latest, "
           "shared stream group", "where to begin. JSON may leave queues out, which begin at the default, and -1 is "
           "latest, -2 earliest; group is where the consumerGroup stands. A stream heeds it only before its first "
           "batch; queues that appear later begin at earliest", '{"orders": {"0": 42}}'),
    Option("startingTimestamp", _TIME, values.parse_times, "none", "begin at the first message stored at or after a "
           "time: ms, ISO 8601 with a zone, or before now (-10m); for all queues, by topic, or by topic and queue",
           "-10m", timed=True),
    Option("startingOffsetsByTimestampStrategy", "word", values.parse_words(*STRATEGIES), "error", "for a queue in "
           "which nothing was stored since startingTimestamp: error, latest (begin at its end) or earliest", "latest"),
    Option("endingOffsets", _OFFSETS.replace("earliest, ", ""), values.parse_positions, "batch latest, stream none",
           "where to end, exclusive. JSON may leave queues out, which end at latest; -1 is latest. A stream takes "
           "latest when it starts, and idles at the end unless it is stopped", '{"orders": {"0": 100}}'),
    Option("endingTimestamp", _TIME, values.parse_times, "none", "end before the first message stored at or after a "
           "time, written as for startingTimestamp; where there is none, at latest", "2026-01-31T12:00:00Z",
           timed=True),
    Option("failOnDataLoss", "true or false", values.parse_flag, "true", "false: skip messages that are gone and "
           "log a warning, instead of failing; a stream counts those that were gone when it planned a batch", "false"),
    Option("maxOffsetsPerTrigger", "count", values.parse_count, "none", "most messages in one micro-batch, shared out "
           "over queues by backlog; no queue starves", "10000", (STREAM,)),
    Option("maxBytesPerTrigger", "size", values.parse_size, "none", "most bytes of records, as the log has them, in "
           "one micro-batch; only a record that is bigger by itself goes beyond", "64m", (STREAM,)),
    Option("maxOffsetsPerQueue", "count", values.parse_count, "none", "most messages of each queue in one "
           "micro-batch", "1000", (STREAM,)),
    Option("minOffsetsPerTrigger", "count", values.parse_count, "none", "wait until so many messages are there, or "
           "maxTriggerDelay is over; AvailableNow does not wait", "1000", (STREAM,)),
    Option("maxTriggerDelay", "duration", values.parse_duration, "15m", "longest wait for minOffsetsPerTrigger",
           "1m", (STREAM,)),
    Option("minPartitions", "count", values.parse_count, "one task a queue", "split the biggest queues until there "
           "are about so many tasks; order holds within a task", "16"),
    Option("maxRecordsPerPartition", "count", values.parse_count, "none", "split queues so that no task has more "
           "messages", "100000"),
    Option("columns", "names", values.parse_names, "the default ones", "columns to read, in this order, or * for "
           "all; what is not asked for is not decoded", "queueOffset,body"),
    Option("checkCrc", "true or false", values.parse_flag, "false", "compare every body with its checksum", "true"),
    Option("maxDecompressedBytes", "size", values.parse_size, f"{MAX_DECOMPRESSED_BYTES >> 20}m", "a compressed "
           "body that grows beyond is an error, not a memory problem", "256m"),
    Option("readMode", "word", values.parse_words(*READ_MODES), "auto", "how files are read: mmap, pread (for "
           "network and FUSE mounts), or auto, which looks at the mount", "pread"),
    Option("tags", "tags or JSON", filters.parse_tags, "*", "only messages with one of these tags, || between them; "
           "for all topics, or by topic in JSON. Others are passed over by their queue's units, and not read from "
           "the log", "A || B", alias="subExpression"),
    Option("sql92", "SQL92 or JSON", filters.parse_sql92, "none", "only messages whose properties make this true; for "
           "all topics, or by topic in JSON. A topic has tags or sql92, not both", "amount > 5 AND region = 'EU'"),
    Option("keys", "words", values.parse_search_words, "none", "only messages that have one of these keys (blanks "
           "separate them), found by the store's key index", "order-4711", (BATCH,)),
    Option("msgId", "words", values.parse_search_words, "none", "only messages with one of these ids (blanks separate "
           "them): the producer's or the broker's", "7F0000010A2F18B4AAC20001BBC60000", (BATCH,)),
    Option("consumerGroup", "name", values.parse_text, "none", "the consumer group: startingOffsets=group begins "
           "where it stands, and a stream is a member of it and publishes what is finished", "billing"),
    Option("assignment", "word", values.parse_words(*ASSIGNMENTS), "all", "all: the query reads all queues and is "
           "alone in its group; shared: the queries of the group share the queues", "shared", (STREAM,)),
    Option("allocateStrategy", "strategy", values.parse_text, "avg", "who gets which queue where the group shares "
           "them: avg, circle, consistentHash, machineRoom:…, machineRoomNearby, config:…, or package.module:name of a "
           "callable", "circle", (STREAM,)),
    Option("messageModel", "word", values.parse_words(*MODELS), "clustering", "broadcasting: every query of the group "
           "reads all queues, keeps its offsets in its checkpoint and publishes none", "broadcasting", (STREAM,)),
    Option("orderly", "true or false", values.parse_flag, "false", "tasks read a queue only while it is this query's, "
           "and no queue is split", "true", (STREAM,)),
    Option("commitOffsets", "word", values.parse_words(*COMMITS), "auto", "publish what is finished as the group's "
           "offsets: auto (warn where it cannot be), required (fail there), off", "required", (STREAM,)),
    Option("onOffsetConflict", "word", values.parse_words(*CONFLICTS), "checkpoint", "when a query starts again and "
           "its group stands elsewhere: go on from the checkpoint, from the group's offsets, or fail if the group is "
           "ahead", "group", (STREAM,)),
    Option("groupFallback", "word", values.parse_words(*FALLBACKS), "latest", "where a group begins in a topic in "
           "which it has no offset, but in young queues (there at 0): latest, earliest, or timestamp, which is "
           "that of startingTimestamp", "earliest"),
    Option("fenceLostQueues", "true or false", values.parse_flag, "false", "true: a task fails if its queue is "
           "another member's before the task has read it to the end, instead of delivering what that one delivers too",
           "true", (STREAM,)),
    Option("leaseTimeout", "duration", values.parse_duration, "120s", "after so long without a sign of life a member "
           "counts as dead; one on this host whose process has ended, at once", "60s", (STREAM,)),
    Option("leaseHeartbeat", "duration", values.parse_duration, "30s", "how often a member gives a sign of life",
           "10s", (STREAM,)),
    Option("handoverTimeout", "duration", values.parse_seconds, "60s", "how long (from 1s on) a query that shares "
           "queues keeps those that another member is entitled to while its batch runs; then the other one reads the "
           "batch's messages again", "10m", (STREAM,)),
    Option("subscribeRetry", "true or false", values.parse_flag, "true", "read the group's retry topic too, once it is "
           "there: messages that were sent back come again, under their own topic", "false", (STREAM,)),
    Option("longPollingMs", "duration", values.parse_wait, "0", "how long a trigger that finds nothing waits for "
           "messages; a query that is stopped meanwhile ends at once", "15s", (STREAM,)),
)  # fmt: skip
