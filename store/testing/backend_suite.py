"""The contract of `store.backend` as tests, for every place that has queues.

docs/BACKENDS.md says how to write a backend and how to run these tests over it.
"""

from rmq_spark.store.testing.backend_absence import BackendAbsenceTests
from rmq_spark.store.testing.backend_groups import BackendGroupTests
from rmq_spark.store.testing.backend_reading import BackendReadingTests
from rmq_spark.store.testing.backend_sinks import BackendSendBackTests, BackendSinkTests


class BackendSuite(BackendReadingTests, BackendAbsenceTests, BackendGroupTests, BackendSinkTests, BackendSendBackTests):
    """All tests of a backend. Call the subclass `Test…`, and give it the fixtures that `BackendFixtures` describes.

    A test is skipped, with the reason, if the place lacks a capability. The five classes may be used alone: a backend
    that only reads passes `BackendReadingTests`, and `BackendAbsenceTests` if its queues are on servers.
    """
