"""The functions by which programs copy messages between a Parquet file and a store directory or a live cluster.

The modules of the engine are imported when a function needs them, so that importing this module is cheap.
"""

from typing import TYPE_CHECKING, Any, Unpack, overload

from rmq_spark.store.argument_checks import (
    changed_arguments,
    check_flags,
    check_place,
    check_setting,
    refuse_cluster_options,
    refuse_store_options,
)
from rmq_spark.store.errors import OptionError
from rmq_spark.store.names import MAX_SENT_BODY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import PurePath

    from rmq_spark.store.model import QueueKey
    from rmq_spark.store.places import ClusterArguments
    from rmq_spark.store.tools.export_parquet import Exported, Range
    from rmq_spark.store.tools.import_parquet import Imported


@overload
def export_parquet(
    path: "str | PurePath",
    target: "str | PurePath",
    *,
    topics: "Sequence[str] | None" = None,
    begin_ms: int | None = None,
    end_ms: int | None = None,
    bounds: "Mapping[QueueKey | tuple[str, int], Range] | None" = None,
    columns: "Sequence[str] | None" = None,
    commit_log_path: str | None = None,
    row_group_rows: int = 65_536,
    overwrite: bool = False,
    progress: "Callable[[int, int], None] | None" = None,
) -> "Exported":
    """Export from a store directory."""


@overload
def export_parquet(
    *,
    target: "str | PurePath",
    name_server: str,
    topics: "Sequence[str] | None" = None,
    begin_ms: int | None = None,
    end_ms: int | None = None,
    bounds: "Mapping[QueueKey | tuple[str, int, str], Range] | None" = None,
    columns: "Sequence[str] | None" = None,
    row_group_rows: int = 65_536,
    overwrite: bool = False,
    progress: "Callable[[int, int], None] | None" = None,
    **cluster_options: "Unpack[ClusterArguments]",
) -> "Exported":
    """Export from a live cluster."""


