"""A store opened for writing: the lock, sections under it, topics, and leaving it in order.

Nothing is believed from one section to the next: a broker or another process may have written in between.
"""

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import StoreError, StorePathError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.rebuild_note import Rebuild
from rmq_spark.store.format.store_settings import DelayTerms, StoreSettings
from rmq_spark.store.log.broker_kind import found_broker_version
from rmq_spark.store.log.file_sizes import FileSizes
from rmq_spark.store.log.recovery import begin_rebuild, forget_note, prepare
from rmq_spark.store.log.retention import Expired, Needed
from rmq_spark.store.log.section import Section
from rmq_spark.store.log.settings_file import check_settings, write_settings
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.store_kind import commit_log_folders
from rmq_spark.store.log.store_lock import StoreLock
from rmq_spark.store.log.waiting_messages import WaitingMessages
from rmq_spark.store.log.waiting_queues import refuse_lost_waiting_queues
from rmq_spark.store.log.watermark_file import SIDE_FOLDER

_LOG = logging.getLogger("rmq_spark")


class Finisher(Protocol):
    """Who keeps promises of dead writers, and knows which part of the log that takes."""

    def __call__(self, section: Section) -> bool:
        """Do of what was promised as much as fits into a section; return whether that was anything.

        Called under the lock before a section's own work, which comes only when there is nothing left.
        """

    def needed_from(self) -> Needed | None:
        """Return from where on the log must stay for promises that are not kept yet, None without any."""


# What a folder may hold and still count as one where nothing is yet: a task of a sink stages before anybody appends.
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
    """How a writer takes the lock, the sizes of files in a store that it makes, and what it says of delays."""

    application: str = "rmq-spark"  # by which others know who holds the lock
    lock_timeout_ms: int = 60_000  # counts only while the holder makes no progress
    allow_network_store: bool = False
    commit_log_path: str | None = None
    sizes: FileSizes = field(default_factory=FileSizes)
    delays: DelayTerms = field(default_factory=DelayTerms)


