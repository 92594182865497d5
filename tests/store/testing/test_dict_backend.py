"""The reading half of the contract with places that have queues, for the example: a dict."""

from support.place_fixtures import DictFixtures

from rmq_spark.store.testing.backend_reading import BackendReadingTests


class TestDict(DictFixtures, BackendReadingTests):
    pass
