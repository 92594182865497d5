"""The lines of the log that were not there at the look before, for what looks at a place again and again."""

import logging
import threading
from typing import Self


class NewLines(logging.Filter):
    """While it is entered, the log of rmq-spark has a line again only if the look before did not have it.

    Lines of other threads than that of the look are not filtered.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: set[str] = set()
        self._now: set[str] = set()
        self._thread: int | None = None

    def __enter__(self) -> Self:
        logging.getLogger("rmq_spark").addFilter(self)
        return self

    def __exit__(self, *of_error: object) -> None:
        logging.getLogger("rmq_spark").removeFilter(self)

    def begin_look(self) -> None:
        """Note that the lines of the next look follow, in this thread."""
        self._thread = threading.get_ident()
        self._before, self._now = self._now, set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is new."""
        if record.thread != self._thread:
            return True
        line = record.getMessage()
        is_new = line not in self._before | self._now
        self._now.add(line)
        return is_new
