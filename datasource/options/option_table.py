"""The option tables of the source and the sink, and the parsing of the options that a user gives.

Each option is declared here, once: its name, type, parser, default, requirements, description and example. The fields
of `ReadOptions`, `Limits`, `GroupOptions` and `SinkOptions` take their defaults from these tables (`option_field`). The
tables in docs/OPTIONS.md and docs/GUIDE.md are generated from them too (`document_row`, `guide_row`).
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

from rmq_spark.datasource.options import filters
from rmq_spark.datasource.options import option_parsers as parsers
from rmq_spark.datasource.options.cluster_options import TLS_ON
from rmq_spark.datasource.options.option_parsers import InvalidValueError
from rmq_spark.datasource.options.unknown_options import describe_unknown
from rmq_spark.store.backend import Capability, Location
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES, READ_MODES
from rmq_spark.store.names import LEDGER_TOPIC, MAX_SENT_BODY_BYTES, STAGE_TOPIC

BATCH, STREAM = "batch", "stream"
GROUP = "consumerGroup"
SEND, SEND_BACK = "mode=send", "mode=sendBack"
EXACTLY_ONCE, AT_LEAST_ONCE = "exactlyOnce", "atLeastOnce"
BROADCASTING = "messageModel=broadcasting"


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one option.

    The guide has only the first sentence of `description`, so it must be complete by itself. The description does not
    mention the default, because the documents have a column for it.
    """

    name: str
    type: str
    parse: Callable[..., Any]  # its arguments: the text, and the current time in ms if `timed`
    default: str | None  # the text that an omitted option is treated as; None if it then has no value
    description: str
    example: str
    queries: tuple[str, ...] = (BATCH, STREAM)
    alias: str | None = None
    timed: bool = False
    default_words: str = "none"  # the default in the documents, if `default` is None
    requires: str | None = None  # an option, or an option and its value, without which this one is an error
    conflicts: str | None = None  # an option and its value with which this one must have its default
    needs: Capability | None = None  # what a place must be able to do for this option
    is_secret: bool = False  # errors do not show its text; Spark hides it because of its name

    @property
    def default_value(self) -> Any:
        """The value that the option has if it is omitted, or None if it then has no value."""
        return None if self.default is None else self.parse(self.default)

    @property
    def shown_default(self) -> str:
        """The default as the documents show it."""
        return self.default_words if self.default is None else self.default


_FLAG = "true or false"
_OFFSETS = "earliest, latest, group or JSON"
_STREAM, _BATCH = (STREAM,), (BATCH,)
_of_group = partial(Option, queries=_STREAM, requires=GROUP, needs=Capability.GROUPS)
_of_members = partial(_of_group, conflicts=BROADCASTING)
_of_cluster = partial(Option, needs=Capability.NAME_SERVERS)
_of_tls = partial(_of_cluster, requires=TLS_ON)
_of_exact = partial(_of_cluster, conflicts=f"delivery={AT_LEAST_ONCE}")
# fmt: off
_COMMIT_LOG_PATH = Option(
    "commitLogPath", "paths", parsers.parse_paths, None,
    "Folder or folders of the commit log (a broker's storePathCommitLog), if outside of the store's folder.",
    "/disk1/log,/disk2/log", default_words="in path", needs=Capability.FILES)
