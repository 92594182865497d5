"""Mistakes of a cluster's user: each error names the option, the address, and what to do next.

Most queries are planned and read as by Spark, but without it.
"""

import json
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import StructType

from rmq_spark import explain
from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.errors import RmqError
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster, ServerTls, faults

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = StructType().add("brokerName", "string").add("body", "binary")
CERTIFICATES = Path(__file__).resolve().parents[1] / "support" / "certificates"
# An old offset text, as the checkpoint of a query that read a directory has it.
OF_A_DIRECTORY = {"orders": {"0": 5, "1": 7}, "@": {"v": 1, "start": {"orders": {"0": 0, "1": 7}}}}
NS, BROKER = "<name server>", "<broker-a>"  # stand for addresses in the options and texts below


@pytest.fixture
def cluster(run_cluster: Callable[..., RunningCluster]) -> Iterator[RunningCluster]:
    """Two brokers with one queue of the topic orders, each with one message."""
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=1)
    for broker in cluster.brokers:
        cluster.send("orders", b"x", broker=broker)
    yield cluster
    client._idle.forget()


def with_addresses(cluster: RunningCluster, text: str) -> str:
    """Return a text with the addresses of servers."""
    return text.replace(NS, cluster.address).replace(BROKER, cluster.brokers["broker-a"].address)


def options_of(cluster: RunningCluster, given: dict[str, str]) -> dict[str, str]:
    """Return the options of a query of the topic orders, with those that are `given`."""
    options = {"nameServer": NS, "subscribe": "orders", "requestTimeout": "10s", "brokerDownTimeout": "500ms"}
    if {"assign", "subscribePattern"} & given.keys():
        del options["subscribe"]
    return {name: with_addresses(cluster, text) for name, text in (options | given).items()}


def read(cluster: RunningCluster, **given: str) -> list[dict[str, Any]]:
    """Plan and read a batch query."""
    reader = RmqDataSource(options_of(cluster, given)).reader(SCHEMA)
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def last_line(cluster: RunningCluster, **given: str) -> str:
    """Return the last line of the error that a batch query raises."""
    with pytest.raises(RmqError) as caught:
        read(cluster, **given)
    return str(caught.value).splitlines()[-1]


def require(cluster: RunningCluster, line: str, *parts: str) -> None:
    for part in parts:
        assert with_addresses(cluster, part) in line, line


# The options that are wrong; then what the last line contains: option, address or name, next step.
MISTAKES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "wrong port": (
        {"nameServer": "127.0.0.1:1"},
        ("name server 127.0.0.1:1 cannot be reached: connection refused", "Check the option nameServer", "9876"),
    ),
    "no port": (
        {"nameServer": "ns1"},
        ("the option nameServer: 'ns1' is not an address", "Write for example ns1:9876"),
    ),
    "name of no machine": (
        {"nameServer": "no-such-host.invalid:9876"},
        ("name server no-such-host.invalid:9876 cannot be reached", "Check the option nameServer"),
    ),
    "broker as name server": (
        {"nameServer": BROKER},
        (f"name server {BROKER} answered 3", "so it is a broker", "Set nameServer to the name servers of the cluster"),
    ),
    "unknown topic": (
        {"subscribe": "orderz"},
        ('has a route of topic "orderz"', f"nameServer={NS}", "Check the name (option subscribe)"),
    ),
    "wrong namespace": (
        {"namespace": "team-a"},
        (f"nameServer={NS}, namespace team-a", "the namespace (option namespace=team-a)"),
    ),
    "path and nameServer": ({"path": "/data/store"}, ("path and nameServer are both given", "Keep one of them")),
    "no broker in brokerAddresses": (
        {"brokerAddresses": "localhost:10911"},
        ("brokerAddresses has the part 'localhost:10911'", "for example broker-a=host1:10911"),
    ),
    "address of another broker": (
        {"brokerAddresses": f"broker-b={BROKER}"},
        (f"at {BROKER}, the address of the broker broker-b, answers the broker broker-a", "brokerAddresses=broker-b="),
    ),
    "secret without key": (
        {"secretKey": "planted"},
        ("the option accessKey is missing", "expected both accessKey and secretKey", "Set both"),
    ),
    "queue id without broker": (
        {"startingOffsets": '{"orders": {"0": 0}}'},
        ("startingOffsets: found the queue id 0", "one of the brokers broker-a, broker-b", 'as in "broker-a:0"'),
    ),
    "queue of an unknown broker": (
        {"assign": '{"orders": ["broker-x:0"]}'},
        ('assign: topic "orders" has no queue broker-x:0', "Its queues are: broker-a:0, broker-b:0"),
    ),
    "TLS to a server without": (
        {"tls": "true"},
        (f"name server {NS} did not make a TLS connection", "Set tls=false if the server has no TLS"),
    ),
    "option of a directory": (
        {"readMode": "mmap"},
        ("readMode is not possible here", f"nameServer={NS}", "Leave readMode out"),
    ),
}


