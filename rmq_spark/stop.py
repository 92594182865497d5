"""Stop a streaming query at its endingOffsets. A Python source cannot do that by itself."""

import json
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rmq_spark.store.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import SourceProgress
    from pyspark.sql.streaming.query import StreamingQuery

# How long one wait for the query's own end is, so how late we notice the bound, in seconds.
_LOOK_EVERY_S = 0.2


def stop_at_end(query: "StreamingQuery", timeout: float | None = None) -> bool:
    """Block until the query has delivered everything up to its endingOffsets, then stop it.

    Returns True when it has, also if the query ended by itself (AvailableNow). Returns False when
    `timeout` seconds have passed, and leaves the query running; or when the query was stopped
    before it got there. Of several rmq sources in one query, those with endingOffsets count.

    Raises OptionError when the first finished batch shows no rmq source with endingOffsets; the
    query is left running. If the query fails, raises its StreamingQueryException.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        # Before the look, so that what a query finished just before it ended is seen.
        terminated = query.awaitTermination(_wait_s(deadline))  # type: ignore[arg-type]
        progress = query.lastProgress
        if progress is not None and _has_ended(progress.sources):
            query.stop()
            return True
        if terminated or (deadline is not None and time.monotonic() >= deadline):
            return False


def _wait_s(deadline: float | None) -> float:
    """Return how long to wait now. Spark takes fractions, whatever its types say, but not zero."""
    if deadline is None:
        return _LOOK_EVERY_S
    return max(0.001, min(_LOOK_EVERY_S, deadline - time.monotonic()))


def _has_ended(sources: "Iterable[SourceProgress]") -> bool:
    """Say whether a finished batch reached the bound in every source that has one.

    Progress is reported after a batch is committed, so its end offset has been delivered.
    """
    marks = [mark for source in sources if (mark := _mark(source.endOffset)) is not None]
    if not marks:
        return False  # the query reported before its first batch
    bounded = [mark for mark in marks if mark.get("ending")]
    if not bounded:
        raise OptionError(
            "stop_at_end: the query reads no rmq source with endingOffsets, so it has no end to "
            "wait for. Set endingOffsets (or endingTimestamp) on the stream, or call query.stop() "
            "yourself."
        )
    return all(mark.get("ended") for mark in bounded)


def _mark(offset: object) -> Mapping[str, object] | None:
    """Return what our source wrote under "@" into an offset; nothing of another source's offset."""
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return {}
    if offset is None:
        return None
    mark = offset.get("@", {}) if isinstance(offset, Mapping) else {}
    return mark if isinstance(mark, Mapping) else {}
