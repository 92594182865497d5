"""Exactly once at brokers that are stopped, slow, without a slave, or killed in the middle of a batch.

The tests print what they see. RMQ_SPARK_ROUNDS=20 repeats the first two of them more often, RMQ_SPARK_SEED=7 chooses
other moments, and RMQ_SPARK_ROWS=200000 is the size of the batch whose growth is measured.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from compat_kit import exact_life
from compat_kit.clusters import NAMES, FourServers, await_registrations, run_doctor
from compat_kit.exact_faults import (
    LogEnd,
    Program,
    find_faults,
    milliseconds,
    run,
    run_command,
    stop_all_threads,
)
from compat_kit.exact_program import QUERY, QUEUES
from compat_kit.rocketmq import Broker, Java
from compat_kit.sessions import kill_session, processes_of, signal_all
from compat_kit.sink_drill import prepare_cluster

import rmq_spark

pytestmark = pytest.mark.compat
A, B = NAMES
ROUNDS = int(os.environ.get("RMQ_SPARK_ROUNDS", "0"))
SEED = int(os.environ.get("RMQ_SPARK_SEED", "24"))
ROWS_SHOWN = int(os.environ.get("RMQ_SPARK_ROWS", "16000"))
CONF = {"mappedFileSizeCommitLog": 256 << 20, "mappedFileSizeConsumeQueue": 6_000_000}
TOPICS = ("paused", "late", "torn", "grown", "doctored", "survived", "frozen")
FILLING = 900  # characters of a property of each row that may be torn
TRIES = 20  # batches until one has a torn row
_COMMIT, _JVM = "python_streaming_sink_runner", "org.apache.spark.deploy.SparkSubmit"
HARMLESS = (
    "none of transientStorePoolEnable, enableControllerMode, enableDLegerCommitLog, "
    "enableBuildConsumeQueueConcurrently is on. flushDiskType=ASYNC_FLUSH: a power cut may lose rows (condition C1)."
)
_LIMIT_S = 300.0  # the end of a hang


@pytest.fixture(scope="module")
def servers(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FourServers]:
    """Two brokers with the topics of the tests, prepared for the sink. The ledger is on the first one."""
    with FourServers(java, tmp_path_factory.mktemp(f"faults-{java.version}"), **CONF) as servers:
        prepare(servers, *TOPICS)
        yield servers


def prepare(servers: FourServers, *topics: str) -> None:
    prepare_cluster(servers)
    with servers.client() as client:
        for topic in topics:
            client("create-topic", topic=topic, queues=QUEUES)


def restart(servers: FourServers, name: str, **conf: object) -> None:
    """Kill a broker, and start it with further settings. Returns when both name servers list both brokers."""
    broker = servers.brokers[name]
    broker.kill()
    broker.conf = {**CONF, "brokerName": name, "namesrvAddr": servers.address, **conf}
    servers.start(broker)
    await_registrations(servers.java, servers.address)


def faults_of(
    servers: FourServers,
    folder: Path,
    topic: str,
    batches: Mapping[int, int],
    damaged: Mapping[tuple[str, int], set[int]] | None = None,
) -> list[str]:
    return find_faults(run(servers, folder, "read_texts", topic=topic), batches, damaged)


# Pauses and slow disks.


def test_a_commit_dies_while_brokers_are_stopped_for_seconds(servers: FourServers, tmp_path: Path) -> None:
    print(f"\n{servers.java.version}, seed {SEED}: the writer dies with sends in flight, and brokers stop for seconds")
    die_and_take_over(servers, tmp_path, "paused", rounds=ROUNDS or 2, settle_ms=1_000, pauses=True)


@pytest.mark.release("5.3.3")
def test_a_commit_dies_while_the_disk_is_slow(java: Java, tmp_path: Path) -> None:
    print(f"\n{java.version}, seed {SEED}: synchronous flush, and two programs that write and flush all the time")
    with FourServers(java, tmp_path / "servers", **CONF, flushDiskType="SYNC_FLUSH") as servers:
        prepare(servers, "slow")
        with busy_disk(tmp_path):
            die_and_take_over(servers, tmp_path, "slow", rounds=ROUNDS or 1, settle_ms=5_000, pauses=False)


def die_and_take_over(
    servers: FourServers, folder: Path, topic: str, *, rounds: int, settle_ms: int, pauses: bool
) -> None:
    """Kill a writer with sends in flight, finish its batch, and repeat it. Do so `rounds` times.

    With `pauses` some brokers are stopped right after these sends, in every second round also at the first barrier.
    """
    random, rows = Random(SEED), 6_000
    for batch in range(rounds):
        victims = [servers.brokers[name].pid for name in random.choice([[A, B], [B], [B], [A]])] if pauses else []
        number, delay_s = random.randint(2, 10), random.uniform(0, 0.02)
        moment = {"request": "PublishRequest", "number": number, "delay_s": delay_s, "freezes": victims, "dies": True}
        arguments = {"topic": topic, "batch": batch, "rows": rows, "body_bytes": 4_000, "settle_ms": settle_ms}
        again = {"request": "SendRequest", "number": 1, "is_before": True, "freezes": victims}
        stops_again = pauses and batch % 2 == 1
        with ExitStack() as stack:
            stack.callback(thaw, victims)
            writer = stack.enter_context(Program(servers, folder, "write_batch", **arguments, moment=moment))
            died = writer.await_death()["at"]
            follower = stack.enter_context(
                Program(
                    servers, folder, "finish", topic=topic, settle_ms=settle_ms, moment=again if stops_again else None
                )
            )
            if pauses:
                pause_and_thaw(victims, random, f"round {batch}: the writer has died", died)
            if stops_again:
                stopped = follower.await_event("moment")["at"]
                pause_and_thaw(victims, random, f"round {batch}: the barrier is sent", stopped)
            outcome = follower.result()
            assert not outcome["error"], outcome
            tell(batch, died, follower)
        assert run(servers, folder, "write_batch", **arguments)["skipped"], "it was finished"
    assert not faults_of(servers, folder, topic, dict.fromkeys(range(rounds), rows))


def pause_and_thaw(victims: list[int], random: Random, what: str, stopped: float) -> None:
    """Let brokers that were stopped continue after some seconds, and print the time."""
    time.sleep(random.uniform(3, 6))
    thaw(victims)
    print(f"{what}, {len(victims)} brokers were stopped for {milliseconds(stopped, time.monotonic())}")


def tell(batch: int, died: float, follower: Program) -> None:
    """Print when each step of a take-over ended, in time since the death, and how many messages were visible then."""
    steps = [one for one in follower.events() if one["event"] in ("taken", "not listed", "barrier", "settled")]
    visible = [one["rows"] for one in steps if "rows" in one]
    texts = [f"{one['event']} {milliseconds(died, one['at'])} {one.get('rows', '')}" for one in steps]
    print(f'round {batch}: {"; ".join(texts)}; {visible[-1] - visible[0]} rows became visible after "not listed"')


def thaw(pids: list[int]) -> None:
    signal_all(pids, signal.SIGCONT)


@contextmanager
def busy_disk(folder: Path) -> Iterator[None]:
    """Let two programs write and flush files in a folder meanwhile."""
    program = (
        "import os, sys\n"
        "file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "while True:\n"
        "    os.pwrite(file, os.urandom(32 << 20), 0)\n"
        "    os.fsync(file)\n"
    )
    with ExitStack() as stack:
        for number in range(2):
            command = [sys.executable, "-c", program, str(folder / f"busy-{number}")]
            process = subprocess.Popen(command, start_new_session=True)
            stack.callback(kill_session, process)
        yield


# A master that waits for a slave that does not exist.


def test_a_master_without_a_slave_stops_the_query_with_a_clear_error(servers: FourServers, tmp_path: Path) -> None:
    # 5.x waits for slaves only if more than one replica must have the message.
    more = {"inSyncReplicas": 2, "totalReplicas": 2, "slaveTimeout": 100} if servers.java.is_5 else {}
    late = {"brokerRole": "SYNC_MASTER", **more}
    arguments = {"topic": "late", "rows": 400, "timeout_ms": 1_000}
    restart(servers, B, **late)
    done = run(servers, tmp_path, "write_batch", batch=0, **arguments)
    assert not done["error"], "rows that are stored late are stored"

    with Program(
        servers,
        tmp_path,
        "write_batch",
        batch=1,
        broker=B,  # so no connection breaks that the session needs
        **{**arguments, "timeout_ms": 2_000},  # it sends the row ten times as long, and the broker starts meanwhile
        moment={"request": "AppendRequest", "number": 2, "is_before": True, "waits": True},  # the row `done`
    ) as writer:
        writer.await_event("moment")
        restart(servers, A, **late)
        writer.go_on()
        check_late(writer.result(), "400 of its rows are in their queues")
    assert run(servers, tmp_path, "write_batch", batch=1, broker=B, **arguments)["skipped"]

    check_late(run(servers, tmp_path, "write_batch", batch=2, **arguments), "none of its rows is in its queue yet")
    status, listed = run_command(servers, "intents", "--count-rows", "--json")
    assert not status, listed
    assert '"written": 0, "missing": 400' in listed
    check_late(run(servers, tmp_path, "write_batch", batch=2, **arguments), "an earlier session has begun it")

    for name in NAMES:
        restart(servers, name)
    assert not run(servers, tmp_path, "write_batch", batch=2, **arguments)["error"]
    assert not faults_of(servers, tmp_path, "late", {0: 400, 1: 400, 2: 400})


def check_late(outcome: Mapping[str, str], state: str) -> None:
    assert outcome["error"] == "BrokerError", outcome
    assert "is not safe in the ledger" in outcome["text"]
    assert state in outcome["text"]
    assert "Start the slave of the broker, or set brokerRole=ASYNC_MASTER" in outcome["text"]


# Torn rows.


def test_a_torn_row_stops_the_query_until_it_is_skipped(servers: FourServers, tmp_path: Path) -> None:
    random, rows = Random(SEED), 16_000
    arguments = {"topic": "torn", "rows": rows, "body_bytes": 12, "property_chars": FILLING, "broker": B}
    print(f"\n{servers.java.version}, seed {SEED}")
    broker = servers.brokers[B]
    batches: dict[int, int] = {}
    for batch in range(TRIES):
        batches[batch] = rows
        log = LogEnd(broker)
        with Program(servers, tmp_path, "write_batch", batch=batch, **arguments) as writer:
            writer.await_event("promised")
            looks, is_cut = kill_in_a_row(broker, log, writer, random)
            if is_cut:
                servers.start(broker)
            outcome = writer.result()
        print(f"batch {batch}: {looks} looks, {'killed in a row' if is_cut else 'published'}; {outcome['text']}")
        if outcome["error"]:
            break
        assert not faults_of(servers, tmp_path, "torn", batches)
    assert outcome["error"] == "IntentStuckError", "no row was torn: try another RMQ_SPARK_SEED"
    assert outcome["written"] + outcome["missing"] == rows
    assert outcome["missing"]
    assert B in outcome["queue"]
    assert "without its last properties" in outcome["text"]
    assert run(servers, tmp_path, "write_batch", batch=batch, **arguments)["text"] == outcome["text"], "it stays open"

    status, printed = run_command(servers, "intents", "skip", f"{QUERY}-torn", "--settle-time", "1")
    print(printed)
    assert not status, printed
    assert f"{rows:,} of its rows are stored, 0 are missing" in printed
    place, offset = find_damaged(printed)
    assert run(servers, tmp_path, "write_batch", batch=batch, **arguments)["skipped"]
    assert not run(servers, tmp_path, "write_batch", batch=batch + 1, **arguments)["error"]
    batches[batch + 1] = rows
    assert not faults_of(servers, tmp_path, "torn", batches, {place: {offset}})


def kill_in_a_row(broker: Broker, log: LogEnd, writer: Program, random: Random) -> tuple[int, bool]:
    """Stop a broker again and again while it stores rows, and kill it when it has stopped in the properties of a row.

    Return how often its log was looked at, and whether it was killed.
    """
    looks = 0
    while not (writer.events("committed") or writer.events("failed")):
        time.sleep(random.uniform(0.0005, 0.006))
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            stop_all_threads(broker.pid)
            looks += 1
            cut = log.find_cut("torn")
            if cut is not None and b"x" * FILLING not in cut.properties:
                broker.kill()
                print(f"cut after {len(cut.properties.rstrip(bytes(1)))} of {len(cut.properties)} bytes of properties")
                return looks, True
        finally:
            if broker.program.process.poll() is None:
                os.kill(broker.pid, signal.SIGCONT)
    return looks, False


def find_damaged(printed: str) -> tuple[tuple[str, int], int]:
    """Return the queue, as broker and queue id, and the queue offset of the damaged copy that a command has printed."""
    (line,) = [line for line in printed.splitlines() if "has damaged copies of rows" in line]
    queue, _, offsets = line.removeprefix("Queue ").partition(" has damaged copies of rows at the queue offsets ")
    broker, _, queue_id = queue.partition("/")[2].partition(":")
    return (broker, int(queue_id)), int(offsets.rstrip("."))


# Readers.


@pytest.mark.release("4.9.7")
def test_readers_see_a_batch_grow(servers: FourServers, tmp_path: Path) -> None:
    brokers = {name: f"127.0.0.1:{broker.port}" for name, broker in servers.brokers.items()}
    arguments = {"topic": "grown", "rows": ROWS_SHOWN, "body_bytes": 1_000}
    middle = {"request": "PublishRequest", "number": max(ROWS_SHOWN // 2_000, 2), "dies": True}
    with Program(servers, tmp_path, "watch", topic="grown", brokers=brokers) as watch:
        watch.await_event("visible")
        assert not run(servers, tmp_path, "write_batch", batch=0, **arguments)["error"]
        await_rows(watch, ROWS_SHOWN)
        first, last = growth(watch, 0, ROWS_SHOWN)
        print(f"\n{servers.java.version}: {ROWS_SHOWN} rows on {2 * QUEUES} queues were seen to grow for ", end="")
        print(milliseconds(first, last))
        with Program(servers, tmp_path, "write_batch", batch=1, **arguments, moment=middle) as writer:
            died = writer.await_death()["at"]
        assert not run(servers, tmp_path, "finish", topic="grown", settle_ms=5_000)["error"]
        await_rows(watch, 2 * ROWS_SHOWN)
        first, last = growth(watch, ROWS_SHOWN, 2 * ROWS_SHOWN)
        sessions = [one for one in watch.events("visible") if one["at"] <= died + 1]
        print(
            f"the commit died with {sessions[-1]['rows'] - ROWS_SHOWN} of them visible; the last one was visible ",
            end="",
        )
        print(f"{milliseconds(died, last)} later, {milliseconds(first, last)} after the first one")
    assert not faults_of(servers, tmp_path, "grown", {0: ROWS_SHOWN, 1: ROWS_SHOWN})


def await_rows(watch: Program, rows: int) -> None:
    until = time.monotonic() + _LIMIT_S
    while not any(one["rows"] >= rows for one in watch.events("visible")):
        assert time.monotonic() < until, watch.events()[-3:]
        time.sleep(0.05)


def growth(watch: Program, begin: int, end: int) -> tuple[float, float]:
    """Return when the first row of a batch became visible and when the last one did, as the numbers of rows tell."""
    times = [one["at"] for one in watch.events("visible") if begin < one["rows"] <= end]
    return times[0], times[-1]


# The doctor.


def test_the_doctor_names_settings_that_break_the_promise(servers: FourServers) -> None:
    setting = "enableBuildConsumeQueueConcurrently"
    words = ("--sink", "doctored", "--request-timeout", "20")
    restart(servers, B, **{setting: True})
    _, lines = run_doctor(servers.java, servers.address, *words)
    restart(servers, B)
    print(*lines, sep="\n")
    assert f"ok       sink topic doctored on {A}: settings: {HARMLESS}" in lines
    assert not [line for line in lines if line.startswith("missing")]
    # A broker of 4.9 does not have this setting, but tells all that is in its file.
    (line,) = [line for line in lines if line.startswith(f"warning  sink topic doctored on {B}: settings: ")]
    assert f"{setting}=true" in line


# The JVM of Spark is killed alone.


@pytest.mark.parametrize(
    "topic",
    [
        pytest.param("survived", marks=pytest.mark.release("5.3.3")),
        pytest.param("frozen", marks=pytest.mark.release("4.9.7")),
    ],
)
def test_a_commit_outlives_its_jvm(servers: FourServers, tmp_path: Path, topic: str) -> None:
    """The commit of a killed driver ends before the next driver begins, or is frozen and continues beside it."""
    rows = 24_000
    fill_source(tmp_path / "source", 2 * rows)
    brokers = {name: f"127.0.0.1:{broker.port}" for name, broker in servers.brokers.items()}
    pids = [broker.pid for broker in servers.brokers.values()]
    with ExitStack() as stack:
        watch = stack.enter_context(Program(servers, tmp_path, "watch", topic=topic, brokers=brokers))
        watch.await_event("visible")
        first = stack.enter_context(life(servers, tmp_path, topic, rows))
        while watch.events("visible")[-1]["rows"] == 0:
            assert first.poll() is None, (tmp_path / "life.log").read_text(errors="replace")[-4000:]
            time.sleep(0.005)
        signal_all(pids, signal.SIGSTOP)
        try:
            survivors = processes_of(first.pid, _COMMIT)
            assert survivors, "the commit was over too soon"
            signal_all(processes_of(first.pid, _JVM), signal.SIGKILL)
            if topic == "frozen":
                signal_all(survivors, signal.SIGSTOP)
        finally:
            thaw(pids)
        if topic == "frozen":
            second = stack.enter_context(life(servers, tmp_path, topic, rows))
            time.sleep(20)  # the next driver begins, and waits for the end of the connections
            print(f"\n{watch.events('visible')[-1]['rows']} rows are visible while the first commit is frozen")
            thaw(survivors)
        else:
            await_end(first.pid)
            print(f"\n{servers.java.version}: {watch.events('visible')[-1]['rows']} rows are visible after the commit")
            second = stack.enter_context(life(servers, tmp_path, topic, rows))
        assert second.wait(_LIMIT_S) == 0, (tmp_path / "life.log").read_text(errors="replace")[-4000:]
    assert not faults_of(servers, tmp_path, topic, {0: 2 * rows})


def fill_source(path: Path, rows: int) -> None:
    bodies = [f"000-{number:07}".encode().ljust(1_000, b".") for number in range(rows)]
    with rmq_spark.open_store(str(path), queues=1) as store:
        store.send_many(pa.table({"body": pa.array(bodies, pa.binary())}), topic=exact_life.SOURCE_TOPIC)


@contextmanager
def life(servers: FourServers, folder: Path, topic: str, rows_a_batch: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the stream from the source to a topic. Left: all its processes were killed."""
    places = [str(folder / "source"), servers.address, str(folder / "checkpoint"), topic, str(rows_a_batch)]
    command = [*servers.java.network.prefix, sys.executable, "-P", str(exact_life.__file__), *places]
    with (folder / "life.log").open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        kill_session(process)


def await_end(session: int) -> None:
    """Wait until no commit of a session runs any more."""
    until = time.monotonic() + _LIMIT_S
    while processes_of(session, _COMMIT):
        assert time.monotonic() < until, "the commit without a JVM does not end"
        time.sleep(0.1)
