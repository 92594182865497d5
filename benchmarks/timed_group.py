"""The real source, as a member of a consumer group, with the time that each trigger spends on the group.

The time is that of all calls of `GroupPlanner`, which a query without a group does not make. In a cluster it contains
the requests that the query waits for, which are also recorded by kind. Heartbeats are not in it: their thread sends
them beside the query.

Spark's Python workers import this module by name: `spark_for_benchmarks` puts its folder on their path.
"""

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from plain_sources import LOOKS_FILE
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.types import StructType

from rmq_spark.datasource.spark import group_planner
from rmq_spark.datasource.spark.group_planner import GroupPlanner
from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store.cluster.member_lists import MemberLists
from rmq_spark.store.cluster.member_offsets import MemberOffsets
from rmq_spark.store.cluster.membership import Membership


class GroupTimes(NamedTuple):
    """The time of one trigger in ms: all that it spends on its group; of that, requests to brokers; and heartbeats.

    The last part of the total, the text for Spark's progress, is counted with the next trigger.
    """

    total_ms: float
    members_ms: float  # 38, and at the first trigger the first heartbeats
    offsets_ms: float  # 14
    commits_ms: float  # 15
    heartbeats_ms: float  # 34, in their own thread


_RECORD = struct.Struct(f"<{len(GroupTimes._fields)}d")
_TOTAL, _MEMBERS, _OFFSETS, _COMMITS, _HEARTBEATS = range(len(GroupTimes._fields))
_TIMED: tuple[tuple[Any, str, int], ...] = (
    (GroupPlanner, "has_changed", _TOTAL),
    (GroupPlanner, "refresh", _TOTAL),
    (GroupPlanner, "publish", _TOTAL),
    (group_planner, "mark_of", _TOTAL),
    (MemberLists, "find", _MEMBERS),
    (MemberOffsets, "read", _OFFSETS),
    (MemberOffsets, "commit", _COMMITS),
    (Membership, "_beat", _HEARTBEATS),
)
_spent_ms: list[float] = []  # empty while nothing is timed: a process may have the readers of several queries


class TimedGroup(RmqDataSource):
    """The real source; if it is a member of a group, each trigger adds its `GroupTimes` to the looks file."""

    @classmethod
    def name(cls) -> str:
        return "timed_group"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if not _spent_ms:
            _spent_ms.extend([0.0] * len(GroupTimes._fields))
            for owner, name, index in _TIMED:
                setattr(owner, name, _timed(getattr(owner, name), index))
            descriptor = os.open(os.environ[LOOKS_FILE], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            note_answered = _timed(GroupPlanner.note_answered, _TOTAL)

            def note_trigger(*arguments: Any, **named: Any) -> None:
                note_answered(*arguments, **named)
                os.write(descriptor, _RECORD.pack(*_spent_ms))
                _spent_ms[:] = [0.0] * len(_spent_ms)

            GroupPlanner.note_answered = note_trigger  # type: ignore[method-assign]
        return super().streamReader(schema)


def _timed(method: Callable[..., Any], index: int) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        begin_ns = time.perf_counter_ns()
        try:
            return method(*arguments, **named)
        finally:
            _spent_ms[index] += (time.perf_counter_ns() - begin_ns) / 1e6

    return call


def read_group_times(looks_file: Path) -> list[GroupTimes]:
    """Return the times of all triggers that a `TimedGroup` has recorded."""
    return [GroupTimes(*found) for found in _RECORD.iter_unpack(looks_file.read_bytes())]
