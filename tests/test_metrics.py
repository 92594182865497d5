"""Metrics of places over HTTP, read with the parser of prometheus_client."""

import re
import socket
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.broken_packages import GONE, break_package
from support.metric_pages import ANY_PORT, scrape, value

import rmq_spark
from rmq_spark.joined_collectors import add_collectors, remove_collectors
from rmq_spark.metric_table import COUNTER, METRICS, make_families
from rmq_spark.metrics import MeasuredPlace, PlaceCollector, load_client, parse_address, serve_delivery_metrics
from rmq_spark.store import Served, lags_at
from rmq_spark.store.places import locate
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.embedded import EmbeddedCluster, EmbeddedStore

CollectorRegistry = pytest.importorskip(
    "prometheus_client", reason="the extra metrics is not installed"
).CollectorRegistry


@pytest.fixture
def store(tmp_path: Path) -> EmbeddedStore:
    """A store in which the group billing has read three of five messages, and has two dead letters."""
    store = EmbeddedStore(tmp_path / "store")
    store.create_topic("orders", queues=1)
    store.send("orders", *(["x" * 10] * 5))
    store.create_topic("%DLQ%billing", queues=1)
    store.send("%DLQ%billing", "dead", "letter")
    rmq_spark.reset_offsets(store.path, "billing", {"orders": {0: 3}})
    return store


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """A cluster in which the group billing has read one of three messages."""
    with EmbeddedCluster(tmp_path / "cluster") as cluster:
        cluster.create_topic("orders", queues=1)
        cluster.send("orders", "one", "two", "three")
        rmq_spark.reset_offsets(name_server=cluster.name_server, group="billing", to={"orders": {"broker-a:0": 1}})
        yield cluster


def place_of(store: EmbeddedStore, *groups: str) -> MeasuredPlace:
    """Return the store with these groups, or with all of them."""
    location = locate({"path": store.path})
    assert location is not None
    return MeasuredPlace(store.path, location, groups or None)


def test_serve_metrics_of_a_store(store: EmbeddedStore) -> None:
    before = set(threading.enumerate())
    with rmq_spark.serve_metrics(ANY_PORT, store.path) as server:
        found = scrape(server.url)
    assert value(found, "rmq_up") == 1
    labels = {"place": store.path, "group": "billing", "topic": "orders", "broker": "", "queue": "0"}
    assert value(found, "rmq_group_lag_messages", **labels) == 2
    assert value(found, "rmq_group_lag_bytes", **labels) > 20
    assert value(found, "rmq_group_oldest_waiting_seconds", **labels) >= 0
    assert value(found, "rmq_group_expired_messages", **labels) == 0
    assert value(found, "rmq_group_offset", **labels) == 3
    assert value(found, "rmq_queue_max_offset", topic="orders") == 5
    assert value(found, "rmq_group_dead_letters_total", group="billing") == 2
    assert set(threading.enumerate()) == before


def test_serve_metrics_of_a_cluster(cluster: EmbeddedCluster) -> None:
    with rmq_spark.serve_metrics(ANY_PORT, name_server=cluster.name_server, groups=["billing"]) as server:
        found = scrape(server.url)
    labels = {"place": cluster.name_server, "group": "billing", "broker": "broker-a", "queue": "0"}
    assert value(found, "rmq_group_lag_messages", topic="orders", **labels) == 2
    assert value(found, "rmq_queue_max_offset", broker="broker-a", topic="orders") == 3


def test_serve_metrics_shows_that_a_cluster_is_away(cluster: EmbeddedCluster, caplog: pytest.LogCaptureFixture) -> None:
    name = cluster.name_server
    with rmq_spark.serve_metrics(ANY_PORT, name_server=name, max_age_s=0, request_timeout_ms=500) as server:
        assert value(scrape(server.url), "rmq_up", place=name) == 1
        cluster.running.name_servers[0].kill()
        for _ in range(2):
            assert scrape(server.url) == {("rmq_up", (("place", name),)): 0}
        assert len([one for one in caplog.records if "was not measured" in one.getMessage()]) == 1
        cluster.running.name_servers[0].start()
        cluster.running.register_all()
        assert value(scrape(server.url), "rmq_up", place=name) == 1


