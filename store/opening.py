"""The functions by which programs open a store directory or a live cluster, and `close`.

The modules of the engine are imported when a function needs them, so that importing this module is cheap.
"""

import math
from typing import TYPE_CHECKING, Any, Unpack, overload

from rmq_spark.store.argument_checks import changed_arguments, check_place, refuse_cluster_options, refuse_store_options
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES
from rmq_spark.store.names import LEDGER_TOPIC, STAGE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import PurePath

    from rmq_spark.store.client.producer import Producer
    from rmq_spark.store.client.pull_consumer import PullConsumer
    from rmq_spark.store.cluster.consumer import ClusterConsumer
    from rmq_spark.store.cluster.diagnosis import ClusterFinding
    from rmq_spark.store.cluster.producer import ClusterProducer
    from rmq_spark.store.places import ClusterArguments
    from rmq_spark.store.view.cluster_explorer import ClusterExplorer
    from rmq_spark.store.view.explorer import StoreExplorer


@overload
def open_reader(
    path: "str | PurePath", *, commit_log_path: str | None = None, read_mode: str = "auto"
) -> "StoreExplorer":
    """Open a store directory."""


@overload
def open_reader(
    *,
    name_server: str,
    **cluster_options: "Unpack[ClusterArguments]",
) -> "ClusterExplorer":
    """Open a live cluster."""


