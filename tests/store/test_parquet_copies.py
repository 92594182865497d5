"""Tests of `export_parquet` and `import_parquet` with a live cluster: copies in both directions, and mistakes."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rmq_spark
from rmq_spark import OptionError, export_parquet, import_parquet
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RELEASES, Account, AccountTable, RunningCluster, ServerTls, faults
from rmq_spark.store.tools import import_source

COUNT = 240
SENT_BATCH = 320  # SEND_BATCH_MESSAGE
SAME = ("tags", "keys", "body", "flag")
CERTIFICATES = Path(__file__).resolve().parents[1] / "support" / "certificates"
ENGINE_OWN = {"UNIQ_KEY", "CLUSTER", "MSG_REGION", "TRACE_ON", "WAIT", "INNER_NUM"}  # a broker adds some
MAP = pa.map_(pa.string(), pa.string())
Row = tuple[object, ...]


def messages(count: int = COUNT, queues: int = 3) -> pa.Table:
    """Return messages of two topics, each for a queue that is given."""
    numbers = range(count)
    return pa.table(
        {
            "topic": [("orders", "bills")[number % 2] for number in numbers],
            "body": [f"body {number}".encode() for number in numbers],
            "tags": [None if number % 5 else "t" for number in numbers],
            "keys": [f"k{number} all" for number in numbers],
            "properties": pa.array([[("region", "eu"), ("n", f"{number}")] for number in numbers], MAP),
            "flag": pa.array(numbers, pa.int32()),
            "queueId": pa.array([number // 2 % queues for number in numbers], pa.int32()),
        }
    )


def rows_by_queue(file: Path) -> dict[tuple[str, int], list[Row]]:
    """Return what a copy keeps of the rows of a file, by topic and queue id, in order."""
    found = defaultdict(list)
    for row in pq.read_table(file).to_pylist():
        properties = tuple(sorted(pair for pair in row["properties"] if pair[0] not in ENGINE_OWN))
        found[row["physicalTopic"], row["queueId"]].append((*(row[name] for name in SAME), properties))
    return dict(found)


def ids_of(cluster: RunningCluster, file: Path) -> list[str]:
    """Return the ids of all messages in a cluster, in the order of queues and offsets."""
    export_parquet(target=file, name_server=cluster.address, overwrite=True)
    ids: list[str] = pq.read_table(file)["msgId"].to_pylist()
    return ids


@pytest.fixture(params=sorted(RELEASES))
def cluster(request: pytest.FixtureRequest, run_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    """A cluster of two brokers without topics."""
    return run_cluster(release=request.param, brokers=2)


@pytest.fixture
def lone(run_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    """A cluster of one broker without topics."""
    return run_cluster()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """The messages in a file that was exported from a store."""
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 20, queues=3) as store:
        store.send_many(messages())
    export_parquet(tmp_path / "store", tmp_path / "store.parquet")
    return tmp_path / "store.parquet"


@pytest.fixture
def of_brokers(tmp_path: Path) -> Path:
    """A file with messages for queues of broker-a and broker-b."""
    brokers = pa.array([("broker-a", "broker-b")[number // 4 % 2] for number in range(COUNT)])
    pq.write_table(messages(queues=2).append_column("brokerName", brokers), tmp_path / "brokers.parquet")
    return tmp_path / "brokers.parquet"


@pytest.mark.parametrize("release", sorted(RELEASES))
def test_a_store_a_cluster_and_a_store_have_the_same_messages(
    run_cluster: Callable[..., RunningCluster], exported: Path, tmp_path: Path, release: str
) -> None:
    cluster = run_cluster(release=release)
    told: list[tuple[int, int]] = []
    done = import_parquet(source=exported, name_server=cluster.address, progress=lambda *step: told.append(step))
    assert (done.messages, done.skipped, done.topics) == (COUNT, 0, ("bills", "orders"))
    assert told == [(0, COUNT), (COUNT, COUNT)]
    copy = tmp_path / "cluster.parquet"
    back = export_parquet(target=copy, name_server=cluster.address, row_group_rows=50)
    assert (back.messages, back.topics, back.bytes) == (COUNT, ("bills", "orders"), copy.stat().st_size)
    assert pq.ParquetFile(copy).metadata.row_group(0).num_rows == 50
    assert pq.read_schema(copy).names == [*rmq_spark.COLUMNS, "brokerName"]
    assert json.loads(pq.read_schema(copy).metadata[b"rmq"]) == {"v": 1, "queues": {"bills": 3, "orders": 3}}
    assert import_parquet(tmp_path / "other", copy).messages == COUNT
    export_parquet(tmp_path / "other", tmp_path / "other.parquet")
    assert rows_by_queue(exported) == rows_by_queue(copy) == rows_by_queue(tmp_path / "other.parquet")
    with rmq_spark.open_reader(tmp_path / "other") as reader:
        assert len(reader.queues("orders")) == 3, "as many as in the first store"


def test_import_parquet_keeps_queues_of_brokers(cluster: RunningCluster, of_brokers: Path, tmp_path: Path) -> None:
    import_parquet(source=of_brokers, name_server=cluster.address)
    copy = tmp_path / "copy.parquet"
    export_parquet(target=copy, name_server=cluster.address)
    rows = {row["body"]: (row["brokerName"], row["queueId"]) for row in pq.read_table(copy).to_pylist()}
    given = {row["body"]: (row["brokerName"], row["queueId"]) for row in pq.read_table(of_brokers).to_pylist()}
    assert rows == given
    export_parquet(target=copy, name_server=cluster.address, overwrite=True, bounds={("orders", 1, "broker-b"): (2, 5)})
    part = pq.read_table(copy)
    assert part["queueOffset"].to_pylist() == [2, 3, 4]
    assert set(part["brokerName"].to_pylist()) == {"broker-b"}
    back = import_parquet(tmp_path / "one", of_brokers)
    assert back.messages == COUNT, "a store has no brokers, so queues with one id become one"
    with rmq_spark.open_reader(tmp_path / "one") as reader:
        assert [reader.bounds(queue).max_offset for queue in reader.queues("orders")] == [COUNT // 4, COUNT // 4, 0, 0]


def test_export_parquet_of_a_cluster_chooses_topics_times_and_columns(lone: RunningCluster, tmp_path: Path) -> None:
    with rmq_spark.open_store(name_server=lone.address) as store:
        store.send_many(messages(40))
    file = tmp_path / "x.parquet"
    whole = export_parquet(target=file, name_server=lone.address, topics=["orders"])
    assert (whole.messages, whole.topics) == (20, ("orders",))
    times = sorted(pq.read_table(file)["storeTimestamp"].cast(pa.int64()).to_pylist())
    words = {"topics": ["orders"], "columns": ["body", "brokerName"], "overwrite": True, "name_server": lone.address}
    none = export_parquet(target=file, begin_ms=times[-1] // 1000 + 1, **words)
    assert (none.messages, pq.read_schema(file).names) == (0, ["body", "brokerName"])
    assert export_parquet(target=file, end_ms=times[0] // 1000, **words).messages == 0
    assert export_parquet(target=file, begin_ms=times[0] // 1000, end_ms=times[-1] // 1000 + 1, **words).messages == 20


def test_export_parquet_of_a_cluster_is_atomic_and_outside_of_stores(
    lone: RunningCluster, tmp_store: Callable[[str], Path], tmp_path: Path
) -> None:
    lone.create_topic("orders")
    lone.send("orders", *map(str, range(300)), queue_id=0)
    target = tmp_path / "x.parquet"
    target.write_bytes(b"before")

    def die(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(OptionError, match="overwrite=True"):
        export_parquet(target=target, name_server=lone.address)
    with pytest.raises(OptionError, match=r"is a folder; expected the name of a file\. Give a file in it\."):
        export_parquet(target=tmp_path, name_server=lone.address, overwrite=True)
    with pytest.raises(KeyboardInterrupt):
        export_parquet(target=target, name_server=lone.address, row_group_rows=100, overwrite=True, progress=die)
    assert target.read_bytes() == b"before"
    assert [one.name for one in tmp_path.glob("x.parquet*")] == ["x.parquet"]
    with pytest.raises(OptionError, match="is inside the store"):
        export_parquet(target=tmp_store("demo") / "x.parquet", name_server=lone.address)


def test_import_parquet_gives_equal_ids_when_it_is_repeated(
    lone: RunningCluster, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.parquet"
    import_parquet(source=exported, name_server=lone.address)
    first = ids_of(lone, file)
    assert len(set(first)) == COUNT
    monkeypatch.setattr(import_source, "_PART_ROWS", 100)  # the ids do not depend on the parts
    import_parquet(source=exported, name_server=lone.address)
    twice = ids_of(lone, file)
    assert len(twice) == 2 * COUNT
    assert set(twice) == set(first)
    done = import_parquet(source=exported, name_server=lone.address, skip_rows=COUNT - 5, keep_queues=False)
    assert (done.messages, done.skipped) == (5, COUNT - 5)
    assert set(ids_of(lone, file)) == set(first)
    for words in ({"name": "other"}, {"topic": "orders"}):
        before = set(ids_of(lone, file))
        import_parquet(source=exported, name_server=lone.address, **words)
        assert len(set(ids_of(lone, file)) - before) == COUNT, "an import of its own"


@pytest.mark.parametrize("part", [0, 1, 2])
def test_import_parquet_says_how_many_rows_are_stored_when_it_stops(
    lone: RunningCluster, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    def stop(done: int, total: int) -> None:
        if done == part * 100:
            raise KeyboardInterrupt

    monkeypatch.setattr(import_source, "_PART_ROWS", 100)
    monkeypatch.setattr(import_source, "_READ_ROWS", 100)
    with pytest.raises(KeyboardInterrupt) as stopped:
        import_parquet(source=exported, name_server=lone.address, progress=stop)
    (note,) = stopped.value.__notes__
    if part:
        assert f"the first {part * 100} of {COUNT} rows are certainly stored. " in note
        assert f"Repeat it with skip_rows={part * 100} to send the others." in note
    else:
        assert note == "rmq: no row is certainly stored. Repeat it without skip_rows."
    import_parquet(source=exported, name_server=lone.address, skip_rows=part * 100)
    ids = ids_of(lone, tmp_path / "x.parquet")
    assert len(ids) == len(set(ids)) == COUNT


def test_import_parquet_counts_the_rows_of_a_part_that_a_broker_refused(lone: RunningCluster, exported: Path) -> None:
    lone.create_topic("orders", 3)
    lone.create_topic("bills", 3)
    refused = faults.with_code(13, "a planted refusal")
    lone.broker.fail(SENT_BATCH, refused, when=lambda call: call.command.fields["b"] == "bills")
    lone.broker.fail(310, refused, when=lambda call: call.command.fields["b"] == "bills")
    with pytest.raises(rmq_spark.RmqError) as error:
        import_parquet(source=exported, name_server=lone.address, broker_down_timeout_ms=300)
    (*_, note) = error.value.__notes__
    assert re.fullmatch(r"rmq: the first \d+ of 240 rows are certainly stored, and \d+ or more .*", note)


@pytest.mark.parametrize("first", ["broker-a", "broker-b"])
def test_the_number_of_rows_to_skip_counts_no_row_after_one_that_is_missing(
    run_cluster: Callable[..., RunningCluster], tmp_path: Path, first: str
) -> None:
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", 1)
    rows = [
        {"body": f"{number}", "queueId": 0, "brokerName": first if number < 10 else f"broker-{'ab'[number % 2]}"}
        for number in range(100)
    ]
    schema = pa.schema([("body", pa.string()), ("queueId", pa.int32()), ("brokerName", pa.string())])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "x.parquet")
    words = {"source": tmp_path / "x.parquet", "name_server": cluster.address, "topic": "orders"}
    refused = faults.with_code(13, "a planted refusal")
    for code in (310, SENT_BATCH):
        cluster.brokers["broker-b"].fail(code, refused)
    with pytest.raises(rmq_spark.RmqError) as error:
        import_parquet(**words)
    note = error.value.__notes__[-1]
    if first == "broker-a":
        assert note == (
            "rmq: the first 11 of 100 rows are certainly stored, and 44 or more of the others. Repeat it with "
            "skip_rows=11 to send the others."
        )
    else:
        assert note == (
            "rmq: the first 0 of 100 rows are certainly stored, and 45 or more of the others. Repeat it without "
            "skip_rows."
        )
    cluster.brokers["broker-b"].heal()
    import_parquet(**words, skip_rows=11 if first == "broker-a" else 0)
    export_parquet(target=tmp_path / "stored.parquet", name_server=cluster.address)
    stored = pq.read_table(tmp_path / "stored.parquet")["body"].to_pylist()
    assert {int(body) for body in stored} == set(range(100))


def test_import_parquet_sends_again_what_a_broker_did_not_answer(
    cluster: RunningCluster, of_brokers: Path, tmp_path: Path
) -> None:
    for topic in ("orders", "bills"):
        cluster.create_topic(topic, 2)
    cluster.brokers["broker-a"].fail(SENT_BATCH, faults.closes_connection(), times=1)
    import_parquet(source=of_brokers, name_server=cluster.address)
    ids = ids_of(cluster, tmp_path / "x.parquet")
    assert len(set(ids)) == COUNT < len(ids), "the request is stored twice, with the same ids"


@pytest.mark.parametrize("topic", ["orders", "new"])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"queueId": 0},
            r"rows with queueId and no brokerName, and .* expected rows of these queues: broker-a \(.*, broker-b",
        ),
        (
            {"queueId": 0, "brokerName": "broker-c"},
            "has rows of broker broker-c; expected rows of these queues: broker-a",
        ),
        ({"queueId": None, "brokerName": "broker-b"}, "brokerName 'broker-b' and no queueId; expected both"),
        ({"queueId": 70_000, "brokerName": "broker-b"}, "has a row with queueId 70000; expected 0 to 65535"),
    ],
)
def test_import_parquet_refuses_queues_that_a_cluster_does_not_have(
    run_cluster: Callable[..., RunningCluster], tmp_path: Path, given: dict[str, Any], text: str, topic: str
) -> None:
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", 2)
    schema = pa.schema([("topic", pa.string()), ("body", pa.string()), ("queueId", pa.int32())])
    if "brokerName" in given:
        schema = schema.append(pa.field("brokerName", pa.string()))
    rows = [{"topic": topic, "body": "x", **given}, {"topic": "another", "body": "x"}]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "x.parquet")
    with pytest.raises(OptionError, match=text) as refused:
        import_parquet(source=tmp_path / "x.parquet", name_server=cluster.address)
    assert "keep_queues=False" in str(refused.value)
    assert "Nothing was sent." in str(refused.value)
    with rmq_spark.open_reader(name_server=cluster.address) as reader:
        assert not {"new", "another"} & set(reader.topics())
        assert not any(bounds.max_offset for bounds in reader.all_bounds(reader.queues("orders")).values())
    spread = import_parquet(source=tmp_path / "x.parquet", name_server=cluster.address, keep_queues=False)
    assert spread.messages == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"brokerName": "broker-a"},
            r"has rows of queue broker-a:2; expected rows of these queues: broker-a \(2 queues\)",
        ),
        ({}, r"has rows of queue 2; expected rows of these queues: broker-a \(2 queues\)"),
    ],
)
def test_import_parquet_refuses_a_topic_with_too_few_queues(
    lone: RunningCluster, tmp_path: Path, given: dict[str, str], text: str
) -> None:
    lone.create_topic("orders", 2)
    rows = [{"topic": "orders", "body": "x", "queueId": number, **given} for number in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    with pytest.raises(OptionError, match=text):
        import_parquet(source=tmp_path / "x.parquet", name_server=lone.address)
    assert lone.broker.bounds("orders")[0].max_offset == 0


def test_import_parquet_creates_a_missing_topic_for_its_queues(lone: RunningCluster, tmp_path: Path) -> None:
    rows = [{"topic": "new", "body": "x", "queueId": 6}, {"topic": "other", "body": "x", "queueId": None}]
    schema = pa.schema([("topic", pa.string()), ("body", pa.string()), ("queueId", pa.int32())])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "x.parquet")
    import_parquet(source=tmp_path / "x.parquet", name_server=lone.address)
    with rmq_spark.open_reader(name_server=lone.address) as reader:
        assert reader.bounds(QueueKey("new", 6, "broker-a")).max_offset == 1
        assert [len(reader.queues(topic)) for topic in ("new", "other")] == [7, 4]


def test_import_parquet_names_the_row_that_is_too_large(
    lone: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_source, "_PART_ROWS", 10)
    monkeypatch.setattr(import_source, "_READ_ROWS", 10)
    bodies = [b"x" * (300 if number == 25 else 10) for number in range(30)]
    pq.write_table(pa.table({"body": bodies}), tmp_path / "x.parquet")
    words = {"source": tmp_path / "x.parquet", "name_server": lone.address, "topic": "orders"}
    with pytest.raises(OptionError, match=r"row 25, topic 'orders': its body has 300 bytes") as refused:
        import_parquet(**words, max_message_size=200)
    assert "the first 20 of 30 rows are certainly stored" in refused.value.__notes__[-1]
    lone.broker.settings.max_message_bytes = 200
    with pytest.raises(rmq_spark.BrokerError, match="illegal"):
        import_parquet(**words)


@pytest.fixture
def half(run_cluster: Callable[..., RunningCluster]) -> dict[str, Any]:
    """The arguments for a cluster of which broker-b cannot be reached."""
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", "one", broker="broker-a")
    return {
        "name_server": cluster.address,
        "broker_addresses": "broker-b=127.0.0.1:1",
        "broker_down_timeout_ms": 200,
        "request_timeout_ms": 500,
    }


def test_a_broker_that_is_away_is_named(half: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    with pytest.raises(rmq_spark.BackendUnavailableError, match="broker-b"):
        export_parquet(target=file, **half)
    assert not file.exists()
    rows = {"body": ["x"], "queueId": pa.array([0], pa.int32()), "brokerName": ["broker-b"]}
    pq.write_table(pa.table(rows), file)
    with pytest.raises(rmq_spark.BackendUnavailableError, match="broker-b") as away:
        import_parquet(source=file, topic="orders", **half)
    assert "no row is certainly stored" in away.value.__notes__[-1]


def test_a_broker_that_goes_away_during_an_export_is_named(
    run_cluster: Callable[..., RunningCluster], tmp_path: Path
) -> None:
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=1)
    for name in cluster.brokers:
        cluster.send("orders", *map(str, range(100)), broker=name)

    def leave(done: int, total: int) -> None:
        cluster.brokers["broker-b"].kill()

    with pytest.raises(rmq_spark.BackendUnavailableError, match="broker-b"):
        export_parquet(
            target=tmp_path / "x.parquet",
            name_server=cluster.address,
            row_group_rows=50,
            progress=leave,
            broker_down_timeout_ms=300,
        )
    assert not list(tmp_path.glob("x.*"))


def test_an_account_without_a_right_is_refused_by_name(
    cluster: RunningCluster, of_brokers: Path, tmp_path: Path
) -> None:
    for topic in ("orders", "bills"):
        cluster.create_topic(topic, 2)
    accounts = AccountTable(
        Account("reader", "secret", topics={"*": "SUB|GET"}, groups={"*": "SUB|GET"}),
        Account("writer", "secret", topics={"*": "PUB"}, groups={}),
    )
    for broker in cluster.brokers.values():
        broker.accounts = accounts
    place = {"name_server": cluster.address, "secret_key": "secret"}
    if cluster.release.is_5:  # 4.9 does not check batches
        with pytest.raises(rmq_spark.NoPermissionError, match="PUB"):
            import_parquet(source=of_brokers, access_key="reader", **place)
    assert import_parquet(source=of_brokers, access_key="writer", **place).messages == COUNT
    with pytest.raises(rmq_spark.NoPermissionError, match="orders"):
        export_parquet(target=tmp_path / "x.parquet", access_key="writer", topics=["orders"], **place)
    assert export_parquet(target=tmp_path / "x.parquet", access_key="reader", **place).messages == COUNT
    with pytest.raises(rmq_spark.NoPermissionError, match="topic new does not exist and cannot be created"):
        import_parquet(source=of_brokers, access_key="writer", topic="new", **place)


def test_a_topic_that_does_not_exist_is_named(lone: RunningCluster, tmp_path: Path) -> None:
    with pytest.raises(rmq_spark.NotFoundError, match='no name server has a route of topic "absent"'):
        export_parquet(target=tmp_path / "x.parquet", name_server=lone.address, topics=["absent"])
    assert not list(tmp_path.glob("x.*"))


def test_tls_on_one_side_only_is_named(run_cluster: Callable[..., RunningCluster], exported: Path) -> None:
    file = str(CERTIFICATES / "localhost.pem")
    cluster = run_cluster(tls=ServerTls(file, file, is_enforced=True))
    target = exported.with_name("x.parquet")
    for call in (
        lambda **words: import_parquet(source=exported, **words),
        lambda **words: export_parquet(target=target, overwrite=True, **words),
    ):
        with pytest.raises(rmq_spark.BackendUnavailableError, match="then set tls=true"):
            call(name_server=cluster.address)
        call(name_server=cluster.address, tls=True, tls_verify="none")
        with pytest.raises(rmq_spark.BackendUnavailableError, match="tls"):
            call(name_server=run_cluster().address, tls=True, tls_verify="none")
    assert pq.read_table(target).num_rows == COUNT


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "neither path nor name_server was given"),
        ({"path": "x", "name_server": "ns:1"}, "path and name_server were both given"),
        ({"path": "x", "tls": True}, "tls is for a cluster; .* Leave it out, or give name_server"),
        ({"name_server": "ns:1", "commit_log_path": "x"}, "commit_log_path is for a store directory; .* Leave it out"),
        ({"name_server": "ns:1", "acces_key": "x"}, "unknown argument acces_key"),
    ],
)
def test_export_parquet_and_import_parquet_refuse_invalid_places(
    arguments: dict[str, Any], text: str, exported: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=f"^(export_parquet: )?.*{text}"):
        export_parquet(target=tmp_path / "x.parquet", **arguments)
    with pytest.raises(OptionError, match=text):
        import_parquet(source=exported, **arguments)


def test_import_parquet_refuses_arguments_of_the_other_place(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="skip_rows is for a cluster"):
        import_parquet(tmp_path / "s", exported, skip_rows=3)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="lock_timeout_ms is for a store directory"):
        import_parquet(source=exported, name_server="ns:1", lock_timeout_ms=3)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="found no source"):
        import_parquet(name_server="ns:1")  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="found no target"):
        export_parquet(name_server="ns:1")  # type: ignore[call-overload]


@pytest.mark.parametrize("skip_rows", [-1, COUNT + 1, True])
def test_import_parquet_refuses_to_skip_other_numbers_of_rows(
    lone: RunningCluster, exported: Path, skip_rows: int
) -> None:
    with pytest.raises(OptionError, match=f"skip_rows={skip_rows!r} must be an integer from 0 to {COUNT}"):
        import_parquet(source=exported, name_server=lone.address, skip_rows=skip_rows)
