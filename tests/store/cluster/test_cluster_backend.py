"""The contract with places that have queues, for a cluster of either version."""

from support.cluster_fixtures import ClusterFixtures

from rmq_spark.store.testing.backend_suite import BackendSuite


class TestCluster5(ClusterFixtures, BackendSuite):
    pass


class TestCluster4(ClusterFixtures, BackendSuite):
    RELEASE = "4.9"
    TELLS_ZERO_FROM_NONE = False