@pytest.fixture
def two_brokers(tmp_path: Path) -> Iterator[RunningCluster]:
    """A cluster in which each of two brokers has ten messages of orders and one retry, and two groups read nothing."""
    with RunningCluster(tmp_path / "cluster", brokers=2, is_light=True) as cluster:
        for topic, count in (("orders", 10), ("%RETRY%billing", 1)):
            cluster.create_topic(topic, queues=1)
            for broker in cluster.brokers:
                cluster.advance(topic, count, broker=broker)
        for group in ("billing", "audit"):
            rmq_spark.reset_offsets(name_server=cluster.address, group=group, to="earliest", topics="orders")
        yield cluster


def test_serve_metrics_counts_the_queues_of_a_broker_that_is_away(two_brokers: RunningCluster) -> None:
    name, groups = two_brokers.address, ["billing", "audit"]
    with rmq_spark.serve_metrics(ANY_PORT, name_server=name, groups=groups, max_age_s=0) as server:
        found = scrape(server.url)
        assert value(found, "rmq_group_away_queues", group="audit", broker="broker-b") == 0
        assert value(found, "rmq_group_retries_total", group="billing") == 2
        two_brokers.brokers["broker-b"].kill()
        for _ in range(2):
            found = scrape(server.url)
            for group in groups:
                assert value(found, "rmq_group_away_queues", group=group, broker="broker-b") == 1
                assert value(found, "rmq_group_away_queues", group=group, broker="broker-a") == 0
                assert value(found, "rmq_group_lag_messages", group=group) == 10
            retries = {labels for metric, labels in found if metric == "rmq_group_retries_total"}
            assert [dict(labels)["group"] for labels in retries] == ["audit"]
        two_brokers.brokers["broker-b"].start()
        two_brokers.register_all()
        found = scrape(server.url)
        assert value(found, "rmq_group_away_queues", group="billing", broker="broker-b") == 0
        assert value(found, "rmq_group_retries_total", group="billing") == 2


