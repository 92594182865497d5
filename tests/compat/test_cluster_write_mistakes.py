"""Mistakes of users who write to a live cluster, by Spark and by programs: each is answered by name, and quickly.

Every answer says what was found, what was expected and what to do next. A refused write stores nothing.
"""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import support.loopback_server
from compat_kit import secured
from compat_kit.clusters import TwoBrokers, run_reader
from compat_kit.deliveries import pull_deliveries
from compat_kit.our_stores import broker_conf
from compat_kit.rocketmq import Java
from compat_kit.secured import CLOSED, READ, TlsFiles

pytestmark = pytest.mark.compat

CERTIFICATES = Path(support.loopback_server.__file__).parent / "certificates"
_HERE = {"nameServer": "NAME_SERVER", "delivery": "atLeastOnce", "topic": "open", "requestTimeout": "5s"}
_BODY = "body binary"
_LIMIT = 4 << 20
_REGISTERED_S = 90
# Options, rows and schema of a write by Spark, and the text of its error.
SPARK_CASES: dict[str, tuple[dict[str, str], list[dict[str, Any]], str, str]] = {
    "no delivery": ({"nameServer": "NAME_SERVER", "topic": "open"}, [{"body": b"x"}], _BODY, "delivery=atLeastOnce"),
    "exactly once": (_HERE | {"delivery": "exactlyOnce"}, [{"body": b"x"}], _BODY, "delivery=atLeastOnce"),
    "path too": (_HERE | {"path": "store"}, [{"body": b"x"}], _BODY, "path and nameServer"),
    "option of a directory": (_HERE | {"flush": "sync"}, [{"body": b"x"}], _BODY, "flush"),
    "no topic": (
        {name: text for name, text in _HERE.items() if name != "topic"},
        [{"body": b"x"}],
        _BODY,
        "option topic",
    ),
    "system topic": (_HERE | {"topic": "SCHEDULE_TOPIC_XXXX"}, [{"body": b"x"}], _BODY, "internal topic"),
    "missing topic": (
        _HERE | {"topic": "absent", "createTopic": "false"},
        [{"body": b"x"}],
        _BODY,
        "rmq create -n NAMESERVER absent",
    ),
    "topic without write permission": (_HERE | {"topic": "closed"}, [{"body": b"x"}], _BODY, "mqadmin updateTopicPerm"),
    "body over the limit": (
        _HERE,
        [{"body": b"first"}, {"body": b"x" * (_LIMIT + 1)}],
        _BODY,
        f"row 1.*{_LIMIT + 1} bytes.*maxMessageSize",
    ),
    "null body": (_HERE, [{"body": b"first"}, {"body": None}], _BODY, "row 1.*its body is null"),
    "bad property": (
        _HERE,
        [{"body": b"x", "properties": {"a\x01b": "1"}}],
        "body binary, properties map<string,string>",
        "is not a property name",
    ),
    "properties over the limit": (
        _HERE,
        [{"body": b"x", "properties": {"a": "y" * 33_000}}],
        "body binary, properties map<string,string>",
        "expected at most 32500",
    ),
    "queueId without brokerName": (_HERE, [{"body": b"x", "queueId": 1}], "body binary, queueId int", "no brokerName"),
    "queueId out of range": (
        _HERE,
        [{"body": b"x", "queueId": 9, "brokerName": "broker-a"}],
        "body binary, queueId int, brokerName string",
        "queueId 9 of broker broker-a",
    ),
    "unknown broker": (
        _HERE,
        [{"body": b"x", "queueId": 0, "brokerName": "broker-z"}],
        "body binary, queueId int, brokerName string",
        "broker broker-z.*broker-a \\(2 queues\\)",
    ),
    "unknown column": (_HERE, [{"body": b"x", "partition": 1}], "body binary, partition int", "partition"),
    "nobody at the name server": (
        _HERE | {"nameServer": "127.0.0.1:1"},
        [{"body": b"x"}],
        _BODY,
        "127.0.0.1:1.*refused",
    ),
    "TLS with a certificate of nobody": (
        _HERE | {"tls": "true"},
        [{"body": b"x"}],
        _BODY,
        "certificate is not accepted",
    ),
}


@pytest.fixture(scope="module")
def cluster_answers(java: Java, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp(f"write-mistakes-{java.version}")
    with TwoBrokers(java, folder, **broker_conf()) as cluster, cluster.client() as client:
        client("create-topic", topic="open", queues=2)
        client("create-topic", topic="closed", queues=2, perm=4)
        cases = {name: case[:3] for name, case in SPARK_CASES.items()}
        answers = cluster.write("try_writes", cases=cases)
        late = {"body": "x", "deliver_at_ms": 4_000_000_000_000}
        answers["a time, for programs"] = cluster.write("try_sends", cases={"x": ({}, {"topic": "open", **late})})["x"]
        answers["stored"] = len(pull_deliveries(client, ["open", "closed"]))
    for name, found in answers.items():
        print(java.version, name, found)
    return dict(answers)


@pytest.mark.parametrize("name", SPARK_CASES)
def test_mistakes_of_spark_writes_are_named(cluster_answers: dict[str, Any], name: str) -> None:
    text, _ = cluster_answers[name]
    assert re.search(SPARK_CASES[name][3], text), text


def test_refused_writes_store_nothing(cluster_answers: dict[str, Any], java: Java) -> None:
    assert cluster_answers["stored"] == 0


def test_a_delivery_time_that_a_broker_cannot_keep_is_refused(cluster_answers: dict[str, Any], java: Java) -> None:
    text, _ = cluster_answers["a time, for programs"]
    assert re.search("timerWheelEnable=true" if java.is_5 else "no timer", text), text


SEND_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "wrong secret": (
        {"access_key": "full-reader", "secret_key": "wrong"},
        {"topic": READ},
        "OptionError.*its key is wrong",
    ),
    "no account": ({}, {"topic": READ}, "OptionError.*accessKey"),
    "no right to send": (
        {"access_key": "full-reader", "secret_key": secured.SECRET},
        {"topic": CLOSED},
        "NoPermissionError.*PUB of the topic",
    ),
    "no right to create": (
        {"access_key": "full-reader", "secret_key": secured.SECRET},
        {"topic": "fresh"},
        "NoPermissionError.*mqadmin updateTopic",
    ),
}


