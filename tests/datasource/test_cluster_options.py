"""Options of a live cluster: which places they fit, which they exclude, and what errors show of secrets."""

import pickle
import re

import pytest
from pyspark.sql.types import StructType
from support.parsed_options import parse_options, parse_sink_options

from rmq_spark.consuming import _check_source
from rmq_spark.datasource.options.option_table import CONNECTION_OPTIONS, OPTIONS, SINK_OPTIONS
from rmq_spark.datasource.options.schema import Field
from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store.backend import Capability, CommitTerms, Guarantee
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.exactly_once.sink import ExactSink
from rmq_spark.store.cluster.sink import ClusterSink
from rmq_spark.store.errors import OptionError

CLUSTER = {"nameServer": "ns1:9876", "subscribe": "orders"}
DIRECTORY = {"path": "/store", "subscribe": "orders"}
SECRETS = {"accessKey": "planted-name", "secretKey": "planted-secret", "securityToken": "planted-token"}
# The default of spark.redaction.regex in Spark 4.
REDACTED = re.compile(r"(?i)secret|password|passwd|token|access[.]?key")

SINK = {"nameServer": "ns1:9876"}
AT_LEAST_ONCE = SINK | {"delivery": "atLeastOnce"}
SENT_BACK = SINK | {"mode": "sendBack", "consumerGroup": "g"}
OF_SINK = [option for option in SINK_OPTIONS if option.needs is Capability.NAME_SERVERS]
OF_EXACT = {option.name: option for option in SINK_OPTIONS if option.conflicts == "delivery=atLeastOnce"}
OF_CLUSTERS = [option for option in OPTIONS if option.needs is Capability.NAME_SERVERS]
OF_DIRECTORIES = [
    option
    for option in OPTIONS
    if option.needs in (Capability.FILES, Capability.SIZES, Capability.KEY_SEARCH, Capability.LEASES)
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


def test_a_write_to_a_place_that_cannot_be_written_is_refused_as_a_capability(monkeypatch) -> None:
    monkeypatch.setattr(ClusterAddress, "capabilities", frozenset({Capability.NAME_SERVERS}))
    message = refusal(SINK | {"delivery": "exactlyOnce"})
    assert message.startswith("a write is not possible here: the cluster at nameServer=ns1:9876 cannot be written; ")
    message = refusal(SENT_BACK)
    assert message.startswith("mode=sendBack is not possible here: the cluster at nameServer=ns1:9876 cannot take ")


def test_options_of_connections_are_the_same_for_the_source_and_the_sink() -> None:
    of_sink = [option for option in SINK_OPTIONS if option.needs is Capability.NAME_SERVERS]
    only_writing = ["maxMessageSize", "stageTopic", "ledgerTopic", "settleTime", "fenceTimeout"]
    assert [option.name for option in of_sink if option not in OPTIONS] == ["brokerDownTimeout", *only_writing]
    only_reading = {"brokerDownTimeout", "retiredBrokers", "pullsInFlight", "pullGroup"}
    assert [option for option in OF_CLUSTERS if option.name not in only_reading] == list(CONNECTION_OPTIONS)
    given = {
        "nameServer": "ns1:9876",
        "brokerAddresses": "broker-a=host:1",
        "tls": "true",
        "tlsVerify": "full",
        "tlsCaFile": "/a",
        "tlsCertFile": "/b",
        "tlsKeyFile": "/c",
        "tlsKeyPassword": "planted",
        "namespace": "team",
        "requestTimeout": "1s",
        "brokerDownTimeout": "10m",
    } | SECRETS
    assert {*given, "credentialsFile", *only_writing} == {option.name for option in of_sink}
    reading = parse_options(given | {"subscribe": "orders"}, 0)
    assert parse_sink_options(given).location == reading.location


@pytest.mark.parametrize("option", [one for one in OF_SINK if one.name != "nameServer"], ids=lambda one: one.name)
def test_option_of_a_cluster_is_refused_in_a_write_with_path(option) -> None:
    beside = {"tlsCertFile": "/a", "tlsKeyFile": "/b"} if option.name in ("tlsCertFile", "tlsKeyFile") else {}
    refused = "tlsCertFile" if beside else option.name
    with pytest.raises(OptionError, match=f'^{refused} is not possible here: the store at "/store" cannot be reached '):
        parse_sink_options({"path": "/store"} | beside | {option.name: option.example})


@pytest.mark.parametrize(
    ("name", "cannot"),
    [
        ("commitLogPath", Capability.FILES),
        ("flush", Capability.FILES),
        ("stagingRetention", Capability.FILES),
        ("lockTimeout", Capability.FILES),
        ("allowNetworkStore", Capability.FILES),
    ],
)
def test_option_of_a_directory_is_refused_in_a_write_to_a_cluster(name, cannot) -> None:
    (option,) = [option for option in SINK_OPTIONS if option.name == name]
    with pytest.raises(OptionError) as caught:
        parse_sink_options(AT_LEAST_ONCE | {name: option.example})
    assert str(caught.value) == (
        f"{name} is not possible here: the cluster at nameServer=ns1:9876 cannot {cannot}; expected a place that can. "
        f"Leave {name} out."
    )


def test_other_options_of_the_sink_are_accepted_for_a_cluster() -> None:
    refused = {"path", "commitLogPath", "flush", "stagingRetention", "lockTimeout", "allowNetworkStore"}
    others = [option for option in SINK_OPTIONS if option.requires is None and option.needs is None]
    given = {option.name: option.example for option in others if option.name not in refused | {"mode"}}
    assert given.keys() == {"delivery", "txnAppId", "txnVersion"}
    of_send = {option.name: option.example for option in SINK_OPTIONS if option.requires == "mode=send"}
    options = parse_sink_options(SINK | given | of_send)
    sink = options.sink()
    assert (sink.terms.topic, sink.terms.queue_count, sink.terms.compression) == ("orders", 8, "zlib")
    assert (sink.terms.max_message_bytes, sink.guarantee) == (1 << 20, Guarantee.AT_LEAST_ONCE)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("text", ["0", "16m", "15361k"])
def test_maxMessageSize_is_limited_by_the_size_of_requests(text) -> None:
    with pytest.raises(OptionError, match=f'^maxMessageSize="{text}": expected a size from 1 byte to 15m: '):
        parse_sink_options(AT_LEAST_ONCE | {"maxMessageSize": text})
    assert parse_sink_options(AT_LEAST_ONCE | {"maxMessageSize": "15m"}).max_message_bytes == 15 << 20
    assert parse_sink_options(AT_LEAST_ONCE).sink().terms.max_message_bytes == 4 << 20


def refusal(given) -> str:
    with pytest.raises(OptionError) as caught:
        parse_sink_options(given | SECRETS if "nameServer" in given else given)
    assert "planted" not in str(caught.value)
    return str(caught.value)


def test_delivery_to_a_cluster_is_exactlyOnce_unless_another_one_is_given() -> None:
    for given in ({}, {"Delivery": "EXACTLYONCE"}):
        sink = parse_sink_options(SINK | given).sink()
        assert isinstance(sink, ExactSink)
        assert sink.guarantee is sink.terms.guarantee is Guarantee.EXACTLY_ONCE
        assert sink.commit_terms == CommitTerms()
    assert isinstance(parse_sink_options(AT_LEAST_ONCE).sink(), ClusterSink)


def test_options_of_exactlyOnce_are_in_the_terms_of_its_commit() -> None:
    given = {
        "onBatchConflict": "skip",
        "onBatchGap": "continue",
        "stageTopic": "SPARK_STAGE",
        "ledgerTopic": "SPARK_LEDGER",
        "settleTime": "30s",
        "fenceTimeout": "10m",
        "txnAppId": "billing",
        "txnVersion": "7",
    }
    options = parse_sink_options(SINK | given)
    terms = options.commit_terms()
    assert terms == CommitTerms(
        on_conflict="skip",
        on_gap="continue",
        is_transaction=True,
        stage_topic="SPARK_STAGE",
        ledger_topic="SPARK_LEDGER",
        settle_ms=30_000,
        fence_timeout_ms=600_000,
    )
    assert options.sink().commit_terms == terms
    assert pickle.loads(pickle.dumps(options)) == options
    assert set(OF_EXACT) == {"onBatchConflict", "onBatchGap", "stageTopic", "ledgerTopic", "settleTime", "fenceTimeout"}


@pytest.mark.parametrize("option", OF_EXACT.values(), ids=OF_EXACT)
def test_option_of_exactlyOnce_is_refused_where_no_batch_is_recorded(option) -> None:
    for text in (option.example, option.default):
        assert refusal(AT_LEAST_ONCE | {option.name: text}) == (
            f"{option.name} has no effect with delivery=atLeastOnce, which keeps no record of batches. Leave "
            f"{option.name} out, or delivery."
        )
        assert refusal(SENT_BACK | {option.name: text}) == (
            f"{option.name} has no effect with mode=sendBack in a cluster, which keeps no record of batches. Leave "
            f"{option.name} out."
        )


@pytest.mark.parametrize("compression", ["zlib", "lz4", "zstd"])
def test_exactlyOnce_refuses_compression_in_a_cluster_only(compression) -> None:
    assert refusal(SINK | {"compression": compression}) == (
        f"compression={compression} is not possible with delivery=exactlyOnce to a cluster: a broker stores the rows "
        "of a batch as they are; expected compression=none. Compress the column body, or add delivery=atLeastOnce."
    )
    assert parse_sink_options(SINK | {"compression": "none"}).sink().terms.compression is None
    assert parse_sink_options(AT_LEAST_ONCE | {"compression": compression}).sink().terms.compression == compression
    assert parse_sink_options({"path": "/x", "compression": compression}).sink().terms.compression == compression


def test_delivery_of_a_directory_is_exactlyOnce() -> None:
    for given in ({}, {"mode": "sendBack", "consumerGroup": "g"}):
        assert refusal({"path": "/store", "delivery": "atLeastOnce"} | given) == (
            'delivery=atLeastOnce is not possible here: the store at "/store" stores each batch exactly once; expected '
            "a cluster (option nameServer), or no delivery. Leave delivery out."
        )
        parse_sink_options({"path": "/store", "delivery": "exactlyOnce"} | given)


def test_sendBack_in_a_cluster_refuses_delivery_exactlyOnce() -> None:
    parse_sink_options(SENT_BACK)
    parse_sink_options(SENT_BACK | {"delivery": "atLeastOnce"})
    assert refusal(SENT_BACK | {"delivery": "exactlyOnce"}) == (
        "mode=sendBack with delivery=exactlyOnce is not possible here: the cluster at nameServer=ns1:9876 does not "
        "recognise a message that was sent back before; expected no delivery. Leave delivery out: a row that Spark "
        "writes again after a failure is then sent back again."
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"path": "/store"}, "path and nameServer are both given: a query has one place"),
        ({"tlsVerify": "full"}, "tlsVerify: found no tls=true"),
        ({"subscribe": "orders"}, 'unknown option "subscribe". It is for reading'),
        ({"pullGroup": "group"}, 'unknown option "pullGroup". It is for reading'),
        ({"secretKey": " "}, 'secretKey="…": expected a text that is not empty'),
    ],
)
def test_options_of_a_write_to_a_cluster_that_contradict_each_other_are_refused(given, message) -> None:
    with pytest.raises(OptionError) as caught:
        parse_sink_options(AT_LEAST_ONCE | SECRETS | given)
    assert str(caught.value).startswith(message)
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize("option", [one for one in OPTIONS if one.is_secret], ids=lambda one: one.name)
def test_spark_redacts_the_value_of_each_secret_option(option) -> None:
    assert REDACTED.search(option.name)


