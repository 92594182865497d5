"""The options of one write, parsed by the table in `sink_option_table` and checked against each other.

Everything that can be refused without looking at a store is refused here. Names do not depend on case.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rmq_spark.datasource.option_parsing import index_options, parse_given, strip_spark_options
from rmq_spark.datasource.option_table import OPTIONS
from rmq_spark.datasource.sink_option_table import SINK_OPTIONS
from rmq_spark.store.errors import OptionError

if TYPE_CHECKING:
    from rmq_spark.store import CommitOptions, SendBackSettings, SinkSettings

# RocketMQ's own: DefaultMQProducer#defaultTopicQueueNums, #compressMsgBodyOverHowmuch (5.3).
QUEUE_COUNT = 4
COMPRESS_OVER_BYTES = 4096
LOCK_TIMEOUT_MS = 60_000
STAGING_RETENTION_MS = 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of one write. Without `path` it cannot write. Sizes are bytes, durations ms."""

    path: str | None = None
    commit_log_path: tuple[str, ...] | None = None
    topic: str | None = None
    queue_count: int = QUEUE_COUNT
    create_topic: bool = True
    flush: str = "sync"
    compression: str = "none"
    compress_over_bytes: int = COMPRESS_OVER_BYTES
    on_batch_conflict: str = "fail"
    on_batch_gap: str = "fail"
    staging_retention_ms: int = STAGING_RETENTION_MS
    lock_timeout_ms: int = LOCK_TIMEOUT_MS
    txn_app_id: str | None = None
    txn_version: int | None = None
    allow_network_store: bool = False
    mode: str = "send"
    group: str | None = None
    max_reconsume_times: int | None = None
    expired_original: str = "error"

    @property
    def is_sending_back(self) -> bool:
        """Say whether rows are messages that failed, and not new ones."""
        return self.mode == "sendBack"

    def check_complete(self) -> str:
        """Return the path; raises OptionError if none was given."""
        if self.path is None:
            raise OptionError(
                'path is required: the store\'s folder, as in .option("path", "/data/store") or .save("/data/store"). '
                "(A table in Spark's catalog hands a Python source no options.)"
            )
        return self.path

    def check_stream(self) -> None:
        """Raise OptionError for what a stream cannot have: a transaction that the user numbers."""
        if self.txn_app_id is not None:
            raise OptionError(
                "txnAppId and txnVersion work in batch writes only, foreachBatch among them. A stream that writes "
                "with writeStream needs neither: its query id and batch id do what they do."
            )

    def sink_settings(self) -> "SinkSettings":
        """Return what the engine needs to know of the write; raises OptionError without a path."""
        from rmq_spark.store import OutboxSettings, SinkSettings  # which no reader needs

        return SinkSettings(
            path=self.check_complete(),
            outbox=OutboxSettings(
                commit_log_path=None if self.commit_log_path is None else ",".join(self.commit_log_path),
                queue_count=self.queue_count,
                creates_topics=self.create_topic,
                compression=None if self.compression == "none" else self.compression,
                compress_over=self.compress_over_bytes,
            ),
            commit=self._commit_options(),
            lock_timeout_ms=self.lock_timeout_ms,
            allow_network_store=self.allow_network_store,
        )

    def send_back_settings(self) -> "SendBackSettings":
        """Return what the engine needs to know of a write of failed rows; raises OptionError without a path."""
        from rmq_spark.store import SendBackSettings, SendBackTerms

        assert self.group is not None, "checked when the options were parsed"
        return SendBackSettings(
            path=self.check_complete(),
            terms=SendBackTerms(self.group, self.max_reconsume_times, self.expired_original),
            commit_log_path=None if self.commit_log_path is None else ",".join(self.commit_log_path),
            commit=self._commit_options(),
            lock_timeout_ms=self.lock_timeout_ms,
            allow_network_store=self.allow_network_store,
        )

    def _commit_options(self) -> "CommitOptions":
        from rmq_spark.store import CommitOptions

        return CommitOptions(
            on_conflict=self.on_batch_conflict,
            on_gap=self.on_batch_gap,
            is_transaction=self.txn_app_id is not None,
            create_topics=self.create_topic,
            queue_count=self.queue_count,
            flush=self.flush,
            staging_retention_ms=self.staging_retention_ms,
        )


