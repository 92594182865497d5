"""The timer message by message, in dicts: the slow twin of `store/delivery/timer.py`.

Messages have numbers. No files, no chains, no limits: draining both must give the same messages.
"""

from dataclasses import dataclass, field

_SECOND = 1000
_WINDOW = 172_800 * _SECOND


@dataclass(frozen=True, slots=True)
class TwinMessage:
    """A message that waits: its number, TIMER_OUT_MS, and for a cancellation the key of the cancelled message.

    `key` identifies it for cancellations: topic and UNIQ_KEY. `rolls` is how often it was rolled.
    """

    number: int
    out_ms: int
    key: str
    deletes: str | None = None
    rolls: int = 0


@dataclass(slots=True)
class TimerTwin:
    """Waiting messages by second, in order. `put_back` are rolled messages, which are at the end of the queue."""

    read_ms: int = 0
    seconds: dict[int, list[tuple[TwinMessage, bool]]] = field(default_factory=dict)
    put_back: list[TwinMessage] = field(default_factory=list)

    def take(self, message: TwinMessage, now_ms: int) -> None:
        """Take one message from the queue."""
        write_ms = now_ms // _SECOND * _SECOND
        if write_ms - _SECOND - self.read_ms >= 86_400 * _SECOND:
            waiting = [second for second in self.seconds if second < write_ms - _SECOND]
            self.read_ms = min(waiting, default=write_ms - _SECOND)
        second = max(message.out_ms // _SECOND * _SECOND, self.read_ms)
        beyond = second - write_ms - _WINDOW
        is_rolled = beyond >= 0
        if is_rolled:
            second = write_ms + (_WINDOW // 2 if beyond < _WINDOW // 3 else _WINDOW)
        self.seconds.setdefault(second, []).append((message, is_rolled))

    def due(self, now_ms: int) -> list[TwinMessage]:
        """Return the messages that are delivered by now, in order, and put back those that must be rolled."""
        delivered = []
        for second in sorted(second for second in self.seconds if second < now_ms // _SECOND * _SECOND):
            chain = self.seconds.pop(second)
            gone = {
                f"{message.out_ms // _SECOND}+{message.deletes}"
                for message, is_rolled in chain
                if message.deletes is not None and not is_rolled
            }
            for message, is_rolled in chain:
                if is_rolled:
                    again = TwinMessage(message.number, message.out_ms, message.key, message.deletes, message.rolls + 1)
                    self.put_back.append(again)
                elif message.deletes is None and f"{message.out_ms // _SECOND}+{message.key}" not in gone:
                    delivered.append(message)
            self.read_ms = second + _SECOND
        return delivered