# The options of the source and the sink that say where a cluster is and how to connect to it.
CONNECTION_OPTIONS = (
    _of_cluster("nameServer", "addresses", parsers.parse_text, None,
                "Name servers of a live cluster, each as host:port, separated by semicolons or commas. A name that has "
                "several IP addresses stands for all of them.", "ns1:9876;ns2:9876",
                default_words="one of path, nameServer"),
    _of_cluster("brokerAddresses", "addresses", parsers.parse_text, None,
                "Addresses at which driver and executors reach brokers, by the names of the brokers. They replace "
                "those that the name servers return, for example with port forwarding.",
                "broker-a=host1:10911;broker-b=host2:10911", default_words="those of the name servers"),
    _of_cluster("accessKey", "text", parsers.parse_text, None,
                "Name of the account that signs requests. Requires secretKey.", "rmq-reader",
                default_words="environment variable RMQ_ACCESS_KEY", is_secret=True),
    _of_cluster("secretKey", "text", parsers.parse_text, None,
                "Secret key of the account.", "…",
                default_words="environment variable RMQ_SECRET_KEY", is_secret=True),
    _of_cluster("securityToken", "text", parsers.parse_text, None,
                "Security token of a temporary account, which accessKey and secretKey belong to.", "…",
                default_words="no token", is_secret=True),
    _of_cluster("credentialsFile", "path", parsers.parse_path, None,
                "File with the keys of the account, on the driver and on every executor. It is read again when it "
                "changes, so tokens can rotate.", "/run/secrets/rmq", default_words="no file"),
    _of_cluster("tls", _FLAG, parsers.parse_flag, "false", "Whether connections are encrypted.", "true"),
    _of_tls("tlsVerify", "word", parsers.parse_words("ca", "full", "none"), "ca",
            "Checks of a server's certificate: ca (its issuer, as in RocketMQ's own client), full (its host name too) "
            "or none.", "full"),
    _of_tls("tlsCaFile", "path", parsers.parse_path, None,
            "File with the certificates of the authorities that issue servers' certificates, on every machine.",
            "/etc/rmq/ca.pem", default_words="the system's"),
    _of_tls("tlsCertFile", "path", parsers.parse_path, None,
            "File with the client's certificate, on every machine. Requires tlsKeyFile.", "/etc/rmq/client.pem",
            default_words="no certificate"),
    _of_tls("tlsKeyFile", "path", parsers.parse_path, None,
            "File with the key of the client's certificate, on every machine.", "/etc/rmq/client.key",
            default_words="no key"),
    _of_tls("tlsKeyPassword", "text", parsers.parse_text, None,
            "Password of the key file.", "…", default_words="no password", is_secret=True),
    _of_cluster("namespace", "name", parsers.parse_text, None,
                "Namespace of topics and groups, as in RocketMQ 4.x clients. Columns, offsets and patterns show names "
                "without it.", "team-a", default_words="no namespace"),
    _of_cluster("requestTimeout", "duration", parsers.parse_duration, "3s",
                "How long a request waits for its answer. Pulls wait longer.", "10s"),
)
OPTIONS = (
    Option("path", "path", parsers.parse_path, None,
           "Folder of the store, a broker's storePathRootDir. `load(path)` is the same. A relative path starts at the "
           "folder in which the driver was started, ~ at the home of its user.", "/data/store",
           default_words="one of path, nameServer"),
    _COMMIT_LOG_PATH,
    *CONNECTION_OPTIONS,
    _of_cluster("brokerDownTimeout", "duration", partial(parsers.parse_duration, minimum_ms=0), None,
                "How long to wait for a broker that does not answer; after that the query fails and names the broker. "
                "0 means for ever: the query reads the other brokers meanwhile, and its progress names the missing "
                "one. A batch query and AvailableNow read nothing until all brokers answer.", "10m",
                default_words="streams 0, batch and AvailableNow 5m"),
    _of_cluster("retiredBrokers", "names", parsers.parse_names, None,
                "Names of brokers that were removed for ever. The query drops their queues, and logs how many messages "
                "were not read.", "broker-b"),
    _of_cluster("pullsInFlight", "count", parsers.parse_count, None,
                "Number of pulls that a task has in flight at each broker.", "16", default_words="from the answers"),
    _of_cluster("pullGroup", "name", parsers.parse_text, None,
                "Consumer group in whose name tasks pull. The account needs the right to subscribe with it.",
                "spark-reader", default_words="the consumerGroup or rmq-spark, with -reader"),
    Option("subscribe", "topics", parsers.parse_topics, None,
           "Topics to read, separated by commas.", "orders,payments", alias="topic", default_words="one of three"),
    Option("subscribePattern", "regular expression", parsers.parse_pattern, None,
           "Topics to read, by a regular expression of Python (not Java) that matches the whole name. RocketMQ's own "
           "topics match only if the pattern, or one of its alternatives, is their full name.", "orders-.*",
           default_words="one of three"),
    Option("assign", "JSON", parsers.parse_assignment, None,
           "Queues to read, by topic and queue id. In a cluster the name of the broker precedes the id, as in "
           '"broker-a:0", unless one broker has the whole topic.', '{"orders": [0, 1]}', default_words="one of three"),
    Option("startingOffsets", _OFFSETS, parsers.parse_starts, None,
           "Where a new query begins. In JSON -1 is latest and -2 earliest; queues that it omits begin at the default. "
           "group is the committed offset of the consumerGroup. A stream uses it for its first batch only; queues that "
           "appear later begin at earliest. With shared queues it counts for each queue that the query gets.",
           '{"orders": {"0": 42}}', default_words="batch: earliest; stream: latest; with shared queues: group"),
    Option("startingTimestamp", "time or JSON", parsers.parse_times, None,
           "Begin at the first message stored at or after a time, for all queues, by topic, or by topic and queue. A "
           "time is ms since 1970, ISO 8601 with a zone, or relative to now (-10m).", "-10m", timed=True),
    Option("startingOffsetsByTimestampStrategy", "word", parsers.parse_words("error", "latest", "earliest"), "error",
           "Start of a queue without a message since startingTimestamp: error, latest (its end) or earliest.",
           "latest"),
    Option("endingOffsets", "latest or JSON", parsers.parse_positions, None,
           "Where the query ends, exclusive. In JSON -1 is latest; queues that it omits end at latest. A stream "
           "resolves latest when it starts, and idles at the end unless it is stopped.", '{"orders": {"0": 100}}',
           default_words="batch latest, stream none"),
    Option("endingTimestamp", "time or JSON", parsers.parse_times, None,
           "End before the first message stored at or after a time, written as for startingTimestamp. Without such a "
           "message a queue ends at latest.", "2026-01-31T12:00:00Z", timed=True),
    Option("failOnDataLoss", _FLAG, parsers.parse_flag, "true",
           "Whether missing messages fail the query; with false it skips and logs them. A stream counts those that "
           "were missing when it planned a batch.", "false"),
    Option("maxOffsetsPerTrigger", "count", parsers.parse_count, None,
           "Maximum number of messages in a micro-batch, divided among queues by backlog. No queue starves.", "10000",
           _STREAM),
    Option("maxBytesPerTrigger", "size", parsers.parse_size, None,
           "Maximum size of the records in a micro-batch, as the log has them. Only a single record may exceed it. In "
           "a cluster the size is an estimate, from the average of the topic's records.",
           "64m", _STREAM, needs=Capability.SIZE_ESTIMATES),
    Option("maxOffsetsPerQueue", "count", parsers.parse_count, None,
           "Maximum number of messages of each queue in a micro-batch.", "1000", _STREAM),
    Option("minOffsetsPerTrigger", "count", parsers.parse_count, None,
           "Number of new messages for which a trigger waits, at most for maxTriggerDelay. AvailableNow does not wait.",
           "1000", _STREAM),
    Option("maxTriggerDelay", "duration", parsers.parse_duration, "15m",
           "Maximum wait for minOffsetsPerTrigger.", "1m", _STREAM),
    Option("minPartitions", "count", parsers.parse_count, None,
           "Split the largest queues until there are about this many tasks. Order holds within a task.", "16",
           default_words="as the work needs"),
    Option("maxRecordsPerPartition", "count", parsers.parse_count, None,
           "Split queues so that no task has more messages.", "100000"),
    Option("handOverBytes", "size", partial(parsers.parse_size, minimum=0), "1m",
           "Maximum size of the records of a micro-batch that the driver reads itself, without a Python task. 0 leaves "
           "all batches to tasks.", "64k", _STREAM, needs=Capability.SIZES),
    Option("columns", "names", parsers.parse_names, None,
           "Columns to read, in this order, or * for all. Other columns are not decoded.", "queueOffset,body",
           default_words="the default ones"),
    Option("checkCrc", _FLAG, parsers.parse_flag, "false", "Verify the checksum of every body.", "true"),
    Option("maxDecompressedBytes", "size", parsers.parse_size, f"{MAX_DECOMPRESSED_BYTES >> 20}m",
           "Maximum size of a decompressed body; a larger one is an error.", "256m"),
    Option("readMode", "word", parsers.parse_words(*READ_MODES), "auto",
           "How files are read: mmap, pread (for network and FUSE mounts), or auto, which depends on the mount.",
           "pread", needs=Capability.FILES),
    Option("tags", "tags or JSON", filters.parse_tags, None,
           "Only messages with one of these tags, separated by ||; for all topics, or by topic in JSON. Other messages "
           "are skipped by their consume-queue entries and not read from the log.", "A || B", alias="subExpression",
           default_words="*"),
    Option("sql92", "SQL92 or JSON", filters.parse_sql92, None,
           "Only messages whose properties satisfy this expression; for all topics, or by topic in JSON. A topic has "
           "tags or sql92, not both.", "amount > 5 AND region = 'EU'"),
    Option("keys", "words", parsers.parse_search_words, None,
           "Only messages with one of these keys, separated by blanks. The key index finds them.", "order-4711",
           _BATCH, needs=Capability.KEY_SEARCH),
    Option("msgId", "words", parsers.parse_search_words, None,
           "Only messages with one of these ids of the producer or the broker, separated by blanks.",
           "7F0000010A2F18B4AAC20001BBC60000", _BATCH, needs=Capability.KEY_SEARCH),
    Option(GROUP, "name", parsers.parse_text, None,
           "Consumer group of the query. startingOffsets=group begins at its committed offsets. A stream is a member "
           "of the group and publishes its offsets.", "billing",
           needs=Capability.GROUP_OFFSETS),
    _of_group("assignment", "word", parsers.parse_words("all", "shared"), None,
              "all: the query reads all queues and is alone in its group; shared: the members of the group share the "
              "queues. In a cluster only shared is possible.", "shared", default_words="all; in a cluster shared"),
    _of_members("allocateStrategy", "strategy", parsers.parse_text, "avg",
                "How the members of a group share its queues: avg, circle, consistentHash, machineRoom:…, "
                "machineRoomNearby, config:…, or package.module:name of a callable.", "circle"),
    _of_group("messageModel", "word", parsers.parse_words("clustering", "broadcasting"), "clustering",
              "clustering, or broadcasting: every query of the group reads all queues. Then its offsets are in its "
              "checkpoint, and it publishes none.", "broadcasting"),
    _of_members("orderly", _FLAG, parsers.parse_flag, "false",
                "Read each queue in one task, and only while this query owns it.", "true",
                needs=Capability.FENCES),
    _of_group("commitOffsets", "word", parsers.parse_words("auto", "required", "off"), "auto",
              "Whether to publish the group's offsets: auto (warn if that fails), required (fail then) or off. In a "
              "cluster, off means that the query does not join the group: it begins at the group's offsets, and reads "
              "all queues.", "required"),
    _of_members("onOffsetConflict", "word", parsers.parse_words("checkpoint", "group", "fail"), "checkpoint",
                "Where a restarted query resumes if the group's offsets differ: at the checkpoint, at the group's "
                "offsets, or fail. fail applies if the group is ahead.", "group"),
    _of_group("groupFallback", "word", parsers.parse_words("latest", "earliest", "timestamp"), "latest",
              "Where a group begins in a topic without a committed offset: latest, earliest or timestamp. timestamp is "
              "the startingTimestamp. A young queue begins at 0 in any case.", "earliest", queries=(BATCH, STREAM),
              needs=Capability.GROUP_OFFSETS),
    _of_members("fenceLostQueues", _FLAG, parsers.parse_flag, "false",
                "Fail a task if another member takes its queue before the task has read it to the end. Otherwise both "
                "deliver the messages.", "true", needs=Capability.LEASES),
    _of_members("leaseTimeout", "duration", parsers.parse_duration, "120s",
                "Time without a heartbeat after which a member counts as dead. A member on this host counts as dead as "
                "soon as its process has ended.", "60s", needs=Capability.LEASES),
    _of_members("leaseHeartbeat", "duration", parsers.parse_duration, "30s",
                "Interval of a member's heartbeats, at most half of leaseTimeout.", "10s", needs=Capability.LEASES),
    _of_members("handoverTimeout", "duration", partial(parsers.parse_duration, minimum_ms=1000), "60s",
                "How long a running batch keeps queues that another member waits for, at least 1s. After that the "
                "other member reads the batch's messages again.", "10m", needs=Capability.LEASES),
    _of_group("subscribeRetry", _FLAG, parsers.parse_flag, "true",
              "Read the group's retry topic too, as soon as it exists. Messages that were sent back then come again, "
              "under their own topic.", "false", needs=Capability.SEND_BACK),
    Option("longPollingMs", "duration", partial(parsers.parse_duration, minimum_ms=0), "0",
           "How long a trigger without new messages waits for one. A query that is stopped meanwhile ends at once.",
           "15s", _STREAM),
)

