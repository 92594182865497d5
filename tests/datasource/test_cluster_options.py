"""Options of a live cluster: which places they fit, which they exclude, and what errors show of secrets."""

import pickle
import re

import pytest
from pyspark.sql.types import StructType
from support.parsed_options import parse_options, parse_sink_options

from rmq_spark.consuming import _check_source
from rmq_spark.datasource.options.option_table import OPTIONS
from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store.backend import Capability
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.errors import OptionError

CLUSTER = {"nameServer": "ns1:9876", "subscribe": "orders"}
DIRECTORY = {"path": "/store", "subscribe": "orders"}
SECRETS = {"accessKey": "planted-name", "secretKey": "planted-secret", "securityToken": "planted-token"}
# The default of spark.redaction.regex in Spark 4.
REDACTED = re.compile(r"(?i)secret|password|passwd|token|access[.]?key")

OF_CLUSTERS = [option for option in OPTIONS if option.needs is Capability.NAME_SERVERS]
OF_DIRECTORIES = [
    option
    for option in OPTIONS
    if option.needs in (Capability.FILES, Capability.SIZES, Capability.KEY_SEARCH, Capability.GROUPS)
]


@pytest.mark.parametrize("option", [one for one in OF_CLUSTERS if one.name != "nameServer"], ids=lambda one: one.name)
def test_option_of_a_cluster_is_refused_with_path(option) -> None:
    beside = {"tlsCertFile": "/a", "tlsKeyFile": "/b"} if option.name in ("tlsCertFile", "tlsKeyFile") else {}
    refused = "tlsCertFile" if beside else option.name
    with pytest.raises(OptionError, match=f'^{refused} is not possible here: the store at "/store" cannot be reached '):
        parse_options(DIRECTORY | beside | {option.name: option.example}, 0)


@pytest.mark.parametrize("option", OF_DIRECTORIES, ids=lambda one: one.name)
def test_option_of_a_directory_is_refused_with_name_server(option) -> None:
    with pytest.raises(OptionError, match=f"^{option.name} is not possible here: the cluster at nameServer=ns1:9876 "):
        parse_options(CLUSTER | {option.name: option.example}, 0)


GROUP = CLUSTER | {"consumerGroup": "billing"}


def test_stream_in_a_group_is_refused_unless_it_only_begins_at_the_group() -> None:
    with pytest.raises(OptionError, match=r"^consumerGroup in a stream without startingOffsets=group is not possible "):
        parse_options(GROUP, 0).check_stream()
    given = GROUP | {"startingOffsets": "group", "groupFallback": "earliest", "maxBytesPerTrigger": "1m"}
    options = parse_options(given, 0)
    options.check_stream()
    assert (options.is_member, options.begins_at_group, options.retry_topic) == (False, True, None)
    options.check_batch()


def test_stream_in_a_group_of_a_directory_is_a_member() -> None:
    options = parse_options(DIRECTORY | {"consumerGroup": "billing", "startingOffsets": "group"}, 0)
    assert (options.is_member, options.retry_topic) == (True, "%RETRY%billing")


REFUSED = {
    "path and nameServer": (CLUSTER | {"path": "/store"}, "path and nameServer are both given"),
    "TLS options without tls": (CLUSTER | {"tlsVerify": "full"}, "tlsVerify: found no tls=true"),
    "a certificate without a key": (CLUSTER | {"tls": "true", "tlsCertFile": "/a"}, "tlsCertFile is given without"),
    "authorities that are not used": (
        CLUSTER | {"tls": "true", "tlsVerify": "none", "tlsCaFile": "/a"},
        "tlsCaFile has no effect with tlsVerify=none",
    ),
    "a port that is none": (CLUSTER | {"nameServer": "ns1:port"}, "nameServer.*'ns1:port' is not an address"),
    "a broker without an address": (
        CLUSTER | {"brokerAddresses": "broker-a"},
        "brokerAddresses has the part 'broker-a'",
    ),
    "a file and keys": (CLUSTER | SECRETS | {"credentialsFile": "/keys"}, "credentialsFile and accessKey, secretKey"),
    "a blank secret": (CLUSTER | SECRETS | {"secretKey": " "}, 'secretKey="…": expected a text that is not empty'),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_contradict_each_other_are_refused_without_secrets(given, message) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        parse_options(given, 0)
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topic": "orders"}, "^a write is not possible here: the cluster at nameServer=ns1:9876 cannot be written; "),
        (
            {"mode": "sendBack", "consumerGroup": "g"},
            "^mode=sendBack is not possible here: the cluster at nameServer=ns1:9876 cannot take messages back ",
        ),
    ],
)
def test_a_write_to_a_cluster_is_refused_as_a_capability(given, message) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        parse_sink_options({"NAMESERVER": "ns1:9876"} | SECRETS | given)
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize("option", [one for one in OPTIONS if one.is_secret], ids=lambda one: one.name)
def test_spark_redacts_the_value_of_each_secret_option(option) -> None:
    assert REDACTED.search(option.name)


def test_secret_options_are_those_of_account_and_key() -> None:
    assert {option.name for option in OPTIONS if option.is_secret} == {*SECRETS, "tlsKeyPassword"}


def test_consume_is_refused_for_a_stream_of_a_cluster() -> None:
    with pytest.raises(
        OptionError, match=r"^consume\(\) is not possible here: the cluster at .* cannot take messages "
    ):
        _check_source(parse_options(CLUSTER, 0), "/store", "billing", "concurrently")


def test_broker_name_is_a_default_column_of_a_cluster(monkeypatch) -> None:
    monkeypatch.setattr(ClusterAddress, "open", lambda self: NoBackend())
    assert RmqDataSource(CLUSTER).schema().startswith("topic string, brokerName string, queueId int, ")


class NoBackend:
    """A backend of which only the identity is asked."""

    def identity(self) -> None:
        return None

    def close(self) -> None:
        return None


def test_reader_has_the_secrets_that_partitions_lack() -> None:
    reader = RmqDataSource(CLUSTER | SECRETS).reader(StructType().add("body", "binary"))
    copy = pickle.loads(pickle.dumps(reader))
    assert copy._settings.secrets.credentials.secret_key == "planted-secret"
    plain = RmqDataSource(CLUSTER).reader(StructType().add("body", "binary"))
    assert plain._settings.secrets is None


@pytest.mark.parametrize(("given", "wait_ms"), [({}, 300_000), ({"brokerDownTimeout": "0"}, 0)])
def test_tasks_of_a_batch_query_wait_five_minutes_for_a_broker(given, wait_ms) -> None:
    reader = RmqDataSource(CLUSTER | given).reader(StructType().add("body", "binary"))
    assert reader._options.location.broker_down_timeout_ms == wait_ms