def test_secret_options_are_those_of_account_and_key() -> None:
    assert {option.name for option in OPTIONS if option.is_secret} == {*SECRETS, "tlsKeyPassword"}


@pytest.mark.parametrize(
    ("path", "name_server", "model", "message"),
    [
        (None, "ns1:9876", "orderly", "cannot suspend queues for an orderly listener; .*model=.concurrently"),
        (None, "ns2:9876", "concurrently", 'name_server="ns2:9876" is not where the stream reads: nameServer=ns1:9876'),
        ("/store", None, "concurrently", 'path="/store" is not where the stream reads: nameServer=ns1:9876'),
    ],
)
def test_consume_in_a_cluster_refuses_other_places_and_orderly_listeners(path, name_server, model, message) -> None:
    source = parse_options(CLUSTER | {"consumerGroup": "billing"}, 0)
    assert _check_source(source, None, "ns1:9876", "billing", "concurrently") == source.location
    with pytest.raises(OptionError, match=message):
        _check_source(source, path, name_server, "billing", model)


def test_consume_of_a_directory_refuses_a_name_server() -> None:
    source = parse_options(DIRECTORY | {"consumerGroup": "billing"}, 0)
    with pytest.raises(OptionError, match="is not where the stream reads: path=/store"):
        _check_source(source, None, "ns1:9876", "billing", "concurrently")


def test_sendBack_in_a_cluster_needs_the_column_brokerName() -> None:
    given = ("commitLogOffset bigint", "topic string", "queueId int", "queueOffset bigint", "reconsumeTimes int")
    fields = [Field(*text.split(), nullable=True) for text in given]
    with pytest.raises(OptionError, match="without the column brokerName"):
        parse_sink_options(SENT_BACK).check_columns(fields)
    parse_sink_options(SENT_BACK).check_columns([*fields, Field("brokerName", "string", nullable=True)])
    parse_sink_options({"path": "/store", "mode": "sendBack", "consumerGroup": "g"}).check_columns(fields)


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