def open_reader(
    path: "str | PurePath | None" = None,
    *,
    commit_log_path: str | None = None,
    read_mode: str = "auto",
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> "StoreExplorer | ClusterExplorer":
    """Open the store at `path`, or the cluster of `name_server`, for reading.

    In a store no file is changed, created or locked. `commit_log_path` is needed only if the commit log is outside of
    the store's folder: its folder, or several separated by commas. `read_mode` is "mmap" (map files into memory),
    "pread" (do not map them) or "auto" (map them except on network and FUSE file systems). A notebook shows the reader
    as a summary. Raises StorePathError if there is no store at `path`, or a store of an unsupported kind.

    `name_server` is "host:9876", several separated by a semicolon. The reader of a cluster connects at its first call.
    The other arguments are like a query's options. `tls_verify` is "ca", "full" or "none". A read waits
    `broker_down_timeout_ms` for a broker (0: for ever). Raises OptionError for an invalid argument.
    """
    given = dict(locals())
    check_place("open_reader", path, name_server, "read from", cluster_options, open_reader)
    if name_server is not None:
        from rmq_spark.store.places import locate_cluster
        from rmq_spark.store.view.cluster_explorer import ClusterExplorer

        refuse_store_options("open_reader", open_reader, given, ())
        return ClusterExplorer(locate_cluster(name_server, cluster_options))
    refuse_cluster_options("open_reader", cluster_options)
    from rmq_spark.store.disk import files
    from rmq_spark.store.view.explorer import StoreExplorer

    assert path is not None
    return StoreExplorer(files.store_folder(path), commit_log_path=commit_log_path, read_mode=read_mode)


@overload
def open_store(
    path: "str | PurePath",
    *,
    flush: str = "async",
    queues: int = 4,
    create_topic: bool = True,
    compression: str | None = None,
    compress_over: int = 4096,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
    segment_bytes: int = 1 << 30,
    message_delay_level: str | None = None,
    timer_max_delay_sec: int | None = None,
    broker_version: str | None = None,
) -> "Producer":
    """Open a store directory."""


@overload
def open_store(
    *,
    name_server: str,
    queues: int = 4,
    create_topic: bool = True,
    compression: str | None = None,
    compress_over: int = 4096,
    max_message_size: int = 4 << 20,
    **cluster_options: "Unpack[ClusterArguments]",
) -> "ClusterProducer":
    """Open a live cluster."""


def open_store(
    path: "str | PurePath | None" = None,
    *,
    flush: str = "async",
    queues: int = 4,
    create_topic: bool = True,
    compression: str | None = None,
    compress_over: int = 4096,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
    segment_bytes: int = 1 << 30,
    message_delay_level: str | None = None,
    timer_max_delay_sec: int | None = None,
    broker_version: str | None = None,
    max_message_size: int = 4 << 20,
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> "Producer | ClusterProducer":
    """Open the store at `path`, or the cluster of `name_server`, for sending messages.

    With `create_topic`, a missing topic is created with `queues` queues. Bodies of at least `compress_over` bytes are
    compressed with `compression` (none, zlib, lz4 or zstd).

    If there is no store at `path`, it is created with segments of `segment_bytes`. With `flush="async"`, sent messages
    survive the death of any process; with "sync" they also survive a power cut. If another process writes, a call
    waits, and fails when that process has made no progress for `lock_timeout_ms`.

    Three settings are saved in the store and apply to all its writers. `message_delay_level` is the table of delay
    levels (default: RocketMQ's "1s 5s 10s 30s 1m … 2h"). `timer_max_delay_sec` is the maximum time until a message is
    delivered, in seconds (default 259,200). `broker_version` is the version of the store's brokers, "5" or "4.9";
    brokers of version 4.9 do not support delivery times.

    In a cluster, a missing topic gets `queues` queues on each master. A body, compressed or not, has at most
    `max_message_size` bytes, which the brokers must accept too (maxMessageSize). A call that finds a broker away waits
    for it, or for another one, for `broker_down_timeout_ms` (0: for ever). The other arguments mean what they mean for
    `open_reader`. The producer connects at its first call.

    Raises OptionError for an invalid argument, before anything is changed. Raises StorePathError if `path` is not a
    store and no store can be created there. While a broker holds the store, sends raise LockTimeoutError.
    """
    given = dict(locals())
    check_place("open_store", path, name_server, "send to", cluster_options, open_store)
    if name_server is not None:
        return _open_cluster_producer(name_server, given, cluster_options)
    for_clusters = changed_arguments(open_store, given, {"max_message_size"})
    refuse_cluster_options("open_store", [*for_clusters, *cluster_options])
    from rmq_spark.store.client.producer import Producer
    from rmq_spark.store.disk import files
    from rmq_spark.store.log.segments import FileSizes
    from rmq_spark.store.log.store_writer import WriterSettings
    from rmq_spark.store.transaction.sink import RecordBuilderSettings, check_delays, check_opening

    compression = check_opening(
        flush=flush,
        queues=queues,
        create_topic=create_topic,
        compression=compression,
        compress_over=compress_over,
        commit_log_path=commit_log_path,
        lock_timeout_ms=lock_timeout_ms,
        allow_network_store=allow_network_store,
        segment_bytes=segment_bytes,
    )
    delays = check_delays(message_delay_level, timer_max_delay_sec, broker_version)
    sizes = FileSizes(segment_bytes=segment_bytes)
    settings = WriterSettings("rmq-spark", lock_timeout_ms, allow_network_store, commit_log_path, sizes, delays)
    builder = RecordBuilderSettings(commit_log_path, queues, create_topic, compression, compress_over, sizes, delays)
    assert path is not None
    return Producer(files.store_folder(path), settings, builder, flush)


def _open_cluster_producer(
    name_server: str, given: "Mapping[str, Any]", cluster_options: "Mapping[str, Any]"
) -> "ClusterProducer":
    """Return a producer of a cluster from the arguments of `open_store`."""
    from rmq_spark.store.argument_checks import check_flags, check_setting, check_word
    from rmq_spark.store.cluster.producer import ClusterProducer, ProducerSettings
    from rmq_spark.store.cluster.write_routes import NewTopics
    from rmq_spark.store.disk import files
    from rmq_spark.store.disk.clock import random_bits
    from rmq_spark.store.disk.host import ipv4_address
    from rmq_spark.store.format.body_codec import BodyRules
    from rmq_spark.store.format.message_ids import UniqueIds
    from rmq_spark.store.names import MAX_QUEUES, MAX_SENT_BODY_BYTES
    from rmq_spark.store.places import locate_cluster
    from rmq_spark.store.transaction.sink import COMPRESSIONS

    refuse_store_options("open_store", open_store, given, _CLUSTER_PRODUCER)
    check_setting("queues", given["queues"], 1, MAX_QUEUES)
    check_setting("compress_over", given["compress_over"], 0)
    check_setting("max_message_size", given["max_message_size"], 1, MAX_SENT_BODY_BYTES)
    check_flags(create_topic=given["create_topic"])
    compression = given["compression"]
    if compression is not None:
        check_word("compression", compression, COMPRESSIONS)
    address = locate_cluster(name_server, {"broker_down_timeout_ms": 3000, **cluster_options})
    settings = ProducerSettings(
        BodyRules.named(compression, given["compress_over"], given["max_message_size"]),
        NewTopics(given["create_topic"], given["queues"]),
        address.broker_down_timeout_ms or math.inf,
    )

    def open_ids() -> UniqueIds:
        return UniqueIds(ipv4_address(), files.process_id(), random_bits())

    return ClusterProducer(address, settings, open_ids, random_bits())


_CLUSTER_PRODUCER = frozenset({"queues", "create_topic", "compression", "compress_over", "max_message_size"})


@overload
def open_consumer(
    path: "str | PurePath",
    group: str | None = None,
    *,
    columns: "Sequence[str] | None" = None,
    commit_log_path: str | None = None,
    read_mode: str = "auto",
    check_crc: bool = False,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
    long_polling: bool = True,
    max_transfer_bytes_on_message_in_memory: int = 262_144,
    max_transfer_count_on_message_in_memory: int = 32,
    max_transfer_bytes_on_message_in_disk: int = 65_536,
    max_transfer_count_on_message_in_disk: int = 8,
    access_message_in_memory_max_ratio: int = 40,
    max_filter_message_count: int = 16_000,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
) -> "PullConsumer":
    """Open a store directory."""


@overload
def open_consumer(
    *,
    name_server: str,
    group: str | None = None,
    columns: "Sequence[str] | None" = None,
    check_crc: bool = False,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
    long_polling: bool = True,
    **cluster_options: "Unpack[ClusterArguments]",
) -> "ClusterConsumer":
    """Open a live cluster."""


def open_consumer(
    path: "str | PurePath | None" = None,
    group: str | None = None,
    *,
    columns: "Sequence[str] | None" = None,
    commit_log_path: str | None = None,
    read_mode: str = "auto",
    check_crc: bool = False,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
    long_polling: bool = True,
    max_transfer_bytes_on_message_in_memory: int = 262_144,
    max_transfer_count_on_message_in_memory: int = 32,
    max_transfer_bytes_on_message_in_disk: int = 65_536,
    max_transfer_count_on_message_in_disk: int = 8,
    access_message_in_memory_max_ratio: int = 40,
    max_filter_message_count: int = 16_000,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> "PullConsumer | ClusterConsumer":
    """Open the store at `path`, or the cluster of `name_server`, for pulling messages as RocketMQ's pull consumers do.

    Use it in `with`. `group` is required for committed offsets and for sending messages back. `columns` are the columns
    of the pulled messages. If `long_polling` is False, a pull that finds no message waits at most a second for one.

    In a store, every pull first delivers scheduled messages that are due, unless a broker does this or the store is
    read-only. The size of a pull is limited as a broker limits it. The limits have the names and defaults of
    MessageStoreConfig. A record is treated as on disk if its distance from the end of the log is more than
    `access_message_in_memory_max_ratio` percent of the machine's memory. `max_filter_message_count` is in bytes of
    consume-queue entries, which have 20 bytes per message. If another process writes, a call waits, and fails when that
    process has made no progress for `lock_timeout_ms`. `allow_network_store` applies to sends and deliveries; offsets
    are committed on any file system.

    In a cluster, the brokers deliver and limit. The other arguments mean what they mean for `open_reader`. The consumer
    connects at its first call.

    Raises OptionError for an invalid group name, an unknown column or an invalid argument, and StorePathError if there
    is no store at `path`. Source: DefaultMQPullConsumer (4.9, 5.3).
    """
    given = dict(locals())
    check_place("open_consumer", path, name_server, "pull from", cluster_options, open_consumer)
    from rmq_spark.store.argument_checks import check_flags, check_setting

    check_setting("max_decompressed_bytes", max_decompressed_bytes, 1)
    check_flags(check_crc=check_crc, long_polling=long_polling, allow_network_store=allow_network_store)
    pulling = {name: given[name] for name in ("group", "check_crc", "max_decompressed_bytes", "long_polling")}
    if columns is not None:
        pulling["columns"] = columns
    if name_server is not None:
        return _open_cluster_consumer(name_server, pulling, given, cluster_options)
    return _open_store_consumer(pulling, given, cluster_options)


def _open_store_consumer(
    pulling: "dict[str, Any]", given: "Mapping[str, Any]", cluster_options: "Mapping[str, Any]"
) -> "PullConsumer":
    """Return a consumer of a store directory from the arguments of `open_consumer`."""
    from rmq_spark.store.argument_checks import check_setting
    from rmq_spark.store.client.pull_consumer import PullConsumer
    from rmq_spark.store.delivery.scheduler import DeliveryScheduler
    from rmq_spark.store.disk import files
    from rmq_spark.store.group.pull_limits import LIMIT_SETTINGS, limits_of_broker
    from rmq_spark.store.log.store_writer import WriterSettings

    refuse_cluster_options("open_consumer", cluster_options)
    check_setting("lock_timeout_ms", given["lock_timeout_ms"], 0)
    limits = limits_of_broker(**{name: given[name] for name in LIMIT_SETTINGS})
    root, log = files.store_folder(given["path"]), given["commit_log_path"]
    return PullConsumer(
        root,
        **pulling,
        limits=limits,
        commit_log_path=log,
        read_mode=given["read_mode"],
        settings=WriterSettings("rmq-spark", given["lock_timeout_ms"], given["allow_network_store"], log),
        scheduler=DeliveryScheduler(root, commit_log_path=log, allow_network_store=given["allow_network_store"]),
    )


def _open_cluster_consumer(
    name_server: str, pulling: "dict[str, Any]", given: "Mapping[str, Any]", cluster_options: "Mapping[str, Any]"
) -> "ClusterConsumer":
    """Return a consumer of a cluster from the arguments of `open_consumer`."""
    from rmq_spark.store.cluster.consumer import ClusterConsumer
    from rmq_spark.store.places import locate_cluster

    refuse_store_options("open_consumer", open_consumer, given, {*pulling, "columns"})
    if "broker_down_timeout_ms" in cluster_options:
        raise OptionError(
            "open_consumer: broker_down_timeout_ms was given; expected request_timeout_ms, because a consumer does not "
            "wait for a broker that is away. Remove it."
        )
    return ClusterConsumer(locate_cluster(name_server, cluster_options), **pulling)


def examine_cluster(
    name_server: str,
    topics: "Sequence[str]" = (),
    group: str | None = None,
    *,
    sink_topics: "Sequence[str]" = (),
    stage_topic: str = STAGE_TOPIC,
    ledger_topic: str = LEDGER_TOPIC,
    **cluster_options: "str | int | None",
) -> "list[ClusterFinding]":
    """Try what a query of a live cluster needs, and return a finding for each: what, its state, why, and the next step.

    The state is "ok", "warning" (a query runs, but slower or without a feature) or "missing" (a query fails or waits).
    `topics` will be read, and the committed offsets of the consumer group `group`. Nothing in the cluster is changed
    for them.

    To `sink_topics` a query is to write with exactly-once delivery. That is tried too: a row that has no effect is
    stored in the ledger, a message without rows in the stage topic, and offsets in a consumer group RMQ_SPARK_…; the
    sink topics get no message. The other arguments are those of `open_reader` for a cluster. Raises OptionError for an
    invalid argument.
    """
    from rmq_spark.store.cluster.doctor import diagnose_cluster
    from rmq_spark.store.cluster.exactly_once.target_topics import OwnTopics
    from rmq_spark.store.disk.clock import wall_clock_ms
    from rmq_spark.store.places import locate_cluster

    address = locate_cluster(name_server, cluster_options, group=group)
    own = OwnTopics(stage_topic, ledger_topic)
    return diagnose_cluster(address, topics, group, now_ms=wall_clock_ms(), sinks=sink_topics, own_topics=own)


def close(
    path: "str | PurePath",
    *,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
) -> None:
    """Make all messages durable, and mark the store at `path` as cleanly shut down by removing its file `abort`.

    Call it after programs appended with `flush="async"`, before a broker opens the store. It first finishes the commits
    of dead writers. It also writes to the broker's files how far scheduled messages have been delivered. Raises
    StorePathError if `path` is not a store, and LockTimeoutError while a broker holds the store.
    """
    from rmq_spark.store.delivery.scheduler import DeliveryScheduler
    from rmq_spark.store.disk import files
    from rmq_spark.store.log.store_state import commit_log_folders
    from rmq_spark.store.log.store_writer import WriterSettings

    # Raises if the store is missing; open_store would create it.
    commit_log_folders(files.store_folder(path), commit_log_path)
    producer = open_store(
        path,
        commit_log_path=commit_log_path,
        lock_timeout_ms=lock_timeout_ms,
        allow_network_store=allow_network_store,
    )
    settings = WriterSettings("rmq-spark", lock_timeout_ms, allow_network_store, commit_log_path)
    DeliveryScheduler(files.store_folder(path), settings).hand_over()
    producer.close()
