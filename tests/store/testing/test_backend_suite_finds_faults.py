"""Faults planted in a backend. The suite runs over it in a pytest of its own, and a test of the suite must fail."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from support.cluster_fixtures import ClusterFixtures
from support.dict_backend import DictBackend
from support.place_fixtures import DictFixtures, LocalFixtures

from rmq_spark.store.backend import CommitTotals
from rmq_spark.store.cluster.sink import ClusterSink, ClusterTask
from rmq_spark.store.cluster.write_routes import WriteRoutes
from rmq_spark.store.errors import OffsetRangeError, StoreError
from rmq_spark.store.format.content_ids import ContentIds
from rmq_spark.store.local.backend import LocalBackend
from rmq_spark.store.local.sink import LocalSink
from rmq_spark.store.model import CommitKey, QueueBounds, QueueRange, RecordProof
from rmq_spark.store.testing.backend_groups import BackendGroupTests
from rmq_spark.store.testing.backend_reading import BackendReadingTests
from rmq_spark.store.testing.backend_sinks import BackendSinkTests

pytest_plugins = ["pytester"]

Real = Callable[..., Any]


def bounds_end_one_early(real: Real) -> Real:
    def bounds(backend: DictBackend, queues: Any) -> Any:
        found = real(backend, queues)
        return {queue: QueueBounds(of.min_offset, max(of.min_offset, of.max_offset - 1)) for queue, of in found.items()}

    return bounds


def read_yields_the_message_at_the_end(real: Real) -> Real:
    def read(backend: DictBackend, part: QueueRange, *rest: Any) -> Iterator[Any]:
        try:
            yield from real(backend, QueueRange(part.queue, part.begin, part.end + 1), *rest)
        except OffsetRangeError:
            yield from real(backend, part, *rest)

    return read


def read_ignores_the_filter(real: Real) -> Real:
    return lambda backend, part, columns, limits, wanted: real(backend, part, columns, limits, None)


def progress_stops_at_the_last_match(real: Real) -> Real:
    def read(backend: DictBackend, *given: Any) -> Iterator[Any]:
        for found in real(backend, *given):
            if found.batch.num_rows:
                yield found._replace(next_offset=found.batch.column("queueOffset")[-1].as_py() + 1)

    return read


def positions_of_expired_messages(real: Real) -> Real:
    return lambda backend, at: dict.fromkeys(at, RecordProof(0, 0)) | real(backend, at)


def another_error_for_a_missing_queue(real: Real) -> Real:
    def messages(backend: DictBackend, queue: Any) -> Any:
        try:
            return real(backend, queue)
        except LookupError as error:
            raise StoreError(str(error)) from None

    return messages


def refresh_never_sees_a_change(real: Real) -> Real:
    return lambda backend: bool(real(backend)) and False


def commit_stores_twice(real: Real) -> Real:
    def commit(sink: LocalSink, key: CommitKey, receipts: Any, before_commit: Any = None) -> CommitTotals:
        totals = real(sink, CommitKey(key.query_id), receipts, before_commit)
        return cast(CommitTotals, totals)

    return commit


def check_fence_lets_all_pass(real: Real) -> Real:
    return lambda *_: None


def open_task_ignores_the_token(real: Real) -> Real:
    return lambda sink, token, key, task, partition: real(sink, None, key, task, partition)


def ids_are_the_same_in_all_partitions(real: Real) -> Real:
    return lambda sink, token, key, task, partition: real(sink, token, key, task, 0)


def ids_are_others_for_each_attempt(real: Real) -> Real:
    def open_task(sink: ClusterSink, token: str | None, key: CommitKey, task: str, partition: int) -> Any:
        return real(sink, token, CommitKey(f"{key.query_id}/{task}", key.batch_id), task, partition)

    return open_task


def ids_depend_on_the_order(real: Real) -> Real:
    return lambda ids, digests: np.arange(len(digests), dtype=np.uint64)


def discard_sends_the_rows(real: Real) -> Real:
    return lambda task: task.finish()


def rows_go_to_one_queue(real: Real) -> Real:
    return lambda routes, topic: real(routes, topic)[:1]


PROGRESS = "test_read_reports_progress_beyond_messages_that_do_not_match"
READING = DictFixtures, BackendReadingTests
GROUPS, SINKS = (LocalFixtures, BackendGroupTests), (LocalFixtures, BackendSinkTests)
CLUSTER_SINKS = ClusterFixtures, BackendSinkTests
FAULTS = [
    (READING, DictBackend, "bounds", bounds_end_one_early, "test_bounds_are_half_open"),
    (READING, DictBackend, "read", read_yields_the_message_at_the_end, "test_read_half_open_range[3-7]"),
    (READING, DictBackend, "read", read_ignores_the_filter, f"{PROGRESS}[tag]"),
    (READING, DictBackend, "read", progress_stops_at_the_last_match, f"{PROGRESS}[tag with the hash of another]"),
    (READING, DictBackend, "positions", positions_of_expired_messages, "test_positions_leave_out_expired_messages"),
    (
        READING,
        DictBackend,
        "_messages",
        another_error_for_a_missing_queue,
        "test_not_found_error_for_a_missing_queue[bounds]",
    ),
    (READING, DictBackend, "refresh", refresh_never_sees_a_change, "test_refresh_finds_new_messages_queues_and_topics"),
    (
        GROUPS,
        LocalBackend,
        "check_fence",
        check_fence_lets_all_pass,
        "test_check_fence_of_a_former_owner_is_a_conflict",
    ),
    (SINKS, LocalSink, "commit", commit_stores_twice, "test_commit_of_a_batch_that_ran_again_stores_it_once"),
    (SINKS, LocalSink, "open_task", open_task_ignores_the_token, "test_open_task_refuses_the_token_of_another_place"),
    (
        CLUSTER_SINKS,
        ClusterSink,
        "open_task",
        ids_are_the_same_in_all_partitions,
        "test_rows_have_distinct_ids",
    ),
    (CLUSTER_SINKS, ClusterSink, "open_task", ids_are_others_for_each_attempt, "test_zombie_task_stores_twins"),
    (CLUSTER_SINKS, ContentIds, "_number", ids_depend_on_the_order, "test_zombie_task_stores_twins"),
    (CLUSTER_SINKS, ClusterTask, "discard", discard_sends_the_rows, "test_discarded_task_stores_nothing"),
    (CLUSTER_SINKS, WriteRoutes, "queues", rows_go_to_one_queue, "test_ids_do_not_depend_on_the_queues"),
]


def run(pytester: pytest.Pytester, suite: tuple[type, type], name: str) -> str:
    """Run one test of the suite with these fixtures. Return its outcome."""
    imports = [f"from {one.__module__} import {one.__name__}" for one in suite]
    names = ", ".join(one.__name__ for one in suite)
    pytester.makepyfile(test_backend="\n".join([*imports, f"class TestBackend({names}):", "    pass"]))
    found = pytester.inline_run(f"test_backend.py::TestBackend::{name}")
    (outcome,) = [report.outcome for report in found.getreports("pytest_runtest_logreport") if report.when == "call"]
    return outcome


@pytest.mark.parametrize(
    ("suite", "owner", "method", "fault", "finder"), FAULTS, ids=[one[3].__name__ for one in FAULTS]
)
def test_suite_finds_the_fault(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    suite: tuple[type, type],
    owner: type,
    method: str,
    fault: Callable[[Real], Real],
    finder: str,
) -> None:
    assert run(pytester, suite, finder) == "passed", "without the fault"
    monkeypatch.setattr(owner, method, fault(inspect.getattr_static(owner, method)))
    assert run(pytester, suite, finder) == "failed"
