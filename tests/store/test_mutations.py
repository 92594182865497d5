"""Damaged stores: whatever happens to the bytes, a reader gives the right rows or an error with evidence.

Each seed damages one of the golden stores in one way (`store.testing.mutations`) and reads all of it. The judge is
built on the independent decoder (`tests/golden/decode_store.py`). It accepts a case if

1. nothing but an RmqError came out, within 5 seconds and a bounded address space;
2. each row is the row of the undamaged store; or else the record where it says it lies, decoded slowly from the
   damaged bytes, is whole, with the right CRC, its length, queue, queue offset, topic and stored body are the undamaged
   ones, and the row is what that record says: so only fields differ that no checksum protects (flag, times, hosts,
   properties, reconsumeTimes, and the bits of sysFlag that leave the record whole);
3. the rows of a queue are those from its min to its max offset, without a gap;
4. no row of the undamaged store is missing without an error, but where a reader cannot know better:
   - its segment is gone and none before it is there: retention deletes just so;
   - `abort` is there: a queue may end earlier, because readers end where units end;
   - its unit is gone, with all after it, and the record lies before the last segment with records: readers look for
     messages without a unit in the last segment only, as a broker's recovery does;
   - its queue's first file is gone, and the log does not begin at 0: retention deletes just so; or a later unit of the
     queue is fill or points before the log's begin: then all before it is taken for expired;
   - its record's store time was set back, and another message has the time of the last one, which the checkpoint
     names: then the record is older than the end of the log, as stale ones are;
   - the first record that is damaged lies just where the checkpoint says that a broker's recovery ended the log;
   - the log's file is another store's: whole records, newer than the checkpoint;
   - another queue of its topic gives an error: a queue id may be damaged, and nobody reads half a topic by accident;
5. damage to files that rows do not come from (index, timer, lock ...) changes nothing;
6. `find_key` names only messages that have the key, `offset_at_time` an offset within the bounds, and the right one
   where store times ascend.

`python tests/store/test_mutations.py --seed 7` shows one case. Failures print their seed.
"""

import argparse
import base64
import importlib.util
import json
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from types import FrameType, ModuleType
from typing import Any

import pytest

from rmq_spark.store import COLUMNS, StoreReader, open_reader
from rmq_spark.store.errors import RmqError
from rmq_spark.store.testing.arrow_rows import Row, arrow_rows
from rmq_spark.store.testing.mutations import MutableStore
from rmq_spark.store.units import QueueKey

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
NAMES = list(COLUMNS)
CASE_SECONDS = 5
WORKERS = 2
ADDRESS_SPACE_BYTES = 1 << 30  # beyond what a worker has after it read every store once
WEIGHTS = {"demo": 0.3}  # the larger ones more seldom
INNER_BATCH = 0x80
# What rows come from: damage elsewhere must not be noticed.
SOURCES = ("commitlog", "consumequeue/", "batchconsumequeue", "config/topics.json", "checkpoint", "abort")


def load_decoder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_decode_store", GOLDEN / "decode_store.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


decoder = load_decoder()
STORES = (*decoder.STORES, *decoder.STORES_OF_BROKERS, *decoder.DIGESTED)


def plain(row: dict[str, Any]) -> Row:
    """Return a row of the decoder as the reader gives it."""
    times = {name: wrapped(row[name]) for name in ("bornTimestamp", "storeTimestamp")}
    return {**row, **times, "body": base64.b64decode(row["body"])}


def wrapped(time_ms: int) -> int:
    """Return a time in microseconds, in 64 bits."""
    return (time_ms * 1000 + 2**63) % 2**64 - 2**63


class Bytes:
    """The commit log of a store as it lies on disk, record by record."""

    def __init__(self, store: Path) -> None:
        self._folder = store / "commitlog"
        self._segments: dict[int, bytes] = {}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if len(path.name) == 20 and path.name.isdigit() and path.is_file():
                self._segments[int(path.name)] = path.read_bytes()

    @property
    def begin(self) -> int:
        """Return where the first segment begins that a broker would keep: an empty last one does not count."""
        return min((begin for begin, data in self._segments.items() if data), default=1 << 63)

    def record(self, place: int) -> Any | None:
        """Return the whole record at a physical offset, None if there is none."""
        begin = max((begin for begin in self._segments if begin <= place), default=None)
        if begin is None:
            return None
        try:
            return decoder.parse_record(self._segments[begin], place - begin, begin)
        except (decoder.NoRecordError, UnicodeDecodeError):
            return None


