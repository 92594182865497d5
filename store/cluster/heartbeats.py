"""Which heartbeats of a member are due, and at which brokers. Pure: times come from the caller's monotonic clock, in s.

A member sends a heartbeat to each broker every 30 s, at once if its subscriptions have changed or its connection was
lost, and after pauses of 1 s to 5 s while a broker is away. A broker forgets a member that is silent for 120 s. So a
broker that has acknowledged nothing for 100 s counts like one to which the connection was lost: others may have taken
the queues of the member.

Source: MQClientInstance#sendHeartbeatToAllBroker, ClientHousekeepingService (4.9, 5.3).
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

INTERVAL_S = 30.0  # ClientConfig#heartbeatBrokerInterval
FORGOTTEN_S = 100.0  # a broker waits 120 s (ClientChannelInfo, CHANNEL_EXPIRED_TIMEOUT)
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 5.0


@dataclass(slots=True)
class _Beat:
    """The heartbeats to one broker."""

    due_s: float
    seen_s: float = -inf  # when the last heartbeat was sent that the broker has acknowledged
    failures: int = 0
    is_registered: bool = False


class HeartbeatSchedule:
    """The heartbeats of a member to all its brokers. For one thread at a time."""

    def __init__(self) -> None:
        self._beats: dict[str, _Beat] = {}

    @property
    def brokers(self) -> Collection[str]:
        """The names of the brokers."""
        return self._beats.keys()

    def change_brokers(self, brokers: Collection[str], now_s: float) -> None:
        """Set the brokers. Heartbeats to new ones are due at once; those that are missing get none any more."""
        self._beats = {name: self._beats.get(name) or _Beat(now_s) for name in brokers}

    def hasten(self, brokers: Collection[str], now_s: float) -> None:
        """Make heartbeats to these brokers due at once."""
        for name in brokers:
            self._beats[name].due_s = now_s

    def take_due(self, now_s: float) -> list[str]:
        """Return the brokers to which a heartbeat is due. Until its outcome is noted, only `hasten` makes one due."""
        due = [name for name, beat in self._beats.items() if beat.due_s <= now_s]
        for name in due:
            self._beats[name].due_s = inf
        return due

    def next_s(self) -> float:
        """Return the time at which the next heartbeat is due; infinity without brokers."""
        return min((beat.due_s for beat in self._beats.values()), default=inf)

    def note_answer(self, broker: str, sent_s: float) -> bool:
        """Note that a broker has acknowledged the heartbeat that was sent at `sent_s`.

        Return whether it knows the member again, after a loss.
        """
        beat = self._beats.get(broker)
        if beat is None:
            return False
        is_back = not beat.is_registered and beat.seen_s > -inf
        beat.due_s = min(beat.due_s, sent_s + INTERVAL_S)
        beat.seen_s, beat.failures, beat.is_registered = sent_s, 0, True
        return is_back

    def note_failure(self, broker: str, now_s: float) -> None:
        """Note that a broker has not acknowledged a heartbeat. The next one is due after a pause."""
        beat = self._beats.get(broker)
        if beat is not None:
            beat.due_s = min(beat.due_s, now_s + min(_FIRST_PAUSE_S * 2**beat.failures, _LAST_PAUSE_S))
            beat.failures += 1

    def note_loss(self, broker: str, now_s: float) -> bool:
        """Note that a broker may have forgotten the member. Return whether it had the member registered.

        If so, the next heartbeat is due at once.
        """
        beat = self._beats.get(broker)
        if beat is None or not beat.is_registered:
            return False
        beat.due_s, beat.is_registered = now_s, False
        return True

    def is_registered(self, broker: str) -> bool:
        """Return whether a broker has acknowledged a heartbeat on a connection that was not lost."""
        return broker in self._beats and self._beats[broker].is_registered

    def has_failed(self, broker: str) -> bool:
        """Return whether a broker has not acknowledged the last heartbeat to it."""
        return broker in self._beats and self._beats[broker].failures > 0

    def has_lapsed(self, broker: str) -> bool:
        """Return whether the member is not registered at a broker, and the last heartbeat to it has not failed."""
        return broker in self._beats and not self.is_registered(broker) and not self.has_failed(broker)

    def forgetful(self, now_s: float) -> list[str]:
        """Return the brokers that have the member registered and may have forgotten it, for want of heartbeats."""
        return [name for name, beat in self._beats.items() if beat.is_registered and now_s - beat.seen_s > FORGOTTEN_S]
