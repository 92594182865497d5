"""The contract with places that have queues, for a store directory."""

import json

from support.place_fixtures import LocalFixtures

from rmq_spark.store import places
from rmq_spark.store.local.directory import StoreDirectory
from rmq_spark.store.testing.backend_suite import BackendSuite


class TestStoreDirectory(LocalFixtures, BackendSuite):
    def test_from_mark_returns_the_location(self, location: StoreDirectory) -> None:
        for place in (location, StoreDirectory(location.path, "/a/log,/b/log")):
            assert places.from_mark(json.loads(json.dumps(place.mark()))) == place
