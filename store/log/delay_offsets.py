"""Delay offsets: config/delayOffset.json, the delivery progress of each delay level, which brokers use too.

Any process may read the file. Delivery writes it under the store's lock. A broker reads the file when it starts. While
the broker runs, it writes the file every ten seconds, and when it stops.

| state of the files | result of reading |
| --- | --- |
| the file is valid | the file's offsets |
| the file is missing, or stays empty or corrupt | the offsets in `.bak`, the previous version of the file |
| file and `.bak` are missing or empty | no offsets, so every level begins at its first message |
| one is corrupt, and none is valid | DamageError |

An offset may be beyond the end of its level's queue. Then the log was longer once: a power cut truncated it, or an
older copy replaced it. If such an offset stayed, new messages below it would be treated as delivered and so be lost. A
broker lowers the offset when it starts. Here the writer lowers it before it appends to the queue.

Source: ScheduleMessageService#load, #correctDelayOffset, #persist, ConfigManager, DelayOffsetSerializeWrapper (4.9,
5.3). RocketMQ does not start if the file is corrupt and `.bak` is missing.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.config_json import DelayOffsets, decode_delay_offsets, encode_delay_offsets

_LOG = logging.getLogger("rmq_spark")
_TRIES = 4
_WAIT_SECONDS = 0.02  # doubled after each try; a broker overwrites the file within milliseconds
_WHAT = "without it every delay level begins again, and messages that were delivered before are delivered twice"
_NEXT_STEP = "Restore config/delayOffset.json from a copy, or remove it and its .bak and accept the duplicates."


@dataclass(frozen=True, slots=True)
class _Contents:
    """The offsets that were read, as `file`, and the file's bytes as `data`.

    `data` is None if the offsets come from `.bak`, or if there are none.
    """

    file: DelayOffsets = field(default_factory=DelayOffsets)
    data: bytes | None = None


class DelayOffsetFile:
    """The delay offsets of the store at `root`. Not thread-safe.

    `now_ms` is the clock (ms since the epoch). `sleep` takes seconds.
    """

    def __init__(self, root: str, disk: Disk, now_ms: Callable[[], int], sleep: Callable[[float], None]) -> None:
        self._root, self._disk, self._now_ms, self._sleep = root, disk, now_ms, sleep
        self._path = files.join(root, filenames.CONFIG, filenames.DELAY_OFFSET_JSON)
        self._contents = _Contents()  # a cache of what was last read or written
        self._synced: bytes | None = None  # the bytes of the file that are known to be durable

    def read(self) -> Mapping[int, int]:
        """Return the next queue offset to deliver, by delay level. Needs no lock.

        Raises DamageError if the file or its `.bak` is corrupt and neither is valid.
        """
        self._contents = self._refresh()
        return self._contents.file.offsets

    def write(self, offsets: Mapping[int, int]) -> None:
        """Set the offsets of these levels, and keep all others in the file. Call it under the store's lock.

        `offsets` maps a delay level to the next queue offset to deliver. Nothing is written if the file has these
        offsets already. After an error or a crash the file has either all of the new offsets or none.
        """
        contents = self._contents = self._refresh()  # other processes may have changed the file since the last read
        if offsets.items() <= contents.file.offsets.items():
            return
        version = contents.file.data_version
        if version is not None:  # 5.x; DataVersion#nextVersion
            version = replace(version, counter=version.counter + 1, timestamp=self._now_ms())
        file = replace(contents.file, offsets={**contents.file.offsets, **offsets}, data_version=version)
        data = encode_delay_offsets(file, bare_numbers=True)
        if contents.data is None:
            # The file is missing or corrupt. Valid offsets can only be in `.bak`, which is not changed.
            self._disk.make_folder(files.parent(self._path))
            self._disk.sync_folder(self._root)
        else:
            if contents.data != self._synced:
                # The current version may be a broker's, which does not sync the file. Until the new file replaces it,
                # the current version and its name must survive a power cut.
                self._disk.make_durable(self._path, contents.data)
            # Readers use `.bak` if they find the file corrupt later. It is not synced, because the file itself is valid
            # after a power cut.
            self._disk.replace_unsynced(self._path + filenames.BACKUP_SUFFIX, contents.data)
        # A crash during this call leaves either the old or the new file. Both are valid.
        self._disk.replace(self._path, data)
        self._contents, self._synced = _Contents(file, data), data

    def keep_within(self, ends: Mapping[int, int]) -> None:
        """Lower the offset of each level to the end of its queue if it is beyond. Call it under the store's lock.

        `ends` maps a delay level to the queue offset of its queue's end. Does nothing if the file is corrupt, because
        delivery reports that.
        """
        try:
            offsets = self.read()
        except DamageError:
            return
        lower = {level: end for level, end in ends.items() if offsets.get(level, 0) > end}
        for level, end in lower.items():
            _LOG.error(
                "rmq: the offset of delay level %d was %d, beyond its queue's end, and was lowered to the end, %d. The "
                "log was longer when the offset was written",
                level,
                offsets[level],
                end,
            )
        if lower:
            self.write(lower)

    def _refresh(self) -> _Contents:
        problem = None
        for attempt in range(_TRIES):
            data = files.read_small(self._path)
            if data is None:
                break
            if data == self._contents.data:
                return self._contents
            try:
                if data:
                    return _Contents(decode_delay_offsets(data), data)
            except ValueError as error:
                problem = error
            if attempt < _TRIES - 1:
                self._sleep(_WAIT_SECONDS * 2**attempt)
        backup_path = self._path + filenames.BACKUP_SUFFIX
        backup = files.read_small(backup_path)
        if backup:
            try:
                return _Contents(decode_delay_offsets(backup))
            except ValueError as error:
                what = f"not the JSON of delay offsets, nor is the file itself; {_WHAT}"
                raise DamageError(what, backup_path, 0, "JSON", str(error), _NEXT_STEP) from error
        if problem is not None:
            what = f"not the JSON of delay offsets, and its .bak is missing or empty; {_WHAT}"
            raise DamageError(what, self._path, 0, "JSON", str(problem), _NEXT_STEP) from problem
        return _Contents()
