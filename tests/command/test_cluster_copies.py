"""`rmq send`, `export` and `import` with `--name-server`: where messages are stored, copies, and mistakes by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmq_spark.store.testing.brokers import RELEASES, RunningCluster, faults
from rmq_spark.store.tools import Imported, import_source

Rmq = Callable[..., Any]
SEND, SEND_BATCH = 310, 320


@pytest.fixture(params=sorted(RELEASES))
def cluster(request: pytest.FixtureRequest, run_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    """Two brokers with two queues each."""
    cluster = run_cluster(release=request.param, brokers=2)
    cluster.create_topic("orders", queues=2)
    return cluster


@pytest.fixture
def lone(run_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    """One broker with two queues."""
    cluster = run_cluster()
    cluster.create_topic("orders", queues=2)
    return cluster


def test_a_message_in_a_cluster_has_what_was_said_of_it(rmq: Rmq, cluster: RunningCluster) -> None:
    words = ("--tags", "paid", "--key", "a", "--key", "b", "--property", "colour=red=x", "--queue", "broker-b:1")
    (sent,) = rmq("send", "-n", cluster.address, "orders", "hello", *words, "--json").rows
    assert list(sent) == ["topic", "brokerName", "queueId", "msgId", "queueOffset", "commitLogOffset"]
    assert (sent["brokerName"], sent["queueId"], sent["queueOffset"]) == ("broker-b", 1, 0)
    (row,) = rmq("get", "-n", cluster.address, "--id", sent["msgId"], "--json").rows
    assert (row["body"], row["tags"], row["keys"], row["queueId"]) == ("hello", "paid", "a b", 1)
    assert (row["brokerName"], row["commitLogOffset"]) == ("broker-b", sent["commitLogOffset"])
    assert row["properties"]["colour"] == "red=x"
    head, line = rmq(
        "send", "-n", cluster.address, "orders", "x", "--queue", 0, "--broker", "broker-a"
    ).out.splitlines()
    assert head.split() == ["topic", "brokerName", "queueId", "queueOffset", "msgId"]
    assert line.split()[:4] == ["orders", "broker-a", "0", "0"]


def test_standard_input_and_lines_are_sent_to_a_cluster(rmq: Rmq, cluster: RunningCluster) -> None:
    assert rmq("send", "-n", cluster.address, "orders", "--queue", "broker-a:0", stdin=b"two\nlines \xff").status == 0
    ran = rmq("send", "-n", cluster.address, "orders", "--queue", "broker-a:0", "--lines", stdin="one\r\ntwo\n\nfour")
    head, line = ran.out.splitlines()
    assert head.split() == ["topic", "brokerName", "queueId", "messages", "firstOffset", "lastOffset"]
    assert line.split() == ["orders", "broker-a", "0", "4", "1", "4"]
    bodies = [row["body"] for row in rmq("cat", "-n", cluster.address, "orders", "--json").rows]
    assert bodies == [None, "one", "two", "", "four"]
    rmq("send", "-n", cluster.address, "orders", "--lines", stdin="a\nb\nc\nd")
    ran = rmq("send", "-n", cluster.address, "orders", "--lines", "--json", stdin="a\nb\nc\nd")
    assert {(row["brokerName"], row["queueId"]) for row in ran.rows} == {
        (broker, number) for broker in cluster.brokers for number in range(2)
    }
    assert len({row["msgId"] for row in ran.rows}) == 4


def test_messages_with_a_sharding_key_go_to_one_queue(rmq: Rmq, cluster: RunningCluster) -> None:
    words = ("send", "-n", cluster.address, "orders", "--lines", "--json", "--sharding-key", "customer-7")
    rows = [*rmq(*words, stdin="a\nb\nc").rows, *rmq(*words, stdin="d").rows]
    assert len({(row["brokerName"], row["queueId"]) for row in rows}) == 1
    assert [row["queueOffset"] for row in rows] == [0, 1, 2, 3]


def test_a_delayed_message_is_sent_to_a_cluster(rmq: Rmq, cluster: RunningCluster) -> None:
    words = ("send", "-n", cluster.address, "orders", "later")
    assert rmq(*words, "--delay-level", 3).status == 0
    rows = {row["topic"]: row["messages"] for row in rmq("topics", "-n", cluster.address, "--all", "--json").rows}
    assert (rows["SCHEDULE_TOPIC_XXXX"], rows["orders"]) == (1, 0)
    ran = rmq(*words, "--deliver-at", "now+1h")
    if cluster.release.is_5:
        assert ran.status == 0
    else:
        assert ran.status == 1
        assert "brokers of RocketMQ 4.9, which have no timer" in ran.err


def test_a_topic_is_only_created_in_a_cluster_on_request(rmq: Rmq, cluster: RunningCluster) -> None:
    ran = rmq("send", "-n", cluster.address, "ordres", "x")
    assert (ran.status, ran.out) == (1, "")
    assert "topic ordres does not exist: no name server has a route of it" in ran.err
    assert "Or let it be created: --create-topic." in ran.err
    assert rmq("send", "-n", cluster.address, "new", "x", "--create-topic").status == 0
    assert len(rmq("queues", "-n", cluster.address, "new", "--json").rows) == 8
    assert rmq("send", "-n", cluster.address, "few", "x", "--create-topic", "--queues", 1).status == 0
    assert len(rmq("queues", "-n", cluster.address, "few", "--json").rows) == 2


def test_a_topic_of_a_store_is_created_with_queues(rmq: Rmq, store: Path) -> None:
    assert rmq("send", store, "few", "x", "--create-topic", "--queues", 2).status == 0
    assert len(rmq("queues", store, "few", "--json").rows) == 2


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("--queue", "0"), 1, "expected both. Give --queue BROKER:ID, or leave it out"),
        (("--queue", "broker-c:0"), 1, "broker broker-c is not listed with the topic now"),
        (("--queue", "broker-a:7"), 1, "queueId 7 of broker broker-a is not a queue"),
        (("--broker", "broker-a"), 2, "--broker requires --queue"),
        (("--queue", "broker-a:0", "--broker", "broker-b"), 2, "name two brokers"),
        (("--queues", "3"), 2, "--queues requires --create-topic"),
        (("--lock-timeout", "3"), 2, "--lock-timeout is for a store at PATH"),
        (("--allow-network-store",), 2, "--allow-network-store is for a store at PATH"),
        (("--commit-log-path", "log"), 2, "--commit-log-path is for a store at PATH"),
        (("--pull-group", "g"), 2, "No such option '--pull-group'"),
        (("--tls-ca-file", __file__), 2, "--tls-ca-file without --tls has no effect"),
        (("--property", "colour"), 2, "NAME=VALUE"),
        (("--lines",), 2, "Give one of them"),
    ],
)
def test_wrong_words_send_nothing_to_a_cluster(
    rmq: Rmq, run_cluster: Callable[..., RunningCluster], words: tuple[str, ...], status: int, text: str
) -> None:
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=2)
    ran = rmq("send", "-n", cluster.address, "orders", "x", *words)
    assert (ran.status, ran.out) == (status, "")
    assert text in ran.err
    assert rmq("count", "-n", cluster.address, "orders", "--json").rows[0]["messages"] == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("send",), "Missing argument 'PATH' or option '--name-server'"),
        (("send", "-n", "ns:1"), "Missing argument 'TOPIC'"),
        (("send", "-n", "ns:1", "./store", "orders"), "PATH and --name-server cannot be combined: found PATH ./store"),
        (("send", "-n", "ns:1", "tests", "orders", "x"), "PATH and --name-server cannot be combined: found PATH tests"),
        (("send", "-n", "ns:1", "orders", "two", "words"), "Got unexpected extra argument (words)"),
        (("send", "store", "orders", "x", "--queue", "broker-a:0"), "the broker broker-a was given, but PATH is a"),
        (("send", "store", "orders", "x", "--tls"), "--tls: for a cluster, but PATH store is a store"),
        (("export",), "Missing argument 'PATH' or option '--name-server'"),
        (("export", "-n", "ns:1"), "Missing argument 'FILE'"),
        (("export", "-n", "ns:1", "store", "x"), "PATH and --name-server cannot be combined: found PATH store and"),
        (("import", "-n", "ns:1", "store", "x"), "PATH and --name-server cannot be combined: found PATH store and"),
        (("import", "-n", "ns:1", "none"), "File 'none' does not exist"),
        (("import", "store", "README.md", "--skip", "3"), "--skip is for a cluster"),
        (("import", "-n", "ns:1", "README.md", "--lock-timeout", "3"), "--lock-timeout is for a store at PATH"),
    ],
)
def test_words_for_both_places_or_none_are_answered_with_what_is_right(
    rmq: Rmq, words: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    ran = rmq(*words)
    assert (ran.status, ran.out) == (2, "")
    assert text in ran.err


@pytest.mark.parametrize("words", [("count",), ("send", "orders", "x", "--create-topic"), ("create",), ("check",)])
def test_an_address_in_place_of_path_is_not_a_folder(
    rmq: Rmq, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = rmq(words[0], "127.0.0.1:9876", *words[1:])
    assert (ran.status, ran.out) == (1, "")
    assert "expected a folder. Give -n HOST:PORT for a cluster, or ./host:port for a folder." in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["send", "export", "import"])
def test_help_has_path_and_the_options_for_a_cluster(rmq: Rmq, name: str) -> None:
    text = rmq(name, "--help").out
    assert f"rmq {name} [OPTIONS] (PATH | -n HOST:PORT) " in text
    options, of_clusters = text.split("\nOptions:")[1].split("\nOptions for a cluster:")
    assert "--name-server" not in options
    assert "-n, --name-server HOST:PORT" in of_clusters
    assert ("--pull-group" in of_clusters) is (name == "export")


def test_a_message_that_may_be_stored_is_named(rmq: Rmq, lone: RunningCluster) -> None:
    lone.broker.fail(None, faults.closes_connection(), when=lambda call: call.command.code in (SEND, SEND_BATCH))
    ran = rmq("send", "-n", lone.address, "orders", "hello")
    assert (ran.status, ran.out) == (1, "")
    found = ran.err.split("Look for the ids ")[1].split(".")[0]
    assert [row["body"] for row in rmq("get", "-n", lone.address, "--id", found, "--json").rows] == ["hello"]
    ran = rmq("send", "-n", lone.address, "orders", "--lines", "--queue", 1, stdin="a\nb\nc\nd\ne\n")
    assert (ran.status, ran.out) == (1, "")
    assert "and 2 more" in ran.err
    assert "0 of 5 messages of the call are stored. 5 are stored or not." in ran.err
    assert "message_ids" not in ran.err
    for message_id in ran.err.splitlines()[-2:]:
        assert rmq("get", "-n", lone.address, "--id", message_id).status == 0


def test_lines_that_were_sent_before_an_error_are_counted(rmq: Rmq, lone: RunningCluster) -> None:
    lone.broker.settings.max_message_bytes = 1 << 20
    lines = f"{'a' * 99}\n" * 11_000 + "x" * (1 << 21) + "\n"
    ran = rmq("send", "-n", lone.address, "orders", "--lines", stdin=lines)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("11,000 messages were sent before this error:\n")
    assert "illegal" in ran.err
    assert rmq("count", "-n", lone.address, "orders", "--json").rows[0]["messages"] == 11_000


def test_ctrl_c_in_a_send_to_a_cluster_says_that_it_may_be_stored(
    rmq: Rmq, lone: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rmq_spark.store.cluster.sender.Sender.send", stop)
    ran = rmq("send", "-n", lone.address, "orders", "hello")
    assert (ran.status, ran.out) == (130, "")
    assert ran.err == "rmq send: stopped. Messages that were being sent may be stored.\n"


def test_a_broker_that_is_away_is_named_by_send_export_and_import(
    rmq: Rmq, lone: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.command.place._BROKER_DOWN_MS", 200)
    monkeypatch.setattr("rmq_spark.command.export_import._BROKER_DOWN_MS", 200)
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"body": ["x"]}), file)
    words = ("-n", lone.address, "--broker-addresses", "broker-a=127.0.0.1:1")
    for ran in (
        rmq("send", *words, "orders", "x"),
        rmq("export", *words, tmp_path / "new"),
        rmq("import", *words, file, "--topic", "orders"),
    ):
        assert (ran.status, ran.out) == (1, "")
        assert "broker-a" in ran.err
        assert "127.0.0.1:1 cannot be reached" in ran.err
        assert "brokerDownTimeout" not in ran.err
    assert "rmq import: no row is certainly stored. Repeat it without --skip." in ran.err
    assert not (tmp_path / "new").exists()


def test_an_import_waits_a_minute_for_a_broker_that_restarts(
    rmq: Rmq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "rmq_spark.import_parquet", lambda **arguments: given.update(arguments) or Imported("n", 1, 0, ())
    )
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "x.parquet")
    assert rmq("import", "-n", "ns:1", tmp_path / "x.parquet").status == 0
    assert (given["broker_down_timeout_ms"], given["skip_rows"], given["keep_queues"]) == (60_000, 0, True)


def test_what_a_cluster_has_can_be_exported_and_imported(rmq: Rmq, cluster: RunningCluster, tmp_path: Path) -> None:
    for broker in cluster.brokers:
        rmq("send", "-n", cluster.address, "orders", "--lines", "--queue", 1, "--broker", broker, stdin="a\nb\nc\n")
    file, again = tmp_path / "m.parquet", tmp_path / "again.parquet"
    (row,) = rmq("export", "-n", cluster.address, file, "--topic", "orders", "--json").rows
    assert row == {"path": str(file), "messages": 6, "bytes": file.stat().st_size, "topics": ["orders"]}
    ran = rmq("import", "-n", cluster.address, file, "--topic", "copies")
    assert (ran.status, ran.out, ran.err) == (0, "", "6 messages sent. Topics: copies.\n")
    (row,) = rmq("import", "-n", cluster.address, file, "--topic", "copies", "--skip", 2, "--json").rows
    assert (row["messages"], row["skipped"], row["topics"]) == (4, 2, ["copies"])
    assert rmq("export", "-n", cluster.address, again, "--topic", "copies").err.startswith("10 messages of copies")
    rows = pq.read_table(again).to_pylist()
    assert len({row["msgId"] for row in rows}) == 6
    assert {(row["brokerName"], row["queueId"]) for row in rows} == {("broker-a", 1), ("broker-b", 1)}
    ran = rmq("export", "-n", cluster.address, again, "--topic", "copies")
    assert ran.status == 2
    assert "add --overwrite" in ran.err
    assert "6 messages appended, 0 skipped as imported before" in rmq("import", tmp_path / "store", file).err


def test_a_file_of_a_store_needs_spread_in_a_cluster_of_several_brokers(
    rmq: Rmq, cluster: RunningCluster, store: Path, tmp_path: Path
) -> None:
    file = tmp_path / "m.parquet"
    rmq("export", store, file, "--topic", "orders")
    words = ("import", "-n", cluster.address, file, "--topic", "copies")
    ran = rmq(*words)
    assert ran.status == 1
    assert "the file has rows with queueId and no brokerName, and the topic is on several brokers" in ran.err
    assert "Give --spread to spread the messages over them" in ran.err
    assert rmq("topics", "-n", cluster.address, "--json").rows == [
        row for row in rmq("topics", "-n", cluster.address, "--json").rows if row["topic"] != "copies"
    ]
    assert rmq(*words, "--spread").err == "1,170 messages sent. Topics: copies.\n"
    assert rmq("count", "-n", cluster.address, "copies", "--json").rows[0]["messages"] == 1170


def test_ctrl_c_in_an_import_into_a_cluster_says_how_to_go_on(
    rmq: Rmq, lone: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_source, "_PART_ROWS", 10)
    monkeypatch.setattr(import_source, "_READ_ROWS", 10)
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"body": [f"{number}" for number in range(25)]}), file)
    calls = iter(range(1, 100))

    class Bar:
        def __enter__(self) -> Callable[[int, int], None]:
            return self.note

        def __exit__(self, *_: object) -> None: ...

        def note(self, done: int, total: int) -> None:
            if next(calls) == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rmq_spark.command.export_import.progress", lambda *_: Bar())
        ran = rmq("import", "-n", lone.address, file, "--topic", "orders")
    assert (ran.status, ran.out) == (130, "")
    assert ran.err.splitlines()[-1] == (
        "rmq import: stopped: the first 20 of 25 rows are certainly stored. Repeat it with --skip 20 to send the "
        "others."
    )
    assert rmq("import", "-n", lone.address, file, "--topic", "orders", "--skip", 20).err.endswith(
        "5 messages sent, 20 skipped. Topics: orders.\n"
    )
    bodies = [row["body"] for row in rmq("cat", "-n", lone.address, "orders", "--json").rows]
    assert sorted(map(int, bodies)) == list(range(25))
    assert (
        "must be an integer from 0 to 25" in rmq("import", "-n", lone.address, file, "--topic", "o", "--skip", 26).err
    )
