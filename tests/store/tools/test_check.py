"""Tests of `check`: it finds all planted damage, no damage in sound stores, and changes nothing."""

import gzip
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark import StoreChangedError, StorePathError, check
from rmq_spark.store import DeliveryScheduler
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes, Segment
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store
from rmq_spark.store.tools.check_report import CheckReport
from rmq_spark.store.tools.log_walk import written_bytes

CLOSED = ("basic", "propcrc", "preblank", "truncated-stale", "batchcq-cqext", "timer", "demo", "broker497")


def load_planted() -> ModuleType:
    path = Path(__file__).with_name("planted_damage.py")
    spec = importlib.util.spec_from_file_location("planted_damage", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


planted = load_planted()


def messages(count: int, topic: str = "orders", **columns: object) -> pa.Table:
    return pa.table(
        {
            "topic": [topic] * count,
            "body": [f"{number}".encode() * 20 for number in range(count)],
            "keys": [f"k{number} g{number % 7}" for number in range(count)],
            "tags": [f"t{number % 3}" for number in range(count)],
            "queueId": pa.array([number % 3 for number in range(count)], pa.int32()),
            **columns,
        }
    )


def ours(path: Path) -> Path:
    """Write a store with a ledger and shut it down cleanly."""
    with rmq_spark.open_store(path, segment_bytes=1 << 16) as store:
        store.send_many(messages(600))
    rmq_spark.export_parquet(path, path.with_suffix(".parquet"))
    rmq_spark.import_parquet(path, path.with_suffix(".parquet"), topic="again", keep_queues=False)
    return path


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> Callable[[str], Path]:
    made = ours(tmp_path_factory.mktemp("ours") / "ours")
    return lambda name: made if name == "ours" else golden / name


def serious(report: CheckReport) -> list[str]:
    return [str(finding) for finding in report.findings if finding.severity != "note"]


def contents(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        held = path.stat()
        data = path.read_bytes() if path.is_file() and held.st_size < 1 << 22 else b""
        found[str(path.relative_to(folder))] = held.st_size, held.st_mtime_ns, hash(data)
    return found


def test_planted_damages_are_at_least_a_hundred() -> None:
    assert len(planted.ALL) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("name", planted.ALL)
def test_check_finds_planted_damage(name: str, pristine: Callable[[str], Path], tmp_path: Path) -> None:
    store, damage = planted.ALL[name]
    copy = Path(shutil.copytree(pristine(store), tmp_path / store))
    damage(copy, Random(name))
    report = check(copy)
    assert not report.is_healthy, report
    assert all(finding.what and finding.path for finding in report.findings)


@pytest.mark.parametrize("name", CLOSED)
def test_check_of_a_store_that_rocketmq_closed_is_healthy(name: str, golden: Path) -> None:
    assert serious(check(golden / name)) == []


def test_check_of_a_timer_with_its_wheel_is_healthy(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("timer")
    (path / "timerwheel").write_bytes(gzip.decompress((path / "timerwheel.gz").read_bytes()))
    assert serious(check(path)) == []


@pytest.mark.parametrize("name", ["crashed", "livekill533"])
def test_check_of_a_store_of_a_dead_broker_finds_no_damage(name: str, golden: Path) -> None:
    report = check(golden / name)
    assert report.state == "crashed"
    assert not report.is_healthy
    assert report.count("damage") == 0
    undispatched = [one for one in report.findings if "have no entry yet" in one.what]
    assert sum(one.messages for one in undispatched) == (42 if name == "livekill533" else 0)


def _empty(path: Path) -> None:
    rmq_spark.create_store(path)


def _closed(path: Path) -> None:
    ours(path)


def _unsettled(path: Path) -> None:
    rmq_spark.open_store(path, segment_bytes=1 << 16).send_many(messages(300))


def _delays(path: Path) -> None:
    with rmq_spark.open_store(path, segment_bytes=1 << 16, message_delay_level="1s 7s 9d") as store:
        store.send_many(messages(90, delayLevel=pa.array([n % 4 for n in range(90)], pa.int32())))


def _times(path: Path) -> None:
    with rmq_spark.open_store(path, segment_bytes=1 << 16) as store:
        for number in range(5):
            store.send("orders", b"later", deliver_at_ms=wall_clock_ms() + 86_400_000 + number)
    rmq_spark.close(path)  # moves waiting messages into the timer's files


def _groups(path: Path) -> None:
    with rmq_spark.open_store(path, segment_bytes=1 << 16) as store:
        store.send_many(messages(60))
    rmq_spark.reset_offsets(path, "billing", "latest", topics=["orders"])


def _sent_back(path: Path) -> None:
    with rmq_spark.open_store(path, segment_bytes=1 << 16) as store:
        sent = store.send_many(messages(20)).append_column("reconsumeTimes", pa.array([0] * 20, pa.int32()))
        store.send_back(sent.drop_columns(["storeTimestamp"]), "billing", -1)
    rmq_spark.republish_dead_letters(path, "billing", topic="orders")


def _retired(path: Path) -> None:
    with rmq_spark.open_store(path, segment_bytes=1 << 14) as store:
        store.send_many(messages(900))
        assert store.expire(max_bytes=40_000).segments


def _rolled(path: Path) -> None:
    sizes = FileSizes(1 << 13, 400, 460, IndexShape(50, 200))
    with StoreWriter(str(path), Disk(), WriterSettings(sizes=sizes), lambda: 1, time.sleep):
        pass
    with rmq_spark.open_store(path) as store:
        for part in range(4):
            store.send_many(messages(150, f"topic{part}"))


def _several_folders(path: Path) -> None:
    folders = [path.with_name(f"log{number}") for number in range(2)]
    for folder in folders:
        folder.mkdir()
    (path / "config").mkdir(parents=True)
    joined = ",".join(map(str, folders))
    with rmq_spark.open_store(path, segment_bytes=1 << 14, commit_log_path=joined) as store:
        store.send_many(messages(400))


def _samples(path: Path) -> None:
    build_store(path, [SampleMessage("a", n % 2, b"x%d" % n) for n in range(300)], segment_bytes=4096)


def _batch_samples(path: Path) -> None:
    build_store(path, [SampleMessage("a", 0, b"x%d" % n) for n in range(99)], batch_topics=["a"])


def _crashed_and_recovered(path: Path) -> None:
    store = rmq_spark.open_store(path, segment_bytes=1 << 16)
    store.send_many(messages(200))
    (path / "rmq" / "watermark").unlink()
    rmq_spark.close(path)


HEALTHY = (
    _empty, _closed, _unsettled, _delays, _times, _groups, _sent_back, _retired, _rolled, _several_folders, _samples,
    _batch_samples, _crashed_and_recovered,
)  # fmt: skip


@pytest.mark.parametrize("make", HEALTHY)
def test_check_of_a_written_store_is_healthy(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "s"
    make(path)
    folders = ",".join(map(str, sorted(tmp_path.glob("log*")))) or None
    report = check(path, commit_log_path=folders)
    assert serious(report) == []
    assert make is _empty or report.records > 0


def test_check_reads_records_across_blocks(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq_spark.store.tools.log_walk._BLOCK_BYTES", 5000)
    report = check(golden / "demo")
    assert report.findings == ()


def test_check_is_tested_on_twenty_kinds_of_healthy_stores() -> None:
    assert len(CLOSED) + len(HEALTHY) >= 20


def test_check_of_a_broker_without_a_key_index_is_healthy(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("demo")
    shutil.rmtree(path / "index")
    report = check(path)
    assert serious(report) == []
    assert "has no key index" in str(report)


def test_check_notes_that_retention_deleted_segments(tmp_path: Path) -> None:
    _retired(tmp_path / "s")
    (note,) = [one for one in check(tmp_path / "s").findings if "have expired" in one.what]
    assert note.severity == "note"


def _behind_a_filler(path: Path) -> None:
    change(path / "commitlog/00000000000000000000", 16384 - 5)


def _behind_the_end(path: Path) -> None:
    change(path / "commitlog/00000000000000049152", 16000)


def _page(path: Path) -> None:
    change(path / "checkpoint", 2000)


def _unit_0_of_the_index(path: Path) -> None:
    change(next((path / "index").iterdir()), 40 + 400 + 8)


def _lock(path: Path) -> None:
    change(path / "lock", 1)


def change(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x5A
    path.write_bytes(data)


@pytest.mark.parametrize("alter", [_behind_a_filler, _behind_the_end, _page, _unit_0_of_the_index, _lock])
def test_check_ignores_bytes_that_are_never_read(
    alter: Callable[[Path], None], tmp_store: Callable[[str], Path]
) -> None:
    path = tmp_store("basic")
    alter(path)
    assert serious(check(path)) == []


@pytest.mark.parametrize("name", ["demo", "livekill533"])
def test_check_changes_nothing_on_disk(name: str, tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store(name)
    (path / "commitlog" / "00000000000000000000").touch()
    before = contents(path)
    folder_times = {one: one.stat().st_mtime_ns for one in path.rglob("*") if one.is_dir()}
    check(path)
    assert contents(path) == before
    assert {one: one.stat().st_mtime_ns for one in folder_times} == folder_times


def test_check_reports_queue_offsets_of_messages_in_damaged_bytes(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("basic")
    segment = path / "commitlog" / "00000000000000016384"
    data = bytearray(segment.read_bytes())
    data[5100:7000] = bytes(1900)
    segment.write_bytes(data)
    report = check(path)
    lost = [one for one in report.findings if one.begin is not None and "in damaged bytes" in one.what]
    assert [(one.topic, one.queue_id, one.begin, one.end, one.messages) for one in lost] == [("TopicR", 0, 23, 26, 3)]
    assert all(one.severity == "damage" for one in lost)
    table = report.to_arrow()
    assert table.column_names[:5] == ["severity", "area", "what", "path", "position"]
    assert len(table) == len(report.findings)


def test_check_reports_the_position_of_damage(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("demo")
    queue = path / "consumequeue/orders/0/00000000000000000000"
    change(queue, 5 * 20 + 3)
    (finding,) = [one for one in check(path).findings if one.severity != "note"]
    assert (finding.path, finding.position) == (str(queue), 100)
    assert (finding.topic, finding.queue_id, finding.begin, finding.end) == ("orders", 0, 5, 6)


def test_check_of_a_store_that_a_broker_holds_is_live_and_healthy(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("livekill533")
    os.utime(path / "lock")
    lock = FileLock(str(path / "lock"))
    assert lock.try_take()
    try:
        report = check(path)
    finally:
        lock.release()
    assert report.state == "live"
    assert serious(report) == []


def _last_unit(path: Path) -> tuple[Path, bytes]:
    file = path / "consumequeue/orders/0/00000000000000000000"
    data = bytearray(file.read_bytes())
    end = len(data.rstrip(b"\0")) + 19  # the tags code may end with zeros
    data[end // 20 * 20 - 8 : end // 20 * 20] = bytes(8)
    return file, bytes(data)


def _half_of_topics(path: Path) -> tuple[Path, bytes]:
    file = path / "config/topics.json"
    return file, file.read_bytes()[:50]


def _ledger_begun(path: Path) -> tuple[Path, bytes]:
    file = next((path / "rmq/ledger").glob("*.json"))
    return file, file.read_bytes()[:20]


def _last_keys(path: Path) -> tuple[Path, bytes]:
    (file,) = (path / "index").iterdir()
    data = bytearray(file.read_bytes()[:1000])
    count = int.from_bytes(data[36:40], "big")
    data[36:40] = (count - 40).to_bytes(4, "big")
    return file, bytes(data) + file.read_bytes()[1000:]


@pytest.mark.slow
@pytest.mark.parametrize("alter", [_last_unit, _half_of_topics, _ledger_begun, _last_keys])
def test_check_rereads_what_a_live_writer_was_writing(
    alter: Callable[[Path], tuple[Path, bytes]], tmp_path: Path
) -> None:
    path = tmp_path / "s"
    sizes = FileSizes(1 << 16, 4000, 4600, IndexShape(100, 2000))
    with StoreWriter(str(path), Disk(), WriterSettings(sizes=sizes), lambda: 1, time.sleep):
        pass
    ours(path)
    file, half = alter(path)
    whole = file.read_bytes()
    assert half != whole
    file.write_bytes(half)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        if not slept:
            file.write_bytes(whole)
        slept.append(seconds)

    lock = FileLock(str(path / "lock"))
    assert lock.try_take()
    try:
        assert serious(check(path, sleep=sleep)) == []
        assert slept
        file.write_bytes(half)
        stays_so = serious(check(path, sleep=lambda seconds: None))
    finally:
        lock.release()
    assert stays_so or alter is _last_keys, "a lasting fault is reported, except missing keys"


@pytest.mark.parametrize("times", [1, 100])
def test_check_of_a_store_that_is_written_to_meanwhile_is_healthy(times: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with StoreWriter(str(path), Disk(), WriterSettings(sizes=FileSizes(1 << 16)), lambda: 1, time.sleep):
        pass
    with rmq_spark.open_store(path) as store:
        store.send_many(messages(60))
    seen: list[int] = []

    def write(done: int, total: int) -> None:
        if done != total or len(seen) >= times:
            return
        seen.append(total)
        with rmq_spark.open_store(path) as store:
            store.send_many(messages(1))

    report = check(path, progress=write)
    assert serious(report) == []
    assert report.state == "live"
    assert len(seen) == min(times, 2), "it is checked once more, as beside a running writer"


def test_check_ends_although_writers_die_during_each_scan(tmp_path: Path) -> None:
    path = ours(tmp_path / "s")
    looks: list[int] = []

    def die(done: int, total: int) -> None:
        if done == total and len(looks) < 20:
            looks.append(total)
            (path / "abort").write_text(str(len(looks)))
            os.utime(path / "abort", (1_000 + len(looks), 1_000 + len(looks)))

    (path / "abort").write_text("0")
    assert check(path, progress=die).state == "live"
    assert len(looks) == 3


def test_check_beside_a_running_writer_finds_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "s"
    rmq_spark.create_store(path, topics={"busy": 4}, segment_bytes=1 << 22)
    words = ["-m", "rmq_spark.store.testing.busy_writer", str(path), "--name", "a", "--count", "60000", "--each", "500"]
    root = Path(__file__).resolve().parents[3]
    writer = subprocess.Popen(
        [sys.executable, *words, "--notes", str(tmp_path / "notes")],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        reports = []
        while writer.poll() is None and sum(report.records > 0 for report in reports) < 4:
            reports.append(check(path))
    finally:
        writer.kill()
        writer.wait()
    assert [line for report in reports for line in serious(report)] == []
    assert any(report.records for report in reports)


def test_check_beside_a_writer_that_closes_after_each_commit_finds_no_damage(tmp_path: Path) -> None:
    path = ours(tmp_path / "s")

    def write(done: int, total: int) -> None:
        with rmq_spark.open_store(path, flush="sync") as store:
            store.send_many(messages(5))

    report = check(path, progress=write)
    assert report.state == "live"
    assert serious(report) == []
    assert serious(check(path)) == []


def test_check_reports_progress_in_bytes_of_the_log(golden: Path) -> None:
    told: list[tuple[int, int]] = []
    check(golden / "demo", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (558975, 558975)


def test_written_bytes_of_a_deleted_segment_is_0(tmp_path: Path) -> None:
    gone = Segment(0, 4096, str(tmp_path / "00000000000000000000"))
    with pytest.raises(StoreChangedError, match="is gone"):
        list(files.data_extents(gone.path, 0, 4096))
    assert written_bytes(gone, 0) == 0


def test_check_refuses_a_folder_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(StorePathError, match="is not a RocketMQ store"):
        check(tmp_path)


def test_check_reports_a_missing_segment_once_and_its_loss_by_queue(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=1 << 16) as store:
        store.send_many(messages(1500))
    missing = path / f"commitlog/{1 << 16:020}"
    missing.unlink()
    found = [one for one in check(path).findings if one.severity == "damage"]
    assert {one.path for one in found} == {str(missing)}
    assert sum(f"{1 << 16:020} (missing)" in one.what for one in found) == 1
    assert sorted(one.queue_id for one in found if one.queue_id is not None) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(4))
def test_check_of_garbage_entries_ignores_a_missing_extension(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path) as store:
        store.send_many(messages(3000))
    random = Random(seed)
    file = path / "consumequeue/orders/0/00000000000000000000"
    data = bytearray(file.read_bytes())
    for _ in range(3):
        at = random.randrange(20_000 - 20)
        data[at : at + 20] = random.randbytes(20)
    file.write_bytes(data)
    found = [one for one in check(path).findings if one.severity != "note"]
    assert {one.path for one in found} == {str(file)}
    assert rmq_spark.repair(path).report.is_healthy


def test_check_reports_a_file_that_changes_at_each_try(
    tmp_store: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: object, **named: object) -> None:
        raise StoreChangedError("a file is gone")

    path, waits = tmp_store("demo"), list[float]()
    monkeypatch.setattr("rmq_spark.store.tools.check.check_timer", changed)
    report = check(path, sleep=waits.append)
    assert not report.is_healthy
    assert any("a file is gone" in f"{one}" for one in report.findings)
    assert waits


def test_check_reports_a_clock_that_was_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, ahead_ms = str(tmp_path / "store"), 30 * 86_400_000
    with rmq_spark.open_store(root) as store:
        store.send("orders", "waits", deliver_at_ms=wall_clock_ms() + 60_000)
    assert not [one for one in check(root).findings if "ahead of this machine's clock" in one.what]
    now_ms = wall_clock_ms() + ahead_ms
    with monkeypatch.context() as patch:
        for module in ("client.producer", "delivery.scheduler"):
            patch.setattr(f"rmq_spark.store.{module}.wall_clock_ms", lambda: now_ms, raising=False)
        with DeliveryScheduler(root) as ticker:
            while not ticker.tick(now_ms).delivered:
                pass
        with rmq_spark.open_store(root) as store:
            store.send("orders", "stored ahead")
    report = check(root)
    found = [one for one in report.findings if "ahead of this machine's clock" in one.what]
    assert {(one.severity, one.area) for one in found} == {("repairable", "store"), ("repairable", "timer")}
