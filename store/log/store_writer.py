"""The writer of one store: takes the lock, opens write sessions, creates new stores and settings, shuts down cleanly.

A session trusts no state that is cached from the previous session, because a broker or another process may have written
in between.
"""

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol

from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StoreError, StorePathError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.own_files import DelayTerms, Rebuild, StoreSettings
from rmq_spark.store.log.recovery import begin_rebuild, forget_note, prepare
from rmq_spark.store.log.retention import Expired, Needed, RetentionHold, refuse_lost_waiting_queues
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.single_append import SingleAppender
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.store_lock import StoreLock
from rmq_spark.store.log.store_state import (
    SIDE_FOLDER,
    check_settings,
    commit_log_folders,
    found_broker_version,
    write_settings,
)
from rmq_spark.store.log.write_session import WriteSession

_LOG = logging.getLogger("rmq_spark")


class RollForward(Protocol):
    """Completes promises of dead writers, and states which part of the log the open promises need.

    A promise is work that a writer announced on disk, and may not have completed before it died.
    """

    def __call__(self, session: WriteSession, /) -> bool:
        """Complete as many open promises as fit into one session. Return whether there was any work.

        Called under the lock, before the caller's own session, repeatedly until it returns False.
        """

    def needed_from(self) -> Needed | None:
        """Return the lowest physical offset that open promises need. Return None if no promise is open."""


# The folder of a new store may contain these names already, because a task of a sink creates staging files before the
# first append.
_OWN_NAMES = {
    SIDE_FOLDER,
    filenames.CONSUME_QUEUE,
    filenames.INDEX,
    filenames.CONFIG,
    filenames.COMMIT_LOG,
    filenames.LOCK,
}


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """A writer's settings: the lock, the file sizes of a store that it creates, and delays."""

    application: str = "rmq-spark"  # shown to processes that wait for the lock
    lock_timeout_ms: int = 60_000  # counted only while the holder makes no progress
    allow_network_store: bool = False
    commit_log_path: str | None = None
    sizes: FileSizes = field(default_factory=FileSizes)
    delays: DelayTerms = field(default_factory=DelayTerms)