def test_serve_metrics_asks_a_broker_that_hangs_once(
    two_brokers: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    broker = two_brokers.brokers["broker-b"]
    broker.freeze()
    groups, place = ["billing", "audit"], two_brokers.address
    with rmq_spark.serve_metrics(
        ANY_PORT, name_server=place, groups=groups, max_age_s=0, request_timeout_ms=300
    ) as server:
        for _ in range(2):
            found = scrape(server.url)
            assert value(found, "rmq_up") == 1
            assert [value(found, "rmq_group_away_queues", group=group, broker="broker-b") for group in groups] == [1, 1]
    assert len(caplog.records) == 1, [one.getMessage() for one in caplog.records]


def test_serve_metrics_measures_only_the_named_groups(store: EmbeddedStore) -> None:
    rmq_spark.reset_offsets(store.path, "audit", "earliest", "orders")
    with rmq_spark.serve_metrics(ANY_PORT, store.path, groups=["audit"]) as server:
        found = scrape(server.url)
    assert {dict(labels).get("group") for _, labels in found} == {"audit", None}


def test_serve_metrics_shows_0_for_groups_without_retries_and_dead_letters(store: EmbeddedStore) -> None:
    rmq_spark.reset_offsets(store.path, "audit", "earliest", "orders")
    with rmq_spark.serve_metrics(ANY_PORT, store.path) as server:
        found = scrape(server.url)
    retries = [value(found, "rmq_group_retries_total", group=group) for group in ("audit", "billing")]
    dead_letters = [value(found, "rmq_group_dead_letters_total", group=group) for group in ("audit", "billing")]
    assert (retries, dead_letters) == ([0, 0], [0, 2])


def test_PlaceCollector_measures_at_most_once_in_max_age_s(store: EmbeddedStore) -> None:
    now_s = [0.0]
    collector = PlaceCollector([place_of(store)], max_age_s=5, monotonic_s=lambda: now_s[0])

    def lag() -> float:
        (family,) = (one for one in collector.collect() if one.name == "rmq_group_lag_messages")
        return float(family.samples[0].value)

    assert lag() == 2
    store.send("orders", "another")
    now_s[0] = 4.9
    assert lag() == 2
    now_s[0] = 5
    assert lag() == 3


def test_PlaceCollector_adds_and_removes_while_it_measures(store: EmbeddedStore) -> None:
    asked: list[Sequence[str] | None] = []
    changes: list[threading.Thread] = []
    other = place_of(store, "billing")

    def measure(location: Any, groups: Sequence[str] | None) -> Any:
        asked.append(groups)
        for change in (lambda: collector.add(other, "second"), lambda: collector.drop("nobody")):
            changes.append(threading.Thread(target=change, daemon=True))
            changes[-1].start()
            changes[-1].join(60)
        return lags_at(location, groups)

    collector = PlaceCollector(max_age_s=1e9, monotonic_s=lambda: 0.0, measure=measure)
    collector.add(place_of(store, "slow"), "first")
    collector.collect()
    assert not any(change.is_alive() for change in changes)
    collector.collect()
    assert asked == [["slow"], ["slow", "billing"]], "the second collection has new groups, so it measures"
    collector.collect()
    assert len(asked) == 2


def test_PlaceCollector_measures_a_place_until_its_last_owner_is_removed(store: EmbeddedStore) -> None:
    place = place_of(store, "billing")
    collector = PlaceCollector(monotonic_s=lambda: 0.0)
    for owner in ("one", "other"):
        collector.add(place, owner)
    collector.drop("one")
    assert "rmq_up" in {family.name for family in collector.collect()}
    collector.drop("other")
    assert collector.collect() == []


def test_PlaceCollector_logs_once_that_a_place_is_away(store: EmbeddedStore, caplog: pytest.LogCaptureFixture) -> None:
    def fail(location: Any, groups: Sequence[str] | None) -> Any:
        if location.read_mode == "auto":
            raise rmq_spark.BackendUnavailableError("no answer")
        return lags_at(location, groups)

    failing = place_of(store, "one")
    answering = replace(failing, location=replace(failing.location, read_mode="mmap"), groups=["billing"])  # type: ignore[type-var]
    collector = PlaceCollector([failing, answering], max_age_s=0, monotonic_s=lambda: 0.0, measure=fail)
    for _ in range(2):
        (up,) = (family for family in collector.collect() if family.name == "rmq_up")
        assert [sample.value for sample in up.samples] == [0]
    assert [one.getMessage() for one in caplog.records] == [
        f"rmq: {store.path} was not measured, and rmq_up is 0: no answer"
    ]


def test_PlaceCollector_asks_for_the_named_groups_at_once(store: EmbeddedStore) -> None:
    asked: list[Sequence[str] | None] = []

    def measure(location: Any, groups: Sequence[str] | None) -> Any:
        asked.append(groups)
        return lags_at(location, groups)

    collector = PlaceCollector([place_of(store, "billing", "audit")], monotonic_s=lambda: 0.0, measure=measure)
    collector.collect()
    assert asked == [["billing", "audit"]]


def test_serve_metrics_logs_an_unknown_group_once(store: EmbeddedStore, caplog: pytest.LogCaptureFixture) -> None:
    with rmq_spark.serve_metrics(ANY_PORT, store.path, groups=["biling", "billing"], max_age_s=0) as server:
        for _ in range(2):
            found = scrape(server.url)
            assert value(found, "rmq_group_lag_messages", group="billing") == 2
            assert value(found, "rmq_up") == 1
    (line,) = (one.getMessage() for one in caplog.records)
    assert line.startswith(f"rmq: the lag of consumer group biling of {store.path} was not measured: ")


def test_a_registry_has_each_metric_of_several_places_once(store: EmbeddedStore, tmp_path: Path) -> None:
    other = EmbeddedStore(tmp_path / "other")
    other.send("orders", "x")
    registry = CollectorRegistry()
    collectors = [PlaceCollector([place_of(one)], monotonic_s=lambda: 0.0) for one in (other, store)]
    with rmq_spark.serve_metrics(ANY_PORT, store.path, registry=registry) as server:
        add_collectors(registry, collectors)
        with urllib.request.urlopen(server.url) as page:
            lines = page.read().decode().splitlines()
        assert lines.count("# TYPE rmq_up gauge") == 1
        assert [line for line in lines if line.startswith("rmq_up{")] == [
            f'rmq_up{{place="{path}"}} 1.0' for path in (store.path, other.path)
        ]
    remove_collectors(registry, collectors)
    remove_collectors(registry, collectors)
    assert list(registry.collect()) == []


def test_serve_delivery_metrics_has_the_totals(store: EmbeddedStore) -> None:
    served = Served()
    with serve_delivery_metrics(ANY_PORT, store.path, served) as server:
        served.messages, served.rounds, served.failures, served.latest_ms = 7, 3, 1, 1500
        found = scrape(server.url)
    assert value(found, "rmq_delivered_messages_total", place=store.path) == 7
    assert value(found, "rmq_delivery_rounds_total") == 3
    assert value(found, "rmq_delivery_failures_total") == 1
    assert value(found, "rmq_delivery_latest_seconds") == 1.5
    assert value(found, "rmq_group_lag_messages", group="billing") == 2


def test_serve_metrics_adds_to_a_registry(store: EmbeddedStore) -> None:
    registry = CollectorRegistry()
    with rmq_spark.serve_metrics(ANY_PORT, store.path, registry=registry) as server:
        assert server.registry is registry
        assert registry.get_sample_value("rmq_up", {"place": store.path}) == 1
    assert registry.get_sample_value("rmq_up", {"place": store.path}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "found neither path and name_server; expected one of them"),
        ({"path": "store", "name_server": "a:1"}, "found both"),
        ({"path": "store", "groups": "billing"}, "groups='billing' is a text"),
        ({"path": "store", "groups": ["a b"]}, "consumer group 'a b' is not a group's name"),
        ({"path": "store", "tls": True, "namespace": "n"}, "serve_metrics: tls, namespace are for a cluster; "),
        ({"name_server": "a:1", "tsl": True}, "tsl"),
    ],
)
def test_serve_metrics_refuses_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(rmq_spark.OptionError, match=message):
        rmq_spark.serve_metrics(ANY_PORT, **arguments)  # type: ignore[arg-type]


