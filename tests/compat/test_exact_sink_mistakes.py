"""Mistakes of users who write exactly once to a live cluster: each is answered by name, and none stores a row unnamed.

Every answer says what was found, what was expected and what to do next. After each mistake the target queues are read.
"""

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from compat_kit import secured
from compat_kit.clusters import TwoBrokers, run_reader
from compat_kit.deliveries import pull_deliveries
from compat_kit.our_stores import broker_conf
from compat_kit.rocketmq import Java
from compat_kit.secured import ADMIN, NAME, READ, Rights, keys_of
from compat_kit.sink_drill import prepare_cluster

import rmq_spark

pytestmark = pytest.mark.compat

_PROGRAM = Path(__file__).parent / "compat_kit" / "exact_mistakes.py"
_NOTHING: tuple[bytes, ...] = ()
_EIGHT = tuple(b"%d" % number for number in range(8))
_NOT_PREPARED = "NotFoundError: the topics .* do not exist: .* expected existing topics.*rmq prepare-sink"
_STUCK = "IntentStuckError: batch {batch} of query query of {topic} was begun and cannot be finished, because of queue "
_SHRUNK = _STUCK.format(batch=0, topic="shrunk") + "shrunk/.*without this queue; expected the queue of the batch"
_DELETED = _STUCK.format(batch=1, topic="deleted") + "deleted/"
_LOST = _STUCK.format(batch=1, topic="stuck") + r"stuck/.*the blob at offset \d+ of queue stage-gone/"
_NOT_DONE = "Repair the cause and start the query again, or give the missing rows up: rmq intents skip"
_LIVES = "BackendUnavailableError: batch 0 .* may still send: .* still lists .*fenceTimeout.*Stop that process"
_NO_OPEN = "NotFoundError: query .* has no open intent: found {}.*expected a batch that was begun.*rmq intents"
_ALL_THE_SAME = "no error"
# The error of each mistake, and the bodies that are in its target topic then.
CASES: dict[str, tuple[str, Sequence[bytes]]] = {
    # The cluster is not prepared, or not for this query.
    "nothing prepared": (_NOT_PREPARED, _NOTHING),
    "nothing prepared, new topic": (_NOT_PREPARED, _NOTHING),
    "wrong stage and ledger": (_NOT_PREPARED.replace("topics .*", "topics no-stage .*no-ledger .*"), _NOTHING),
    "no ledger": (
        "BackendUnavailableError: the ledger no-ledger is nowhere: .*expected it on one broker.*rmq prepare-sink",
        _NOTHING,
    ),
    "no stage, topics in rows": ("NotFoundError: .*the topic no-stage .*rmq prepare-sink", _NOTHING),
    "wrong namespace": (
        "NotFoundError: .*do not exist in the namespace elsewhere.*rmq prepare-sink .*--namespace elsewhere",
        _NOTHING,
    ),
    "ledger asked for on another broker": ("OptionError: .*is on broker broker-a already.*Use that ledger", _NOTHING),
    "ledger asked for on no broker": ("OptionError: broker broker-z is not .* one of broker-a, broker-b", _NOTHING),
    # Options.
    "delivery misspelt": ('OptionError: delivery="exactly-once": expected one of: exactlyOnce, atLeastOnce', _NOTHING),
    "compression": ("OptionError: compression=zlib .*delivery=exactlyOnce.*Compress the column body", _NOTHING),
    "stage is ledger": ("OptionError: stageTopic and ledgerTopic are the same topic same; expected two", _NOTHING),
    "stage is a system topic": ("OptionError: stageTopic=SCHEDULE_TOPIC_XXXX is a topic of RocketMQ", _NOTHING),
    "txnAppId of a stream": ("OptionError: txnAppId and txnVersion work in batch writes only.*Leave them", _NOTHING),
    "txnAppId without version": ("OptionError: txnAppId is given without txnVersion. Give both", _NOTHING),
    "another onBatchGap": ('OptionError: onBatchGap="ignore": expected one of: fail, continue', (b"b0", b"b1")),
    # Target topics.
    "target is the stage": ("OptionError: topic RMQ_SPARK_STAGE is .*stages rows.*Use another topic", _NOTHING),
    "target is the ledger": ("OptionError: topic RMQ_SPARK_LEDGER is the ledger .*Use another topic", _NOTHING),
    "target is the stage of others": ("OptionError: .*the stage or the ledger of other queries", _NOTHING),
    "target is a retry topic": ("OptionError: topic %RETRY%billing is the retry topic of a group", _NOTHING),
    "target is a system topic": ("OptionError: topic SCHEDULE_TOPIC_XXXX is an internal topic", _NOTHING),
    "target does not exist": ("NotFoundError: topic absent does not exist: .*rmq create -n NAMESERVER", _NOTHING),
    "target without write permission": ("NoPermissionError: topic closed .*mqadmin updateTopicPerm", _NOTHING),
    # Rows.
    "delay level": ("OptionError: .*row 1, .*delayLevel 3; expected none .*atLeastOnce", _NOTHING),
    "delivery time": ("OptionError: .*row 1, .*deliverTimestamp in the future; .*atLeastOnce", _NOTHING),
    "body over the limit": ("OptionError: .*row 1, .*4194305 bytes; .*maxMessageSize.*Split the message$", _NOTHING),
    "body at the limit, with what a batch adds": ("OptionError: .*row 1, .*takes 41943.* in a batch", _NOTHING),
    "properties over the limit": ("OptionError: .*row 1, .*take 33045 bytes; expected at most 32500", _NOTHING),
    "null body": ("OptionError: .*row 1, .*its body is null. Give a body", _NOTHING),
    "topic of the stage in a row": ("OptionError: .*topic RMQ_SPARK_STAGE is .*Use another topic", _NOTHING),
    # Ledgers.
    "ledger twice": ("BrokerError: there are two ledgers: .*broker-a, broker-b; expected one.*Stop all", _NOTHING),
    "ledger closed": ("NoPermissionError: the ledger ledger-closed .*perm 4; expected 6.*updateTopicPerm", _NOTHING),
    "ledger small": (_ALL_THE_SAME, (b"small",)),  # only queue 0 has rows, and offsets of groups need no queue
    "ledger large": (_ALL_THE_SAME, (b"large", b"small")),
    "intents of two ledgers": ("BrokerError: there are two ledgers: .*rmq intents", (b"large", b"small")),
    "ledger deleted": ("BackendUnavailableError: the ledger .*(is nowhere|is not at broker)", (b"b0", b"b1")),
    # A broker of 5.3 forgets the offsets of groups with the topic, and one of 4.9 keeps them.
    "ledger replaced": (
        "BatchConflictError: .*(the ledger has no batch of this query|contradicts the marks|was replaced)"
        ".*Compare the target topics with the checkpoint.*(Nothing was written|has written nothing)",
        (b"b0", b"b1"),
    ),
    # Batches that are not the next ones.
    "first batch is not 0": ("BatchConflictError: batch 3 .*ledger has no batch.*onBatchGap=continue", _NOTHING),
    "copied checkpoint": ("BatchConflictError: batch 1 .*is 1 with 1 rows.*checkpoint was copied", (b"b0", b"b1")),
    "copied checkpoint, more rows": ("BatchConflictError: batch 1 .*to write has 2 rows", (b"b0", b"b1")),
    "older checkpoint": ("BatchConflictError: batch 0 .*written once and in order.*rolled back", (b"b0", b"b1")),
    "gap": ("BatchConflictError: batch 4 .*so 2 to 3 would be missing.*onBatchGap=continue", (b"b0", b"b1")),
    "conflict skipped": (_ALL_THE_SAME, (b"b0", b"b1")),
    "version with other rows": ("BatchConflictError: batch 1 of .*nightly.*a txnVersion", (b"b0", b"b1", b"v1")),
    "version repeated": (_ALL_THE_SAME, (b"b0", b"b1", b"v1")),
    # Batches that are not open.
    "skip what is done": (_NO_OPEN.format("batch 0"), (b"b0",)),
    "finish what is done": (_NO_OPEN.format("batch 0"), (b"b0",)),
    "skip an unknown query": (_NO_OPEN.format("no row"), (b"b0",)),
    "skip a negative number": ("OptionError: missing=-1 must be an integer", (b"b0",)),
    # What changes between the tasks and the commit.
    "target shrunk before the commit": (
        "NotFoundError: the batch cannot be committed: queue narrowed/.*accepts no messages any more.*Start the batch",
        _NOTHING,
    ),
    "target shrunk, batch repeated": (_ALL_THE_SAME, (b"x",)),
    "target deleted before the commit": ("BackendUnavailableError: .*topic vanished.*it was deleted", _NOTHING),
    "stage deleted before the commit": (
        "BackendUnavailableError: topic stage-lost is not listed on broker .*rmq prepare-sink",
        _NOTHING,
    ),
    "stage replaced before the commit": (
        "BackendUnavailableError: batch 0 .*does not show the rows .*was created again, start the batch again",
        _NOTHING,
    ),
    # What changes while a batch is open. `skip` publishes what can be, also if its number is wrong.
    "target shrunk while open": (f"{_SHRUNK}.*0 of its rows are written, 8 are missing.*{_NOT_DONE}", _NOTHING),
    "next batch while open": (_SHRUNK, _NOTHING),
    "finish without the queues": (_SHRUNK, _NOTHING),
    "target whole again": (_ALL_THE_SAME, _EIGHT),
    "target deleted while open": (f"{_DELETED}.*does not have the topic.*2 are missing.*{_NOT_DONE}", _NOTHING),
    "target replaced while open": (f"{_DELETED}.*the topic was created again.*2 are missing", _NOTHING),
    "skip of a deleted target": (_ALL_THE_SAME, _NOTHING),
    "next batch after a skip": (_ALL_THE_SAME, (b"next",)),
    "stage deleted while open": ("BackendUnavailableError: topic stage-gone is not listed .*prepare-sink", (b"b0",)),
    "stage replaced while open": (f"{_LOST}.*0 of its rows are written, 2 are missing.*{_NOT_DONE}", (b"b0",)),
    "skip of a lost stage with another number": (f"{_LOST}.*confirmed number .* is 1; expected 2", (b"b0",)),
    "skip of a lost stage": (_ALL_THE_SAME, (b"b0",)),
    "next batch after a lost stage": (_ALL_THE_SAME, (b"b0", b"next")),
    # Two processes with one checkpoint.
    "second query at once": (_LIVES, _NOTHING),
    "skip while it is written": (_LIVES, _NOTHING),
    "first query at once": (_ALL_THE_SAME, (b"one", b"two")),
    "second query afterwards": (_ALL_THE_SAME, (b"one", b"two")),
}
# Mistakes after which a part of the rows is stored, which the error counts.
PARTS = {
    "skip without a number": "4 of its rows are written, 4 are missing",
    "skip with another number": "confirmed number of missing rows is 3; expected 4. 4 of its rows are written",
}
CREATED = ("no-stage", "no-ledger", "new-topic", "elsewhere%unprepared", "elsewhere%RMQ_SPARK_STAGE")
Answers = Mapping[str, tuple[str, list[bytes]]]


