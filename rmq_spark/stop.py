"""Stop a streaming query at its endingOffsets, because a Python data source cannot end its query."""

import json
import logging
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rmq_spark.store.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import SourceProgress, StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery

_LOG = logging.getLogger("rmq_spark")
_POLL_S = 0.2

# Spark's names of the triggers with which a query terminates by itself.
_ENDING_TRIGGERS = ("AvailableNowTrigger", "OneTimeTrigger")


def stop_at_end(query: "StreamingQuery", timeout: float | None = None) -> bool:
    """Wait until the query has delivered all messages up to its endingOffsets, then stop it and return True.

    Returns False after `timeout` seconds; the query then continues. Also returns False if the query terminates before
    its end, because it was stopped, or because its trigger is AvailableNow and the store does not have all the messages
    yet. If the query reads several rmq streams, it has reached its end when all streams with endingOffsets have. An
    endingTimestamp is treated like endingOffsets.

    If no stream has endingOffsets, the trigger matters. With AvailableNow or Once, waits until the query terminates and
    returns True. With any other trigger, raises OptionError after the first batches; the query then continues. Spark
    Connect does not tell the trigger, so there it waits in any case, and logs a warning. If the query fails, raises its
    StreamingQueryException.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    is_warned = False
    while True:
        # Spark accepts fractions of a second, despite its type hint, but not 0.
        wait_s = _POLL_S if deadline is None else max(0.001, min(_POLL_S, deadline - time.monotonic()))
        # Wait before reading the progress, so that it includes a batch that completed just before the query terminated.
        terminated = query.awaitTermination(wait_s)  # type: ignore[arg-type]
        progress = _progress_of_this_run(query, terminated)
        bounded = [] if progress is None else _bounded_marks(progress.sources)
        if bounded and all(mark.get("ended") for mark in bounded):
            query.stop()
            return True
        if bounded is None:
            if terminated:
                return True
            if hasattr(query, "_jsq"):
                _check_ends_by_itself(query)
            elif not is_warned:
                is_warned = True
                _LOG.warning(
                    "rmq: stop_at_end waits until the query terminates: no rmq source of it has endingOffsets, and "
                    "Spark Connect does not tell whether the trigger ends it"
                )
        if terminated or (deadline is not None and time.monotonic() >= deadline):
            return False


def _progress_of_this_run(query: "StreamingQuery", terminated: bool | None) -> "StreamingQueryProgress | None":
    """Return the query's last progress report, or None while it may describe a batch that an earlier run planned.

    After a restart Spark first repeats the interrupted batch. The end offset of that batch was made with the options of
    the earlier run. Only the second batch, or a trigger that finds no new data, shows an offset that was made with the
    options of this run.
    """
    if query.lastProgress is None:
        return None
    status = query.status
    # While a trigger is active, isDataAvailable is not final.
    found_nothing = not status["isDataAvailable"] and not status["isTriggerActive"]
    progress = query.lastProgress  # read after the status, so that a batch that ended meanwhile is included
    is_ours = terminated or found_nothing or query.recentProgress[0].batchId != progress.batchId
    return progress if is_ours else None


def _bounded_marks(sources: "Iterable[SourceProgress]") -> list[Mapping[str, object]] | None:
    """Return the metadata ("@") in the end offsets of the sources that have endingOffsets.

    Returns None if no source has endingOffsets, and [] before the first batch. Spark reports progress after it has
    committed a batch, so all messages up to an end offset have been delivered.
    """
    marks = [mark for source in sources if (mark := _mark(source.endOffset)) is not None]
    bounded = [mark for mark in marks if mark.get("ending")]
    return bounded if bounded or not marks else None


def _check_ends_by_itself(query: "StreamingQuery") -> None:
    """Raise OptionError unless the query's trigger is AvailableNow or Once. Only the JVM knows the trigger."""
    java = query._jsq  # Spark Connect has none
    if str(java.streamingQuery().trigger()) not in _ENDING_TRIGGERS:
        raise OptionError(
            "stop_at_end: the query reads no rmq source with endingOffsets, and its trigger is neither AvailableNow "
            "nor Once, so it has no end to wait for. Set endingOffsets (or endingTimestamp) on the stream, or call "
            "query.stop() yourself."
        )


def _mark(offset: object) -> Mapping[str, object] | None:
    """Return the metadata ("@") in an offset of an rmq stream.

    Returns None if there is no offset yet, and {} if it is the offset of another kind of source.
    """
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return {}
    if offset is None:
        return None
    mark = offset.get("@", {}) if isinstance(offset, Mapping) else {}
    return mark if isinstance(mark, Mapping) else {}
