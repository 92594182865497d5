"""What the driver does of a write: see that there is a store, append what the tasks staged, or give it up."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rmq_spark.datasource.sink_options import SinkOptions
from rmq_spark.store import (
    CommitKey,
    StagedCopies,
    StagedFile,
    abort_copies,
    abort_sink,
    check_send_back_sink,
    check_sent_topic,
    commit_copies,
    commit_sink,
    open_reader,
    open_store,
)


def ensure_store(options: SinkOptions) -> str | None:
    """See that there is a store to write to, and make it where nothing is yet; return its id. Takes no lock.

    The id is None until one of our writers has appended. Raises StorePathError for a path that is something else, and
    for one that cannot be written; OptionError for a topic that nobody may send to.
    """
    if options.is_sending_back:
        return check_send_back_sink(options.send_back_settings())
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


def commit_files(
    options: SinkOptions,
    key: CommitKey,
    files: Sequence[StagedFile | StagedCopies],
    before_intent: Callable[[], None] | None = None,
) -> None:
    """Append the rows of all files to the store, once, and log how many they were. Many may commit at once.

    `before_intent` is called under the store's lock, before anything says that a batch which is new will be there.

    Raises BatchConflictError, LockTimeoutError, DiskFullError and what else keeps the store from taking them.
    """
    application = f"rmq-spark sink, {key}"
    if options.is_sending_back:
        copies = [one for one in files if isinstance(one, StagedCopies)]
        commit_copies(replace(options.send_back_settings(), application=application), key, copies, before_intent)
    else:
        rows = [one for one in files if isinstance(one, StagedFile)]
        commit_sink(replace(options.sink_settings(), application=application), key, rows, before_intent)


def discard_files(options: SinkOptions, key: CommitKey, files: Sequence[StagedFile | StagedCopies]) -> None:
    """Take away what tasks staged, but for what a commit has promised. What cannot be taken away is swept up later."""
    if options.is_sending_back:
        copies = [one for one in files if isinstance(one, StagedCopies)]
        abort_copies(options.send_back_settings(), key, copies)
    else:
        abort_sink(options.sink_settings(), key, [one for one in files if isinstance(one, StagedFile)])