_of_send = partial(Option, requires=SEND)
_of_send_back = partial(Option, requires=SEND_BACK)
SINK_OPTIONS = (
    Option("path", "path", parsers.parse_path, None,
           "Folder of the store, a broker's storePathRootDir; an empty or missing folder becomes a new store. A "
           "relative path starts at the folder in which the driver was started, ~ at the home of its user.",
           "/data/store", default_words="one of path, nameServer"),
    _COMMIT_LOG_PATH,
    *CONNECTION_OPTIONS,
    _of_cluster("brokerDownTimeout", "duration", partial(parsers.parse_duration, minimum_ms=0), None,
                "How long a task waits for a broker that stores nothing; after that the write fails and names the "
                "broker. A commit fails after the same time without progress. 0 means for ever.", "10m",
                default_words="5m"),
    Option("delivery", "word", parsers.parse_words(EXACTLY_ONCE, AT_LEAST_ONCE), EXACTLY_ONCE,
           "How often each row is stored: exactlyOnce or atLeastOnce. A store directory has only exactlyOnce. With "
           "atLeastOnce, rows that Spark writes to a cluster again after a failure are doubled, with the same message "
           "ids.", AT_LEAST_ONCE),
    _of_send("topic", "topic", parsers.parse_topic, None,
             "Topic of all rows; overrides a column topic.", "orders", default_words="the column topic"),
    _of_send("queues", "count", partial(parsers.parse_count, maximum=parsers.QUEUES_MAX), "4",
             "Number of queues of a new topic. Existing topics keep theirs.", "8"),
    _of_send("createTopic", _FLAG, parsers.parse_flag, "true",
             "Whether missing topics are created; with false a missing topic is an error.", "false"),
    Option("flush", "word", parsers.parse_words("sync", "async"), "sync",
           "With sync, committed rows survive a power cut. With async they survive if all processes are killed, but "
           "perhaps not a power cut.", "async", needs=Capability.FILES),
    _of_send("compression", "word", parsers.parse_words("none", "zlib", "lz4", "zstd"), "none",
             "Compression of bodies: none, zlib, lz4 or zstd. RocketMQ reads lz4 and zstd since 4.9.4.", "zlib"),
    _of_send("compressOver", "size", parsers.parse_size, "4096",
             "Minimum size of a body that is compressed.", "16k"),
    _of_send("maxMessageSize", "size", partial(parsers.parse_size, maximum=MAX_SENT_BODY_BYTES), "4m",
             "Maximum size of a body in a cluster, after compression; a larger one fails the write before any row of "
             "its task is sent. With exactlyOnce the properties and 22 bytes more count too. The brokers' own "
             "maxMessageSize must be at least as large.", "1m",
             needs=Capability.NAME_SERVERS),
    Option("onBatchConflict", "word", parsers.parse_words("fail", "skip"), "fail",
           "For a batch that was committed before with other rows: fail, or skip. skip keeps the stored rows and drops "
           "the new ones.", "skip", needs=Capability.EXACTLY_ONCE, conflicts=f"delivery={AT_LEAST_ONCE}"),
    Option("onBatchGap", "word", parsers.parse_words("fail", "continue"), "fail",
           "When batches are missing between the query's last stored one and this one: fail, or continue.",
           "continue", _STREAM, needs=Capability.EXACTLY_ONCE, conflicts=f"delivery={AT_LEAST_ONCE}"),
    _of_exact("stageTopic", "topic", parsers.parse_topic, STAGE_TOPIC,
              "Topic of a cluster in which tasks store rows until the commit publishes them. `rmq prepare-sink` "
              "creates it, on all brokers.", "SPARK_STAGE"),
    _of_exact("ledgerTopic", "topic", parsers.parse_topic, LEDGER_TOPIC,
              "Topic of a cluster that records which batches were written. `rmq prepare-sink` creates it, on one "
              "broker.", "SPARK_LEDGER"),
    _of_exact("settleTime", "duration", parsers.parse_duration, "5s",
              "Longest time in which a broker of the cluster executes a request that it has read. A batch that an "
              "interrupted commit has begun is finished after twice this time.", "30s"),
    _of_exact("fenceTimeout", "duration", parsers.parse_duration, "150s",
              "How long to wait until the brokers have closed the connections of an interrupted commit. They close "
              "those of a frozen process after 120 s.", "10m"),
    Option("stagingRetention", "duration", parsers.parse_duration, "24h",
           "Age at which staged rows of a write that was never committed are removed.", "6h",
           needs=Capability.FILES),
    Option("lockTimeout", "duration", parsers.parse_duration, "60s",
           "How long to wait for another writer that holds the store's lock and makes no progress. A writer that makes "
           "progress is waited for without a limit.", "10m", needs=Capability.FILES),
    Option("txnAppId", "text", parsers.parse_text, None,
           "With txnVersion: the name of the writer. A write with a name and version is applied once, however often it "
           "is repeated. With atLeastOnce a repeated write is stored again, with the same message ids.",
           "billing-to-orders", _BATCH),
    Option("txnVersion", "count", parsers.parse_version, None,
           "With txnAppId: the number of the write, such as the batch id of foreachBatch. A write whose number is not "
           "above the last one is skipped; with atLeastOnce none is.", "17", _BATCH),
    Option("allowNetworkStore", _FLAG, parsers.parse_flag, "false",
           "Whether to append to a store on a network or FUSE file system, by one machine at a time. Locks and syncs "
           "may be unreliable there.", "true", needs=Capability.FILES),
    Option("mode", "word", parsers.parse_words("send", "sendBack"), "send",
           "send: rows are new messages; sendBack: rows are messages of the store that consumerGroup failed to "
           "consume. Those are delivered again or become dead letters. sendBack requires consumerGroup.", "sendBack"),
    _of_send_back(GROUP, "name", parsers.parse_text, None,
                  "Consumer group that failed to consume the messages.", "billing"),
    _of_send_back("maxReconsumeTimes", "count", partial(parsers.parse_integer, maximum=parsers.INT_MAX), None,
                  "Number of retries after which a message becomes a dead letter. The group's own number is "
                  "retryMaxTimes in a broker's subscriptionGroup.json.", "3", default_words="group's, else 16"),
    _of_send_back("expiredOriginal", "word", parsers.parse_words("error", "resend"), "error",
                  "For a message that has expired from the log: error, or resend. resend sends the row, which needs "
                  "the column body.", "resend"),
)
# fmt: on