@pytest.fixture(scope="module")
def answers(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp(f"exact-mistakes-{java.version}")
    with TwoBrokers(
        java, folder, **{**broker_conf(), "timerWheelEnable": True}
    ) as cluster:  # 5.3 deletes no topic without
        found: Answers = run_reader(java, cluster.address, folder, "try_mistakes", program=_PROGRAM)
    for name, answer in found.items():
        print(java.version, name, *answer)
    return found


@pytest.mark.parametrize("name", CASES)
def test_mistakes_are_named_and_store_nothing_else(answers: Answers, name: str) -> None:
    text, bodies = answers[name]
    expected, stored = CASES[name]
    assert re.search(expected, text), text
    assert bodies == [*stored]


@pytest.mark.parametrize("name", PARTS)
def test_rows_that_a_skip_has_stored_are_counted(answers: Answers, name: str) -> None:
    text, bodies = answers[name]
    assert re.search(f"{_SHRUNK}.*{PARTS[name]}", text), text
    assert len(bodies) == 4
    assert set(bodies) < set(_EIGHT)


def test_refused_writes_create_no_topic(answers: Answers) -> None:
    assert {name: answers[f"created {name}"][0] for name in CREATED} == dict.fromkeys(CREATED, "[False, False]")


def test_every_answer_is_expected(answers: Answers) -> None:
    assert answers.keys() == {*CASES, *PARTS, *(f"created {name}" for name in CREATED)}


_ALL, _STAGE, _LEDGER = ["Pub", "Sub", "Get"], "Topic:RMQ_SPARK_STAGE", "Topic:RMQ_SPARK_LEDGER"
_GROUPS = {"Group:*": ["Sub", "Create"]}
_CLUSTER = {"Cluster:*": ["Get"]}
WRITERS: Rights = {
    "without-ledger": {f"Topic:{READ}": _ALL, _STAGE: _ALL, **_GROUPS, **_CLUSTER},
    "without-stage": {f"Topic:{READ}": _ALL, _LEDGER: _ALL, **_GROUPS, **_CLUSTER},
    "without-cluster": {f"Topic:{READ}": _ALL, _STAGE: _ALL, _LEDGER: _ALL, **_GROUPS},
    "without-target": {f"Topic:{READ}": ["Sub", "Get"], _STAGE: _ALL, _LEDGER: _ALL, **_GROUPS, **_CLUSTER},
    "with-all": {f"Topic:{READ}": _ALL, _STAGE: _ALL, _LEDGER: _ALL, **_GROUPS, **_CLUSTER},
}
# The error of each account, and how many rows it stores.
ACCOUNTS: dict[str, tuple[str, int]] = {
    "without-ledger": ("NoPermissionError: .*RMQ_SPARK_LEDGER.*SUB of the topic", 0),
    "without-stage": ("NoPermissionError: .*RMQ_SPARK_STAGE.*PUB of the topic", 0),
    "without-cluster": ("NoPermissionError: .*Get of the cluster.*delivery=atLeastOnce", 0),
    "without-target": (f"IntentStuckError: batch 0 .*PUB of the topic.*0 of its rows .*{_NOT_DONE}", 0),
    "with-all": (_ALL_THE_SAME, 1),
}


def test_missing_rights_are_named(java: Java, tmp_path: Path) -> None:
    served = secured.with_accounts(java, tmp_path, WRITERS)
    expected = dict(ACCOUNTS)
    if not java.is_5:  # ACL 1.0 has no rights of the cluster, and does not check requests with several messages
        expected |= dict.fromkeys(("without-cluster", "without-target"), ACCOUNTS["with-all"])
    with served.broker:
        secured.create_users(served, WRITERS)
        found: Answers = run_reader(
            java,
            served.broker.namesrv,
            tmp_path,
            "try_accounts",
            program=_PROGRAM,
            broker=NAME,
            topic=READ,
            administrator=keys_of(*ADMIN),
            accounts={name: keys_of(name) for name in WRITERS},
        )
    for name, (text, bodies) in found.items():
        print(java.version, name, text)
        assert re.search(expected[name][0], text), (name, text)
        assert bodies.count(b"from " + name.encode()) == expected[name][1], name
        assert "planted" not in text


@pytest.mark.release("5.3.3")
def test_streams_with_a_copied_checkpoint_store_no_row_twice(java: Java, tmp_path: Path) -> None:
    """Spark does not notice that two drivers have copies of one checkpoint; the ledger does."""
    source, topic = str(tmp_path / "source"), "copies"
    first, second = str(tmp_path / "first"), str(tmp_path / "second")

    def follow(name: str, *steps: tuple[str, list[str]]) -> list[str]:
        (folder := tmp_path / name).mkdir()
        arguments = {"source": source, "topic": topic, "steps": list(steps)}
        program = _PROGRAM.with_name("cluster_writer.py")
        return list(run_reader(java, cluster.address, folder, "follow_checkpoints", program=program, **arguments))

    with TwoBrokers(java, tmp_path / "servers", **broker_conf()) as cluster, cluster.client() as client:
        prepare_cluster(cluster)
        client("create-topic", topic=topic, queues=2)
        assert follow("alone", (first, ["a", "b"])) == ["no error"]
        shutil.copytree(first, second)
        with rmq_spark.open_store(source) as store:
            store.send("orders", "c")
        assert follow("one", (first, [])) == ["no error"]
        assert follow("two", (second, [])) == ["no error"], "it finds the batch written"
        answers = follow("after", (first, ["d"]), (second, ["e"]), (first, []))
        found = pull_deliveries(client, [topic])
    print(java.version, *answers)
    assert answers[0] == answers[2] == "no error"
    assert re.search("BatchConflictError: batch 2 .*last batch in the store is 2.*checkpoint was copied", answers[1])
    assert Counter(one.body for one in found) == Counter([b"a", b"b", b"c", b"d", b"e"])