class StoreWriter:
    """Appends to one store. One thread at a time; any number of processes, which take turns.

    Opening makes the store where there is none yet. Raises StorePathError for what is no store or may not be written.
    `finishers` are called in every section before its own work: what dead writers promised comes first, and retention
    leaves what that takes.
    """

    def __init__(
        self,
        root: str,
        disk: Disk,
        settings: WriterSettings,
        now_ms: Callable[[], int],
        sleep: Callable[[float], None],
        finishers: Sequence[Finisher] = (),
    ) -> None:
        self.root, self.disk, self.settings, self.now_ms = files.absolute(root), disk, settings, now_ms
        self._finishers = tuple(finishers)
        self._terms = settings.delays
        self._told_held: tuple[str | None, int] = None, 0
        self._told_failure = ""
        self.lock = StoreLock(self.root, disk, settings, now_ms, sleep)
        self._make_folders()
        folders = commit_log_folders(self.root, settings.commit_log_path)
        check_settings(self.root)
        self._files = StoreFiles(self.root, folders, disk, settings.sizes, now_ms, self.lock.note_progress)
        self._waiting = WaitingMessages(
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
    def section(self) -> Iterator[Section]:
        """Give the lock and a section under it; the store is whole by then, whatever died before.

        Raises LockTimeoutError where the lock is not to be had, DamageError for a store that recovery must not
        touch. After an error in the section the next one begins by recovering. What dead writers left to be done comes
        first, in sections of its own: others get their turn in between.
        """
        while True:
            with self.lock.hold() as hold:
                try:
                    self._make_settings()
                    prepare(self._files)
                    section = Section(self._files, self.lock, self._needed_from)
                    if not any([finish(section) for finish in self._finishers]):
                        yield section
                        self._retire(section)
                        return
                finally:
                    if self.lock.is_latest(hold):  # else a later section has the files open
                        self._files.close()

    def close(self) -> None:
        """Leave the store as one that was closed in order: everything is on disk for good, `abort` is gone."""
        with self.section() as section:
            section.settle()
        self.release()

    def begin_rebuild(self, rebuild: Rebuild) -> None:
        """Have the next section make files anew from the log: see `recovery.begin_rebuild`. Under the lock."""
        try:
            begin_rebuild(self._files, rebuild)
        finally:
            self._files.close()

    def forget_note(self) -> None:
        """Remove our note of the store, and the registry of queues: see `recovery.forget_note`. Under the lock."""
        try:
            forget_note(self._files)
        finally:
            self._files.close()

    def release(self) -> None:
        """Let go of every file and lock. What was appended stays: visible, and safe from the death of processes."""
        try:
            self._files.close()
        finally:
            self.lock.release()

    def set_retention(self, max_age_ms: int | None, max_bytes: int | None) -> None:
        """Write into the store's settings what every writer of ours deletes at the end of its sections."""
        with self.section():
            held = check_settings(self.root)
            assert held is not None
            changed = replace(held, retention_ms=max_age_ms, retention_bytes=max_bytes)
            write_settings(self.disk, self.root, changed)

    def _needed_from(self) -> Needed | None:
        """Return what a finisher, or a message that waits, needs from the least physical offset on, None if none."""
        asked = (*(finish.needed_from for finish in self._finishers), self._waiting.needed_from)
        needed = [one for ask in asked if (one := ask()) is not None]
        return min(needed, key=lambda one: one.physical_offset, default=None)

    def _retire(self, section: Section) -> None:
        """Delete what the settings say is old. What was appended is appended, whatever is in the way here."""
        try:
            held = check_settings(self.root)
            if held is not None and (held.retention_ms, held.retention_bytes) != (None, None):
                self._tell_held(section.expire(held.retention_ms, held.retention_bytes))
            self._told_failure = ""
        except StoreError as error:
            if str(error) != self._told_failure:  # once: every section tries again, and the disk fills meanwhile
                self._told_failure = str(error)
                _LOG.warning("rmq: retention in %s failed, and is tried again by the next writer: %s", self.root, error)

    def _tell_held(self, found: Expired) -> None:
        """Say in the log what keeps retention from its work, once for each segment more: the disk fills up with them.

        Who is at work keeps it for a while, and that is no news; who is dead and cannot be finished, for ever.
        """
        held = (found.held_by, found.held_bytes)
        if found.is_held_for_good and held != self._told_held:
            self._told_held = held
            _LOG.warning(
                "rmq: retention in %s leaves %d bytes of log that are old: %s promises rows that are looked for there, "
                "and cannot be finished. An error in this log says why, what to mend, and how to give them up",
                self.root,
                found.held_bytes,
                found.held_by,
            )

    def _make_folders(self) -> None:
        """Make an empty store where there is nothing yet but what we make ourselves."""
        if not files.is_folder(self.root) and files.file_size(self.root) >= 0:
            raise StorePathError(f'path="{self.root}" is a file. Give a folder, or a path where nothing is yet.')
        if {name for name, _ in files.list_folder(self.root)} - _OWN_NAMES:
            return  # somebody's: whether it is a store is asked next
        self.disk.make_folder(self.root, is_own=True)
        for name in (SIDE_FOLDER, filenames.CONSUME_QUEUE, filenames.INDEX, filenames.CONFIG, filenames.COMMIT_LOG):
            self.disk.make_folder(files.join(self.root, name))
        # From here the empty store is there; a crash before leaves folders that this goes on from.
        self.disk.sync_folder(self.root)
        self.disk.sync_folder(files.parent(self.root))

    def _make_settings(self) -> None:
        """Mark the store as one that we write to, once, and go by what it says of itself: sizes of files, delays.

        Who makes a store says how large its files are, for all who write to it and for a broker that opens it. What
        this writer says of delays goes into the settings; messages that wait already keep the time in their units.
        """
        held = check_settings(self.root)
        if held is None:
            has_log = bool(self._files.log.segments.size)
            sizes = None if has_log else self.settings.sizes
            version = found_broker_version(self.root, has_log=has_log)
            made = StoreSettings(uuid.uuid4().hex, file_sizes=sizes.by_name() if sizes else {}, broker_version=version)
            held = self._terms.applied_to(made)
            write_settings(self.disk, self.root, held, sizes)
        elif (changed := self._terms.applied_to(held)) != held:
            sizes = self.settings.sizes.or_those(held.file_sizes) if held.file_sizes else None
            write_settings(self.disk, self.root, changed, sizes)
            _LOG.info("rmq: %s: delays are %s from now on, they were %s", self.root, *map(_delays, (changed, held)))
            held = changed
        self._terms = DelayTerms()  # said once: who opens the store later may say otherwise
        self._files.use_settings(held, self.settings.sizes)


def _delays(settings: StoreSettings) -> str:
    longest_s = settings.timer_max_delay_ms // 1000
    return f"[{settings.levels.text}], at most {longest_s} s, for brokers of {settings.broker_version or 'any version'}"
