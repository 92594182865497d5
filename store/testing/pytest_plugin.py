"""A pytest plugin with the fixtures `rmq_store` and `rmq_cluster`, for the tests of programs that use RocketMQ.

pytest finds it when rmq-spark is installed. `-p no:rmq_spark` turns it off. docs/TESTING.md has examples.

The module is imported at every start of pytest, so the engine is imported when a test asks for a fixture.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rmq_spark.store.testing.embedded import EmbeddedCluster, EmbeddedStore

# The arguments of the mark: those of RunningCluster that need no object of the test kit.
_ARGUMENTS = ("brokers", "name_servers", "release", "cluster", "is_light")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark `rmq_cluster`, so that `--strict-markers` accepts it."""
    config.addinivalue_line(
        "markers",
        "rmq_cluster(brokers=1, name_servers=1, release='5.3'): the cluster of the fixture rmq_cluster",
    )


@pytest.fixture
def rmq_store(tmp_path: Path) -> "EmbeddedStore":
    """An empty RocketMQ store in `tmp_path`: `path`, `options`, `create_topic`, `send`, `messages`."""
    from rmq_spark.store.testing.embedded import EmbeddedStore

    return EmbeddedStore(tmp_path / "rmq-store")


@pytest.fixture
def rmq_cluster(tmp_path: Path, request: pytest.FixtureRequest) -> "Iterator[EmbeddedCluster]":
    """A small RocketMQ cluster in this process: `name_server`, `options`, `create_topic`, `send`, `messages`.

    It ends with the test. The mark `rmq_cluster` has arguments for it.
    """
    from rmq_spark.store.testing.embedded import EmbeddedCluster

    mark = request.node.get_closest_marker("rmq_cluster")
    settings = {} if mark is None else mark.kwargs
    if mark is not None and (mark.args or settings.keys() - set(_ARGUMENTS)):
        given = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in settings.items())]
        pytest.fail(
            f"the mark rmq_cluster has no such arguments: found ({', '.join(given)}); expected some of "
            f"{', '.join(_ARGUMENTS)}, each with its name. Write for example @pytest.mark.rmq_cluster(brokers=2).",
            pytrace=False,
        )
    with EmbeddedCluster(tmp_path / "rmq-cluster", **settings) as cluster:
        yield cluster
