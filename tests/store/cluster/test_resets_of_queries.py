"""Resets of a group whose member is a query: the queues seek, and the others stay where they are."""

from collections.abc import Callable, Iterator, Mapping

import pytest
from support.cluster_fixtures import reset_offset

import rmq_spark
from rmq_spark.store.backend import GroupAssignment, GroupTerms
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.client import monotonic_ms, now_ms
from rmq_spark.store.cluster.group_session import ClusterGroupSession
from rmq_spark.store.filter.row_filter import Expression
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.backend_groups import eventually
from rmq_spark.store.testing.brokers import RELEASES, RunningCluster

GROUP = "billing"
QUEUES = [QueueKey("orders", number, broker) for broker in ("broker-a", "broker-b") for number in range(2)]


class Query:
    """A query that is the only member of the group. It looks for resets whenever it plans."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._passed_ms = 0.0
        self.backend = ClusterBackend(
            ClusterAddress(parse_name_servers(cluster.address)), now_ms, lambda: monotonic_ms() + self._passed_ms
        )
        terms = GroupTerms(GROUP, assignment="shared", expressions=(("orders", Expression("TAG", "*")),))
        session = self.backend.group(terms)
        assert isinstance(session, ClusterGroupSession)
        self._session = session
        self._applied = 0

    @property
    def pushed(self) -> Mapping[QueueKey, int]:
        """The resets that brokers have pushed since the last plan."""
        assert self._session._member is not None
        return self._session._member.news().resets

    @property
    def published(self) -> Mapping[QueueKey, int]:
        """The offsets that the query has published."""
        return self._session.published

    def plan(self, finished: dict[QueueKey, int]) -> GroupAssignment:
        """Plan a batch after these offsets."""
        self._passed_ms += 6_000
        self.backend.refresh()
        found = self._session.rebalance(QUEUES, finished, self._applied)
        self._applied = found.reset_number
        self._session.publish(finished)
        self._session.settle(is_batch=True)
        return found


@pytest.fixture(params=sorted(RELEASES))
def cluster(request: pytest.FixtureRequest, run_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    """Two brokers, each with two queues of the topic orders with ten messages each."""
    cluster = run_cluster(release=request.param, brokers=2)
    cluster.create_topic("orders", queues=2)
    for queue in QUEUES:
        cluster.send("orders", *[b"x"] * 10, broker=queue.broker, queue_id=queue.queue_id)
    return cluster


@pytest.fixture
def query(cluster: RunningCluster) -> Iterator[Query]:
    """A query that has all queues, and has published the offset 8 in each."""
    query = Query(cluster)
    eventually(lambda: set(query.plan({}).owned) == set(QUEUES))
    query.plan(dict.fromkeys(QUEUES, 8))
    yield query
    query.backend.close()


@pytest.mark.parametrize("chosen", [QUEUES, QUEUES[:1]])
def test_a_running_query_seeks_to_the_offsets_of_a_reset(
    cluster: RunningCluster, query: Query, chosen: list[QueueKey]
) -> None:
    to: dict[str, dict[int | str, int]] = {"orders": {queue.id_text: 3 for queue in chosen}}
    assert rmq_spark.reset_offsets(name_server=cluster.address, group=GROUP, to=to) == to
    seen: dict[QueueKey, int] = {}

    def has_sought() -> bool:
        seen.update(query.plan(dict.fromkeys(QUEUES, 8) | seen).resets)
        return seen.keys() >= set(chosen)

    eventually(has_sought)
    assert seen == dict.fromkeys(chosen, 3)


def test_a_query_stays_in_queues_for_which_a_broker_pushes_the_offset_that_it_has_published(
    cluster: RunningCluster, query: Query
) -> None:
    chosen = QUEUES[0]
    rmq_spark.reset_offsets(name_server=cluster.address, group=GROUP, to={"orders": {chosen.id_text: 3}})
    if not cluster.brokers["broker-a"].release.is_5:
        assert eventually(lambda: query.pushed == {QUEUES[0]: 3, QUEUES[1]: 8})
    found = query.plan(dict.fromkeys(QUEUES, 9))  # the end of a batch that ran meanwhile
    assert found.resets == {chosen: 3}
    query.plan({**dict.fromkeys(QUEUES, 9), chosen: 3})
    assert query.plan({**dict.fromkeys(QUEUES, 10), chosen: 4}).resets == {}
    assert query.published == {**dict.fromkeys(QUEUES, 10), chosen: 4}


def test_a_query_applies_a_second_reset_that_goes_back_to_the_offset_that_it_has_published(
    cluster: RunningCluster, query: Query
) -> None:
    reset_offset(cluster.brokers["broker-a"], GROUP, QUEUES[0], 3)
    assert query.plan(dict.fromkeys(QUEUES, 8)).resets == {QUEUES[0]: 3}
    reset_offset(cluster.brokers["broker-a"], GROUP, QUEUES[0], 8)
    assert query.plan(dict.fromkeys(QUEUES, 8)).resets == {QUEUES[0]: 8}
