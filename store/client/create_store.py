"""Creation of an empty store and of topics in it."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from rmq_spark.store.client.producer import Producer
from rmq_spark.store.disk import files
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.names import check_topic_name
from rmq_spark.store.transaction.sink import RecordBuilderSettings, check_delays, check_opening


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
    """Create an empty store at `path`, and topics in it.

    `topics` is a list of names, and each of these topics gets `queues` queues. Or it is a mapping from each name to the
    number of its queues. If the store or a topic exists already, it is not changed. `open_store` describes the other
    arguments and the errors.
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
    names = [topics] if isinstance(topics, str) else list(topics)
    for topic in names:
        check_topic_name(topic)
    delays = check_delays(message_delay_level, timer_max_delay_sec, broker_version)
    sizes = FileSizes(segment_bytes=segment_bytes)
    settings = WriterSettings("rmq-spark create", lock_timeout_ms, allow_network_store, commit_log_path, sizes, delays)
    builder = RecordBuilderSettings(commit_log_path, queues, sizes=sizes, delays=delays)
    with Producer(files.store_folder(path), settings, builder, "sync") as producer:
        producer.settle()
        for topic in names:
            producer.create_topic(topic, topics[topic] if isinstance(topics, Mapping) else queues)