@pytest.mark.parametrize(("given", "parts"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_in_options_names_option_address_and_next_step(
    cluster: RunningCluster, given: dict[str, str], parts: tuple[str, ...]
) -> None:
    line = last_line(cluster, **given)
    require(cluster, line, *parts)
    assert "planted" not in line


def test_query_without_a_mistake_reads_both_brokers(cluster: RunningCluster) -> None:
    assert [row["brokerName"] for row in read(cluster)] == ["broker-a", "broker-b"]


@pytest.mark.parametrize("option", ["brokerAddresses", "retiredBrokers"])
def test_misspelled_broker_is_named_in_a_warning_with_the_brokers(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    text = {"brokerAddresses": f"brokera={BROKER}", "retiredBrokers": "brokera"}[option]
    assert len(read(cluster, **{option: text})) == 2
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    require(cluster, line, f"{option} names brokera", "they list the brokers broker-a, broker-b", "Correct the name")


def test_listed_broker_in_options_gives_no_warning(cluster: RunningCluster, caplog: pytest.LogCaptureFixture) -> None:
    assert len(read(cluster, brokerAddresses=f"broker-a={BROKER}", retiredBrokers="broker-b")) == 1
    assert [record.getMessage() for record in caplog.records] == []


def test_pattern_that_matches_nothing_is_named_in_a_warning_with_the_topics(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(cluster, subscribePattern="order") == []
    (line,) = [record.getMessage() for record in caplog.records]
    require(cluster, line, 'subscribePattern="order" matches no topic', "Did you mean orders?", "Topics: orders.")


def test_proxy_as_name_server_lists_no_topics_for_a_pattern(cluster: RunningCluster) -> None:
    for code in (RequestCode.GET_BROKER_CLUSTER_INFO, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER):
        cluster.name_servers[0].fail(code, faults.with_code(3, "request type is not supported"))
    assert len(read(cluster)) == 2
    line = last_line(cluster, subscribePattern="or.*")
    require(cluster, line, f"name server {NS} answered 3", "it is a proxy or a broker", "Set nameServer", "subscribe")


def test_web_server_as_name_server(cluster: RunningCluster) -> None:
    cluster.name_servers[0].fail(None, faults.garbage())
    line = last_line(cluster)
    require(
        cluster,
        line,
        f"name server {NS} answered bytes that are not a frame",
        "HTTP/1.1",
        "Check the option nameServer",
    )


def test_server_that_listens_and_says_nothing(cluster: RunningCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        line = last_line(cluster, nameServer=address, requestTimeout="500ms")
    require(cluster, line, f"name server {address} did not answer within 500 ms", "Check the option nameServer")
    assert "raise the option requestTimeout" in line


def test_firewall_that_drops_packets(cluster: RunningCluster) -> None:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        socket.socket() as first,
        socket.socket() as second,
    ):
        for one in (first, second):  # a full queue of connections: Linux drops what comes next
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        address = f"127.0.0.1:{server.getsockname()[1]}"
        line = last_line(cluster, nameServer=address, requestTimeout="500ms")
    require(cluster, line, f"name server {address} cannot be reached: no connection within 500 ms")
    assert "Check the option nameServer" in line


@pytest.mark.parametrize(
    ("address", "found"),
    [("127.0.0.1:1", "connection refused"), ("no-such-host.invalid:10911", "that this machine can resolve")],
)
def test_advertised_address_that_cannot_be_reached(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture, address: str, found: str
) -> None:
    cluster.brokers["broker-b"].advertise(address)
    line = last_line(cluster)
    parts = (
        f"broker broker-b at {address} cannot be reached",
        found,
        "set the option brokerAddresses=broker-b=host:port",
    )
    require(cluster, line, *parts, "brokerDownTimeout=500ms")
    (warning,) = [record.getMessage() for record in caplog.records if "is away since" in record.getMessage()]
    require(cluster, warning, *parts)


def test_topic_without_read_permission(cluster: RunningCluster) -> None:
    cluster.brokers["broker-a"].set_topic("orders", perm=2)
    line = last_line(cluster)
    require(
        cluster, line, "orders on the broker broker-a has no read permission (perm without 4)", "Ask an administrator"
    )


@pytest.mark.parametrize("release", ["5.3", "4.9"])
def test_account_that_is_missing_wrong_or_lacks_rights(
    run_cluster: Callable[..., RunningCluster], release: str
) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", b"x")
    cluster.broker.accounts = AccountTable(Account("planted-name", "planted-key", topics={"other": "SUB"}))
    wrong = "the account is unknown, or its key is wrong", "Check the options accessKey, secretKey and securityToken"
    lines = {
        last_line(cluster): wrong,
        last_line(cluster, accessKey="planted-name", secretKey="planted"): wrong,
        last_line(cluster, accessKey="planted-name", secretKey="planted-key"): (
            "the account lacks a right",
            "Ask an administrator for the rights: SUB of the topic and the group",
        ),
    }
    for line, parts in lines.items():
        require(cluster, line, f"broker broker-a at {BROKER}", *parts)
        assert "planted" not in line
    client._idle.forget()


def test_missing_credentials_file(cluster: RunningCluster) -> None:
    line = last_line(cluster, credentialsFile="/missing/keys")
    require(cluster, line, "credentialsFile (/missing/keys) cannot be read", "Correct the option")


def test_plain_connection_to_servers_with_tls_and_their_own_certificate(
    run_cluster: Callable[..., RunningCluster],
) -> None:
    file = str(CERTIFICATES / "localhost.pem")
    cluster = run_cluster(tls=ServerTls(file, file, is_enforced=True))
    cluster.create_topic("orders", queues=1)
    require(
        cluster, last_line(cluster), f"name server {NS} did not answer", "set tls=true", "Check the option nameServer"
    )
    line = last_line(cluster, tls="true")
    require(cluster, line, f"name server {NS} was refused: its certificate", "Set tlsCaFile", "tlsVerify=none")
    line = last_line(cluster, tls="true", tlsVerify="none", nameServer=BROKER)
    require(cluster, line, f"name server {BROKER} answered 3", "so it is a broker", "Set nameServer")
    client._idle.forget()


def test_checkpoint_of_a_directory(cluster: RunningCluster) -> None:
    reader = RmqDataSource(options_of(cluster, {})).streamReader(SCHEMA)
    with pytest.raises(RmqError) as caught:
        reader.latestOffset(json.loads(json.dumps(OF_A_DIRECTORY)), reader.getDefaultReadLimit())
    reader.stop()
    require(cluster, str(caught.value).splitlines()[-1], "checkpoint", "broker", "directory")


# Found when the source is created, when a query asks for routes, and when it waits for brokers.
SHOWN_BY_SPARK = {name: MISTAKES[name] for name in ("option of a directory", "broker as name server")}
SHOWN_BY_SPARK["unreachable broker"] = (
    {},
    ("broker broker-b at 127.0.0.1:1 cannot be reached", "set the option brokerAddresses=broker-b=host:port"),
)


def collect_batch(spark: "SparkSession", options: dict[str, str], folder: Path) -> None:
    """Read with a batch query of Spark."""
    spark.read.format("rmq").options(**options).load().collect()


def run_stream(spark: "SparkSession", options: dict[str, str], folder: Path) -> None:
    """Read what is there with a streaming query of Spark."""
    writer = spark.readStream.format("rmq").options(**options).load().writeStream.format("noop")
    writer.option("checkpointLocation", str(folder)).trigger(availableNow=True).start().awaitTermination()


@pytest.mark.spark
@pytest.mark.parametrize("run", [collect_batch, run_stream])
@pytest.mark.parametrize(("given", "parts"), SHOWN_BY_SPARK.values(), ids=SHOWN_BY_SPARK)
def test_last_line_of_a_spark_error_names_option_address_and_next_step(
    spark: "SparkSession",
    cluster: RunningCluster,
    tmp_path: Path,
    given: dict[str, str],
    parts: tuple[str, ...],
    run: Callable[["SparkSession", dict[str, str], Path], None],
) -> None:
    cluster.brokers["broker-b"].advertise("127.0.0.1:1")
    with pytest.raises(Exception, match="rmq_spark") as caught:
        run(spark, options_of(cluster, given), tmp_path / "checkpoint")
    line = str(caught.value).partition("\n SQLSTATE")[0].splitlines()[-1]  # Spark adds more below
    assert explain(caught.value) in line
    require(cluster, line, *parts)
