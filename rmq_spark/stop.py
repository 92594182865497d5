"""Stop a streaming query at its endingOffsets. A Python source cannot do that by itself."""

import json
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rmq_spark.store.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import SourceProgress, StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery

# How long one wait for the query's own end is, so how late we notice the bound, in seconds.
_LOOK_EVERY_S = 0.2

# What Spark calls the triggers of a query that ends by itself.
_ENDING_TRIGGERS = ("AvailableNowTrigger", "OneTimeTrigger")


def stop_at_end(query: "StreamingQuery", timeout: float | None = None) -> bool:
    """Block until the query has delivered everything up to its endingOffsets, then stop it.

    Returns True when it has. Returns False when `timeout` seconds have passed, and leaves the query
    running; or when the query ended before it got there, because somebody stopped it, or because
    its trigger is AvailableNow and not everything was there. Of several rmq sources in one query,
    those with endingOffsets count.

    A query without endingOffsets that ends by itself (AvailableNow, Once) is waited for: True when
    it has ended. Any other without them has no end: raises OptionError when its first batches
    show that, and leaves it running. If the query fails, raises its StreamingQueryException.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        # Before the look, so that what a query finished just before it ended is seen.
        terminated = query.awaitTermination(_wait_s(deadline))  # type: ignore[arg-type]
        progress = _progress_of_this_run(query, terminated)
        bounded = [] if progress is None else _bounded_marks(progress.sources)
        if bounded and all(mark.get("ended") for mark in bounded):
            query.stop()
            return True
        if bounded is None:
            _check_ends_by_itself(query)
            if terminated:
                return True
        if terminated or (deadline is not None and time.monotonic() >= deadline):
            return False


def _wait_s(deadline: float | None) -> float:
    """Return how long to wait now. Spark takes fractions, whatever its types say, but not zero."""
    if deadline is None:
        return _LOOK_EVERY_S
    return max(0.001, min(_LOOK_EVERY_S, deadline - time.monotonic()))


def _progress_of_this_run(query: "StreamingQuery", terminated: bool | None) -> "StreamingQueryProgress | None":
    """Return the last progress, None as long as it may speak of a batch that an earlier run planned.

    A restart first repeats the batch that died, whose offset knows nothing of the options of this run. The second
    batch is ours, and a trigger that finds nothing new has said that the offset is as we would write it.
    """
    if query.lastProgress is None:
        return None
    status = query.status
    # While a trigger is at work it does not know yet whether there is anything.
    found_nothing = not status["isDataAvailable"] and not status["isTriggerActive"]
    progress = query.lastProgress  # after the status: a batch that ended meanwhile must not be overlooked
    is_ours = terminated or found_nothing or query.recentProgress[0].batchId != progress.batchId
    return progress if is_ours else None


def _bounded_marks(sources: "Iterable[SourceProgress]") -> list[Mapping[str, object]] | None:
    """Return the marks of the sources that have a bound, as a finished batch left them; None if none has one.

    Progress is reported after a batch is committed, so its end offset has been delivered. Before the first batch
    nothing is known: an empty list.
    """
    marks = [mark for source in sources if (mark := _mark(source.endOffset)) is not None]
    bounded = [mark for mark in marks if mark.get("ending")]
    return bounded if bounded or not marks else None


def _check_ends_by_itself(query: "StreamingQuery") -> None:
    """Raise OptionError unless the query's trigger is AvailableNow or Once. Python's side of Spark does not tell."""
    java = getattr(query, "_jsq", None)  # Connect has none
    if java is None or str(java.streamingQuery().trigger()) not in _ENDING_TRIGGERS:
        raise OptionError(
            "stop_at_end: the query reads no rmq source with endingOffsets, and its trigger is neither AvailableNow "
            "nor Once, so it has no end to wait for. Set endingOffsets (or endingTimestamp) on the stream, or call "
            "query.stop() yourself."
        )


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
