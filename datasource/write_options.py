"""The options of a write, checked against each other. `option_table` parses their texts.

`parse_sink_options` makes every check that does not need the store.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rmq_spark.datasource.option_table import (
    OPTIONS,
    SEND,
    SEND_BACK,
    SINK_OPTIONS,
    field_values,
    index_options,
    option_field,
    parse_given,
    strip_spark_options,
)
from rmq_spark.store.errors import OptionError

if TYPE_CHECKING:
    from rmq_spark.store import CommitOptions, SendBackSettings, SinkSettings


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of one write, checked against each other. `path` must not be None to write.

    Sizes are in bytes, durations in ms.
    """

    path: str | None = option_field("path", SINK_OPTIONS)
    commit_log_path: tuple[str, ...] | None = option_field("commitLogPath", SINK_OPTIONS)
    topic: str | None = option_field("topic", SINK_OPTIONS)
    queue_count: int = option_field("queues", SINK_OPTIONS)
    create_topic: bool = option_field("createTopic", SINK_OPTIONS)
    flush: str = option_field("flush", SINK_OPTIONS)
    compression: str = option_field("compression", SINK_OPTIONS)
    compress_over_bytes: int = option_field("compressOver", SINK_OPTIONS)
    on_batch_conflict: str = option_field("onBatchConflict", SINK_OPTIONS)
    on_batch_gap: str = option_field("onBatchGap", SINK_OPTIONS)
    staging_retention_ms: int = option_field("stagingRetention", SINK_OPTIONS)
    lock_timeout_ms: int = option_field("lockTimeout", SINK_OPTIONS)
    txn_app_id: str | None = option_field("txnAppId", SINK_OPTIONS)
    txn_version: int | None = option_field("txnVersion", SINK_OPTIONS)
    allow_network_store: bool = option_field("allowNetworkStore", SINK_OPTIONS)
    mode: str = option_field("mode", SINK_OPTIONS)
    group: str | None = option_field("consumerGroup", SINK_OPTIONS)
    max_reconsume_times: int | None = option_field("maxReconsumeTimes", SINK_OPTIONS)
    expired_original: str = option_field("expiredOriginal", SINK_OPTIONS)

    @property
    def is_sending_back(self) -> bool:
        """Whether the rows are messages that a group failed to consume (mode=sendBack), not new messages."""
        return self.mode == "sendBack"

    def check_complete(self) -> str:
        """Return the path. Raises OptionError if it is missing."""
        if self.path is None:
            raise OptionError(
                'path is required. Give the folder of the store, as in .option("path", "/data/store") or '
                '.save("/data/store"). (A table in Spark\'s catalog cannot pass options to a Python source.)'
            )
        return self.path

    def check_stream(self) -> None:
        """Raise OptionError if txnAppId and txnVersion are given, which a stream cannot have."""
        if self.txn_app_id is not None:
            raise OptionError(
                "txnAppId and txnVersion work in batch writes only, such as those of foreachBatch. Leave them out: "
                "writeStream uses its query id and batch id in their place."
            )

    def sink_settings(self) -> "SinkSettings":
        """Return the engine's settings for writing new messages. Raises OptionError if the path is missing."""
        from rmq_spark.store import RecordBuilderSettings, SinkSettings  # the writing part of the engine: import late

        return SinkSettings(
            path=self.check_complete(),
            record_builder=RecordBuilderSettings(
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
        """Return the engine's settings for sending messages back. Raises OptionError if the path is missing."""
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


# Advice for names that are unknown in a write because they are options of a load().
_HINTS = dict.fromkeys(index_options(OPTIONS), "It is for reading. Leave it out.") | {
    "subscribe": "It is for reading. Give the topic to write to as the option topic or in a column topic.",
    "columns": "It is for reading. Choose columns with select().",
}


def parse_sink_options(given: Mapping[str, str]) -> SinkOptions:
    """Parse and check the options that a user gives for a write. Upper and lower case of their names do not matter.

    Raises OptionError for an unknown name, an invalid value, and values that contradict each other.
    """
    found = parse_given(strip_spark_options(given), SINK_OPTIONS, 0, _HINTS)
    options = SinkOptions(**field_values(SinkOptions, found))
    if (options.txn_app_id is None) != (options.txn_version is None):
        one, missing = ("txnAppId", "txnVersion") if options.txn_version is None else ("txnVersion", "txnAppId")
        raise OptionError(
            f"{one} is given without {missing}. Give both, as in "
            '.option("txnAppId", "billing-to-orders").option("txnVersion", batch_id), or neither.'
        )
    _check_mode(options, found)
    return options


def _check_mode(options: SinkOptions, found: Mapping[str, object]) -> None:
    """Raise OptionError for options that only the other mode has, and for a missing or invalid group."""
    for option in SINK_OPTIONS:
        if option.name in found and option.requires == SEND and options.is_sending_back:
            raise OptionError(
                f"{option.name} has no effect with mode=sendBack: failed messages go unchanged to the retry topic of "
                f"their group. Leave {option.name} out."
            )
        if option.name in found and option.requires == SEND_BACK and not options.is_sending_back:
            raise OptionError(
                f"{option.name} requires mode=sendBack: it is for messages that a group failed to consume. Add "
                f"mode=sendBack, or leave {option.name} out."
            )
    if options.is_sending_back:
        from rmq_spark.store import check_retrying_group

        if options.group is None:
            raise OptionError(
                "mode=sendBack requires consumerGroup, the group that failed to consume the messages. Add it, as in "
                '.option("consumerGroup", "billing").'
            )
        check_retrying_group(options.group)


def looks_like_reading(given: Mapping[str, str]) -> bool:
    """Return whether the options look like those of a load(), judging by their names."""
    names = {name.lower() for name in given}
    # A topic is treated as an option of a write. Together with one of the three names below it is an error in a load().
    only_in_writes = index_options(SINK_OPTIONS).keys() - index_options(OPTIONS).keys() | {"topic"}
    return bool(names & {"subscribe", "subscribepattern", "assign"}) and not names & only_in_writes
