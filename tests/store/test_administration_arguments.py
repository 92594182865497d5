"""The functions for programs that administrate a cluster: arguments that are refused before anything is asked."""

from collections.abc import Callable
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.testing.brokers import RunningCluster

NOWHERE = "127.0.0.1:9"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda: rmq_spark.create_cluster_topic(NOWHERE, "orders", brokers="broker-a"),
            r"create_cluster_topic: brokers='broker-a' is a text; expected a list of names, such as \['broker-a'\]",
        ),
        (
            lambda: rmq_spark.cluster_rates(NOWHERE, "orders"),
            r"cluster_rates: topics='orders' is a text; expected a list of names, such as \['orders'\]",
        ),
        (
            lambda: rmq_spark.create_cluster_topic(NOWHERE, "orders", read_queues=-5),
            "read_queues=-5 must be an integer",
        ),
        (lambda: rmq_spark.create_cluster_topic(NOWHERE, "orders", write_queues=65_537), "an integer from 0 to 65536"),
        (lambda: rmq_spark.create_cluster_topic(NOWHERE, "orders", perm=99), "perm=99 must be an integer from 0 to 7"),
        (lambda: rmq_spark.delete_cluster_topic(NOWHERE, ""), "topic '' is not a topic's name"),
        (lambda: rmq_spark.cluster_routes(NOWHERE, ""), "topic '' is not a topic's name"),
        (lambda: rmq_spark.cluster_rates(NOWHERE, ["a b"]), "topic 'a b' is not a topic's name"),
        (lambda: rmq_spark.create_cluster_topic(NOWHERE, None), "a topic's name is a text, found None"),
    ],
)
def test_a_wrong_name_is_refused_before_a_server_is_asked(call: Callable[[], Any], expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        call()


def test_cluster_rates_names_a_topic_with_a_wrong_name(run_cluster: Callable[..., RunningCluster]) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", queues=1)
    first, second = rmq_spark.cluster_rates(cluster.address, ["", "orders"])
    assert (first.topic, first.problem is None) == ("", False)
    assert (second.topic, second.problem) == ("orders", None)
    with pytest.raises(NotFoundError):
        rmq_spark.delete_cluster_topic(cluster.address, "gone")
