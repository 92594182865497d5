"""TLS of the tests' servers."""

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.testing.brokers import RunningCluster, ServerTls
from rmq_spark.store.testing.brokers.raw_client import RawClient

RunCluster = Callable[..., RunningCluster]
CERTIFICATES = Path(__file__).resolve().parents[3] / "support" / "certificates"
AUTHORITY = str(CERTIFICATES / "authority.crt")
MAX = RequestCode.GET_MAX_OFFSET
BIG = 200_000


def server_tls(*, is_enforced: bool = False, client_ca_file: str | None = None, name: str = "localhost") -> ServerTls:
    file = str(CERTIFICATES / f"{name}.pem")
    return ServerTls(file, file, is_enforced=is_enforced, client_ca_file=client_ca_file)


def client_tls() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=AUTHORITY)
    context.check_hostname = False
    return context


def filled(run_cluster: RunCluster, tls: ServerTls) -> RunningCluster:
    cluster = run_cluster(tls=tls)
    cluster.create_topic("orders", 1)
    cluster.send("orders", bytes(BIG))
    return cluster


def test_a_permissive_server_takes_tls_and_plain_connections(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster, server_tls())
    for server, code in ((cluster.broker, MAX), (cluster.name_servers[0], RequestCode.GET_BROKER_CLUSTER_INFO)):
        for tls in (None, client_tls()):
            with RawClient(server.address, tls=tls) as client:
                for _ in range(2):
                    assert client.call(code, {"topic": "orders", "queueId": 0}).code == 0


def test_large_answers_pass_through_tls(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster, server_tls())
    with RawClient(cluster.broker.address, tls=client_tls()) as client:
        body = bytes(client.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": 0}).body)
    assert len(body) > BIG


def test_an_enforcing_server_closes_plain_connections(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster, server_tls(is_enforced=True))
    with RawClient(cluster.broker.address, tls=client_tls()) as client:
        assert client.call(MAX, {"topic": "orders", "queueId": 0}).code == 0
    with RawClient(cluster.broker.address) as client:
        client.send(MAX, {"topic": "orders", "queueId": 0})
        with pytest.raises(ConnectionError):
            client.receive()


def test_a_server_may_demand_a_certificate_of_the_client(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster, server_tls(client_ca_file=AUTHORITY))
    context = client_tls()
    with RawClient(cluster.broker.address, tls=context) as client, pytest.raises((ssl.SSLError, ConnectionError)):
        client.call(MAX, {"topic": "orders", "queueId": 0})
    context.load_cert_chain(str(CERTIFICATES / "client.pem"))
    with RawClient(cluster.broker.address, tls=context) as client:
        assert client.call(MAX, {"topic": "orders", "queueId": 0}).code == 0


def test_a_server_without_tls_closes_such_a_connection(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    with pytest.raises((ssl.SSLError, ConnectionError)):
        RawClient(cluster.broker.address, tls=client_tls())


def test_a_client_refuses_a_server_of_another_authority(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster, server_tls())
    context = ssl.create_default_context(cafile=str(CERTIFICATES / "other-authority.crt"))
    context.check_hostname = False
    with pytest.raises(ssl.SSLCertVerificationError):
        RawClient(cluster.broker.address, tls=context)
    with RawClient(cluster.broker.address, tls=client_tls()) as client:
        assert client.call(MAX, {"topic": "orders", "queueId": 0}).code == 0