def test_mistakes_of_accounts_are_named(java: Java, tmp_path: Path) -> None:
    broker = secured.with_accounts(java, tmp_path)
    with broker.broker:
        secured.create_users(broker)
        cases = {name: (opening, {"body": "x", **sending}) for name, (opening, sending, _) in SEND_CASES.items()}
        answers = _try_sends(java, broker.broker.namesrv, tmp_path, cases)
    for name, (_, _, expected) in SEND_CASES.items():
        assert re.search(expected, answers[name][0]), (name, answers[name])
        assert secured.SECRET not in answers[name][0]


def test_plain_connections_to_servers_that_demand_TLS_are_named(java: Java, tmp_path: Path) -> None:
    files = TlsFiles(tmp_path / "tls", CERTIFICATES)
    files.use("localhost")
    broker = secured.prepare(replace(java, properties=java.properties | files.properties), tmp_path)
    authority = {"tls": True, "tls_ca_file": str(CERTIFICATES / "authority.crt")}
    with broker.broker:
        (plain,) = _try_sends(java, broker.broker.namesrv, tmp_path, {"x": ({}, {"topic": READ, "body": "x"})}).values()
        right = {"x": (authority, {"topic": READ, "body": "x"})}
        until = time.monotonic() + _REGISTERED_S  # the broker registers late, because the name server demands TLS too
        while (found := _try_sends(java, broker.broker.namesrv, tmp_path, right)["x"][0]) != "no error":
            assert time.monotonic() < until, found
    assert re.search("BackendUnavailableError.*set tls=true", plain[0]), plain


def test_a_broker_that_is_away_and_one_with_a_lower_limit_are_named(java: Java, tmp_path: Path) -> None:
    conf = broker_conf() | {"maxMessageSize": 2000}
    with TwoBrokers(java, tmp_path, **conf) as cluster, cluster.client() as client:
        client("create-topic", topic="open", queues=2)
        to_b = {"topic": "open", "queue_id": 0, "broker_name": "broker-b"}
        cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "limit": ({}, to_b | {"body": "x" * 3000}),
            "name server is a broker": (
                {"name_server": f"127.0.0.1:{cluster.brokers['broker-a'].port}"},
                to_b | {"body": "x"},
            ),
            "nobody at an address": (
                {"broker_addresses": "broker-b=127.0.0.1:1", "broker_down_timeout_ms": 2000},
                to_b | {"body": "x"},
            ),
        }
        answers = cluster.write("try_sends", cases=cases)
    assert re.search("BrokerError.*broker-b.*maxMessageSize", answers["limit"][0]), answers
    assert re.search("BrokerError.*nameServer", answers["name server is a broker"][0]), answers
    assert re.search("BackendUnavailableError.*brokerAddresses", answers["nobody at an address"][0]), answers
    assert answers["nobody at an address"][1] < 20


def test_a_broker_with_a_full_disk_is_named(run_java: Callable[[str], Java], tmp_path: Path) -> None:
    java = run_java("4.9.7")  # 5.x takes no level below 35 %
    full = replace(java, properties=java.properties | {"rocketmq.broker.diskSpaceWarningLevelRatio": "0"})
    conf = broker_conf() | {"cleanResourceInterval": 500}
    with TwoBrokers(full, tmp_path, **conf) as cluster, cluster.client() as client:
        client("create-topic", topic="open", queues=2)
        until = time.monotonic() + _REGISTERED_S  # brokers look at their disks 60 s after their start
        sent = 0
        message = ({"broker_down_timeout_ms": 1000}, {"topic": "open", "body": "x"})
        while (found := cluster.write("try_sends", cases={"x": message})["x"][0]) == "no error":
            assert time.monotonic() < until
            sent += 1
        print(java.version, "full disk", found)
        assert re.search("BackendUnavailableError.*nothing.*disk is full", found), found
        assert len(pull_deliveries(client, ["open"])) == sent


def _try_sends(java: Java, address: str, folder: Path, cases: dict[str, Any]) -> dict[str, tuple[str, float]]:
    program = Path(__file__).parent / "compat_kit" / "cluster_writer.py"
    answers = run_reader(java, address, folder, "try_sends", program=program, cases=cases)
    for name, found in answers.items():
        print(java.version, name, found)
    return dict(answers)
