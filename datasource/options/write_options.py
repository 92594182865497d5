"""The options of a write, checked against each other. `option_table` parses their texts.

`parse_sink_options` makes every check that does not need the store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from rmq_spark.datasource.options.cluster_options import check_place
from rmq_spark.datasource.options.option_table import (
    AT_LEAST_ONCE,
    EXACTLY_ONCE,
    OPTIONS,
    SEND,
    SEND_BACK,
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
from rmq_spark.datasource.options.schema import Field
from rmq_spark.datasource.options.sink_schema import (
    check_send_back_schema,
    check_sink_schema,
    normalise_columns,
    normalise_failed,
)
from rmq_spark.store.backend import (
    BROKER_NAME,
    BatchSink,
    Capability,
    CommitTerms,
    Guarantee,
    Location,
    RepeatedBatch,
    SendBackSink,
    SendBackTerms,
    SinkTerms,
)
from rmq_spark.store.errors import OptionError
from rmq_spark.store.names import check_retrying_group


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of one write of new messages, checked against each other. `location` must not be None to write.

    Sizes are in bytes, durations in ms.
    """

    needs: ClassVar[tuple[Capability, str]] = (Capability.WRITES, "a write")
    location: Location | None = None
    topic: str | None = option_field("topic", SINK_OPTIONS)
    queue_count: int = option_field("queues", SINK_OPTIONS)
    create_topic: bool = option_field("createTopic", SINK_OPTIONS)
    flush: str = option_field("flush", SINK_OPTIONS)
    compression: str = option_field("compression", SINK_OPTIONS)
    compress_over_bytes: int = option_field("compressOver", SINK_OPTIONS)
    max_message_bytes: int = option_field("maxMessageSize", SINK_OPTIONS)
    delivery: str = option_field("delivery", SINK_OPTIONS)
    on_batch_conflict: str = option_field("onBatchConflict", SINK_OPTIONS)
    on_batch_gap: str = option_field("onBatchGap", SINK_OPTIONS)
    staging_retention_ms: int = option_field("stagingRetention", SINK_OPTIONS)
    lock_timeout_ms: int = option_field("lockTimeout", SINK_OPTIONS)
    txn_app_id: str | None = option_field("txnAppId", SINK_OPTIONS)
    txn_version: int | None = option_field("txnVersion", SINK_OPTIONS)
    allow_network_store: bool = option_field("allowNetworkStore", SINK_OPTIONS)
    stage_topic: str = option_field("stageTopic", SINK_OPTIONS)
    ledger_topic: str = option_field("ledgerTopic", SINK_OPTIONS)
    settle_ms: int = option_field("settleTime", SINK_OPTIONS)
    fence_timeout_ms: int = option_field("fenceTimeout", SINK_OPTIONS)

    def check_complete(self) -> Location:
        """Return the location. Raises OptionError if it is missing, or cannot be written to with this mode."""
        if self.location is None:
            raise OptionError(
                'path or nameServer is required. Give the folder of the store, as in .option("path", "/data/store") or '
                '.save("/data/store"), or the name server of a cluster, as in .option("nameServer", "ns1:9876"). '
                "(A table in Spark's catalog cannot pass options to a Python source.)"
            )
        require(self.location, *self.needs)
        return self.location

    def check_stream(self) -> None:
        """Raise OptionError if txnAppId and txnVersion are given, which a stream cannot have."""
        if self.txn_app_id is not None:
            raise OptionError(
                "txnAppId and txnVersion work in batch writes only, such as those of foreachBatch. Leave them out: "
                "writeStream uses its query id and batch id in their place."
            )

    def check_columns(self, given: Sequence[Field]) -> None:
        """Raise OptionError if rows with these columns cannot be written."""
        check_sink_schema(given, self.topic)

    def normalise(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows with each column in the type that the sink expects."""
        has_brokers = self.location is not None and Capability.BROKERS in self.location.capabilities
        return normalise_columns(rows, self.topic, has_brokers=has_brokers)

    def sink(self) -> BatchSink:
        """Return the sink that these options describe. Raises OptionError if the location is missing."""
        terms = SinkTerms(
            self.topic,
            self.queue_count,
            self.create_topic,
            None if self.compression == "none" else self.compression,
            self.compress_over_bytes,
            self.max_message_bytes,
            Guarantee.AT_LEAST_ONCE if self.delivery == AT_LEAST_ONCE else Guarantee.EXACTLY_ONCE,
        )
        return self.check_complete().sink(terms, self.commit_terms())

    def commit_terms(self) -> CommitTerms:
        """Return how the sink commits a batch."""
        return CommitTerms(
            self.on_batch_conflict,
            self.on_batch_gap,
            self.txn_app_id is not None,
            self.flush,
            self.staging_retention_ms,
            self.lock_timeout_ms,
            self.allow_network_store,
            self.stage_topic,
            self.ledger_topic,
            self.settle_ms,
            self.fence_timeout_ms,
        )


@dataclass(frozen=True, slots=True)
class SendBackOptions(SinkOptions):
    """The options of one write with mode=sendBack: its rows are messages that `group` failed to consume.

    `repeated` is the batch of which an earlier run may have sent messages back; only listeners know it.
    """

    needs: ClassVar[tuple[Capability, str]] = (Capability.SEND_BACK, "mode=sendBack")
    group: str = option_field("consumerGroup", SINK_OPTIONS)
    max_reconsume_times: int | None = option_field("maxReconsumeTimes", SINK_OPTIONS)
    expired_original: str = option_field("expiredOriginal", SINK_OPTIONS)
    repeated: RepeatedBatch | None = None

    def check_columns(self, given: Sequence[Field]) -> None:
        """Raise OptionError if rows with these columns cannot be sent back."""
        names = check_send_back_schema(given)
        is_cluster = self.location is not None and Capability.BROKERS in self.location.capabilities
        if is_cluster and BROKER_NAME not in names:
            raise OptionError(
                f"rows cannot be sent back to a cluster without the column {BROKER_NAME}, the broker that stores the "
                "message. The source has this column by default: keep it."
            )

    def normalise(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows with each column in the type that the sink expects."""
        return normalise_failed(rows)

    def sink(self) -> SendBackSink:
        """Return the sink that these options describe. Raises OptionError if the location is missing."""
        terms = SendBackTerms(self.group, self.max_reconsume_times, self.expired_original, self.repeated)
        return self.check_complete().send_back_sink(terms, self.commit_terms())


# Advice for names that are unknown in a write because they are options of a load().
_HINTS = dict.fromkeys(index_options(OPTIONS), "It is for reading. Leave it out.") | {
    "subscribe": "It is for reading. Give the topic to write to as the option topic or in a column topic.",
    "columns": "It is for reading. Choose columns with select().",
}


# A write option of Spark's streams, and those that belong to it, in lower case.
_ASYNC_PROGRESS = "asyncprogresstrackingenabled"
_OF_ASYNC_PROGRESS = {
    _ASYNC_PROGRESS,
    "asyncprogresstrackingcheckpointintervalms",
    "_asyncprogresstrackingoverridesinksupportcheck",
}


def strip_async_progress(given: Mapping[str, str]) -> dict[str, str]:
    """Return the given options without those of Spark's asynchronous progress tracking.

    Raises OptionError if it is enabled: after a restart Spark then gives other messages to a batch id that was written
    already.
    """
    if any(name.lower() == _ASYNC_PROGRESS and text.strip().lower() == "true" for name, text in given.items()):
        raise OptionError(
            "asyncProgressTrackingEnabled=true would lose or repeat messages: after a restart Spark gives a batch id "
            "to other messages, and the batch id is what identifies written rows; expected false. Leave "
            "asyncProgressTrackingEnabled out."
        )
    return {name: text for name, text in given.items() if name.lower() not in _OF_ASYNC_PROGRESS}


def parse_sink_options(given: Mapping[str, str], locate: Locate) -> SinkOptions:
    """Parse and check the options that a user gives for a write. Upper and lower case of their names do not matter.

    `locate` returns the location that the parsed options name, or None. Raises OptionError for an unknown name, an
    invalid value, values that contradict each other, and an option that the place cannot serve.
    """
    found = parse_given(strip_async_progress(strip_spark_options(given)), SINK_OPTIONS, 0, _HINTS)
    check_place(found)
    location = locate(found)
    kind = SendBackOptions if found.get("mode") == "sendBack" else SinkOptions
    require(location, *kind.needs)
    refuse_unsupported(found, SINK_OPTIONS, location)
    _check_delivery(kind, found, location)
    if ("txnAppId" in found) != ("txnVersion" in found):
        one, missing = ("txnAppId", "txnVersion") if "txnAppId" in found else ("txnVersion", "txnAppId")
        raise OptionError(
            f"{one} is given without {missing}. Give both, as in "
            '.option("txnAppId", "billing-to-orders").option("txnVersion", batch_id), or neither.'
        )
    _check_mode(kind, found)
    return kind(location=location, **field_values(kind, found))


def _check_delivery(kind: type[SinkOptions], found: Mapping[str, Any], location: Location | None) -> None:
    """Raise OptionError if the place cannot store rows as often as the option delivery says."""
    if location is None:
        return
    given = found.get("delivery")
    is_free = Capability.AT_LEAST_ONCE in location.capabilities
    if given == AT_LEAST_ONCE and not is_free:
        raise OptionError(
            f"delivery={AT_LEAST_ONCE} is not possible here: {location.describe()} stores each batch exactly once; "
            "expected a cluster (option nameServer), or no delivery. Leave delivery out."
        )
    if kind is SendBackOptions:
        if given == EXACTLY_ONCE and is_free:
            raise OptionError(
                f"mode=sendBack with delivery={EXACTLY_ONCE} is not possible here: {location.describe()} does not "
                "recognise a message that was sent back before; expected no delivery. Leave delivery out: a row that "
                "Spark writes again after a failure is then sent back again."
            )
        if is_free:
            _refuse_options_of_records(found, "mode=sendBack in a cluster", "")
    elif given == AT_LEAST_ONCE:
        _refuse_options_of_records(found, f"delivery={AT_LEAST_ONCE}", ", or delivery")
    elif is_free and found.get("compression", "none") != "none":
        raise OptionError(
            f"compression={found['compression']} is not possible with delivery={EXACTLY_ONCE} to a cluster: a broker "
            f"stores the rows of a batch as they are; expected compression=none. Compress the column body, or add "
            f"delivery={AT_LEAST_ONCE}."
        )


def _refuse_options_of_records(found: Mapping[str, Any], what: str, remedy: str) -> None:
    """Raise OptionError if an option is given that only exactly-once writes have."""
    for option in SINK_OPTIONS:
        if option.name in found and option.conflicts == f"delivery={AT_LEAST_ONCE}":
            raise OptionError(
                f"{option.name} has no effect with {what}, which keeps no record of batches. Leave {option.name} out"
                f"{remedy}."
            )


def _check_mode(kind: type[SinkOptions], found: Mapping[str, Any]) -> None:
    """Raise OptionError for options that only the other mode has, and for a missing or invalid group."""
    is_sending_back = kind is SendBackOptions
    for option in SINK_OPTIONS:
        if option.name in found and option.requires == SEND and is_sending_back:
            raise OptionError(
                f"{option.name} has no effect with mode=sendBack: failed messages go unchanged to the retry topic of "
                f"their group. Leave {option.name} out."
            )
        if option.name in found and option.requires == SEND_BACK and not is_sending_back:
            raise OptionError(
                f"{option.name} requires mode=sendBack: it is for messages that a group failed to consume. Add "
                f"mode=sendBack, or leave {option.name} out."
            )
    if is_sending_back:
        if "consumerGroup" not in found:
            raise OptionError(
                "mode=sendBack requires consumerGroup, the group that failed to consume the messages. Add it, as in "
                '.option("consumerGroup", "billing").'
            )
        check_retrying_group(found["consumerGroup"])


def looks_like_reading(given: Mapping[str, str]) -> bool:
    """Return whether the options look like those of a load(), judging by their names."""
    names = {name.lower() for name in given}
    # A topic is treated as an option of a write. Together with one of the three names below it is an error in a load().
    only_in_writes = index_options(SINK_OPTIONS).keys() - index_options(OPTIONS).keys() | {"topic"}
    return bool(names & {"subscribe", "subscribepattern", "assign"}) and not names & only_in_writes
