"""Tests of `plan_repair` and `repair`: they rebuild derived files and lose only messages whose loss was accepted."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark import (
    DamageError,
    LockTimeoutError,
    OptionError,
    StoreChangedError,
    StorePathError,
    check,
    plan_repair,
    repair,
)
from rmq_spark.store import tools
from rmq_spark.store.disk import files
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueKey
from rmq_spark.store.tools.finding import Action, Area, Finding, Findings, Severity

Rows = dict[QueueKey, list[dict[str, object]]]


def rows_of(path: Path) -> Rows:
    found: Rows = {}
    with StoreReader(str(path)) as reader:
        reader.refresh()
        for topic in reader.topics():
            for key in reader.queues(topic):
                held = reader.bounds(key)
                batches = reader.read(key, held.min_offset, held.max_offset, ["queueOffset", "commitLogOffset", "body"])
                found[key] = [row for batch in batches for row in batch.to_pylist()]
    return {key: rows for key, rows in found.items() if rows}


def spoil(path: Path, position: int, count: int = 1) -> None:
    data = bytearray(path.read_bytes())
    for at in range(position, position + count):
        data[at] ^= 0x55
    path.write_bytes(data)


def _a_unit(path: Path) -> None:
    spoil(path / "consumequeue/TopicR/0/00000000000000000000", 64)


def _a_queue_gone(path: Path) -> None:
    shutil.rmtree(path / "consumequeue/TopicA")


def _a_queue_cut(path: Path) -> None:
    file = path / "consumequeue/TopicR/0/00000000000000001000"
    file.write_bytes(file.read_bytes()[:333])


def _keys(path: Path) -> None:
    spoil(next((path / "index").iterdir()), 500, 300)


def _checkpoint(path: Path) -> None:
    (path / "checkpoint").unlink()


def _all_derived(path: Path) -> None:
    shutil.rmtree(path / "consumequeue")
    (path / "consumequeue").mkdir()
    shutil.rmtree(path / "index")
    (path / "checkpoint").write_bytes(bytes(100))


@pytest.mark.parametrize("damage", [_a_unit, _a_queue_gone, _a_queue_cut, _keys, _checkpoint, _all_derived])
def test_repair_rebuilds_derived_files_from_a_sound_log(
    damage: Callable[[Path], None], tmp_store: Callable[[str], Path]
) -> None:
    path = tmp_store("basic")
    before = rows_of(path)
    damage(path)
    plan = plan_repair(path)
    assert not plan.is_empty
    assert plan.messages_lost == 0
    done = repair(plan)
    assert done.report.is_healthy, done.report
    assert rows_of(path) == before
    assert plan_repair(path).is_empty


@pytest.mark.parametrize("name", ["batchconsumequeue", "consumequeue_ext"])
def test_repair_rebuilds_batch_queues_and_queues_with_extensions(name: str, tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("batchcq-cqext")
    before = rows_of(path)
    spoil(next(one for one in (path / name).rglob("*") if one.is_file()), 4)
    assert repair(path).report.is_healthy
    assert rows_of(path) == before


def test_tools_names_the_classes_of_its_results(tmp_store: Callable[[str], Path], tmp_path: Path) -> None:
    path, file = tmp_store("livekill533"), tmp_path / "x.parquet"
    plan = plan_repair(path)
    values = {
        "CheckReport": plan.report,
        "Exported": rmq_spark.export_parquet(path, file),
        "Finding": plan.report.findings[0],
        "Imported": rmq_spark.import_parquet(tmp_path / "s", file),
        "RepairPlan": plan,
        "RepairStep": plan.steps[0],
        "Repaired": repair(plan),
    }
    assert sorted(values) == sorted(tools.__all__)
    for name, value in values.items():
        assert type(value) is getattr(tools, name)
    with pytest.raises(AttributeError, match="CheckReport"):
        tools.Report  # noqa: B018


def test_repair_after_a_crash_does_what_the_next_writer_does(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("livekill533")
    assert "recover" in {step.action for step in plan_repair(path).steps}
    done = repair(path)
    assert done.report.is_healthy
    assert done.report.state == "closed"
    assert sum(map(len, rows_of(path).values())) == 300


def test_plan_repair_changes_nothing(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("livekill533")
    before = {one: (one.stat().st_mtime_ns, one.read_bytes()) for one in path.rglob("*") if one.is_file()}
    plan = plan_repair(path)
    assert plan.to_arrow().num_rows == len(plan.steps)
    assert {one: (one.stat().st_mtime_ns, one.read_bytes()) for one in path.rglob("*") if one.is_file()} == before


def test_plan_repair_leaves_damage_of_the_log_and_shows_how_to_read_around_it(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("basic")
    spoil(path / "commitlog/00000000000000016384", 5150, 1200)
    spoil(path / "consumequeue/TopicA/0/00000000000000000000", 4)
    plan = plan_repair(path)
    assert plan.is_empty
    assert plan.messages_lost == 0
    words = " ".join(step.what for step in plan.steps)
    assert "failOnDataLoss" in words
    assert "cannot be rebuilt while the log is damaged" in words
    before = (path / "commitlog/00000000000000016384").read_bytes()
    assert not repair(plan).steps
    assert (path / "commitlog/00000000000000016384").read_bytes() == before


def test_repair_cuts_the_log_only_with_cut_log_and_accept_loss(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("basic")
    before = rows_of(path)
    spoil(path / "commitlog/00000000000000016384", 5100, 3)  # in the body of message 23 of TopicR
    plan = plan_repair(path, cut_log=True)
    kept = {key: [row for row in rows if row["commitLogOffset"] < 16384 + 5007] for key, rows in before.items()}
    lost = sum(map(len, before.values())) - sum(map(len, kept.values()))
    assert plan.messages_lost == lost > 0
    with pytest.raises(OptionError, match=f"would lose {lost} messages"):
        repair(plan)
    assert rows_of(path).keys() == before.keys()
    done = repair(plan, accept_loss=True)
    assert done.messages_lost == lost
    assert done.report.is_healthy
    assert rows_of(path) == {key: rows for key, rows in kept.items() if rows}


@pytest.mark.parametrize("gone", [("0", "1"), ("1",), ()])
def test_plan_repair_counts_the_loss_of_a_cut_with_or_without_queues(tmp_path: Path, gone: tuple[str, ...]) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=1 << 14, queues=2) as store:
        store.send_many(pa.table({"topic": ["t"] * 100, "body": [b"x" * 400] * 100}))
    rows = [(row["commitLogOffset"], str(key.queue_id)) for key, found in rows_of(path).items() for row in found]
    _, spoilt = max(row for row in rows if row[0] <= 16384 + 1000)
    spoil(path / "commitlog/00000000000000016384", 1000, 50)
    for queue in gone:
        shutil.rmtree(path / "consumequeue/t" / queue)
    plan = plan_repair(path, cut_log=True)
    with pytest.raises(OptionError, match=f"would lose {plan.messages_lost} messages"):
        repair(plan)
    repaired = repair(plan, accept_loss=True)
    assert repaired.report.is_healthy
    lost = len(rows) - sum(map(len, rows_of(path).values()))
    assert lost > 50
    # The message of the corrupt record is counted only if its consume-queue entry remains.
    assert plan.messages_lost == lost - (spoilt in gone)


def test_repair_requires_accept_loss_for_a_cut_without_counted_loss(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=1 << 14, queues=1) as store:
        store.send_many(pa.table({"topic": ["t"] * 30, "body": [b"x" * 400] * 30}))
    spoil(path / "commitlog/00000000000000000000", 15_000, 1000)
    plan = plan_repair(path, cut_log=True)
    uncounted = replace(plan, steps=tuple(replace(step, messages_lost=0) for step in plan.steps))
    assert "cut" in {step.action for step in plan.steps}
    with pytest.raises(OptionError, match="would lose 0 messages"):
        repair(uncounted)


def test_repair_restores_a_config_file_from_its_bak(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("demo")
    (path / "config/topics.json").write_bytes(b'{"topicConfigTable":{')
    assert [step.action for step in plan_repair(path).steps] == ["restore"]
    assert repair(path).report.is_healthy
    assert (path / "config/topics.json").read_bytes() == (path / "config/topics.json.bak").read_bytes()


def test_repair_restores_topics_that_are_newer_than_the_bak(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=1 << 16, queues=3) as store:
        for topic in ("first", "second", "third"):
            store.send(topic, b"x")
    damaged = (path / "config/topics.json").read_bytes()[:-40]
    (path / "config/topics.json").write_bytes(damaged)
    before = rows_of(path)
    (step,) = plan_repair(path).steps
    (finding,) = [one for one in check(path).findings if one.path == str(path / "config/topics.json") and one.expected]
    assert "It adds the topics that are only on disk: third." in finding.next_step
    assert step.action == "restore"
    assert repair(path).report.is_healthy
    assert rows_of(path) == before
    with rmq_spark.open_reader(path) as reader:
        assert reader.topics() == ["first", "second", "third"]
    assert [one.read_bytes() for one in (path / "rmq/before-repair").iterdir()] == [damaged]


def test_repair_restores_a_missing_topics_json_from_its_bak(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("demo")
    before = rows_of(path)
    (path / "config/topics.json").unlink()
    assert repair(path).report.is_healthy
    assert rows_of(path) == before


def test_plan_repair_does_not_restart_a_fully_expired_queue_at_0(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=1 << 14, queues=1) as store:
        for topic, count in (("old", 30), ("new", 300)):
            store.send_many(pa.table({"topic": [topic] * count, "body": [b"x" * 100] * count}))
        assert store.expire(max_bytes=20_000).segments
    file = path / "consumequeue/old/0/00000000000000000000"
    whole = file.read_bytes()
    file.write_bytes(whole[:333])
    plan = plan_repair(path)
    assert plan.is_empty
    assert "a rebuilt queue would begin at 0" in plan.steps[0].what
    file.write_bytes(whole)
    assert check(path).is_healthy
    with rmq_spark.open_store(path) as store:
        assert store.send("old", b"y").queue_offset == 30


def test_repair_does_not_restore_deleted_topics(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=1 << 16, queues=1) as store:
        for topic in ("deleted", "again", "other"):
            store.send_many(pa.table({"topic": [topic] * 9, "body": [b"x"] * 9}))
    config = path / "config/topics.json"
    topics = json.loads(config.read_bytes())
    for topic in ("deleted", "again"):
        shutil.rmtree(path / "consumequeue" / topic)
        del topics["topicConfigTable"][topic]
    config.write_text(json.dumps(topics))
    # Only a broker deletes topics, and only a broker writes this file.
    (path / "config/consumerFilter.json").write_text('{"filterDataByTopic":{}}')
    with rmq_spark.open_store(path, queues=1) as store:
        store.send_many(pa.table({"topic": ["again"] * 2, "body": [b"new"] * 2}))
    before = rows_of(path)
    assert {str(key): len(rows) for key, rows in before.items()} == {"again/0": 2, "other/0": 9}
    for topic in ("again", "other"):
        spoil(path / "consumequeue" / topic / "0/00000000000000000000", 5)
    done = repair(path)
    assert [step.action for step in done.steps] == ["rebuild", "rebuild"]
    assert done.report.is_healthy, done.report
    assert rows_of(path) == before


def test_repair_refuses_an_outdated_plan(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("basic")
    _a_unit(path)
    plan = plan_repair(path)
    os.utime(path / "checkpoint")
    with pytest.raises(StoreChangedError, match="Plan again"):
        repair(plan)


def test_repair_times_out_while_a_broker_holds_the_store(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("basic")
    _a_unit(path)
    plan = plan_repair(path)
    lock = FileLock(str(path / "lock"))
    assert lock.try_take()
    try:
        with pytest.raises(LockTimeoutError):
            repair(plan, lock_timeout_ms=100)
    finally:
        lock.release()
    assert not (path / "abort").exists()


@pytest.mark.parametrize("damaged", ["rmq/intents/q.json", "rmq/settings.json"])
def test_repair_refuses_damage_that_stops_writers_before_its_first_step(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=1 << 14, queues=2) as store:
        store.send_many(pa.table({"topic": ["t"] * 20, "body": [b"x" * 40] * 20}))
    (path / damaged).parent.mkdir(exist_ok=True)
    (path / damaged).write_bytes(b"no json")
    shutil.rmtree(path / "consumequeue/t/1")
    plan = plan_repair(path)
    assert "rebuild" in {step.action for step in plan.steps} or "recover" in {step.action for step in plan.steps}
    whose = {path / "lock", path / "rmq/turn", path / "rmq/holder.json"}
    before = {one: one.read_bytes() for one in path.rglob("*") if one.is_file() and one not in whose}
    with pytest.raises(DamageError, match=Path(damaged).name):
        repair(plan)
    assert {one: one.read_bytes() for one in path.rglob("*") if one.is_file() and one not in whose} == before


def test_repair_that_died_is_completed_by_the_next_writer(
    tmp_store: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_store("basic")
    before = rows_of(path)
    _a_unit(path)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("rmq_spark.store.log.recovery._rescan", die)
        with pytest.raises(KeyboardInterrupt):
            repair(path)
    assert (path / "abort").exists()
    assert not list((path / "consumequeue/TopicR/0").iterdir())
    rmq_spark.close(path)
    assert check(path).is_healthy
    assert rows_of(path) == before


@pytest.mark.parametrize("name", ["topics.json", "topics.json.bak"])
def test_repair_does_not_replace_a_file_without_permission_to_read_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    rmq_spark.create_store(path, topics={"orders": 2})
    rmq_spark.close(path)
    topics = path / "config/topics.json"
    topics.with_name("topics.json.bak").write_bytes(topics.read_bytes())
    before = (topics.with_name(name)).read_bytes()
    broken = plan_repair(_spoilt(path, topics))

    real = files.open_regular

    def refuse(file: str) -> tuple[int, int]:
        if file.endswith(name):
            raise PermissionError(13, "Permission denied", file)
        return real(file)

    topics.write_bytes(before)
    monkeypatch.setattr(files, "open_regular", refuse)
    (found,) = [one for one in check(path).findings if one.path.endswith(name)]
    assert found.severity == "damage"
    assert "Permission denied" in found.found
    assert "as its owner" in found.next_step
    assert not [step for step in plan_repair(path).steps if step.is_done_by_repair]
    assert not repair(path).steps
    with pytest.raises(StorePathError, match="Permission denied"):
        repair(replace(broken, stamp=plan_repair(path).stamp))
    assert topics.with_name(name).read_bytes() == before


def _spoilt(path: Path, file: Path) -> Path:
    file.write_bytes(b"{")
    return path


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("fields", [(0,), (1,), (2,), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("number", [6570360312300275865, -6570360312300275865])
def test_repair_replaces_a_checkpoint_of_garbage(
    number: int, fields: tuple[int, ...], is_closed: bool, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path) as store:
        store.send("orders", b"one")
    page = bytearray((path / "checkpoint").read_bytes())
    for field in fields:
        page[field * 8 : field * 8 + 8] = number.to_bytes(8, "big", signed=True)
    (path / "checkpoint").write_bytes(page)
    if not is_closed:
        (path / "abort").write_text("1")
    found = [one for one in check(path).findings if one.severity != "note" and one.area != "store"]
    assert {one.path for one in found} == {str(path / "checkpoint")}
    assert {one.severity for one in found} == {"repairable"}
    if number > 0 and len(fields) == 5 and is_closed:  # otherwise the offset of the log's end confirms it
        with pytest.raises(DamageError, match=r"s/checkpoint, position 8.*`rmq repair`.*rmq_spark.repair"):
            rmq_spark.open_store(path).send("orders", b"two")
    done = repair(path)
    assert done.report.is_healthy, done.report
    with rmq_spark.open_store(path) as store:
        store.send("orders", b"two")
    assert check(path).is_healthy


def _with_offsets_at_the_ends(path: Path) -> dict[str, str]:
    """Write a store whose groups and first delay level have read all messages; return the two offset files."""
    count = 900
    with rmq_spark.open_store(path, segment_bytes=1 << 16, queues=1) as store:
        for topic, level in (("orders", 0), ("%RETRY%billing", 0), ("orders", 1)):
            columns = {"topic": [topic] * count, "body": [b"x" * 50] * count}
            store.send_many(pa.table({**columns, "delayLevel": pa.array([level] * count, pa.int32())}))
    table = {
        f"{topic}@{group}": {"0": count}
        for topic, group in (("orders", "billing"), ("orders", "CID_RMQ_SYS_TRANS"), ("%RETRY%billing", "billing"))
    }
    said = {
        "consumerOffset.json": json.dumps({"offsetTable": table}),
        "delayOffset.json": json.dumps({"offsetTable": {"1": count}}),
    }
    for name, text in said.items():
        (path / "config" / name).write_text(text)
    assert check(path).is_healthy
    return said


@pytest.mark.parametrize("segment", [1, 3])
def test_repair_clamps_offsets_beyond_a_cut_log_and_keeps_the_old_files(segment: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    said = _with_offsets_at_the_ends(path)
    spoil(path / f"commitlog/{segment << 16:020}", 3000, 400)
    plan = plan_repair(path, cut_log=True)
    assert {Path(step.path).name for step in plan.steps if step.action == "reset"} == set(said)
    done = repair(plan, accept_loss=True)
    assert done.report.is_healthy, done.report
    for name, text in said.items():
        (kept,) = (path / "rmq/before-repair").glob(f"{name}.*")
        assert kept.read_text() == text
    ends = {str(key): rows[-1]["queueOffset"] for key, rows in rows_of(path).items()}
    table = json.loads((path / "config/consumerOffset.json").read_text().replace("{0:", '{"0":'))["offsetTable"]
    assert table["orders@billing"]["0"] == min(int(str(ends["orders/0"])) + 1, 900)


def test_repair_with_cut_log_clamps_offsets_beyond_their_queues(tmp_path: Path) -> None:
    path = tmp_path / "s"
    _with_offsets_at_the_ends(path)
    file = path / "config/consumerOffset.json"
    file.write_text(file.read_text().replace("900", "950"))
    found = [one for one in check(path).findings if one.severity == "damage"]
    assert len(found) == 3
    assert all("rmq_spark.plan_repair with cut_log=True" in one.next_step for one in found)
    assert plan_repair(path).is_empty
    plan = plan_repair(path, cut_log=True)
    assert plan.messages_lost == 0
    assert repair(plan).report.is_healthy


def _a_queue_of_a_wrong_length(folder: Path) -> None:
    (file,) = folder.iterdir()
    os.truncate(file, 777)


def test_repair_plans_every_queue_however_many_are_damaged(tmp_path: Path) -> None:
    path, count = tmp_path / "s", 250
    with rmq_spark.open_store(path, segment_bytes=1 << 16, queues=count) as store:
        ids = pa.array(range(count), pa.int32())
        store.send_many(pa.table({"topic": ["t"] * count, "body": [b"x"] * count, "queueId": ids}))
    for queue_id in range(count):
        _a_queue_of_a_wrong_length(path / f"consumequeue/t/{queue_id}")
    plan = plan_repair(path)
    assert {step.queue for step in plan.steps if step.action == "rebuild"} == {QueueKey("t", n) for n in range(count)}
    assert repair(plan).report.is_healthy
    assert {len(rows) for rows in rows_of(path).values()} == {1}


def test_findings_keep_every_target_of_a_repair_and_the_lowest_cut() -> None:
    found = Findings()
    for number in range(300):
        damage, repairable = Severity.DAMAGE, Severity.REPAIRABLE
        cut = Finding(severity=damage, area=Area.COMMIT_LOG, what="bytes", path="/s/1", action=Action.CUT, messages=1)
        left = Finding(severity=damage, area=Area.CONFIG, what="other", path=f"/s/{number}", messages=1)
        queue = Finding(severity=repairable, area=Area.CONSUME_QUEUE, what="entries", path="/q", action=Action.REBUILD)
        found.add(replace(cut, position=1000 - number))
        found.add(left)
        found.add(replace(queue, topic="t", queue_id=number))
    kept = found.all()
    assert min(one.position for one in kept if one.action == "cut") == 1000 - 299
    assert {one.queue_id for one in kept if one.action == "rebuild"} == set(range(300))
    others = [one for one in kept if one.action == "leave"]
    assert len(others) == 201
    assert sum(one.messages for one in others) == 300


@pytest.mark.parametrize(
    "call",
    [
        "store_files.encode_abort",
        "store_files.encode_checkpoint",
        "recovery.remove_note",
        "recovery.take_away",
        "recovery._rescan",
        "recovery.remove_rebuild",
    ],
)
@pytest.mark.parametrize("damage", [shutil.rmtree, _a_queue_of_a_wrong_length])
def test_repair_that_was_killed_is_completed_by_the_next_repair(
    damage: Callable[[Path], None], call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=1 << 14, queues=2) as store:
        store.send_many(pa.table({"topic": ["t"] * 200, "body": [b"x" * 400] * 200}))
    before = rows_of(path)
    damage(path / "consumequeue/t/1")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"rmq_spark.store.log.{call}", die)
        with pytest.raises(KeyboardInterrupt):
            repair(path)
    with pytest.raises(DamageError, match="has not finished"):
        rows_of(path)
    assert "a repair has not finished; it rebuilds: queue t/1" in str(check(path))
    assert repair(path).report.is_healthy
    assert rows_of(path) == before
