"""Answers of brokers to the producers of groups."""

import json
from collections.abc import Callable

import pytest

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.testing.backend_groups import eventually
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.brokers.raw_client import RawClient

RunCluster = Callable[..., RunningCluster]
GROUP = {"producerGroup": "writers"}
PRODUCERS, UNREGISTER = RequestCode.GET_PRODUCER_CONNECTION_LIST, RequestCode.UNREGISTER_CLIENT


@pytest.fixture(params=["4.9", "5.3"])
def cluster(run_cluster: RunCluster, request: pytest.FixtureRequest) -> RunningCluster:
    return run_cluster(release=request.param, is_light=True)


def connect(cluster: RunningCluster) -> RawClient:
    return RawClient(cluster.broker.address)


def producers(client: RawClient) -> dict[str, str] | None:
    """Return the addresses of the producers by client id. None: the broker does not know the group."""
    answer = client.call(PRODUCERS, GROUP)
    if answer.code == ResponseCode.SYSTEM_ERROR:
        assert answer.remark == "the producer group[writers] not exist"
        return None
    return {one["clientId"]: one["clientAddr"] for one in json.loads(answer.body)["connectionSet"]}


def test_a_heartbeat_makes_a_producer_that_is_listed_on_every_connection(cluster: RunningCluster) -> None:
    with connect(cluster) as one, connect(cluster) as two:
        assert producers(one) is None
        assert one.produce("one", "writers", "others").code == 0
        two.produce("two", "writers")
        assert producers(one) == producers(two) == {"one": one.address, "two": two.address}
        assert cluster.broker.producers.ids("others") == ["one"]
        assert not one.requests, "producers are not notified"


def test_unregistering_concerns_the_connection_and_is_done_when_it_is_answered(cluster: RunningCluster) -> None:
    with connect(cluster) as one, connect(cluster) as two:
        one.produce("one", "writers")
        two.produce("two", "writers")
        two.call(UNREGISTER, {"clientID": "one", "consumerGroup": "writers"})
        assert cluster.broker.producers.ids("writers") == ["one", "two"]
        two.call(UNREGISTER, {"clientID": "one", **GROUP})
        assert producers(two) == {"one": one.address}
        one.call(UNREGISTER, {"clientID": "one", **GROUP})
        assert producers(one) == (None if cluster.release.is_5 else {})


def test_a_producer_goes_with_its_connection(cluster: RunningCluster) -> None:
    with connect(cluster) as one:
        one.produce("one", "writers")
    assert eventually(lambda: not cluster.broker.producers.ids("writers"))


def test_the_connection_of_a_producer_without_heartbeats_is_closed(cluster: RunningCluster) -> None:
    with connect(cluster) as one, connect(cluster) as two:
        one.produce("one", "writers")
        cluster.broker.pass_time(100)
        two.produce("two", "writers")
        cluster.broker.freeze()
        cluster.broker.pass_time(30)
        assert cluster.broker.producers.ids("writers") == ["one", "two"]
        cluster.broker.thaw()
        assert producers(two) == {"two": two.address}
        with pytest.raises(ConnectionError):
            one.receive()


def test_a_broker_that_ends_forgets_its_producers(cluster: RunningCluster) -> None:
    cluster.broker.producers.add("writers", "ghost")
    cluster.broker.kill()
    cluster.broker.restart()
    with connect(cluster) as one:
        assert producers(one) is None


def test_a_lost_producer_is_back_with_its_next_heartbeat(cluster: RunningCluster) -> None:
    with connect(cluster) as one:
        one.produce("one", "writers")
        cluster.broker.producers.remove("writers", "one")
        assert not producers(one)
        one.produce("one", "writers")
        assert producers(one) == {"one": one.address}
