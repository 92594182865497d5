"""config/delayOffset.json: how far each delay level was delivered, for a broker that takes the store over.

Read by anybody, written under the store's lock by who ticks. A broker reads it when it starts, and while it holds the
store it writes it every ten seconds and when it stops.

| what is there | what is read |
| --- | --- |
| the file, whole | the file |
| no file, or one that stays empty or broken | `.bak`, which is what the file held before |
| neither | no offsets: every level begins at its first message |
| a broken one, and nothing whole beside it | DamageError |

An offset behind the end of its level's queue is of a log that was longer: a power cut, or a copy, took the end. A
broker corrects it when it starts; here whoever appends to the queue does, or what is appended passes for delivered.

Source: ScheduleMessageService#load, #correctDelayOffset, #persist, ConfigManager, DelayOffsetSerializeWrapper (4.9,
5.3). RocketMQ does not start on a broken file without `.bak`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import DelayOffsets, decode_delay_offsets, encode_delay_offsets

_LOG = logging.getLogger("rmq_spark")
_TRIES = 4
_WAIT_SECONDS = 0.02  # doubled each time: a broker overwrites the file within milliseconds
_WHAT = "without it every delay level begins anew, and what was delivered before there was a note of it comes again"
_NEXT_STEP = "Restore config/delayOffset.json from a copy, or remove it and its .bak at that price."


@dataclass(frozen=True, slots=True)
class _Held:
    """What was read: the offsets, and the file's bytes if they come from the file itself, whole."""

    file: DelayOffsets = field(default_factory=DelayOffsets)
    data: bytes | None = None


class DelayOffsetFile:
    """The file of the store at `root`. One thread at a time. `now_ms` is the clock, `sleep` takes seconds."""

    def __init__(self, root: str, disk: Disk, now_ms: Callable[[], int], sleep: Callable[[float], None]) -> None:
        self._root, self._disk, self._now_ms, self._sleep = root, disk, now_ms, sleep
        self._path = files.join(root, filenames.CONFIG, filenames.DELAY_OFFSET_JSON)
        self._held = _Held()  # as last read or written: most often it still is
        self._synced: bytes | None = None  # what of the file is known to survive a power cut

    def read(self) -> Mapping[int, int]:
        """Return the next queue offset to deliver by level, as it is now. Takes no lock. Raises DamageError."""
        self._held = self._look()
        return self._held.file.offsets

    def write(self, offsets: Mapping[int, int]) -> None:
        """Set these levels' offsets; other levels, and whatever else the file holds, stay. Under the store's lock.

        Nothing is written where all are there already. After an error or a crash either all or none of them are there.
        """
        held = self._held = self._look()  # again: what others wrote until now must stay
        if offsets.items() <= held.file.offsets.items():
            return
        version = held.file.data_version
        if version is not None:  # 5.x; DataVersion#nextVersion
            version = replace(version, counter=version.counter + 1, timestamp=self._now_ms())
        file = replace(held.file, offsets={**held.file.offsets, **offsets}, data_version=version)
        data = encode_delay_offsets(file, bare_numbers=True)
        if held.data is None:
            # A file that is missing or broken: what counts is in `.bak`, if anywhere, and stays there untouched.
            self._disk.make_folder(files.parent(self._path))
            self._disk.sync_folder(self._root)
        else:
            if held.data != self._synced:
                # A broker waits for no disk. Until the new file has its name, this one must survive a power cut, and
                # under its name.
                self._disk.make_durable(self._path, held.data)
            # For who finds the file broken later. Not synced: whatever a power cut leaves of it, the file is whole.
            self._disk.replace_unsynced(self._path + filenames.BACKUP_SUFFIX, held.data)
        # A crash in here leaves the file as it was, or the new one, both whole.
        self._disk.replace(self._path, data)
        self._held, self._synced = _Held(file, data), data

    def keep_within(self, ends: Mapping[int, int]) -> None:
        """Have each of these levels go on no further than where its queue ends. Under the store's lock.

        A broken file is left to who ticks, and tells of it.
        """
        try:
            held = self.read()
        except DamageError:
            return
        lower = {level: end for level, end in ends.items() if held.get(level, 0) > end}
        for level, end in lower.items():
            _LOG.error(
                "rmq: delay level %d was to go on at queue offset %d, and its queue ends at %d: it goes on there. The "
                "log was longer when that was written",
                level,
                held[level],
                end,
            )
        if lower:
            self.write(lower)

    def _look(self) -> _Held:
        problem = None
        for attempt in range(_TRIES):
            data = files.read_small(self._path)
            if data is None:
                break
            if data == self._held.data:
                return self._held
            try:
                if data:
                    return _Held(decode_delay_offsets(data), data)
            except ValueError as error:
                problem = error
            if attempt < _TRIES - 1:
                self._sleep(_WAIT_SECONDS * 2**attempt)
        backup_path = self._path + filenames.BACKUP_SUFFIX
        backup = files.read_small(backup_path)
        if backup:
            try:
                return _Held(decode_delay_offsets(backup))
            except ValueError as error:
                what = f"not the JSON of delay offsets, nor is the file that it stands in for; {_WHAT}"
                raise DamageError(what, backup_path, 0, "JSON", str(error), _NEXT_STEP) from error
        if problem is not None:
            what = f"not the JSON of delay offsets, and there is no .bak beside it; {_WHAT}"
            raise DamageError(what, self._path, 0, "JSON", str(problem), _NEXT_STEP) from problem
        return _Held()
