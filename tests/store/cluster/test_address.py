"""The location of a cluster: its texts, its pickled forms, and the parsers of its options."""

import pickle
from dataclasses import replace

import pytest

from rmq_spark.store.backend import Capability
from rmq_spark.store.cluster.address import (
    ClusterAddress,
    Credentials,
    TlsOptions,
    join_address,
    parse_broker_addresses,
    parse_name_servers,
    split_address,
)
from rmq_spark.store.errors import OptionError

SECRETS = ("planted-access", "planted-secret", "planted-token", "planted-password")
FULL = ClusterAddress(
    ("ns1:9876", "ns2:9876"),
    (("broker-a", "host1:10911"),),
    Credentials(*SECRETS[:3]),
    TlsOptions(ca_file="/ca.pem", key_password=SECRETS[3]),
    namespace="shop",
)


def has_secret(data: str | bytes) -> bool:
    raw = data.encode() if isinstance(data, str) else data
    return any(secret.encode() in raw for secret in SECRETS)


@pytest.mark.parametrize(
    "text", [repr, str, ClusterAddress.describe, ClusterAddress.mark, ClusterAddress.sharing_advice]
)
def test_texts_of_an_address_show_no_secret(text) -> None:
    assert not has_secret(str(text(FULL)))


def test_describe_names_the_servers_and_the_namespace() -> None:
    assert FULL.describe() == "the cluster at nameServer=ns1:9876;ns2:9876, namespace shop"


def test_pickled_address_is_equal_and_has_the_secrets() -> None:
    copy = pickle.loads(pickle.dumps(FULL))
    assert copy == FULL
    assert hash(copy) == hash(FULL)
    assert copy.credentials.secret_key == SECRETS[1]


def test_without_secrets_pickles_no_secret_and_is_completed_in_the_task() -> None:
    data = pickle.dumps(FULL.without_secrets())
    assert not has_secret(data)
    assert pickle.loads(data).with_secrets_of(FULL) == FULL


def test_without_secrets_says_that_keys_are_withheld() -> None:
    held = FULL.without_secrets().credentials
    assert held is not None
    assert held.is_withheld


def test_without_secrets_keeps_the_path_of_a_file() -> None:
    address = ClusterAddress(("ns:1",), credentials=Credentials(file="/etc/keys"))
    assert address.without_secrets() == address


def test_mark_is_read_again() -> None:
    tls = FULL.tls and replace(FULL.tls, key_password=None)
    assert ClusterAddress.of_mark(FULL.mark()) == ClusterAddress(
        FULL.name_servers, FULL.broker_addresses, None, tls, namespace="shop"
    )
    plain = ClusterAddress(("ns:1",), credentials=Credentials(file="/etc/keys"), tls=TlsOptions("none"))
    assert plain.mark() == {"nameServer": "ns:1", "credentialsFile": "/etc/keys", "tlsVerify": "none"}
    assert ClusterAddress.of_mark(plain.mark()) == plain
    pulls = ClusterAddress(("ns:1",), pull_group="billing-reader")
    assert ClusterAddress.of_mark(pulls.mark()) == pulls


def test_capabilities_have_writing_with_both_guarantees() -> None:
    assert {Capability.BROKERS, Capability.WRITES, Capability.SEND_BACK} <= FULL.capabilities
    assert {Capability.EXACTLY_ONCE, Capability.AT_LEAST_ONCE} <= FULL.capabilities
    assert not FULL.capabilities & {Capability.SUSPENSIONS, Capability.FILES}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ns1:9876", ("ns1", 9876)),
        (" 10.0.0.5:10911 ", ("10.0.0.5", 10911)),
        ("[::1]:9876", ("::1", 9876)),
        ("[fe80:0:0:0:1:2:3:4%eth0]:10911", ("fe80:0:0:0:1:2:3:4%eth0", 10911)),
        ("fe80::1:10911", ("fe80::1", 10911)),
    ],
)
def test_split_address_takes_what_routes_contain(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected
    assert split_address(join_address(*expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "ns1", "ns1:", ":9876", "ns1:x", "ns1:0", "ns1:65536", "ns1:٣", "http://a:80", "a b:1"]
)
def test_split_address_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        split_address(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ns1:9876", ("ns1:9876",)),
        ("ns2:9876; ns1:9876,ns2:9876;", ("ns2:9876", "ns1:9876")),
        ("[::1]:9876", ("[::1]:9876",)),
    ],
)
def test_parse_name_servers_reads_a_list(text: str, expected: tuple[str, ...]) -> None:
    assert parse_name_servers(text) == expected


@pytest.mark.parametrize("text", ["", " ; ", "ns1", "::1:9876", "http://ns1:9876"])
def test_parse_name_servers_refuses_and_names_the_option(text: str) -> None:
    with pytest.raises(OptionError, match="nameServer"):
        parse_name_servers(text)


def test_parse_broker_addresses_reads_pairs() -> None:
    found = parse_broker_addresses("broker-b=h:1;broker=a=[::1]:2")
    assert found == (("broker-b", "h:1"), ("broker=a", "[::1]:2"))
    assert parse_broker_addresses("") == ()


@pytest.mark.parametrize("text", ["broker-a", "=h:1", "broker-a=h", "a=h:1;a=h:2"])
def test_parse_broker_addresses_refuses_and_names_the_option(text: str) -> None:
    with pytest.raises(OptionError, match="brokerAddresses"):
        parse_broker_addresses(text)


def test_credentials_come_from_options_before_the_environment() -> None:
    environment = {"RMQ_ACCESS_KEY": "e", "RMQ_SECRET_KEY": "f"}
    assert Credentials.of_options("a", "b", "c", None, environment) == Credentials("a", "b", "c")
    assert Credentials.of_options(None, None, None, "/f", environment) == Credentials(file="/f")
    assert Credentials.of_options(None, None, None, None, environment) == Credentials("e", "f")
    assert Credentials.of_options(None, None, None, None, {}) is None


@pytest.mark.parametrize(
    ("options", "environment", "named"),
    [
        (("planted-access", None, None, None), {}, "secretKey"),
        ((None, "planted-secret", None, None), {}, "accessKey"),
        ((None, None, "planted-token", None), {}, "accessKey"),
        ((None, "planted-secret", None, "/f"), {}, "credentialsFile"),
        ((None, None, None, None), {"RMQ_SECRET_KEY": "planted-secret"}, "RMQ_ACCESS_KEY"),
        (("a", "planted-secret\udc80", None, None), {}, "UTF-8"),
    ],
)
def test_credentials_that_are_incomplete_are_refused_without_secrets(
    options: tuple[str | None, ...], environment: dict[str, str], named: str
) -> None:
    with pytest.raises(OptionError, match=named) as error:
        Credentials.of_options(*options, environment)
    assert not has_secret(str(error.value))
