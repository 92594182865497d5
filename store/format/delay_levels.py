"""The table of delay levels, `messageDelayLevel`, with the delay of each level.

Until a message of level n is due, it is kept in queue n - 1 of the topic SCHEDULE_TOPIC_XXXX. The tags code of its
consume-queue entry is its due time. The first level is 1. A broker and the store that it opens must use the same table.

Source: ScheduleMessageService#parseDelayLevel, #computeDeliverTimestamp, MessageStoreConfig (4.9, 5.3).
"""

import re
from dataclasses import dataclass

from rmq_spark.store.errors import OptionError

# Each level needs a queue, so a typing error must not create millions. A topic has the same maximum number of queues.
MAX_LEVELS = 1 << 16
UNKNOWN_LEVEL_MS = 1000  # a broker's delay for a level that is not in its table

_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DELAY = re.compile(r"([0-9]{1,9})([smhd])")
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class DelayLevels:
    """A table of delay levels. `delays_ms[level - 1]` is the delay of `level` in ms. There is at least one level."""

    delays_ms: tuple[int, ...]

    @classmethod
    def parse(cls, text: object) -> "DelayLevels":
        """Parse a `messageDelayLevel` like "1s 5s 1m 2h". Raises OptionError if `text` is not in this format."""
        delays = text.split() if isinstance(text, str) else []
        found = [_DELAY.fullmatch(delay) for delay in delays]
        wrong = [delay for delay, match in zip(delays, found, strict=True) if match is None]
        if not delays or wrong or len(delays) > MAX_LEVELS:
            what = f": {_shown(wrong[0])} is not a delay" if wrong else ""
            raise OptionError(
                f"messageDelayLevel={_shown(text)} is not a table of delay levels{what}; expected 1 to {MAX_LEVELS} "
                'delays separated by spaces, each an integer and s, m, h or d, like "1s 5s 10s 1m 2h 1d". '
                "The first one is that of level 1."
            )
        return cls(tuple(int(match[1]) * _UNITS_MS[match[2]] for match in found if match is not None))

    def __len__(self) -> int:
        return len(self.delays_ms)

    @property
    def text(self) -> str:
        """The table in the format of a broker's configuration, like "1s 5s 1m 2h".

        Each delay has the largest unit in which it is a whole number: 60 seconds are `1m`.
        """
        return " ".join(_delay_text(delay_ms) for delay_ms in self.delays_ms)

    def clamp(self, level: int) -> int:
        """Return the level that RocketMQ applies to a message with `level`.

        A level above the last one becomes the last one. A level below 1 becomes 0, which means no delay.
        """
        return max(0, min(level, len(self.delays_ms)))

    def due_after_ms(self, level: int) -> int:
        """Return the delay of a level in ms. Returns UNKNOWN_LEVEL_MS if the level is not in the table."""
        return self.delays_ms[level - 1] if 0 < level <= len(self.delays_ms) else UNKNOWN_LEVEL_MS


def _delay_text(delay_ms: int) -> str:
    unit = max((unit for unit, size_ms in _UNITS_MS.items() if delay_ms % size_ms == 0), key=_UNITS_MS.__getitem__)
    return f"{delay_ms // _UNITS_MS[unit]}{unit}" if delay_ms else "0s"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


DEFAULT_DELAY_LEVELS = DelayLevels.parse("1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h")
