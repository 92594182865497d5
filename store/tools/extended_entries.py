"""Extension of consume queues (`enableConsumeQueueExt`), and its comparison with records.

With an extension, a consume-queue entry contains an address instead of a tags code. The entry of the extension at that
address contains the tags code and the store time.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import StoreError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.consume_queue_entry import (
    MAX_UNIT_BYTES,
    ExtendedEntry,
    NoEntry,
    decode_extended_entry,
    to_position,
)
from rmq_spark.store.log.segments import SegmentRun, list_segments
from rmq_spark.store.model import QueueKey
from rmq_spark.store.tools.finding import Action, Area, Finding, Severity

_NEXT_STEP = (
    "Filters let such messages pass. rmq_spark.repair rebuilds the queue from the commit log, without an extension."
)


class ExtendedEntries:
    """The extension files of a store's queues. Not thread-safe.

    The files of a queue are listed when they are first needed. Entries are read one by one, which is slow, because
    brokers write no extension by default.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._runs: dict[QueueKey, SegmentRun | None] = {}
        self._findings: list[Finding] = []

    @cached_property
    def exists(self) -> bool:
        """Whether the store has the folder with extensions."""
        return files.is_folder(files.join(self._root, filenames.CONSUME_QUEUE_EXT))

    def agree(
        self, key: QueueKey, addresses: NDArray[np.int64], tags_codes: NDArray[np.int64], times: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Compare the extension's entries at `addresses` with the tags codes and store times (ms) of their records.

        Returns an array with True for each address, even if an entry differs: `odd_files` yields a finding about it.
        """
        run = self._run(key)
        each = zip(addresses.tolist(), tags_codes.tolist(), times.tolist(), strict=True)
        for address, tags_code, time_ms in each:
            position = to_position(address)
            entry = _read_entry(run, position) if run is not None else NoEntry("the queue has no extension")
            found = (entry.tags_code, entry.store_timestamp) if isinstance(entry, ExtendedEntry) else entry.why
            if found != (tags_code, time_ms):
                segment = run.holding(position) if run is not None else None
                self._findings.append(
                    Finding(
                        severity=Severity.REPAIRABLE,
                        area=Area.CONSUME_QUEUE_EXT,
                        what=f"the extension of an entry of queue {key}",
                        path=segment.path if segment else self._folder(key),
                        position=position - segment.begin if segment else position,
                        expected=f"tags code and store time {(tags_code, time_ms)}",
                        found=str(found),
                        topic=key.topic,
                        queue_id=key.queue_id,
                        messages=1,
                        next_step=_NEXT_STEP,
                        action=Action.REBUILD,
                    )
                )
        return np.ones(len(addresses), np.bool_)

    def odd_files(self) -> Iterator[Finding]:
        """Yield the findings about all extension files and their entries. Call it last.

        It includes the findings of earlier calls of `agree`. It also lists the files of queues for which `agree` was
        not called.
        """
        tree = files.join(self._root, filenames.CONSUME_QUEUE_EXT)
        for topic, _ in files.list_folder(tree):
            for name, is_folder in files.list_folder(files.join(tree, topic)):
                if is_folder and name.isascii() and name.isdigit():
                    self._run(QueueKey(topic, int(name)))
        yield from self._findings

    def _run(self, key: QueueKey) -> SegmentRun | None:
        if key not in self._runs:
            folder = self._folder(key)
            try:
                self._runs[key] = list_segments(folder)
            except StoreError as error:
                if is_unreadable(error):
                    raise
                self._runs[key] = None
                self._findings.append(
                    Finding(
                        severity=Severity.REPAIRABLE if files.list_folder(folder) else Severity.NOTE,
                        area=Area.CONSUME_QUEUE_EXT,
                        what=f"the files of the extension of queue {key}: {error}",
                        path=folder,
                        topic=key.topic,
                        queue_id=key.queue_id,
                        next_step=_NEXT_STEP,
                        action=Action.REBUILD,
                    )
                )
        return self._runs[key]

    def _folder(self, key: QueueKey) -> str:
        return files.join(self._root, filenames.queue_folder(key.topic, key.queue_id, filenames.CONSUME_QUEUE_EXT))


def _read_entry(run: SegmentRun, position: int) -> ExtendedEntry | NoEntry:
    segment = run.holding(position)
    if segment is None:
        return NoEntry("no file has that position")
    with OpenFile(segment.path) as file:
        data = file.read(position - segment.begin, MAX_UNIT_BYTES)
    return decode_extended_entry(data, 0)
