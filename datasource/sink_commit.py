"""What the driver does of a write: see that there is a store, append what the tasks staged, or give it up."""

from collections.abc import Sequence
from dataclasses import replace

from rmq_spark.datasource.sink_options import SinkOptions
from rmq_spark.store import (
    CommitKey,
    StagedFile,
    abort_sink,
    check_sent_topic,
    commit_sink,
    open_reader,
    open_store,
)


def ensure_store(options: SinkOptions) -> str | None:
    """See that there is a store to write to, and make it where nothing is yet; return its id. Takes no lock.

    The id is None until one of our writers has appended. Raises StorePathError for a path that is something else, and
    for one that cannot be written; OptionError for a topic that nobody may send to.
    """
    settings = options.sink_settings()
    if options.topic is not None:
        check_sent_topic(options.topic)
    open_store(
        settings.path,
        commit_log_path=settings.outbox.commit_log_path,
        allow_network_store=settings.allow_network_store,
    )
    with open_reader(settings.path, commit_log_path=settings.outbox.commit_log_path) as store:
        return store.store_id()


def commit_files(options: SinkOptions, key: CommitKey, files: Sequence[StagedFile]) -> None:
    """Append the rows of all files to the store, once, and log how many they were. Many may commit at once.

    Raises BatchConflictError, LockTimeoutError, DiskFullError and what else keeps the store from taking them.
    """
    commit_sink(replace(options.sink_settings(), application=f"rmq-spark sink, {key}"), key, files)


def discard_files(options: SinkOptions, key: CommitKey, files: Sequence[StagedFile]) -> None:
    """Take away what tasks staged, but for what a commit has promised. What cannot be taken away is swept up later."""
    abort_sink(options.sink_settings(), key, files)