def test_serve_metrics_refuses_a_port_in_use_and_a_missing_store(store: EmbeddedStore, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(rmq_spark.OptionError, match=f'cannot serve metrics at "{address}": Address already in use'):
            rmq_spark.serve_metrics(address, store.path)
    with pytest.raises(rmq_spark.StorePathError):
        rmq_spark.serve_metrics(ANY_PORT, tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("host:9464", ("host", 9464)),
        (":80", ("0.0.0.0", 80)),
        ("[::1]:7", ("::1", 7)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
    ],
)
def test_parse_address(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


@pytest.mark.parametrize("text", ["", "9464", "host", "host:", "host:x", "host:70000", "::1:80", "host:-1", 9464])
def test_parse_address_refuses(text: Any) -> None:
    with pytest.raises(rmq_spark.OptionError, match="expected HOST:PORT with a port below"):
        parse_address(text)


def test_serve_metrics_without_the_extra_names_it(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=r'serve_metrics needs .* pip install "rmq-spark\[metrics\]"'):
        rmq_spark.serve_metrics(ANY_PORT, store.path)


def test_an_import_that_fails_inside_prometheus_client_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_package(monkeypatch, tmp_path, "prometheus_client")
    with pytest.raises(ModuleNotFoundError) as caught:
        load_client("serve_metrics")
    assert str(caught.value) == GONE


def test_METRICS_follow_the_conventions_of_Prometheus() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch("rmq(_[a-z]+)+", name), name
        assert name.endswith("_total") == (metric.kind == COUNTER), name
        assert not re.search("_(ms|millis|kb|mb|minutes)(_|$)", name), name
        assert metric.help.endswith("."), name
    assert make_families({}) == []
