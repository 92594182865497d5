"""Resets of a group whose member is a query: the queues seek, and the others stay where they are."""

from collections.abc import Callable, Iterator

import pytest
from brokers import RELEASES, RunningCluster

import rmq_spark
from rmq_spark.store.backend import GroupAssignment, GroupTerms
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.client import monotonic_ms, now_ms
from rmq_spark.store.filter.row_filter import Expression
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.backend_groups import eventually

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
        self._session = self.backend.group(terms)
        self._applied = 0

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
    assert {queue: seen[queue] for queue in chosen} == dict.fromkeys(chosen, 3)
    assert {offset for queue, offset in seen.items() if queue not in chosen} <= {8}
