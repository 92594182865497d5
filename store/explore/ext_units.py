"""The extension of queues (`enableConsumeQueueExt`): what units with an address in place of their tags code mean."""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import StoreError
from rmq_spark.store.explore.finding import NOTE, REPAIRABLE, Finding
from rmq_spark.store.format import filenames
from rmq_spark.store.format.unit_ext import (
    MAX_UNIT_BYTES,
    NoUnit,
    UnitExt,
    decode_unit_ext,
    to_position,
)
from rmq_spark.store.log.segments import SegmentRun, list_segments
from rmq_spark.store.units import QueueKey

_NEXT_STEP = "Filters let such messages pass. rmq_spark.repair makes the queue anew from the log, without an extension."


class ExtUnits:
    """The extension files of a store's queues, listed when first needed. One thread.

    Extensions are off by default and rare, so units are looked at one by one.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._runs: dict[QueueKey, SegmentRun | None] = {}
        self.findings: list[Finding] = []
        self.count = 0

    @cached_property
    def is_there(self) -> bool:
        """Say whether the store has extensions at all."""
        return files.is_folder(files.join(self._root, filenames.CONSUME_QUEUE_EXT))

    def agree(
        self, key: QueueKey, addresses: NDArray[np.int64], tags_codes: NDArray[np.int64], times: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Say of each address whether it leads to a unit with that tags code and store time (ms).

        What does not is a finding of its own, so all count as right here.
        """
        run = self._run(key)
        each = zip(addresses.tolist(), tags_codes.tolist(), times.tolist(), strict=True)
        for address, tags_code, time_ms in each:
            position = to_position(address)
            self.count += 1
            unit = self._unit(run, position) if run is not None else NoUnit("there is no extension")
            found = (unit.tags_code, unit.store_timestamp) if isinstance(unit, UnitExt) else unit.why
            if found != (tags_code, time_ms):
                segment = run.holding(position) if run is not None else None
                path = segment.path if segment else self._folder(key)
                at = position - segment.begin if segment else position
                self.findings.append(
                    Finding(
                        REPAIRABLE,
                        filenames.CONSUME_QUEUE_EXT,
                        f"the extension of a unit of queue {key}",
                        path,
                        at,
                        f"tags code and store time {(tags_code, time_ms)}",
                        str(found),
                        key.topic,
                        key.queue_id,
                        messages=1,
                        next_step=_NEXT_STEP,
                        action="rebuild",
                    )
                )
        return np.ones(len(addresses), np.bool_)

    def odd_files(self) -> Iterator[Finding]:
        """Yield what is wrong with the files as such, of queues that nobody asked for too."""
        tree = files.join(self._root, filenames.CONSUME_QUEUE_EXT)
        for topic, _ in files.list_folder(tree):
            for name, is_folder in files.list_folder(files.join(tree, topic)):
                if is_folder and name.isascii() and name.isdigit():
                    self._run(QueueKey(topic, int(name)))
        yield from self.findings

    def _run(self, key: QueueKey) -> SegmentRun | None:
        if key not in self._runs:
            folder = self._folder(key)
            try:
                self._runs[key] = list_segments(folder)
            except StoreError as error:
                if is_unreadable(error):
                    raise
                self._runs[key] = None
                self.findings.append(
                    Finding(
                        NOTE if not files.list_folder(folder) else REPAIRABLE,
                        filenames.CONSUME_QUEUE_EXT,
                        f"the files of the extension of queue {key}: {error}",
                        folder,
                        topic=key.topic,
                        queue_id=key.queue_id,
                        next_step=_NEXT_STEP,
                        action="rebuild",
                    )
                )
        return self._runs[key]

    def _folder(self, key: QueueKey) -> str:
        return files.join(self._root, filenames.queue_folder(key.topic, key.queue_id, filenames.CONSUME_QUEUE_EXT))

    @staticmethod
    def _unit(run: SegmentRun, position: int) -> UnitExt | NoUnit:
        segment = run.holding(position)
        if segment is None:
            return NoUnit("no file has that position")
        with OpenFile(segment.path) as file:
            data = file.read(position - segment.begin, MAX_UNIT_BYTES)
        return decode_unit_ext(data, 0)
