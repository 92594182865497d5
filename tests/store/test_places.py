"""places: which location the options of a query name, and which one its progress names."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.backend import Capability
from rmq_spark.store.cluster.address import ClusterAddress, Credentials, TlsOptions
from rmq_spark.store.errors import OptionError
from rmq_spark.store.local.directory import StoreDirectory
from rmq_spark.store.places import from_mark, locate, locate_cluster, with_wait

SERVERS = {"nameServer": "ns1:9876;ns2:9876"}
KEYS = {"accessKey": "reader", "secretKey": "planted-secret", "securityToken": "planted-token"}
ACCOUNT = Credentials("reader", "planted-secret", "planted-token")
TLS = {"tls": True, "tlsKeyPassword": "planted-password"}


def test_locate_returns_none_if_no_option_names_a_place() -> None:
    assert locate({"subscribe": ("orders",)}, {}) is None


def test_locate_returns_the_cluster_that_the_options_name() -> None:
    given = SERVERS | {
        "brokerAddresses": "broker-a=host1:10911",
        "namespace": "team",
        "requestTimeout": 5000,
        "brokerDownTimeout": 60_000,
        "retiredBrokers": ("broker-b",),
        "pullsInFlight": 8,
        "pullGroup": "pullers",
    }
    assert locate(given, {}) == ClusterAddress(
        ("ns1:9876", "ns2:9876"),
        (("broker-a", "host1:10911"),),
        None,
        None,
        "team",
        5000,
        60_000,
        ("broker-b",),
        8,
        "pullers",
    )


@pytest.mark.parametrize(
    ("given", "group"), [({}, "rmq-spark-reader"), ({"consumerGroup": "billing"}, "billing-reader")]
)
def test_locate_names_the_pull_group_after_the_consumer_group(given: dict[str, Any], group: str) -> None:
    location = locate(SERVERS | given, {})
    assert isinstance(location, ClusterAddress)
    assert location.pull_group == group


@pytest.mark.parametrize(
    ("arguments", "group", "found"),
    [
        ({}, None, "rmq-spark-reader"),
        ({}, "billing", "billing-reader"),
        ({"pull_group": "allowed"}, None, "allowed"),
        ({"pull_group": "allowed"}, "billing", "allowed"),
    ],
)
def test_program_names_the_pull_group_or_it_follows_from_the_group(
    arguments: dict[str, str], group: str | None, found: str
) -> None:
    assert locate_cluster("ns1:9876", arguments, {}, group=group).pull_group == found


@pytest.mark.parametrize(
    ("given", "environment", "credentials"),
    [
        (KEYS, {}, ACCOUNT),
        ({}, {"RMQ_ACCESS_KEY": "a", "RMQ_SECRET_KEY": "b"}, Credentials("a", "b")),
        (
            KEYS,
            {"RMQ_ACCESS_KEY": "a", "RMQ_SECRET_KEY": "b"},
            Credentials("reader", "planted-secret", "planted-token"),
        ),
        ({"credentialsFile": "keys"}, {}, Credentials(file=str(Path("keys").absolute()))),
    ],
)
def test_locate_finds_the_account_in_options_or_the_environment(given, environment, credentials) -> None:
    location = locate(SERVERS | given, environment)
    assert isinstance(location, ClusterAddress)
    assert location.credentials == credentials


def test_locate_makes_paths_of_tls_files_absolute() -> None:
    location = locate(SERVERS | {"tls": True, "tlsVerify": "full", "tlsCaFile": "ca.pem"}, {})
    assert isinstance(location, ClusterAddress)
    assert location.tls == TlsOptions("full", str(Path("ca.pem").absolute()))


def test_locate_refuses_a_secret_key_without_an_access_key() -> None:
    with pytest.raises(OptionError, match="accessKey is missing") as caught:
        locate(SERVERS | {"secretKey": "planted-secret"}, {})
    assert "planted" not in str(caught.value)


def test_without_secrets_keeps_them_out_of_pickles_and_with_secrets_of_brings_them_back() -> None:
    location = locate(SERVERS | KEYS | TLS, {})
    assert isinstance(location, ClusterAddress)
    shown = location.without_secrets()
    for text in (pickle.dumps(shown).decode("latin-1"), repr(location), location.describe(), str(location.mark())):
        assert "planted" not in text
    assert pickle.loads(pickle.dumps(shown)).with_secrets_of(location) == location


def test_from_mark_returns_the_cluster_with_the_account_of_the_environment() -> None:
    location = locate(SERVERS | KEYS | {"namespace": "team"}, {})
    assert location is not None
    mark = json.loads(json.dumps(location.mark()))
    found = from_mark(mark, {"RMQ_ACCESS_KEY": "a", "RMQ_SECRET_KEY": "b"})
    reader = {"namespace": "team", "pull_group": "rmq-spark-reader"}
    assert found == ClusterAddress(("ns1:9876", "ns2:9876"), credentials=Credentials("a", "b"), **reader)
    file = Credentials(file="/etc/keys")
    mark = ClusterAddress(("ns1:9876",), credentials=file).mark()
    assert from_mark(mark, {"RMQ_ACCESS_KEY": "a", "RMQ_SECRET_KEY": "b"}) == ClusterAddress(
        ("ns1:9876",), credentials=file
    )


def test_with_wait_sets_the_wait_of_a_cluster_only() -> None:
    found = with_wait(ClusterAddress(("ns1:9876",), broker_down_timeout_ms=5), 0)
    assert found == ClusterAddress(("ns1:9876",), broker_down_timeout_ms=0)
    assert with_wait(StoreDirectory("/x"), 0) == StoreDirectory("/x")


def test_a_cluster_is_reached_through_a_name_server_and_can_be_written() -> None:
    capabilities = ClusterAddress(("ns1:9876",)).capabilities
    assert {Capability.BROKERS, Capability.NAME_SERVERS, Capability.WRITES} <= capabilities


def test_arguments_of_tls_without_tls_are_refused() -> None:
    with pytest.raises(OptionError, match=r"tls_ca_file: found no tls=True, .* not encrypted"):
        locate_cluster("ns1:9876", {"tls_ca_file": "/ca.pem"}, {})


ADDRESSES = ["127.0.0.1:9876", "ns-1.example.com:9876;ns2:9876", "ns1:9876, ns2:9876", "[::1]:9876"]


@pytest.mark.parametrize("path", ADDRESSES)
def test_an_address_in_place_of_a_path_creates_no_folder(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: locate({"path": path}, {}),
        lambda: rmq_spark.open_store(path),
        lambda: rmq_spark.open_reader(path),
        lambda: rmq_spark.open_consumer(path),
        lambda: rmq_spark.create_store(path),
        lambda: rmq_spark.check(Path(path)),
    ]
    for call in calls:
        with pytest.raises(OptionError, match="looks like the address of a name server, and there is no such folder"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_may_be_named_like_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with rmq_spark.open_store("./ns1:9876") as store:
        store.create_topic("orders", 1)
    with rmq_spark.open_store("ns1:9876") as store:
        assert store.topics() == ["orders"]
    assert isinstance(locate({"path": "ns1:9876"}, {}), StoreDirectory)
    assert isinstance(locate({"path": "orders:today"}, {}), StoreDirectory)
