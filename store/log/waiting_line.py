"""The line of processes that wait for the lock of `turn`, in the order in which they came.

The line has PLACES places, one byte of the file `rmq/turn` each. A process joins at the last place, and moves up
whenever the place before it is free. No process overtakes another one that runs. The process at the first place takes
the lock of `turn` next, and then leaves the line. If the line is full, a process tries to join again later.
"""

from rmq_spark.store.disk.locks import FileLock

PLACES = 8
_FIRST_AT = 16  # the byte of the first place


class WaitingLine:
    """The place of one process in the line. For one thread. The file at `path` must exist when the line is joined."""

    def __init__(self, path: str) -> None:
        self._places = tuple(FileLock(path, _FIRST_AT + number) for number in range(PLACES))

    @property
    def place(self) -> int | None:
        """The number of the place that this process has: 0 is the first one. None if it is not in the line."""
        return next((number for number, place in enumerate(self._places) if place.is_held), None)

    def move_up(self) -> bool:
        """Join the line, or move up as far as possible. Return whether this process is at the first place.

        Call this inside the `try` whose `finally` calls `leave`. Raises the errors of `FileLock.try_take`.
        """
        number = self.place
        if number is None:
            number = PLACES - 1
            if not self._places[number].try_take():
                return False
        while number and self._places[number - 1].try_take():
            self._places[number].release()
            number -= 1
        return not number

    def leave(self) -> None:
        """Leave the line. Does nothing if this process is not in it."""
        for place in self._places:
            place.release()
