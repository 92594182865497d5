"""The one table of the sink's options: names, kinds, defaults and meanings, as `option_table` has the source's."""

from rmq_spark.datasource import sink_values, values
from rmq_spark.datasource.option_table import BATCH, STREAM, Option

FLUSHES = ("sync", "async")
COMPRESSIONS = ("none", "zlib", "lz4", "zstd")
ON_CONFLICT = ("fail", "skip")
ON_GAP = ("fail", "continue")
MODES = ("send", "sendBack")
EXPIRED = ("error", "resend")

_FLAG = "true or false"
SINK_OPTIONS = (
    Option("path", "path", values.parse_path, "required", "the store's folder, a broker's storePathRootDir; where "
           "nothing is yet a store is made. A relative path counts from the folder in which the driver was started, ~ "
           "is the home of its user", "/data/store"),
    Option("commitLogPath", "paths", values.parse_paths, "in path", "folder or folders of the commit log where they "
           "lie elsewhere (a broker's storePathCommitLog)", "/disk1/log,/disk2/log"),
    Option("topic", "topic", sink_values.parse_topic, "the column topic", "topic of all rows, whatever a column topic "
           "says", "orders"),
    Option("queues", "count", sink_values.parse_queue_count, "4", "how many queues a topic gets that is made; topics "
           "that are there keep theirs", "8"),
    Option("createTopic", _FLAG, values.parse_flag, "true", "false: a topic that is not there is an error",
           "false"),
    Option("flush", "word", values.parse_words(*FLUSHES), "sync", "sync: a batch that was committed survives a power "
           "cut; async: it survives a kill of every process, and the disk gets it when the system sees fit", "async"),
    Option("compression", "word", values.parse_words(*COMPRESSIONS), "none", "how bodies are compressed: none, zlib, "
           "lz4 or zstd (RocketMQ 4.9.4 and newer read the last two)", "zlib"),
    Option("compressOver", "size", values.parse_size, "4096", "smallest body that is compressed", "16k"),
    Option("onBatchConflict", "word", values.parse_words(*ON_CONFLICT), "fail", "for a batch that was committed "
           "before, with other rows: fail, or skip (what is in the store stays, the new rows are dropped)", "skip"),
    Option("onBatchGap", "word", values.parse_words(*ON_GAP), "fail", "for a batch id more than one after the "
           "query's last one in the store: fail, or continue", "continue", (STREAM,)),
    Option("stagingRetention", "duration", values.parse_duration, "24h", "after which time staged rows of a write "
           "that was never committed are removed", "6h"),
    Option("lockTimeout", "duration", values.parse_duration, "60s", "longest wait for another writer of the store; "
           "counts only while that one makes no progress", "10m"),
    Option("txnAppId", "text", values.parse_text, "none", "with txnVersion: what makes a write come out once, however "
           "often it is repeated; a name for what writes", "billing-to-orders", (BATCH,)),
    Option("txnVersion", "count", sink_values.parse_version, "none", "with txnAppId: the number of the write, such as "
           "foreachBatch's batch id; one that is not above the last is not written again", "17", (BATCH,)),
    Option("allowNetworkStore", _FLAG, values.parse_flag, "false", "true: append although the store lies on a network "
           "or FUSE file system, where locks and syncs may not hold what they promise", "true"),
    Option("mode", "word", sink_values.parse_mode, "send", "send: rows are new messages; sendBack: rows are messages "
           "of the store that consumerGroup failed to consume, and come again or become dead letters", "sendBack"),
    Option("consumerGroup", "name", values.parse_text, "none", "with mode=sendBack, required: the group that failed",
           "billing"),
    Option("maxReconsumeTimes", "count", sink_values.parse_reconsume_times, "group's, else 16", "with "
           "mode=sendBack: a message that was consumed anew so often becomes a dead letter when it fails again; the "
           "group's is retryMaxTimes in a broker's subscriptionGroup.json", "3"),
    Option("expiredOriginal", "word", values.parse_words(*EXPIRED), "error", "with mode=sendBack, for a message that "
           "is not in the log any more: error, or resend (from the row, which needs the column body)", "resend"),
)  # fmt: skip