class StoreWriter:
    """Appends to one store. For one thread at a time; any number of processes may take turns.

    Opening a writer creates the store if it is missing. Raises StorePathError if the folder is not a store or is not
    writable. Each of the `finishers` runs under the lock before the caller's own session, to complete what dead writers
    promised. Retention keeps the part of the log that the finishers need.
    """

    def __init__(
        self,
        root: str,
        disk: Disk,
        settings: WriterSettings,
        now_ms: Callable[[], int],
        sleep: Callable[[float], None],
        finishers: Sequence[RollForward] = (),
    ) -> None:
        self.root, self.disk, self.settings, self.now_ms = files.store_folder(root), disk, settings, now_ms
        self._finishers = tuple(finishers)
        self._delay_terms = settings.delays
        self._logged_block: tuple[str | None, int] = None, 0
        self._logged_failure = ""
        self.lock = StoreLock(self.root, disk, settings, now_ms, sleep)
        self._create_folders()
        folders = commit_log_folders(self.root, settings.commit_log_path)
        check_settings(self.root)
        self._files = StoreFiles(self.root, folders, disk, settings.sizes, now_ms, self.lock.heartbeat)
        self._retention_hold = RetentionHold(
            self.root, self._files.log, now_ms, lambda: refuse_lost_waiting_queues(self._files)
        )

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @contextmanager
    def section(self) -> Iterator[WriteSession]:
        """Take the lock, recover the store if necessary, and yield a write session.

        Raises LockTimeoutError if the lock cannot be taken. Raises DamageError if the store is damaged in a way that
        recovery must not change. If the session ends with an error, the next session recovers the store. Work that dead
        writers left is completed first, in sessions of its own, so that other writers can take the lock in between.
        """
        while True:
            with self.lock.hold() as hold:
                try:
                    self._create_settings()
                    prepare(self._files)
                    section = WriteSession(self._files, self.lock, self._needed_from)
                    if not any([finish(section) for finish in self._finishers]):
                        yield section
                        self._apply_retention(section)
                        return
                finally:
                    if self.lock.is_latest(hold):  # otherwise a later session uses the files
                        self._files.close()

    def single_appender(self, session: WriteSession) -> SingleAppender:
        """Return an object that appends single messages in a session that `section` has yielded."""
        return SingleAppender(self._files, self.lock, session)

    def close(self) -> None:
        """Make everything durable, mark the store as cleanly shut down (remove `abort`), and release the lock."""
        with self.section() as section:
            section.settle()
        self.release()

    def begin_rebuild(self, rebuild: Rebuild) -> None:
        """Make the next session rebuild files from the log, see `recovery.begin_rebuild`. Call it under the lock."""
        try:
            begin_rebuild(self._files, rebuild)
        finally:
            self._files.close()

    def forget_note(self) -> None:
        """Remove the watermark and the queue registry, see `recovery.forget_note`. Call it under the lock."""
        try:
            forget_note(self._files)
        finally:
            self._files.close()

    def release(self) -> None:
        """Close every file and release the lock. Appended messages stay visible and survive the death of any process.

        They are not durable yet, so a power cut may lose them: see `close`.
        """
        try:
            self._files.close()
        finally:
            self.lock.release()

    def set_retention(self, max_age_ms: int | None, max_bytes: int | None) -> None:
        """Set the limits of age (ms) and size (bytes) in the store's settings. None means no limit.

        All of our writers delete what exceeds the limits at the end of a session.
        """
        with self.section():
            settings = check_settings(self.root)
            assert settings is not None
            changed = replace(settings, retention_ms=max_age_ms, retention_bytes=max_bytes)
            write_settings(self.disk, self.root, changed)

    def _needed_from(self) -> Needed | None:
        """Return the lowest physical offset that must be kept, with its reason. Return None if nothing is needed.

        Finishers and messages that wait for delivery need parts of the log.
        """
        asked = (*(finish.needed_from for finish in self._finishers), self._retention_hold.needed_from)
        needed = [one for ask in asked if (one := ask()) is not None]
        return min(needed, key=lambda one: one.physical_offset, default=None)

    def _apply_retention(self, section: WriteSession) -> None:
        """Delete what has expired by the store's settings.

        Log a failure instead of raising it: the append has succeeded.
        """
        try:
            settings = check_settings(self.root)
            if settings is not None and (settings.retention_ms, settings.retention_bytes) != (None, None):
                self._warn_blocked(section.expire(settings.retention_ms, settings.retention_bytes))
            self._logged_failure = ""
        except StoreError as error:
            if str(error) != self._logged_failure:  # log it once, because every session tries again
                self._logged_failure = str(error)
                _LOG.warning("rmq: retention in %s failed; the next writer tries it again: %s", self.root, error)

    def _warn_blocked(self, found: Expired) -> None:
        """Log a warning if a promise that cannot be completed blocks retention. `found` is the result of `expire`.

        The warning is repeated whenever more segments are kept, because the disk fills up. A promise of a live writer
        blocks retention only for a while, so it causes no warning.
        """
        block = (found.held_by, found.held_bytes)
        if found.is_held_for_good and block != self._logged_block:
            self._logged_block = block
            _LOG.warning(
                "rmq: retention in %s keeps %d bytes of expired log: %s promises rows that must be looked up there, "
                "and cannot be completed. See an earlier error in this log for the cause, how to fix it, and how to "
                "abandon the rows",
                self.root,
                found.held_bytes,
                found.held_by,
            )

    def _create_folders(self) -> None:
        """Create an empty store if the folder is missing, or contains only names that our own processes create."""
        if not files.is_folder(self.root) and files.file_size(self.root) >= 0:
            raise StorePathError(f'path="{self.root}" is a file; expected a folder, or a path that does not exist.')
        if {name for name, _ in files.list_folder(self.root)} - _OWN_NAMES:
            return  # the caller checks whether this existing folder is a store
        self.disk.make_folder(self.root, is_own=True)
        for name in (SIDE_FOLDER, filenames.CONSUME_QUEUE, filenames.INDEX, filenames.CONFIG, filenames.COMMIT_LOG):
            self.disk.make_folder(files.join(self.root, name))
        # After these syncs the empty store exists. A crash before them leaves folders, and the next call creates the
        # rest.
        self.disk.sync_folder(self.root)
        self.disk.sync_folder(files.parent(self.root))

    def _create_settings(self) -> None:
        """Create the store's settings if they are missing, and apply them: file sizes and delays.

        The process that creates a store chooses the sizes of its files, for all writers and for a broker that opens it
        later. Delays that this writer was given replace those in the settings. Messages that are already waiting keep
        the due time in their entries.
        """
        settings = check_settings(self.root)
        if settings is None:
            has_log = bool(self._files.log.segments.size)
            sizes = None if has_log else self.settings.sizes
            version = found_broker_version(self.root, has_log=has_log)
            made = StoreSettings(uuid.uuid4().hex, file_sizes=sizes.by_name() if sizes else {}, broker_version=version)
            settings = self._delay_terms.applied_to(made)
            write_settings(self.disk, self.root, settings, sizes)
        elif (changed := self._delay_terms.applied_to(settings)) != settings:
            sizes = self.settings.sizes.or_those(settings.file_sizes) if settings.file_sizes else None
            write_settings(self.disk, self.root, changed, sizes)
            _LOG.info("rmq: %s: changed delays to %s, they were %s", self.root, *map(_delays, (changed, settings)))
            settings = changed
        self._delay_terms = DelayTerms()  # applied once: a process that opens the store later may change them
        self._files.use_settings(settings, self.settings.sizes)


def _delays(settings: StoreSettings) -> str:
    longest_s = settings.timer_max_delay_ms // 1000
    return f"[{settings.levels.text}], maximum {longest_s} s, for brokers of {settings.broker_version or 'any version'}"