# Option -> where its value goes. What was not given keeps the default that stands above.
_FIELDS = {
    "path": "path",
    "commitLogPath": "commit_log_path",
    "topic": "topic",
    "queues": "queue_count",
    "createTopic": "create_topic",
    "flush": "flush",
    "compression": "compression",
    "compressOver": "compress_over_bytes",
    "onBatchConflict": "on_batch_conflict",
    "onBatchGap": "on_batch_gap",
    "stagingRetention": "staging_retention_ms",
    "lockTimeout": "lock_timeout_ms",
    "txnAppId": "txn_app_id",
    "txnVersion": "txn_version",
    "allowNetworkStore": "allow_network_store",
    "mode": "mode",
    "consumerGroup": "group",
    "maxReconsumeTimes": "max_reconsume_times",
    "expiredOriginal": "expired_original",
}
# What means something in one mode only.
_OF_SEND_BACK = ("consumerGroup", "maxReconsumeTimes", "expiredOriginal")
_OF_SEND = ("topic", "queues", "createTopic", "compression", "compressOver")

# Who copies the options of a load() to a write hears what is the matter, not only that a name is unknown.
_OF_THE_SOURCE = dict.fromkeys(index_options(OPTIONS), "It is for reading; leave it out.") | {
    "subscribe": "It is for reading; where to write says topic, the option or the column.",
    "columns": "It is for reading; choose columns with select().",
}


def parse_sink_options(given: Mapping[str, str]) -> SinkOptions:
    """Return the options that were given, in whatever case.

    Raises OptionError for an unknown name, a value that is not acceptable, and half a transaction.
    """
    found = parse_given(strip_spark_options(given), SINK_OPTIONS, 0, _OF_THE_SOURCE)
    options = SinkOptions(**{field: found[name] for name, field in _FIELDS.items() if name in found})
    if (options.txn_app_id is None) != (options.txn_version is None):
        there, missing = ("txnAppId", "txnVersion") if options.txn_version is None else ("txnVersion", "txnAppId")
        raise OptionError(
            f"{there} is given without {missing}. Give both, as in "
            '.option("txnAppId", "billing-to-orders").option("txnVersion", batch_id), or neither.'
        )
    _check_mode(options, found)
    return options


def _check_mode(options: SinkOptions, found: Mapping[str, object]) -> None:
    """Raise OptionError for options of the other mode, and for a group that is none."""
    for name in _OF_SEND if options.is_sending_back else _OF_SEND_BACK:
        if name in found and options.is_sending_back:
            raise OptionError(
                f"{name} means nothing with mode=sendBack: failed messages go where their group's retries go, and as "
                f"they are. Leave {name} out."
            )
        if name in found:
            raise OptionError(
                f"{name} is about messages that go back to the group that failed to consume them. Add mode=sendBack, "
                f"or leave {name} out."
            )
    if options.is_sending_back:
        from rmq_spark.store import check_retrying_group

        if options.group is None:
            raise OptionError(
                'mode=sendBack needs consumerGroup, the group that failed, as in .option("consumerGroup", "billing").'
            )
        check_retrying_group(options.group)


def looks_like_reading(given: Mapping[str, str]) -> bool:
    """Say whether options that were given are those of a load(), as far as their names tell."""
    names = {name.lower() for name in given}
    # Both have a topic; beside one of the three it is wrong in a load() too.
    of_a_write = index_options(SINK_OPTIONS).keys() - index_options(OPTIONS).keys() | {"topic"}
    return bool(names & {"subscribe", "subscribepattern", "assign"}) and not names & of_a_write
