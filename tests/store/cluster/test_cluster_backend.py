"""The contract with places that have queues, for a cluster of either version."""

from support.cluster_fixtures import ClusterFixtures

from rmq_spark.store.testing.backend_absence import BackendAbsenceTests
from rmq_spark.store.testing.backend_reading import BackendReadingTests
from rmq_spark.store.testing.backend_sinks import BackendSendBackTests, BackendSinkTests


class TestCluster5(ClusterFixtures, BackendReadingTests, BackendAbsenceTests, BackendSinkTests, BackendSendBackTests):
    pass


class TestCluster4(ClusterFixtures, BackendReadingTests, BackendAbsenceTests, BackendSinkTests, BackendSendBackTests):
    RELEASE = "4.9"
