"""Counts and times of a listener's calls, of one task or of several together. Pure.

Times are counted in buckets, so a count has the same size for a thousand calls and for a million. Each bucket is 9 %
wider than the one before it, so a percentile is wrong by at most 5 %. The longest time is exact.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rmq_spark.datasource.spark.listener import Answer

_BUCKETS_PER_DOUBLING = 8
_LEAST_MS = 0.001


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 row" or "2 rows"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


@dataclass(slots=True)
class CallCounts:
    """The calls of a listener, and what became of their rows.

    `rows` is the number of rows that the listener got, and `failed_rows` the number of those that failed.
    `timed_out_calls` is the number of calls that took longer than the timeout. `max_ms` is the longest time of a call.
    `begin_ms` and `end_ms` are when the calls began and ended, in ms since the epoch; None without a call. `buckets`
    has the number of calls for each bucket of times. Not thread-safe.
    """

    rows: int = 0
    calls: int = 0
    failed_rows: int = 0
    timed_out_calls: int = 0
    max_ms: float = 0.0
    begin_ms: int | None = None
    end_ms: int | None = None
    buckets: Counter[int] = field(default_factory=Counter)

    def add(self, rows: int, answer: Answer) -> None:
        """Count one call with this many rows."""
        took_ms = answer.took_s * 1000
        self.rows += rows
        self.calls += 1
        self.failed_rows += rows - answer.done
        self.timed_out_calls += answer.is_late
        self.max_ms = max(self.max_ms, took_ms)
        self.buckets[math.floor(math.log2(max(took_ms, _LEAST_MS)) * _BUCKETS_PER_DOUBLING)] += 1

    def __add__(self, other: "CallCounts") -> "CallCounts":
        """Return the counts of both together."""
        begins = [one.begin_ms for one in (self, other) if one.begin_ms is not None]
        ends = [one.end_ms for one in (self, other) if one.end_ms is not None]
        return CallCounts(
            self.rows + other.rows,
            self.calls + other.calls,
            self.failed_rows + other.failed_rows,
            self.timed_out_calls + other.timed_out_calls,
            max(self.max_ms, other.max_ms),
            min(begins, default=None),
            max(ends, default=None),
            self.buckets + other.buckets,
        )

    @property
    def rows_per_s(self) -> float:
        """Rows per second, from the begin of the first call to the end of the last one. 0 without a call.

        The times are those of the machines that ran the tasks, so the rate is as good as their clocks.
        """
        if self.begin_ms is None or self.end_ms is None:
            return 0.0
        return self.rows * 1000 / max(self.end_ms - self.begin_ms, 1)

    def percentile_ms(self, share: float) -> float:
        """Return the time in ms within which this share of the calls ended, such as 0.95. 0 without a call."""
        left = math.ceil(self.calls * share)
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return min(2 ** ((bucket + 0.5) / _BUCKETS_PER_DOUBLING), self.max_ms)
        return self.max_ms

    def as_dict(self) -> dict[str, Any]:
        """Return the counts with the names of a progress report."""
        return {
            "rows": self.rows,
            "calls": self.calls,
            "failedRows": self.failed_rows,
            "timedOutCalls": self.timed_out_calls,
            "rowsPerSecond": round(self.rows_per_s, 1),
            "callMs": {
                "p50": round(self.percentile_ms(0.5), 3),
                "p95": round(self.percentile_ms(0.95), 3),
                "max": round(self.max_ms, 3),
            },
        }

    def __str__(self) -> str:
        p50, p95 = self.percentile_ms(0.5), self.percentile_ms(0.95)
        return (
            f"{count_text(self.rows, 'row')} in {count_text(self.calls, 'call')}, {self.rows_per_s:.1f} rows/s, "
            f"{count_text(self.failed_rows, 'row')} failed, {count_text(self.timed_out_calls, 'call')} timed out; "
            f"a call took p50 {p50:.3g} ms, p95 {p95:.3g} ms, max {self.max_ms:.3g} ms"
        )
