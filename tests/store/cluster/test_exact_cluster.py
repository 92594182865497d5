"""The exactly-once sink of a cluster under the contract's tests of sinks, on brokers of either version."""

import pytest
from support.cluster_fixtures import ClusterFixtures, address_of

from rmq_spark.store.backend import Guarantee
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.exactly_once.preparation import prepare_sink
from rmq_spark.store.testing.backend_sinks import BackendSinkTests
from rmq_spark.store.testing.brokers import RunningCluster


class _ExactFixtures(ClusterFixtures):
    GUARANTEE = Guarantee.EXACTLY_ONCE

    @pytest.fixture
    def location(self, cluster: RunningCluster) -> ClusterAddress:
        """The address of the cluster, which has the topics of the sink."""
        address = address_of(cluster)
        prepare_sink(address, "broker-a")
        return address


class TestExactCluster5(_ExactFixtures, BackendSinkTests):
    pass


class TestExactCluster4(_ExactFixtures, BackendSinkTests):
    RELEASE = "4.9"
