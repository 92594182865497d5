"""What an intent relies on is found before it is written, or the batch is refused with nothing promised."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from support import exact_commits as commits
from support.exact_commits import STAGE, TOPIC, A, B
from support.sent_messages import address_of

from rmq_spark.store.backend import CommitTerms
from rmq_spark.store.cluster.exactly_once.sink_place import SinkPlace, open_place
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedBatch, StagedRows
from rmq_spark.store.cluster.exactly_once.staged_checks import check_staged
from rmq_spark.store.cluster.exactly_once.target_bounds import bounds_of
from rmq_spark.store.cluster.responses import QueueStats, TopicStatsResponse
from rmq_spark.store.errors import BackendUnavailableError, NoPermissionError, NotFoundError
from rmq_spark.store.format.config_json import PERM_READ
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

KEY = CommitKey("query", 0)


@pytest.fixture(params=["5.3", "4.9"])
def cluster(run_cluster: Callable[..., RunningCluster], request: pytest.FixtureRequest) -> RunningCluster:
    return commits.prepare(run_cluster(release=request.param, brokers=2))


@pytest.fixture
def place(cluster: RunningCluster) -> Iterator[SinkPlace]:
    with open_place(address_of(cluster, request_timeout_ms=20_000), CommitTerms()) as place:
        yield place


def staged(cluster: RunningCluster, **changes: Any) -> StagedBatch:
    receipt: StagedRows = commits.stage(cluster, KEY).receipt
    return StagedBatch.of(KEY, [replace(receipt, **changes)])


def masters(cluster: RunningCluster) -> dict[str, str]:
    return {name: broker.address for name, broker in cluster.brokers.items()}


def test_a_batch_that_can_be_published_has_its_brokers(cluster: RunningCluster, place: SinkPlace) -> None:
    assert check_staged(place, staged(cluster)) == masters(cluster)


def test_an_empty_batch_needs_no_broker(place: SinkPlace) -> None:
    assert check_staged(place, StagedBatch.of(KEY, [])) == {}


def test_a_blob_that_has_expired_is_an_error(cluster: RunningCluster, place: SinkPlace) -> None:
    batch = staged(cluster)
    cluster.brokers[B.broker].expire(STAGE, 0, batch.blob_ends()[QueueKey(STAGE, 0, B.broker)][1])
    with pytest.raises(NotFoundError, match=r"offset 0 of queue .* have expired, and the queue begins at 1"):
        check_staged(place, batch)


def test_a_broker_that_refuses_pulls_is_noticed_before_the_intent(cluster: RunningCluster, place: SinkPlace) -> None:
    batch = staged(cluster)
    cluster.brokers[B.broker].settings.forbidden_groups = frozenset({"RMQ_SPARK_READER"})
    with pytest.raises(NoPermissionError, match=r"RMQ_SPARK_READER|does not allow reading") as caught:
        check_staged(place, batch)
    assert caught.value.__notes__ == [f"rmq: nothing of {batch.key} was written."]


def test_a_blob_that_is_shown_late_is_waited_for(cluster: RunningCluster, place: SinkPlace) -> None:
    batch = staged(cluster)
    late = replace(batch.runs[0], offset=batch.runs[1].offset + 1)
    pauses = []

    def sleep(time_s: float) -> None:
        pauses.append(time_s)
        if len(pauses) == 3:
            cluster.send(STAGE, b"x", broker=A.broker, queue_id=0)

    assert check_staged(replace(place, sleep=sleep), replace(batch, runs=(late,))) == {
        A.broker: masters(cluster)[A.broker]
    }
    assert len(pauses) == 3


def test_a_blob_that_is_never_shown_is_an_error(cluster: RunningCluster, place: SinkPlace) -> None:
    batch = staged(cluster)
    clock = count(step=place.patience_ms)
    late = replace(batch.runs[0], offset=99)
    quick = replace(place, sleep=lambda _: None, monotonic_ms=lambda: next(clock))
    with pytest.raises(
        BackendUnavailableError,
        match=r"does not show the rows .* to reach offset 100 within 200000 ms\. If the topic was created again",
    ):
        check_staged(quick, replace(batch, runs=(late,)))


@pytest.mark.parametrize("change", [{"write_queues": 0}, {"perm": PERM_READ}], ids=["fewer queues", "permission"])
def test_a_queue_that_accepts_no_messages_any_more_is_an_error(
    cluster: RunningCluster, place: SinkPlace, change: dict[str, int]
) -> None:
    batch = staged(cluster)
    cluster.brokers[B.broker].set_topic(TOPIC, **change)
    with pytest.raises(NotFoundError, match=r"queue .* accepts no messages any more"):
        check_staged(place, batch)


def test_a_target_broker_that_is_away_can_be_waited_for(cluster: RunningCluster, place: SinkPlace) -> None:
    batch = staged(cluster)
    only_a = replace(
        batch, runs=tuple(replace(run, stage=QueueKey(STAGE, 0, A.broker), offset=0) for run in batch.runs)
    )
    cluster.brokers[B.broker].kill()
    with pytest.raises(BackendUnavailableError, match=r"broker-b of queue .* has no master now"):
        check_staged(place, only_a)


def test_a_topic_without_a_route_can_be_waited_for(cluster: RunningCluster, place: SinkPlace) -> None:
    """The tasks have just found it, so a name server has been restarted, or all of its brokers are away."""
    batch = staged(cluster)
    cluster.create_topic(TOPIC, brokers=[])
    for server in cluster.name_servers:
        cluster.loop.run(server.routes.delete_topic, TOPIC)
    with pytest.raises(BackendUnavailableError, match=f"no broker of topic {TOPIC} is known at present"):
        check_staged(place, batch)


def test_the_stage_is_created_at_a_target_broker_that_lacks_it(cluster: RunningCluster, place: SinkPlace) -> None:
    for name in ("broker-c", "broker-d"):
        cluster.add_broker(name)
        cluster.create_topic(TOPIC, queues=1, brokers=[name])
    batch = staged(cluster)
    moved = replace(batch.runs[0], queue=QueueKey(TOPIC, 0, "broker-c"))
    for name in ("broker-c", "broker-d"):
        del_topic(cluster, name)
    assert check_staged(place, replace(batch, runs=(moved,))).keys() == {"broker-c"}
    assert STAGE in cluster.brokers["broker-c"].topics
    assert STAGE not in cluster.brokers["broker-d"].topics, "no row goes there"


def test_a_stage_that_was_deleted_is_an_error(cluster: RunningCluster, place: SinkPlace) -> None:
    batch = staged(cluster)
    for broker in cluster.brokers:
        del_topic(cluster, broker)
    with pytest.raises(BackendUnavailableError, match=f"topic {STAGE} is not listed on .* create it: rmq prepare-sink"):
        check_staged(place, batch)


def del_topic(cluster: RunningCluster, broker: str) -> None:
    """Delete the stage at one broker."""
    if STAGE in cluster.brokers[broker].topics:
        cluster.brokers[broker].delete_topic(STAGE)
        for server in cluster.name_servers:
            cluster.loop.run(server.routes.delete_topic, STAGE)
        cluster.register_all()


def test_another_broker_at_the_address_is_an_error() -> None:
    answer = TopicStatsResponse({QueueKey(TOPIC, 0, "broker-b"): QueueStats(0, 0, 0)})
    assert bounds_of(answer, TOPIC, "broker-b") == {B: QueueStats(0, 0, 0)}
    with pytest.raises(BackendUnavailableError, match="broker broker-b has answered at the address of broker broker-a"):
        bounds_of(answer, TOPIC, "broker-a")
