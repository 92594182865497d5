"""`--name-server` and the options that go with it: which words are accepted, what is said of mistakes, and secrets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmq_spark.command.output import typed
from rmq_spark.store.cluster import answer_rules
from rmq_spark.store.testing.brokers import RELEASES, Account, AccountTable, RunningCluster, ServerTls

Rmq = Callable[..., Any]
CERTIFICATES = Path(__file__).resolve().parents[1] / "support" / "certificates"
COMMANDS = [("topics",), ("queues", "orders"), ("count", "orders"), ("cat", "orders")]
SECRET = "planted-secret-4711"
each_release = pytest.mark.parametrize("release", sorted(RELEASES))
each_command = pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RMQ_ACCESS_KEY", "RMQ_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["topics", "queues", "count", "cat", "get", "groups"])
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "Missing argument 'PATH' or option '--name-server'"),
        (("./store", "-n", "ns:9876"), "PATH and --name-server cannot be combined: found PATH ./store and"),
        (("-n", "ns:9876", "--commit-log-path", "log", "x"), "--name-server"),
        (("./store", "--tls"), "--tls: for a cluster, but PATH ./store is a store. Give --name-server"),
        (("./store", "--request-timeout", "1"), "--request-timeout: for a cluster"),
        (("--secret-key", SECRET, "-n", "ns:9876"), "--secret-key does not exist"),
        ((f"--secret-key={SECRET}", "-n", "ns:9876"), "Set the environment variable RMQ_SECRET_KEY"),
        (("--credentials-file", "none", "-n", "ns:9876"), "'none' does not exist"),
    ],
)
def test_wrong_places_are_answered_with_what_is_right(rmq: Rmq, name: str, words: tuple[str, ...], text: str) -> None:
    ran = rmq(name, *words)
    assert (ran.status, ran.out) == (2, "")
    assert text in ran.err
    assert SECRET not in ran.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--tls-ca-file", __file__), "--tls-ca-file without --tls has no effect. Add --tls."),
        (("--access-key", "a"), "--access-key: the environment variable RMQ_SECRET_KEY is missing"),
        (("--access-key", "a", "--credentials-file", __file__), "--access-key and --credentials-file cannot be"),
        (("--commit-log-path", "log"), "--commit-log-path is for a store at PATH"),
    ],
)
def test_options_of_a_cluster_that_do_not_fit_are_refused(rmq: Rmq, words: tuple[str, ...], text: str) -> None:
    ran = rmq("topics", "-n", "ns:9876", *words)
    assert (ran.status, ran.out) == (2, "")
    assert text in ran.err


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("dump", "x"), "storePathRootDir as PATH"),
        (("check",), "storePathRootDir as PATH"),
        (("repair",), "storePathRootDir as PATH"),
        (("serve",), "deliver delayed messages themselves"),
    ],
)
def test_what_needs_files_says_what_to_do_for_a_cluster(rmq: Rmq, words: tuple[str, ...], advice: str) -> None:
    ran = rmq(*words, "--name-server", "ns:9876")
    assert (ran.status, ran.out) == (2, "")
    assert f"--name-server: `rmq {words[0]}` needs the files of a store." in ran.err
    assert advice in ran.err


def test_dump_takes_an_address_after_n_for_a_name_server(rmq: Rmq) -> None:
    ran = rmq("dump", "-n", "ns:9876")
    assert ran.status == 2
    assert "--name-server: `rmq dump` needs the files of a store." in ran.err


def test_help_lists_the_options_for_a_cluster_apart(rmq: Rmq) -> None:
    text = rmq("cat", "--help").out
    options, of_clusters = text.split("\nOptions:")[1].split("\nOptions for a cluster:")
    assert "--columns NAMES" in options
    assert "--name-server" not in options
    assert "-n, --name-server HOST:PORT" in of_clusters
    assert "--columns NAMES" not in of_clusters
    assert "Options for a cluster" not in rmq("check", "--help").out


@each_release
@each_command
def test_a_server_that_is_none_is_an_error(
    run_cluster: Callable[..., RunningCluster], rmq: Rmq, release: str, words: tuple[str, ...]
) -> None:
    cluster = run_cluster(release=release)
    name, *topics = words
    ran = rmq(name, "-n", "127.0.0.1:1", *topics)
    assert (ran.status, ran.out) == (1, "")
    assert "127.0.0.1:1 cannot be reached: connection refused" in ran.err
    assert "Check --name-server, and whether" in ran.err
    ran = rmq(name, "-n", cluster.broker.address, *topics)
    assert (ran.status, ran.out) == (1, "")
    assert cluster.broker.address in ran.err
    assert "nameServer" not in ran.err
    ran = rmq(name, "-n", "no-port", *topics)
    assert (ran.status, ran.out) == (1, "")
    assert "--name-server: 'no-port' is not an address; expected host:port" in ran.err
    if topics:
        ran = rmq(name, "-n", cluster.address, "absent")
        assert (ran.status, ran.out) == (1, "")
        assert (
            f'no name server has a route of topic "absent", in the cluster at --name-server {cluster.address}'
            in ran.err
        )


def test_a_word_that_is_a_folder_and_no_topic_is_explained(
    run_cluster: Callable[..., RunningCluster], rmq: Rmq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path)
    ran = rmq("cat", "-n", run_cluster().address, "store", "orders")
    assert ran.status == 1
    assert ran.err.endswith("store is also a folder: PATH and --name-server cannot be combined.\n")


@pytest.fixture(params=sorted(RELEASES))
def half(request: pytest.FixtureRequest, run_cluster: Callable[..., RunningCluster]) -> tuple[str, ...]:
    """The options for a cluster with a message at each of two brokers, of which broker-b cannot be reached."""
    cluster = run_cluster(release=request.param, brokers=2)
    cluster.create_topic("orders", queues=1)
    for broker in cluster.brokers:
        cluster.send("orders", f"at {broker}", broker=broker)
    return "-n", cluster.address, "--broker-addresses", "broker-b=127.0.0.1:1"


def test_a_broker_that_is_away_is_named_beside_the_rest(half: tuple[str, ...], rmq: Rmq) -> None:
    ran = rmq("queues", *half, "orders", "--json")
    assert ran.status == 0
    first, second = ran.rows
    assert (first["maxOffset"], first["problem"]) == (1, None)
    assert (second["brokerName"], second["minOffset"], second["messages"]) == ("broker-b", None, None)
    assert second["problem"].startswith("away since 20")
    assert ran.err == f"orders/broker-b:0: {second['problem']}\n"
    assert rmq("queues", *half, "orders").out.splitlines()[2].split()[-2:] == ["or", "earlier"]
    ran = rmq("topics", *half, "--json")
    assert (ran.status, ran.rows[0]["messages"]) == (0, 1)
    assert "queues of broker-b: away since 20" in ran.err


def test_count_and_cat_go_on_without_a_broker_and_end_with_1(half: tuple[str, ...], rmq: Rmq) -> None:
    ran = rmq("count", *half, "orders", "--json")
    assert (ran.status, ran.rows) == (1, [{"topic": "orders", "queues": 1, "messages": 1}])
    assert ran.err.startswith("orders/broker-b:0: away since 20")
    ran = rmq("cat", *half, "orders", "--columns", "body")
    assert (ran.status, ran.out) == (1, "at broker-a\n")
    assert ran.err.startswith("orders/broker-b:0: away since 20")
    assert "Check --broker-addresses" in ran.err


def test_cat_writes_no_file_that_is_incomplete(half: tuple[str, ...], rmq: Rmq, tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    ran = rmq("cat", *half, "orders", "--json", "--output", file)
    assert ran.status == 1
    assert "cannot read queue orders/broker-b:0" in ran.err
    assert not file.exists()


def test_get_says_that_the_broker_is_away(half: tuple[str, ...], rmq: Rmq) -> None:
    ran = rmq("get", *half, "--topic", "orders", "--queue", "broker-b:0", "--offset", 0)
    assert (ran.status, ran.out) == (1, "")
    assert "Repeat the read when the broker broker-b is back." in ran.err


@each_release
@each_command
def test_rights_and_accounts(
    run_cluster: Callable[..., RunningCluster],
    rmq: Rmq,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    release: str,
    words: tuple[str, ...],
) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", "one")
    rights = {"topics": {"*": "SUB|GET"}, "groups": {"*": "SUB|GET"}}
    accounts = AccountTable(Account("reader", SECRET, **rights), Account("guest", SECRET))  # type: ignore[arg-type]
    cluster.broker.accounts = accounts
    said = []

    def call(*options: str) -> Any:
        said.append(rmq(words[0], "-n", cluster.address, *options, *words[1:]))
        return said[-1]

    assert call().status == 1, "without an account"
    assert "RMQ_ACCESS_KEY and RMQ_SECRET_KEY, or --credentials-file" in said[-1].err
    monkeypatch.setenv("RMQ_SECRET_KEY", SECRET)
    ran = call("--access-key", "reader")
    assert (ran.status, ran.err) == (0, "")
    assert "orders" in ran.out
    ran = call("--access-key", "guest")
    if release == "5.3" or words[0] == "cat":  # a broker of 4.9 tells bounds to everybody
        assert "Ask an administrator for the right" in ran.err
        assert ran.status == (0 if words[0] in ("topics", "queues") else 1)
    monkeypatch.setenv("RMQ_SECRET_KEY", f"{SECRET}-wrong")
    assert call("--access-key", "reader").status == 1
    monkeypatch.delenv("RMQ_SECRET_KEY")
    file = tmp_path / "keys"
    file.write_text(f"accessKey: reader\nsecretKey: {SECRET}\n")
    assert call("--credentials-file", str(file)).status == 0
    monkeypatch.setenv("RMQ_ACCESS_KEY", "reader")
    monkeypatch.setenv("RMQ_SECRET_KEY", SECRET)
    assert call().status == 0
    assert not any(SECRET in one.out + one.err for one in said)


def test_tls(run_cluster: Callable[..., RunningCluster], rmq: Rmq) -> None:
    file = str(CERTIFICATES / "localhost.pem")
    cluster = run_cluster(tls=ServerTls(file, file, is_enforced=True))
    cluster.create_topic("orders", queues=1)
    words = ("queues", "-n", cluster.address, "orders")
    assert "then give --tls" in rmq(*words).err
    ran = rmq(*words, "--tls")
    assert ran.status == 1
    assert "Set --tls-ca-file to" in ran.err
    assert "only --tls-verify none accepts it" in ran.err
    assert rmq(*words, "--tls", "--tls-verify", "none").status == 0
    assert rmq(*words, "--tls", "--tls-ca-file", str(CERTIFICATES / "authority.crt")).status == 0


def test_another_address_of_a_broker_is_used_and_named(run_cluster: Callable[..., RunningCluster], rmq: Rmq) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", queues=1)
    words = ("queues", "-n", cluster.address, "orders", "--broker-addresses")
    assert rmq(*words, f"broker-a={cluster.broker.address}").err == ""
    ran = rmq(*words, "broker-a=127.0.0.1:1")
    assert "127.0.0.1:1 cannot be reached" in ran.err
    assert "Check --broker-addresses, which gives this address" in ran.err


def test_a_namespace_is_left_out_of_names(run_cluster: Callable[..., RunningCluster], rmq: Rmq) -> None:
    cluster = run_cluster()
    cluster.create_topic("shop%orders", queues=1)
    cluster.send("shop%orders", "one")
    words = ("-n", cluster.address, "--namespace", "shop")
    assert [row["topic"] for row in rmq("topics", *words, "--json").rows] == ["orders"]
    assert [row["topic"] for row in rmq("cat", *words, "orders", "--json").rows] == ["orders"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the option nameServer: 'x'", "--name-server: 'x'"),
        ("set the option brokerAddresses=a=host:port", "set --broker-addresses a=host:port"),
        ("set the option brokerAddresses=broker-name=host:port", "set --broker-addresses broker-name=host:port"),
        (
            "Create the group, or set pullGroup to a group that exists.",
            "Create the group, or give --pull-group a group that exists.",
        ),
        (
            "Or set pullGroup to a group that the account may use.",
            "Or give --pull-group a group that the account may use.",
        ),
        ("Check the option brokerAddresses, which", "Check --broker-addresses, which"),
        ("the authorities in tlsCaFile=x", "the authorities in --tls-ca-file x"),
        ("the files of tlsCertFile, tlsKeyFile (x)", "the files of --tls-cert-file, --tls-key-file (x)"),
        ("the file of credentialsFile (x)", "the file of --credentials-file (x)"),
    ],
)
def test_errors_name_the_options_of_the_command(text: str, expected: str) -> None:
    assert typed(text) == expected


def test_advice_of_a_server_names_no_option_of_queries() -> None:
    for rule in answer_rules.RULES:
        advice = typed(rule.next_step)
        assert not any(name in advice for name in ("nameServer", "pullGroup", "subscribePattern", "with subscribe"))