@dataclass
class Truth:
    """What is in a store that nobody damaged."""

    path: Path
    rows: dict[QueueKey, dict[int, Row]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for topic, queues in decoder.decode_store(self.path)["topics"].items():
            for queue_id, queue in queues.items():
                rows = [plain(row) for row in queue["rows"]]
                self.rows[QueueKey(topic, int(queue_id))] = {row["queueOffset"]: row for row in rows}

    @cached_property
    def bytes(self) -> Bytes:
        return Bytes(self.path)

    @cached_property
    def last_segment(self) -> int:
        """Return where the last segment with a record begins."""
        log = decoder.walk_log(self.path)
        begins = [int(path.name) for path in (self.path / "commitlog").iterdir()]
        return max(begin for begin in begins if begin in log.records)


@dataclass
class Found:
    """What the reader made of a damaged store."""

    rows: dict[QueueKey, list[Row]] = field(default_factory=dict)
    bounds: dict[QueueKey, tuple[int, int]] = field(default_factory=dict)
    errors: dict[QueueKey | None, RmqError] = field(default_factory=dict)


def read_all(path: Path, read_mode: str) -> tuple[Found, list[str]]:
    """Read everything; return it, and what is wrong with the bounds as such."""
    found = Found()
    faults: list[str] = []
    try:
        with open_reader(str(path), read_mode=read_mode) as reader:
            reader.refresh()
            for topic in reader.topics():
                for queue in reader.queues(topic):
                    faults += read_queue(reader, queue, found)
    except RmqError as error:
        found.errors[None] = error
    return found, faults


def read_queue(reader: StoreReader, queue: QueueKey, found: Found) -> Iterator[str]:
    rows = found.rows.setdefault(queue, [])
    try:
        bounds = reader.bounds(queue)
        for batch in reader.read(queue, bounds.min_offset, bounds.max_offset, NAMES, check_crc=True):
            rows += arrow_rows([batch])
    except RmqError as error:
        found.errors[queue] = error
        return
    found.bounds[queue] = bounds.min_offset, bounds.max_offset
    offsets = [row["queueOffset"] for row in rows]
    if offsets != list(range(bounds.min_offset, bounds.max_offset)):
        yield f"{queue}: bounds {bounds}, rows {offsets}"


@dataclass
class Judge:
    """Holds what was found in a damaged store against the truth."""

    truth: Truth
    damaged: Path
    foreign: bool  # a segment of another store was put in: its records are as good as any

    @cached_property
    def bytes(self) -> Bytes:
        return Bytes(self.damaged)

    @property
    def crashed(self) -> bool:
        return (self.damaged / "abort").exists() or (self.truth.path / "abort").exists()

    def faults(self, found: Found) -> Iterator[str]:
        for queue, rows in found.rows.items():
            for row in rows:
                why = self.wrong(queue, row)
                if why:
                    yield f"{queue} offset {row['queueOffset']}: {why}"
        if None in found.errors or self.foreign:
            return
        topics = {queue.topic for queue in found.errors if queue is not None}
        for queue, rows_by_offset in self.truth.rows.items():
            if queue.topic not in topics:
                yield from self.missing(queue, rows_by_offset, found)

    def wrong(self, queue: QueueKey, row: Row) -> str | None:
        """Say what is wrong with a row, None if nothing is."""
        right = self.truth.rows.get(queue, {}).get(row["queueOffset"])
        if row == right:
            return None
        place = row["commitLogOffset"]
        record = self.bytes.record(place)
        if record is None:
            return f"no whole record at {place}"
        if (record.topic, record.queue_id) != (queue.topic, queue.queue_id):
            return f"the record at {place} is of {record.topic}/{record.queue_id}"
        if row not in meanings(record):
            return f"not what the record at {place} says: {difference(row, meanings(record))}"
        if self.foreign:
            return None
        before = self.truth.bytes.record(place)
        if before is None or protected(before) != protected(record):
            return f"another record at {place} than before"
        if right is None:
            return f"stale: no message of the undamaged store (record at {place})"
        return None if right["commitLogOffset"] == place else f"the record at {place}, not {right['commitLogOffset']}"

    def missing(self, queue: QueueKey, rows: dict[int, Row], found: Found) -> Iterator[str]:
        """Yield the offsets of a queue that are missing without an error or an excuse."""
        there = {row["queueOffset"] for row in found.rows.get(queue, [])}
        begin, end = found.bounds.get(queue, (0, 0))
        shortened = self.bytes.begin > 0 and first_file(self.damaged, queue) > first_file(self.truth.path, queue)
        shortened = shortened or self.looks_expired(queue, begin)
        lost = []
        for offset, row in rows.items():
            place = row["commitLogOffset"]
            if offset in there or place < self.bytes.begin:
                continue
            if offset >= end and (self.crashed or place < self.truth.last_segment):
                continue
            if offset < begin and shortened:
                continue
            if offset >= end and 0 < self.confirmed() <= place:
                continue  # bytes that end just where the broker says that its log ended, as after a truncation
            if offset >= end and (self.looks_stale(row, found) or self.looks_cut(place)):
                continue
            lost.append(offset)
        if lost:
            yield f"{queue}: offsets {lost} are silently missing, bounds {found.bounds.get(queue)}"

    def confirmed(self) -> int:
        """Return the checkpoint's confirmPhyOffset, 0 without one."""
        page = self.damaged / "checkpoint"
        data = page.read_bytes()[32:40] if page.is_file() else b""
        return int.from_bytes(data, "big", signed=True) if len(data) == 8 else 0

    def looks_stale(self, row: Row, found: Found) -> bool:
        """Say whether the row's record was set back in time, without a gap to the time of the last message."""
        record = self.bytes.record(row["commitLogOffset"])
        last = max(other["storeTimestamp"] for rows in self.truth.rows.values() for other in rows.values())
        there = any(other["storeTimestamp"] >= last for rows in found.rows.values() for other in rows)
        return record is not None and wrapped(record.store_ms) < row["storeTimestamp"] and there

    def looks_cut(self, place: int) -> bool:
        """Say whether the log may have been cut before `place`: no record where the checkpoint confirms its end."""
        (confirmed,) = struct.unpack_from(">q", (self.truth.path / "checkpoint").read_bytes(), 32)
        return 0 < confirmed <= place and self.truth.bytes.record(confirmed) != self.bytes.record(confirmed)

    def looks_expired(self, queue: QueueKey, begin: int) -> bool:
        """Say whether the unit before a queue's first offset is fill, or points before the log."""
        folder = self.damaged / "consumequeue" / queue.topic / str(queue.queue_id)
        if not folder.is_dir() or begin <= first_file(self.damaged, queue) // 20:
            return False
        for file in folder.iterdir():
            if file.is_file() and file.name.isdigit() and 0 <= (begin - 1) * 20 - int(file.name) < file.stat().st_size:
                place, size = struct.unpack_from(">qi", file.read_bytes(), (begin - 1) * 20 - int(file.name))
                break
        else:
            return False
        return bool(size > 0 and 0 <= place < max(self.bytes.begin, 1 if size == decoder.FILL_SIZE else 0))


def first_file(store: Path, queue: QueueKey) -> int:
    """Return the number in the name of the queue's first file."""
    folders = [store / tree / queue.topic / str(queue.queue_id) for tree in ("consumequeue", "batchconsumequeue")]
    files = [path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_file()]
    return min((int(path.name) for path in files if path.name.isdigit() and path.stat().st_size), default=1 << 63)


def protected(record: Any) -> tuple[Any, ...]:
    """Return the parts of a record that something vouches for: CRC, unit, place."""
    return record.size, record.topic, record.queue_id, record.queue_offset, record.physical_offset, record.body


def meanings(record: Any) -> list[Row]:
    """Return the rows that a record may mean, whatever its sysFlag says of compression and batches."""
    return [plain(row) for part in parts(record) for row in rows_of(part)]


def rows_of(record: Any) -> Iterator[dict[str, Any]]:
    """Yield the record's row, if its body can be unpacked."""
    try:
        yield decoder.row_of(record)
    except Exception:  # whatever zlib, struct and the decoder's own assertions say: it is no row
        return


def parts(record: Any) -> list[Any]:
    """Return the record as one message, and the messages in it if it may be taken for a batch."""
    found = [record]
    if record.sys_flag & INNER_BATCH:
        text = b"INNER_NUM\x01%d\x02INNER_BASE\x01%d\x02"
        for count in range(1, 8):
            properties = decoder.parse_properties(record.properties) | decoder.parse_properties(
                text % (count, record.queue_offset)
            )
            try:
                found += decoder.inner_messages(record, properties)
            except Exception:  # another count
                continue
    return found


def difference(row: Row, rows: list[Row]) -> str:
    if not rows:
        return "nothing"
    nearest = min(rows, key=lambda other: sum(row[name] != other[name] for name in NAMES))
    return str({name: (row[name], nearest[name]) for name in NAMES if row[name] != nearest[name]})[:600]


def search_faults(path: Path, random: Random, truth: Truth, found: Found, read_mode: str) -> Iterator[str]:
    """Yield what is wrong with the answers to look-ups by time and by key."""
    queues = [queue for queue, rows in truth.rows.items() if rows and queue in found.bounds]
    if not queues:
        return
    queue = random.choice(queues)
    row = random.choice(list(truth.rows[queue].values()))
    time_ms = row["storeTimestamp"] // 1000 + random.choice((-1, 0, 0, 1, -(10**12), 10**12))
    key = random.choice([*(row["keys"] or "k").split(" "), row["msgId"]])
    try:
        with open_reader(str(path), read_mode=read_mode) as reader:
            yield from time_faults(queue, time_ms, reader.offset_at_time(queue, time_ms), found)
            for hit, offset in reader.find_key(queue.topic, key):
                rows = {other["queueOffset"]: other for other in found.rows.get(hit, [])}
                if hit in found.bounds and (offset not in rows or not has_key(rows[offset], key)):
                    yield f"find_key({key!r}) names {hit} offset {offset}: {rows.get(offset)}"
    except RmqError:
        return


def has_key(row: Row, key: str) -> bool:
    return key in (row["keys"] or "").split(" ") or key == row["msgId"]


def time_faults(queue: QueueKey, time_ms: int, offset: int, found: Found) -> Iterator[str]:
    begin, end = found.bounds[queue]
    times = [row["storeTimestamp"] // 1000 for row in found.rows[queue]]
    if not begin <= offset <= end:
        yield f"offset_at_time({queue}, {time_ms}) = {offset}, bounds {begin}, {end}"
    elif times == sorted(times) and offset != begin + sum(time < time_ms for time in times):
        yield f"offset_at_time({queue}, {time_ms}) = {offset}, times {times} from {begin} on"


class HangError(BaseException):
    """A case took too long; no RmqError and no Exception, so that nobody takes it for an answer."""


def alarm(number: int, frame: FrameType | None) -> None:
    raise HangError


class Cases:
    """Runs cases by seed in one folder."""

    def __init__(self, folder: Path) -> None:
        self._stores: dict[str, tuple[Truth, MutableStore]] = {}
        pristine = [Path(shutil.copytree(GOLDEN / name, folder / "pristine" / name)) for name in STORES]
        for path in pristine:
            others = [other for other in pristine if other != path]
            self._stores[path.name] = Truth(path), MutableStore(path, folder / "work" / path.name, others)

    def run(self, seed: int, show: Callable[[str], None] = lambda _: None) -> list[str]:
        """Run one case; return what is wrong, each with all that is needed to see it again."""
        random = Random(seed)
        name = random.choices(STORES, [WEIGHTS.get(name, 1.0) for name in STORES])[0]
        truth, store = self._stores[name]
        what = store.mutate(random)
        read_mode = random.choice(("mmap", "pread"))
        show(f"seed {seed}, {name}, {read_mode}: {'; '.join(what)}")
        signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
        faults: list[str] = []
        try:
            found, faults = read_all(store.path, read_mode)
            for queue, error in found.errors.items():
                show(f"  {queue}: {type(error).__name__}: {error}")
                if not str(error):
                    faults.append(f"{queue}: an error without evidence")
            if found.errors and not any(path.startswith(SOURCES) for path in store.changed()):
                faults.append(f"an error for damage that does not matter: {found.errors}")
            foreign = any(one.startswith("commitlog/") and " replaced by commitlog/" in one for one in what)
            faults += Judge(truth, store.path, foreign).faults(found)
            if random.random() < 0.3:
                faults += search_faults(store.path, random, truth, found, read_mode)
        except HangError:
            faults.append(f"still at it after {CASE_SECONDS} s")
        except Exception as error:
            faults.append(f"{type(error).__name__} at {places(error)}: {error}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            store.restore()
        return [f"seed {seed}, {name}, {read_mode}, {'; '.join(what)}: {fault[:900]}" for fault in faults]


def places(error: BaseException) -> str:
    """Name the innermost lines of ours that an error came through."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join(found[-4:])


def work(folder: Path, seeds: range) -> None:
    """Run cases in this process: a line with each seed before it is tried, a line of JSON for each fault."""
    signal.signal(signal.SIGALRM, alarm)
    warnings.simplefilter("error")
    cases = Cases(folder)
    for name in STORES:
        read_all(GOLDEN / name, "mmap")  # imports, caches and pools are there before memory is counted
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE_BYTES, -1))
    for seed in seeds:
        print(seed, flush=True)
        for fault in cases.run(seed):
            print(json.dumps(fault), flush=True)


def run_workers(seeds: range) -> list[str]:
    """Run cases in processes of their own; a process that dies is a fault of the case that it was at."""
    faults: list[str] = []
    waiting = [range(seeds.start + number, seeds.stop, WORKERS) for number in range(WORKERS)]
    running = [(left, start_worker(left)) for left in waiting]
    while running:
        left, worker = running.pop(0)
        output, errors = worker.communicate()
        lines = output.splitlines()
        faults += [json.loads(line) for line in lines if line.startswith('"')]
        if worker.returncode:
            tried = [int(line) for line in lines if line.isdigit()]
            faults.append(f"seed {tried[-1:]}: the process ended with {worker.returncode}: {errors[-2000:]}")
            rest = left[len(tried) :]
            if tried and rest:
                running.append((rest, start_worker(rest)))
    return faults


def start_worker(seeds: range) -> subprocess.Popen[str]:
    arguments = ["--from", str(seeds.start), "--to", str(seeds.stop), "--step", str(seeds.step)]
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        command,
        cwd=root,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )


@pytest.mark.parametrize("read_mode", ["mmap", "pread"])
@pytest.mark.parametrize("name", STORES)
def test_an_undamaged_store_gives_all_rows(name: str, read_mode: str) -> None:
    truth = Truth(GOLDEN / name)
    found, faults = read_all(truth.path, read_mode)
    assert not faults
    assert not found.errors
    assert {queue: rows for queue, rows in found.rows.items() if rows} == {
        queue: list(rows.values()) for queue, rows in truth.rows.items() if rows
    }


def test_a_damaged_store_becomes_whole_again_and_its_origin_stays_whole(tmp_path: Path) -> None:
    """A damage that stayed, or reached the pristine files through a hard link, would spoil every case after it."""
    origin = Path(shutil.copytree(GOLDEN / "demo", tmp_path / "origin"))
    store = MutableStore(origin, tmp_path / "work", [GOLDEN / "basic"])
    for seed in range(150):
        store.mutate(Random(seed))
        store.restore()
        for path in (origin, store.path):
            assert contents_of(path) == contents_of(GOLDEN / "demo"), f"seed {seed}"


def contents_of(folder: Path) -> dict[Path, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_two_thousand_damaged_stores_are_read_right_or_refused() -> None:
    faults = run_workers(range(2_000))
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:20]])


@pytest.mark.torture
def test_a_hundred_thousand_damaged_stores_are_read_right_or_refused() -> None:
    faults = run_workers(range(2_000, 102_000))
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:50]])


def main() -> None:
    parser = argparse.ArgumentParser(description="Damaged stores, case by case.")
    parser.add_argument("--seed", type=int, help="show one case")
    parser.add_argument("--from", type=int, dest="start", default=0)
    parser.add_argument("--to", type=int, dest="stop", default=0)
    parser.add_argument("--step", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.seed is None:
            work(Path(folder), range(options.start, options.stop, options.step))
            return
        signal.signal(signal.SIGALRM, alarm)
        for fault in Cases(Path(folder)).run(options.seed, print):
            print("FAULT", fault)


if __name__ == "__main__":
    main()
