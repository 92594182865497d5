"""The counts of a listener's calls, on their way from Spark's tasks to the process that called `consume`.

Spark runs tasks and commits in processes of its own, and its progress reports take nothing from a Python sink. But it
passes what tasks add to an accumulator to the process that created the accumulator: once for each partition of a batch,
before it reports the progress of that batch. What failed attempts of a task add is dropped.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from pyspark.accumulators import Accumulator, AccumulatorParam

from rmq_spark.datasource.spark.call_counts import CallCounts

_KEPT_BATCHES = 10  # the newest ones; the progress of a batch is reported before the next batch ends
_ALL = -1  # the key of the counts of all batches

Counted: TypeAlias = Mapping[int, CallCounts]  # by batch id


class _SumOfCounts(AccumulatorParam[Counted]):
    """Adds counts, batch by batch. It returns new objects, so another thread may read the old ones meanwhile."""

    def zero(self, value: Counted) -> Counted:
        return {}

    def addInPlace(self, value1: Counted, value2: Counted) -> Counted:
        added = {key: value1.get(key, CallCounts()) + value2.get(key, CallCounts()) for key in {*value1, *value2}}
        kept = sorted(added)
        return {key: added[key] for key in (*kept[:1], *kept[1:][-_KEPT_BATCHES:])}


class BatchCounts:
    """The counts of the calls of one listener, by batch. Thread-safe.

    It is created with the accumulator of a Spark context, in the process that calls `consume`, and pickled for the
    tasks. Only a task may call `add`, and only the creator `report`.
    """

    def __init__(self, context: Any) -> None:
        self._accumulator: Accumulator[Counted] = context.accumulator({}, _SumOfCounts())

    def add(self, batch_id: int, counts: CallCounts) -> None:
        """Add the counts of a task."""
        self._accumulator.add({_ALL: counts, batch_id: counts})

    def report(self, last_batch_id: int) -> dict[str, Any] | None:
        """Return the counts of the newest batch with calls, up to this one, and those of all batches.

        Returns None if there is no such batch.
        """
        counted = self._accumulator.value
        found = [batch_id for batch_id in counted if _ALL < batch_id <= last_batch_id]
        if not found:
            return None
        total = counted[_ALL].as_dict()
        return {"batchId": max(found), **counted[max(found)].as_dict(), "total": total}
