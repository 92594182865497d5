"""What of records and units does not agree, kept until all of the log has been seen."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.explore.unit_ranges import UnitRanges
from rmq_spark.store.format.record_columns import RecordColumns
from rmq_spark.store.units import QueueKey

RUNS_AT_MOST = 20_000  # kept of what does not agree: bounds memory where all is damaged

NO_QUEUE, NO_UNIT, OTHER_UNIT, OTHER_TAGS = "no queue", "no unit", "another unit", "other tags"


@dataclass(slots=True)
class Unmet:
    """Records one behind the other in a queue whose units are not there, or say something else (`kind`).

    `[begin, end)` are queue offsets, `first` and `last` physical offsets of records.
    """

    key: QueueKey
    kind: str
    begin: int
    end: int
    first: int
    last: int
    count: int
    size: int  # of the first record, in bytes
    found: str = ""


@dataclass(slots=True)
class Step:
    """A record whose queue offset is not the next one of its queue in the log."""

    key: QueueKey
    expected: int
    found: int
    place: int  # physical offset of the record
    before: int  # of the queue's record before it


@dataclass(slots=True)
class Doubled:
    """Queue offsets [begin, end) of a queue that earlier records in the log have, too. One unit names one of them.

    `place` is the physical offset of the first later record; the earlier ones have queue offsets up to `limit`.
    """

    begin: int
    end: int
    limit: int
    place: int


@dataclass(slots=True)
class Joined:
    """What came out: units that agree with records, and what does not agree, as of all blocks so far."""

    ranges: UnitRanges = field(default_factory=UnitRanges)
    unmet: list[Unmet] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    unmet_records: int = 0
    last_runs: dict[tuple[QueueKey, str], Unmet] = field(default_factory=dict)  # of `unmet`, by queue and kind
    lives: dict[QueueKey, int] = field(default_factory=dict)
    doubled: dict[QueueKey, list[Doubled]] = field(default_factory=dict)

    def note_doubled(
        self,
        key: QueueKey,
        rows: Mapping[str, NDArray[np.int64]],
        expected: NDArray[np.int64],
        breaks: NDArray[np.intp],
    ) -> None:
        """Keep the queue offsets of a queue's next records that earlier ones have; at 0 it begins anew.

        `rows` has "begin" and "end" of their queue offsets and their "place"; at `breaks` these are not as `expected`.
        """
        begins, ends, runs = rows["begin"], rows["end"], self.doubled.get(key, [])
        if not runs and not (begins[breaks] < expected[breaks]).any():
            return
        stops = np.append(breaks, len(begins)).tolist()
        if runs and stops[0] > 0:
            runs[-1].end = max(runs[-1].end, min(runs[-1].limit, int(ends[stops[0] - 1])))
        for at, stop in zip(breaks.tolist(), stops[1:], strict=True):
            begin, limit = int(begins[at]), int(expected[at])
            if runs and begin:
                limit = max(limit, runs[-1].limit)
            elif runs:
                runs[-1].limit = runs[-1].end
            if 0 < begin < limit and len(runs) < RUNS_AT_MOST:
                runs.append(Doubled(begin, min(limit, int(ends[stop - 1])), limit, int(rows["place"][at])))
        if runs:
            self.doubled[key] = runs

    def note(self, key: QueueKey, kind: str, records: RecordColumns, rows: NDArray[np.intp], found: str = "") -> None:
        """Keep records whose units do not agree, as one run where the last one of their queue ends.

        Of each queue and kind at least one run is kept: a repair plans from them.
        """
        if not len(rows):
            return
        self.unmet_records += len(rows)
        offsets = records.queue_offsets[rows]
        ends = offsets + records.message_counts[rows]
        for piece in np.split(np.arange(len(rows)), np.flatnonzero(offsets[1:] != ends[:-1]) + 1):
            first, last = rows[piece[0]], rows[piece[-1]]
            runs = self.unmet
            before = self.last_runs.get((key, kind))
            if before is not None and before.end == int(offsets[piece[0]]):
                before.end, before.last = int(ends[piece[-1]]), int(records.places[last])
                before.count += len(piece)
            elif before is None or len(runs) < RUNS_AT_MOST:
                run = Unmet(
                    key,
                    kind,
                    int(offsets[piece[0]]),
                    int(ends[piece[-1]]),
                    int(records.places[first]),
                    int(records.places[last]),
                    len(piece),
                    int(records.sizes[first]),
                    found,
                )
                runs.append(run)
                self.last_runs[key, kind] = run