def export_parquet(
    path: "str | PurePath | None" = None,
    target: "str | PurePath | None" = None,
    *,
    topics: "Sequence[str] | None" = None,
    begin_ms: int | None = None,
    end_ms: int | None = None,
    bounds: "Mapping[Any, Range] | None" = None,
    columns: "Sequence[str] | None" = None,
    commit_log_path: str | None = None,
    row_group_rows: int = 65_536,
    overwrite: bool = False,
    progress: "Callable[[int, int], None] | None" = None,
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> "Exported":
    """Write messages of the store at `path`, or of a cluster, into the parquet file `target` (zstd), queue by queue.

    Choose the messages in one of two ways:

    - by topic and time: the messages of `topics` with a store time in [begin_ms, end_ms), in ms since the epoch. If
      `topics` is None, these are all topics except RocketMQ's own. A time that is None sets no limit.
    - by queue offset: `bounds` maps (topic, queue id), in a cluster (topic, queue id, broker name), to a range of queue
      offsets, (begin, end).

    Delayed messages that are not due yet, and half messages of transactions, are not included, because RocketMQ keeps
    them in its own topics.

    `columns` are names of the source's columns; None means all, in a cluster brokerName too. Keep all of them if you
    want to import the file again. A row group is written when it has `row_group_rows` rows or 64 MiB. The file is
    written atomically. An existing file is replaced only if `overwrite` is True. `progress(done, total)` is called with
    the number of messages that were written, and the number of messages to write.

    The arguments for a cluster mean what they mean for `open_reader`. No queue is left out: if the broker of one is
    away for `broker_down_timeout_ms` during a read, or when its bounds are asked for, the call raises
    BackendUnavailableError, which names the broker. NoPermissionError says which right the account lacks.

    Raises OptionError if an argument is invalid, if `target` is inside a store, or if it exists and `overwrite` is
    False. Raises NotFoundError if a topic does not exist, and DamageError or StoreChangedError if a message cannot be
    read. After any of these errors, `target` is unchanged.
    """
    given = dict(locals())
    check_place("export_parquet", path, name_server, "read from", cluster_options, export_parquet)
    if target is None:
        raise OptionError("export_parquet: found no target; expected the path of a file. Give target=.")
    from rmq_spark.store.tools.export_parquet import ExportTerms, export_cluster, export_store

    terms = ExportTerms(topics, begin_ms, end_ms, bounds, columns, row_group_rows, overwrite, progress)
    if name_server is None:
        refuse_cluster_options("export_parquet", cluster_options)
        assert path is not None
        return export_store(path, target, terms, commit_log_path=commit_log_path)
    from rmq_spark.store.places import locate_cluster

    accepted = {name for name in given if name != "commit_log_path"}
    refuse_store_options("export_parquet", export_parquet, given, accepted)
    return export_cluster(locate_cluster(name_server, cluster_options), target, terms)


@overload
def import_parquet(
    path: "str | PurePath",
    source: "str | PurePath",
    *,
    topic: str | None = None,
    name: str | None = None,
    keep_queues: bool = True,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
    progress: "Callable[[int, int], None] | None" = None,
) -> "Imported":
    """Import into a store directory."""


@overload
def import_parquet(
    *,
    source: "str | PurePath",
    name_server: str,
    topic: str | None = None,
    name: str | None = None,
    keep_queues: bool = True,
    skip_rows: int = 0,
    max_message_size: int = 4 << 20,
    progress: "Callable[[int, int], None] | None" = None,
    **cluster_options: "Unpack[ClusterArguments]",
) -> "Imported":
    """Import into a live cluster."""


def import_parquet(
    path: "str | PurePath | None" = None,
    source: "str | PurePath | None" = None,
    *,
    topic: str | None = None,
    name: str | None = None,
    keep_queues: bool = True,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
    progress: "Callable[[int, int], None] | None" = None,
    skip_rows: int = 0,
    max_message_size: int = 4 << 20,
    name_server: str | None = None,
    **cluster_options: "str | int | None",
) -> "Imported":
    """Send the messages of the parquet file `source` to the store at `path`, each once, or to a cluster.

    `source` is a file that `export_parquet` wrote, or any parquet file with columns of the sink. The column `body` is
    required, and also `topic`, unless the argument `topic` is given. Then all messages are sent to that topic.

    Missing topics are created. If the file is an export, a topic gets as many queues as it had in the old place. Each
    message is sent to the queue with its old queue id. If `keep_queues` is False, its queue is chosen by its sharding
    key, or round robin if it has none.

    If a call for a store fails or crashes, call it again: it resumes after the rows that are in the store. `name`
    identifies the import. If it is None, it is derived from the file's content and `topic`. To send the same file twice
    to the same topics, use two names.

    A cluster does not recognise an import, so each message is sent at least once: a repeated call sends all rows but
    the first `skip_rows` again. A message id is made from `name`, `topic`, the file's content and the row's number. So
    a row that is sent again has the same id, and equal rows have different ones. A note on the error of a call has the
    value of `skip_rows` for a repeated call. A message keeps its queue by the columns queueId and brokerName; if the
    topic is on one broker, brokerName may be missing. A missing topic is created on every master. A body has at most
    `max_message_size` bytes. The other arguments mean what they mean for `open_store`; a broker that stores nothing is
    waited for during `broker_down_timeout_ms`.

    `progress(done, total)` is called with the number of messages that are stored, and the number in the file.

    Raises OptionError if the file is invalid, if `name` was used for another file, or if a row is not a valid message
    (rows of earlier commits stay in the store). Raises BatchConflictError if another call with this name is running.
    Also raises the errors that a sink raises.
    """
    given = dict(locals())
    check_place("import_parquet", path, name_server, "send to", cluster_options, import_parquet)
    if source is None:
        raise OptionError("import_parquet: found no source; expected the path of a parquet file. Give source=.")
    from rmq_spark.store.tools.import_parquet import ImportTerms, import_into_store

    terms = ImportTerms(topic, name, keep_queues, progress)
    if name_server is None:
        for_clusters = changed_arguments(import_parquet, given, {"skip_rows", "max_message_size"})
        refuse_cluster_options("import_parquet", [*for_clusters, *cluster_options])
        check_setting("lock_timeout_ms", lock_timeout_ms, 0)
        check_flags(allow_network_store=allow_network_store)
        from rmq_spark.store.log.store_writer import WriterSettings

        settings = WriterSettings("rmq-spark import", lock_timeout_ms, allow_network_store, commit_log_path)
        assert path is not None
        return import_into_store(path, source, terms, settings)
    from rmq_spark.store.places import locate_cluster
    from rmq_spark.store.tools.import_into_cluster import import_into_cluster

    for_stores = {"commit_log_path", "lock_timeout_ms", "allow_network_store"}
    refuse_store_options("import_parquet", import_parquet, given, given.keys() - for_stores)
    check_setting("max_message_size", max_message_size, 1, MAX_SENT_BODY_BYTES)
    address = locate_cluster(name_server, cluster_options)
    return import_into_cluster(address, source, terms, skip_rows=skip_rows, max_message_size=max_message_size)
