"""`create_store`: an empty store, and topics in it."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from rmq_spark.store.commit.arguments import check_delays, check_opening
from rmq_spark.store.commit.outbox import OutboxSettings
from rmq_spark.store.delivery.message_store import MessageStore
from rmq_spark.store.disk import files
from rmq_spark.store.log.file_sizes import FileSizes
from rmq_spark.store.log.store_writer import WriterSettings


def create_store(
    path: str | PurePath,
    *,
    topics: Mapping[str, int] | Sequence[str] = (),
    queues: int = 4,
    segment_bytes: int = 1 << 30,
    message_delay_level: str | None = None,
    timer_max_delay_sec: int | None = None,
    broker_version: str | None = None,
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
) -> None:
    """Make a store at `path`, and the `topics` that are missing: names, each with so many `queues`, or names to queues.

    A store or a topic that is there stays as it is. What else may be given is as in `open_store`, and so is what is
    raised.
    """
    check_opening(
        flush="sync",
        queues=queues,
        create_topic=True,
        compression=None,
        compress_over=0,
        commit_log_path=commit_log_path,
        lock_timeout_ms=lock_timeout_ms,
        allow_network_store=allow_network_store,
        segment_bytes=segment_bytes,
    )
    delays = check_delays(message_delay_level, timer_max_delay_sec, broker_version)
    sizes = FileSizes(segment_bytes=segment_bytes)
    settings = WriterSettings("rmq-spark create", lock_timeout_ms, allow_network_store, commit_log_path, sizes, delays)
    outbox = OutboxSettings(commit_log_path, queues, sizes=sizes, delays=delays)
    with MessageStore(files.absolute(path), settings, outbox, "sync") as made:
        made.settle()
        for topic in [topics] if isinstance(topics, str) else topics:
            made.create_topic(topic, topics[topic] if isinstance(topics, Mapping) else queues)
