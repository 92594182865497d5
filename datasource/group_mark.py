"""What a query of a group tells listeners of itself, under "@" in the latest offset that it reports."""

from collections.abc import Mapping
from typing import Any

from rmq_spark.datasource.limits import QueueRange
from rmq_spark.datasource.share import Share
from rmq_spark.datasource.store_view import StoreView
from rmq_spark.store import QueryGroup
from rmq_spark.store.errors import OffsetRangeError, StoreChangedError
from rmq_spark.store.units import QueueKey

_MEASURED_QUEUES = 100  # that are behind: to look at the log for one takes a third of a ms, at every trigger


def mark_of(
    query: QueryGroup, view: StoreView, share: Share, positions: Mapping[QueueKey, int], now_ms: int
) -> dict[str, Any]:
    """Return who the query is, and in total how far behind it is in its own queues after `positions`.

    That is lagMessages and, if no more than 100 queues are behind, lagBytes and secondsBehind (of the message that was
    stored first), named and meant as the columns of `rmq_spark.group_lag`, which has them queue by queue. `now_ms` is
    in ms since the epoch.
    """
    behind = [
        QueueRange(queue, max(position, there.min_offset), there.max_offset)
        for queue, position in positions.items()
        if (there := view.bounds.get(queue)) is not None and share.has(queue) and position < there.max_offset
    ]
    mark: dict[str, Any] = {"group": query.terms.group, "member": query.member_id, "path": view.path}
    if view.commit_log_path is not None:
        mark["commitLogPath"] = view.commit_log_path
    mark["batch"] = query.batches  # by which the listener of the driver names the batch that has ended
    if query.terms.assignment == "shared":
        mark["shared"] = True
    mark |= {"commit": query.terms.commit, "lagMessages": sum(part.count for part in behind)}
    if len(behind) > _MEASURED_QUEUES:
        return mark
    firsts = [first.store_time_ms for part in behind if (first := view.proof(part.queue, part.begin)) is not None]
    try:
        size_bytes = sum(view.measure(part) for part in behind)
    except (OffsetRangeError, StoreChangedError):
        return mark  # retention was quicker; the next trigger plans anew
    return {**mark, "lagBytes": size_bytes, "secondsBehind": max(now_ms - min(firsts, default=now_ms), 0) / 1000}
