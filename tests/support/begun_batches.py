"""Batches for a cluster of this process that a commit has begun and not finished, because its process died."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from support.sent_messages import address_of

from rmq_spark.store.backend import CommitTerms, SinkTerms
from rmq_spark.store.cluster.exactly_once.publishing import Publishing
from rmq_spark.store.cluster.exactly_once.sink import ExactSink
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.cluster.exactly_once.written_rows import WrittenRows
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.brokers import RunningCluster

TOPIC = "orders"
TERMS = CommitTerms(on_gap="continue", settle_ms=10, fence_timeout_ms=10_000)


class KilledError(BaseException):
    """The process of a commit dies."""


@contextmanager
def dying_after(runs: int) -> Iterator[None]:
    """Let the process of a commit die after it has published the first `runs` runs of its batch."""
    publish = Publishing.run

    def run(self: Publishing, given: Sequence[StagedRun], stored: Mapping[Any, int] | None = None) -> WrittenRows:
        publish(self, given[:runs], stored)
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Publishing, "run", run)
        try:
            yield
        except KilledError:
            return
    raise AssertionError("the process did not die")


def commit(
    cluster: RunningCluster,
    key: CommitKey,
    bodies: Sequence[bytes],
    on_conflict: str = TERMS.on_conflict,
    **address: Any,
) -> None:
    """Write a batch of rows, each of them to the next queue of the topic orders."""
    terms = SinkTerms(TOPIC, creates_topics=False)
    rules = replace(TERMS, on_conflict=on_conflict)
    sink = ExactSink(address_of(cluster, **{"request_timeout_ms": 5000, **address}), terms, rules)
    task = sink.open_task(sink.prepare(), key, "00000", 0)
    task.write(
        pa.RecordBatch.from_pydict(
            {"topic": pa.array([TOPIC] * len(bodies), pa.string()), "body": pa.array(bodies, pa.binary())}
        )
    )
    sink.commit(key, [task.finish()])


def begin(cluster: RunningCluster, key: CommitKey, bodies: Sequence[bytes], runs: int = 0) -> None:
    """Begin a batch and die after `runs` of its runs were published."""
    with dying_after(runs):
        commit(cluster, key, bodies)