def option_field(name: str, table: Iterable[Option] = OPTIONS, *, is_required: bool = False) -> Any:
    """Return a dataclass field for the value of the option `name` in `table`.

    The field has the option's default, or no default if `is_required`.
    """
    option = next(option for option in table if option.name == name)
    default: Any = dataclasses.MISSING if is_required else option.default_value
    return dataclasses.field(default=default, metadata={"option": name})


def field_values(options_class: type, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for the constructor of `options_class`: values by the names of its fields.

    `found` has values by the names of options. Options for which the class has no field are left out.
    """
    fields = {field.metadata.get("option"): field.name for field in dataclasses.fields(options_class)}
    return {fields[name]: value for name, value in found.items() if name in fields}


def document_row(option: Option) -> str:
    """Return the option's row in the tables of docs/OPTIONS.md."""
    return _markdown_row(option, " and ".join(option.queries), option.description, f"`{option.example}`")


def guide_row(option: Option) -> str:
    """Return the option's row in the tables of docs/GUIDE.md, with the first sentence of its description."""
    queries = {(BATCH, STREAM): "streaming and batch", _STREAM: "streaming", _BATCH: "batch"}[option.queries]
    return _markdown_row(option, queries, option.description.split(". ")[0].rstrip(".") + ".")


def _markdown_row(option: Option, queries: str, meaning: str, *more: str) -> str:
    name = f"`{option.name}`" + (f" (or `{option.alias}`)" if option.alias else "")
    required = f" Requires `{option.requires}`." if option.requires not in (None, SEND) else ""
    cells = (name, option.type, option.shown_default, queries, meaning + required, *more)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# Returns the location that parsed options name, by the names of the options. Returns None if no option names one.
Locate: TypeAlias = Callable[[Mapping[str, Any]], Location | None]


def refuse_unsupported(found: Iterable[str], table: Iterable[Option], location: Location | None) -> None:
    """Raise OptionError if an option in `found` (names) needs what the place at `location` cannot do."""
    for option in table if location is not None else ():
        if option.name in found and option.needs is not None:
            require(location, option.needs, option.name)


def require(location: Location | None, capability: Capability, what: str) -> None:
    """Raise OptionError unless the place has the capability that `what`, such as an option, needs."""
    if location is not None and capability not in location.capabilities:
        next_step = "Write to another place." if capability is Capability.WRITES else f"Leave {what} out."
        raise OptionError(
            f"{what} is not possible here: {location.describe()} cannot {capability}; expected a place that can. "
            f"{next_step}"
        )


_SHOWN_CHARACTERS = 120  # of an invalid value in an error; a pasted offset of thousands of queues would hide the rest

# Options of Spark itself. Users also set them on a read, or for all queries, so they are ignored.
_SPARK_OPTIONS = {"checkpointlocation", "queryname", "outputmode"}


def index_options(table: Iterable[Option]) -> dict[str, Option]:
    """Return a dict with the options of a table, by their names and aliases in lower case."""
    return {name.lower(): option for option in table for name in (option.name, option.alias) if name}


def strip_spark_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return the given options without those of Spark itself.

    If load() was called with a list, Spark gives the option `paths`; it is replaced by `path`. Raises OptionError if
    the list does not have exactly one path, and if the source is used as a table in Spark's catalog.
    """
    rest = {name: text for name, text in given.items() if name.lower() not in _SPARK_OPTIONS}
    if "provider" in {name.lower() for name in rest}:
        raise OptionError(
            "rmq cannot be a table in Spark's catalog: Spark gives a Python source the options when the table is "
            'created, not when it is used. Use CREATE TEMPORARY VIEW … USING rmq OPTIONS (…), spark.read.format("rmq") '
            'or write.format("rmq").'
        )
    paths = rest.pop("paths", None)
    if paths is not None:
        rest["path"] = _one_path(paths)
    return rest


def _one_path(paths: str) -> str:
    """Return the only path in `paths`, the JSON list that Spark makes of the argument of load(["…"])."""
    try:
        listed = json.loads(paths)
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not all(isinstance(path, str) for path in listed):
        raise OptionError("paths: expected the argument of load(). Give the folder of one store to load() or as path.")
    if len(listed) != 1:
        raise OptionError(f"load: found {len(listed)} paths; expected one store. Load each, and union the DataFrames.")
    return str(listed[0])


def parse_given(
    given: Mapping[str, str], table: Collection[Option], now_ms: int, hints: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Parse the options that a user gives. Return their values, by the names that the options have in `table`.

    `now_ms` is the time to which relative times refer. `hints` has sentences for the errors about names that are not in
    the table, by the name in lower case. Raises OptionError for an unknown name, an option that is given twice, and an
    invalid value.
    """
    by_name = index_options(table)
    found: dict[str, Any] = {}
    for name, text in given.items():
        option = by_name.get(name.lower())
        if option is None:
            spellings = {text.lower(): text for one in table for text in (one.name, one.alias) if text}
            hint = (hints or {}).get(name.lower())
            raise OptionError(describe_unknown(name, spellings, is_write=table is SINK_OPTIONS, hint=hint))
        if option.name in found:
            raise OptionError(f"{option.name} and its alias {option.alias} are both given. Give one of them.")
        found[option.name] = parse_value(option, text, now_ms)
    return found


def parse_value(option: Option, text: str, now_ms: int) -> Any:
    """Parse the text of one option. Raises OptionError, which says what was expected and gives an example."""
    try:
        return option.parse(text, now_ms) if option.timed else option.parse(text)
    except InvalidValueError as error:
        shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
        if option.is_secret:
            shown = "…"
        raise OptionError(f'{option.name}="{shown}": {error} Example: {option.name}={option.example}') from None
