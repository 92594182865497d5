"""The table of delay levels: after how long a message of a level is due.

A broker has one, `messageDelayLevel`, and so has a store: level n waits in queue n - 1 of SCHEDULE_TOPIC_XXXX, and its
unit's tags code is when it is due. Levels count from 1.

Source: ScheduleMessageService#parseDelayLevel, #computeDeliverTimestamp, MessageStoreConfig (4.9, 5.3).
"""

import re
from dataclasses import dataclass

from rmq_spark.store.errors import OptionError

# Each level is a queue, and a slip of the finger must not make millions: as many as a topic's queues.
MAX_LEVELS = 1 << 16
UNKNOWN_LEVEL_MS = 1000  # what a broker makes of a level that its table does not have

_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DELAY = re.compile(r"([0-9]{1,9})([smhd])")
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class DelayLevels:
    """A table: `delays_ms[level - 1]` is a level's delay, in ms. At least one level."""

    delays_ms: tuple[int, ...]

    @classmethod
    def parse(cls, text: object) -> "DelayLevels":
        """Read a `messageDelayLevel`, as in "1s 5s 1m 2h". Raises OptionError for what is none."""
        delays = text.split() if isinstance(text, str) else []
        found = [_DELAY.fullmatch(delay) for delay in delays]
        wrong = [delay for delay, match in zip(delays, found, strict=True) if match is None]
        if not delays or wrong or len(delays) > MAX_LEVELS:
            what = f": {_shown(wrong[0])} is no delay" if wrong else ""
            raise OptionError(
                f"messageDelayLevel={_shown(text)} is no table of delay levels{what}. Accepted: from 1 to {MAX_LEVELS} "
                'delays with spaces between them, each a whole number and s, m, h or d, as in "1s 5s 10s 1m 2h 1d"; '
                "the first one is that of level 1."
            )
        return cls(tuple(int(match[1]) * _UNITS_MS[match[2]] for match in found if match is not None))

    def __len__(self) -> int:
        return len(self.delays_ms)

    @property
    def text(self) -> str:
        """The table as a broker's configuration has it; each delay in the largest unit that fits."""
        return " ".join(_delay_text(delay_ms) for delay_ms in self.delays_ms)

    def clamp(self, level: int) -> int:
        """Return the level at which a message that asks for `level` waits: at most the last; 0, not at all, below 1."""
        return max(0, min(level, len(self.delays_ms)))

    def due_after_ms(self, level: int) -> int:
        """Return after how long a message of a level is due; a level that the table does not have waits a second."""
        return self.delays_ms[level - 1] if 0 < level <= len(self.delays_ms) else UNKNOWN_LEVEL_MS


def _delay_text(delay_ms: int) -> str:
    unit = max((unit for unit, size_ms in _UNITS_MS.items() if delay_ms % size_ms == 0), key=_UNITS_MS.__getitem__)
    return f"{delay_ms // _UNITS_MS[unit]}{unit}" if delay_ms else "0s"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


DEFAULT_DELAY_LEVELS = DelayLevels.parse("1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h")
