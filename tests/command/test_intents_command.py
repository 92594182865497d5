"""`rmq prepare-sink`, `rmq intents` and `rmq doctor --sink`: what they print, and what they ask for."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.begun_batches import TOPIC, begin, commit

from rmq_spark.command import intents as command
from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.exactly_once.commit_session import CommitSession
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.brokers import RunningCluster, faults

Rmq = Callable[..., Any]
Q = CommitKey("0b7f4a56-6a3e-4f0e-8b1e-3a0f6d1f5c11", 7)
PLAIN = CommitKey("9d1c1b1e-52aa-4c0c-bd0a-0d9a0a6a5b22")
ROWS = [b"a", b"b", b"c"]
FAST = ("--settle-time", "0.01", "--fence-timeout", "10")


@pytest.fixture
def cluster(run_cluster: Callable[..., RunningCluster]) -> Iterator[RunningCluster]:
    """Two brokers with a topic of one queue on each."""
    cluster = run_cluster(brokers=2)
    cluster.create_topic(TOPIC, queues=1)
    yield cluster
    client._idle.forget()


@pytest.fixture
def prepared(rmq: Rmq, cluster: RunningCluster) -> RunningCluster:
    """The cluster with the topics of the sink. Its last rows are refused by broker-b."""
    assert rmq("prepare-sink", "-n", cluster.address, "--ledger-broker", "broker-a").status == 0
    return cluster


def refuse_sends(cluster: RunningCluster) -> None:
    cluster.brokers["broker-b"].fail(RequestCode.SEND_BATCH_MESSAGE, faults.with_code(16, "a planted fault"))


def test_prepare_sink_says_what_it_found_and_made(rmq: Rmq, cluster: RunningCluster) -> None:
    words = ("prepare-sink", "-n", cluster.address, "--ledger-broker", "broker-b")
    ran = rmq(*words)
    assert (ran.status, ran.out) == (0, "")
    assert ran.err == "The ledger is new on broker broker-b.\nRows are staged on broker-a, broker-b.\n"
    assert rmq(*words).err.startswith("The ledger exists already on broker broker-b.\n")
    (row,) = rmq(*words, "--json").rows
    assert row == {
        **{"ledgerBroker": "broker-b", "isNew": False, "stageBrokers": ["broker-a", "broker-b"]},
        **{"group": "RMQ_SPARK_READER", "refusals": {}},
    }
    ran = rmq("prepare-sink", "-n", cluster.address, "--ledger-broker", "broker-a")
    assert ran.status == 1
    assert "topic RMQ_SPARK_LEDGER is on broker broker-b already" in ran.err


def test_prepare_sink_names_a_group_that_is_not_created(rmq: Rmq, cluster: RunningCluster) -> None:
    broker = cluster.brokers["broker-a"]
    broker.settings.creates_groups = False
    broker.fail(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, faults.with_code(16, "planted"))
    ran = rmq("prepare-sink", "-n", cluster.address, "--ledger-broker", "broker-a", "--stage-topic", "MY_STAGE")
    assert ran.status == 0
    assert "Group RMQ_SPARK_READER cannot be used on broker-a: " in ran.err
    assert "MY_STAGE" in cluster.brokers["broker-b"].topics


def test_prepare_sink_does_not_replace_a_ledger_unless_it_is_told_to(rmq: Rmq, prepared: RunningCluster) -> None:
    prepared.brokers["broker-a"].kill()
    words = ("prepare-sink", "-n", prepared.address, "--ledger-broker", "broker-b")
    ran = rmq(*words)
    assert (ran.status, ran.out) == (1, "")
    assert "no ledger was created: broker broker-b has the topic RMQ_SPARK_STAGE" in ran.err
    ran = rmq(*words, "--replace-ledger")
    assert (ran.status, ran.err) == (0, "The ledger is new on broker broker-b.\nRows are staged on broker-b.\n")


@pytest.mark.parametrize("words", [("intents",), ("intents", "list")])
def test_the_list_of_open_batches(rmq: Rmq, prepared: RunningCluster, words: tuple[str, ...]) -> None:
    words = (*words, "-n", prepared.address)
    ran = rmq(*words)
    assert (ran.status, ran.out, ran.err) == (0, "", "No batch is open.\n")
    commit(prepared, CommitKey(Q.query_id, 6), ROWS)
    begin(prepared, Q, ROWS, runs=1)
    begin(prepared, PLAIN, ROWS)
    ran = rmq(*words)
    assert (ran.status, ran.err) == (0, "")
    head, query, plain = (line.split() for line in ran.out.splitlines())
    assert head == ["query", "batch", "begun", "age", "owners", "brokers", "rows"]
    assert (query[0], query[1], query[-1]) == (Q.query_id, "7", "3")
    assert plain[0] == PLAIN.query_id
    row, _ = rmq(*words, "--count-rows", "--json").rows
    assert (row["batch"], row["brokers"], row["problem"]) == (7, ["broker-a", "broker-b"], None)
    assert row["written"] + row["missing"] == row["rows"] == 3
    assert rmq(*words, "--count-rows").out.split()[7:9] == ["written", "missing"]


def test_finish(rmq: Rmq, prepared: RunningCluster) -> None:
    begin(prepared, PLAIN, ROWS)
    ran = rmq("intents", "finish", "-n", prepared.address, PLAIN.query_id, *FAST)
    assert (ran.status, ran.out, ran.err) == (0, "", f"All rows of write {PLAIN.query_id} are stored.\n")
    ran = rmq("intents", "finish", "-n", prepared.address, PLAIN.query_id, *FAST)
    assert (ran.status, ran.out) == (1, "")
    assert "has no open intent" in ran.err
    begin(prepared, Q, ROWS)
    (row,) = rmq("intents", "finish", "-n", prepared.address, Q.query_id, *FAST, "--json").rows
    assert row == {"query": Q.query_id, "batch": 7, "state": "done"}


def test_skip_asks_for_the_number_of_missing_rows(rmq: Rmq, prepared: RunningCluster) -> None:
    begin(prepared, Q, ROWS)
    refuse_sends(prepared)
    words = ("intents", "skip", "-n", prepared.address, Q.query_id, *FAST)
    ran = rmq(*words)
    assert (ran.status, ran.out) == (1, "")
    number = int(ran.err.rpartition("Add --yes ")[2].split()[0])
    assert f"{3 - number} of its rows are written, {number} are missing." in ran.err
    for answer in ("", "yes\n", f"{number + 1}\n"):
        ran = rmq(*words, typed=answer)
        assert ran.status == 1
        assert ran.err.endswith("The batch stays open.\n")
    ran = rmq(*words, typed=f"{number}\n")
    assert (ran.status, ran.out) == (0, "")
    assert ran.err.endswith(f"{Q} is ended. {3 - number} of its rows are stored, {number} are missing.\n")
    assert rmq("intents", "-n", prepared.address).err == "No batch is open.\n"


def test_skip_ends_no_other_batch_than_the_one_that_it_has_shown(
    rmq: Rmq, prepared: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(prepared, Q, ROWS)
    refuse_sends(prepared)

    def confirm_late(_: Any) -> bool:
        """While the question waits for its answer, the query ends its batch and begins the next one."""
        prepared.brokers["broker-b"].heal()
        commit(prepared, Q, ROWS)
        begin(prepared, CommitKey(Q.query_id, 8), ROWS)
        refuse_sends(prepared)
        return True

    monkeypatch.setattr(command, "_confirm", confirm_late)
    ran = rmq("intents", "skip", "-n", prepared.address, Q.query_id, *FAST)
    assert ran.status == 1
    assert f"batch 7 of query {Q.query_id} is not open any more: found batch 8" in ran.err
    assert "No batch is open." not in rmq("intents", "-n", prepared.address).err


def test_skip_in_a_script(rmq: Rmq, prepared: RunningCluster) -> None:
    begin(prepared, Q, ROWS)
    refuse_sends(prepared)
    words = ("intents", "skip", "-n", prepared.address, Q.query_id, *FAST, "--json")
    ran = rmq(*words)
    assert (ran.status, ran.out) == (1, "")
    number = int(ran.err.partition(" are missing")[0].split()[-1])
    assert rmq(*words, "--yes", number + 1).status == 1
    (row,) = rmq(*words, "--yes", number).rows
    assert row == {**{"query": Q.query_id, "batch": 7}, **{"written": 3 - number, "missing": number, "damaged": {}}}


def test_skip_of_a_batch_that_another_session_ends_says_so(
    rmq: Rmq, prepared: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(prepared, Q, ROWS)
    skip = CommitSession.skip

    def skip_late(session: CommitSession, *given: Any) -> Any:
        monkeypatch.undo()
        commit(prepared, Q, ROWS)
        return skip(session, *given)

    monkeypatch.setattr(CommitSession, "skip", skip_late)
    ran = rmq("intents", "skip", "-n", prepared.address, Q.query_id, *FAST)
    assert (ran.status, ran.out) == (0, "")
    assert ran.err.endswith(f"{Q} is ended. Another session has ended it, or the answer to this one was lost.\n")


def test_skip_of_a_lost_batch_says_how_to_go_on(rmq: Rmq, prepared: RunningCluster) -> None:
    begin(prepared, Q, ROWS)
    ledger = prepared.brokers["broker-a"]
    ledger.expire("RMQ_SPARK_LEDGER", 0, ledger.bounds("RMQ_SPARK_LEDGER")[0].max_offset)
    words = ("intents", "skip", "-n", prepared.address, Q.query_id, *FAST)
    ran = rmq(*words, typed="unknown\n")
    assert ran.status == 0
    assert f"{Q} is ended.\nStart the query once with onBatchConflict=skip: " in ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("intents", "skip", "-n", "ns:1", "ID", "--yes", "all"), "--yes all: expected the number of missing rows"),
        (("intents", "finish", "-n", "ns:1"), "Missing argument 'ID'"),
        (("intents", "list"), "cannot find the cluster: found no -n HOST:PORT"),
        (("intents", "end", "-n", "ns:1"), "No such command 'end'"),
        (("prepare-sink", "-n", "ns:1"), "Missing option '--ledger-broker'. Expected the name of one broker, such as "),
        (("prepare-sink", "-n", "ns:1"), "`rmq brokers -n HOST:PORT` lists the names."),
        (("prepare-sink", "-n", "ns:1"), "[OPTIONS] -n HOST:PORT --ledger-broker NAME"),
        (("prepare-sink", "-n", "ns:1", "--ledger-broker", "a", "--ledger-broker", "b"), "found a, b; expected one"),
    ],
)
def test_words_that_do_not_fit_are_refused(rmq: Rmq, words: tuple[str, ...], said: str) -> None:
    ran = rmq(*words)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err


def test_doctor_of_a_sink(rmq: Rmq, cluster: RunningCluster) -> None:
    words = ("doctor", "-n", cluster.address, "--sink", TOPIC)
    ran = rmq(*words)
    assert (ran.status, ran.err) == (1, "A query cannot run: 3 missing.\n")
    assert "missing  ledger RMQ_SPARK_LEDGER: " in ran.out
    rmq("prepare-sink", "-n", cluster.address, "--ledger-broker", "broker-a")
    ran = rmq(*words)
    assert (ran.status, ran.err) == (0, "A query can run.\n")
    assert "ok       sink topic orders on broker-b: registration: " in ran.out
