"""How far the timer of a store is, as its check, its mark and the note of the last commit say together."""

from collections.abc import Mapping
from dataclasses import dataclass

from rmq_spark.store.delivery.timer_mark import Doubt, TimerMark
from rmq_spark.store.format.timer_check import TimerCheck

READ, PART = "timer.read", "timer.part"  # in notes: `Progress`


@dataclass(frozen=True, slots=True)
class Progress:
    """What was delivered: all of the seconds before `read_ms`, and of that one the units up to position `part`."""

    read_ms: int = 0
    part: int = -1

    @classmethod
    def of(cls, check: TimerCheck | None, note: Mapping[str, int]) -> "Progress":
        """Return the larger of what a check says and what a note says."""
        read_ms, noted = 0 if check is None else check.read_time, note.get(READ, 0)
        return cls(noted, note.get(PART, -1)) if noted >= read_ms else cls(read_ms)


@dataclass(frozen=True, slots=True)
class TimerState:
    """What check, mark and note say together."""

    check: TimerCheck | None
    mark: TimerMark | None
    progress: Progress

    @property
    def is_ours(self) -> bool:
        """Say whether nobody but us wrote the check since we did."""
        return self.mark is not None and self.mark.is_of(self.check)

    @property
    def doubt(self) -> Doubt:
        """Which units are to be looked for in what was delivered already."""
        return self.mark.doubt if self.mark is not None else Doubt()

    @property
    def is_told(self) -> bool:
        """Say whether a broker would know of all that was delivered."""
        return (
            self.check is not None
            and self.mark is not None
            and (self.progress == Progress(self.check.read_time, self.mark.part))
        )
