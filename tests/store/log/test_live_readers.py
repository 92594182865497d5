"""Readers beside a writer that appends, rolls, deletes, dies and recovers: no torn, missing, doubled or made-up row.

Two ways. In one process, where a follower looks between any two pieces that the appender writes: the same seed does
the same, so a fault can be followed. And as processes side by side, where a reader is overtaken in the midst of a look.
"""

import fcntl
import os
import struct
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from support.appender import Appender, run_appender
from support.appender_log import AppenderLog, read_history
from support.appender_messages import batch_topic
from support.appender_settings import AppenderSettings
from support.follower import Follower, Verdict, judge

import rmq_spark
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueBounds, QueueKey

KINDS = (("whole", "mmap"), ("whole", "pread"), ("pieces", "auto"))
# Everything often: rolls, deaths, looks.
DENSE = AppenderSettings(
    segment_bytes=1 << 14,
    queue_file_bytes=8 * 20,
    batch_queue_file_bytes=8 * 46,
    segments_kept=6,
    death_chance=0.002,
    pause_chance=0.06,
)
ACTS = 250


def lock_for_this_process_too(descriptor: int) -> None:
    """Take the lock so that a reader in the same process sees it: by open file description, not by process."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))


def follow_step_by_step(folder: Path, seed: int) -> list[Verdict]:
    """Append with three followers that look whenever the appender waits; return what the judge found."""
    random = Random(~seed)
    store = folder / "store"
    store.mkdir()
    history = AppenderLog(folder / "history")
    with ExitStack() as stack:
        followers = []
        for number, (style, read_mode) in enumerate(KINDS):
            notes = stack.enter_context((folder / f"notes{number}").open("w"))
            followers.append(Follower(str(store), notes, style, read_mode, Random(seed)))

        def look(_: float) -> None:
            random.choice(followers).go_round()

        run_appender(store, history, seed, lambda acts: acts >= ACTS, DENSE, pause=look, lock=lock_for_this_process_too)
        for follower in followers:
            follower.go_round()
            follower.close()
    history.close()
    return [judge(folder / f"notes{number}", read_history(folder / "history")) for number in range(len(KINDS))]


def assert_faultless(seed: int, verdicts: list[Verdict]) -> None:
    faults = [f"{KINDS[number]}: {fault}" for number, found in enumerate(verdicts) for fault in found.faults[:5]]
    assert not faults, "\n".join([f"seed {seed}", *faults])
    assert all(found.rows > ACTS // 2 for found in verdicts), (seed, verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_followers_between_any_two_steps_of_a_writer_see_each_message_once(tmp_path: Path, seed: int) -> None:
    assert_faultless(seed, follow_step_by_step(tmp_path, seed))


@pytest.mark.torture(minutes=0.2)
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_followers_between_any_two_steps_of_many_writers_see_each_message_once(tmp_path: Path, seed: int) -> None:
    assert_faultless(seed, follow_step_by_step(tmp_path, seed))


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        history = AppenderLog(tmp_path / name / "history")
        run_appender(tmp_path / name / "store", history, 7, lambda acts: acts >= 60, DENSE, pause=lambda _: None)
        history.close()
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append([(path.relative_to(tmp_path / name), path.read_bytes()) for path in files])
    assert contents[0] == contents[1]


W0, W1 = "w\tt\t0\t0\t0\tone\n", "w\tt\t0\t1\t99\ttwo\n"
A0, A1 = "a" + W0[1:], "a" + W1[1:]


@pytest.mark.parametrize(
    ("history", "notes", "fault"),
    [
        (W0 + A0, "r\tt\t0\t0\tone\n", None),
        (W0 + A0, "r\tt\t0\t0\ttorn\n", "read torn, written were ['one']"),
        (W0 + A0, "", "acknowledged, never read"),
        (W0 + A0, "r\tt\t0\t0\tone\nr\tt\t0\t0\tone\n", "offset 0 after 0"),
        (W0 + A0 + W1 + A1, "r\tt\t0\t1\ttwo\n", "offset 1 after -1"),
        (W0 + A0, "r\tt\t0\t0\tone\nr\tt\t0\t1\tmade up\n", "written were none"),
        (W0 + A0 + W1 + "t\t99\n", "r\tt\t0\t0\tone\nr\tt\t0\t1\ttwo\n", "written were none"),
        (W0 + A0 + W1 + "t\t99\n", "r\tt\t0\t0\tone\n", None),
        (W0 + A0 + W1 + "t\t99\n" + A1, "r\tt\t0\t0\tone\nr\tt\t0\t1\ttwo\n", None),
        (W0 + A0 + W1 + A1 + "x\t99\n", "l\tt\t0\t0\t1\nr\tt\t0\t1\ttwo\n", None),
        (W0 + A0 + W1 + A1, "l\tt\t0\t0\t1\nr\tt\t0\t1\ttwo\n", "offset 0 at 0: acknowledged, never read"),
        (W0 + A0, "r\tt\t0\t0\tone\nb\tt\t0\t1\t0\n", "stepped back"),
        (W0 + A0, "r\tt\t0\t0\tone\ne\tDamageError why\n", "DamageError why"),
    ],
)
def test_the_judge_finds_what_is_wrong(tmp_path: Path, history: str, notes: str, fault: str | None) -> None:
    (tmp_path / "history").write_text(history)
    (tmp_path / "notes").write_text(notes)
    found = judge(tmp_path / "notes", read_history(tmp_path / "history")).faults
    assert (fault is None and not found) or (fault is not None and fault in found[0]), found


class SideBySide:
    """An appender and followers as processes on one store."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._store, self._history, self._stop = folder / "store", folder / "history", folder / "stop"
        self._followers = [self._start_follower(number) for number in range(len(KINDS))]

    def append(self, seconds: float, seed: int, *, killed: bool = False) -> None:
        """Append for some seconds; `killed`: for as long, and then SIGKILL instead of an end in order."""
        options = [str(self._store), "--seed", str(seed), "--history", str(self._history)]
        appender = start("appender", *options, "--seconds", str(seconds * (100 if killed else 1)))
        try:
            code = appender.wait(seconds if killed else None)
        except subprocess.TimeoutExpired:
            appender.kill()
            appender.wait()
        else:
            assert code == 0, f"the appender ended with {code}"

    def end(self) -> list[Verdict]:
        """Let the followers go round once more; return what the judge found."""
        self._stop.touch()
        for follower in self._followers:
            assert follower.wait() == 0
        history = read_history(self._history)
        return [judge(self._folder / f"notes{number}", history) for number in range(len(KINDS))]

    def _start_follower(self, number: int) -> subprocess.Popen[bytes]:
        style, read_mode = KINDS[number]
        places = ["--notes", str(self._folder / f"notes{number}"), "--stop", str(self._stop)]
        kind = ["--style", style, "--read-mode", read_mode, "--seed", str(self._seed)]
        return start("follower", str(self._store), *places, *kind)


def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"support.{module}", *arguments]
    root = Path(__file__).resolve().parents[3]
    return subprocess.Popen(command, cwd=root, env={"PYTHONPATH": ":".join(filter(None, sys.path))})


@pytest.fixture
def seed() -> int:
    """A seed for processes side by side, printed; their interleaving is not in its hand."""
    chosen = int(os.environ.get("RMQ_SPARK_SEED", "0")) or Random().randrange(1, 2**32)
    print(f"seed {chosen}")
    return chosen


@pytest.mark.slow
def test_readers_beside_an_appending_process_see_each_message_once(tmp_path: Path, seed: int) -> None:
    side_by_side = SideBySide(tmp_path, seed)
    side_by_side.append(10, seed)
    assert_faultless(seed, side_by_side.end())


@pytest.mark.torture(minutes=11)
def test_readers_beside_processes_that_are_killed_see_each_message_once(tmp_path: Path, seed: int) -> None:
    """Ten minutes, through some forty writers; each finds what the one before left when it was killed."""
    random = Random(seed)
    side_by_side = SideBySide(tmp_path, seed)
    left = 600.0
    while left > 0:
        seconds = random.uniform(2, 28)
        side_by_side.append(seconds, random.randrange(2**32), killed=True)
        left -= seconds
    side_by_side.append(2, seed)
    assert_faultless(seed, side_by_side.end())


def test_a_store_that_gets_a_segment_and_is_closed_while_it_is_listed_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "store")

    def send(count: int) -> None:
        with rmq_spark.open_store(path, segment_bytes=1 << 14, queues=1) as store:
            for _ in range(count):
                store.send("orders", b"x" * 1000)

    send(3)
    with StoreReader(path) as reader:
        list_queues = reader._list_queues

        def append_and_list(touched: set[QueueKey] | None) -> object:
            monkeypatch.undo()
            time.sleep(0.01)  # the files get other times
            send(20)
            return list_queues(touched)

        monkeypatch.setattr(reader, "_list_queues", append_and_list)
        reader.refresh()  # the log is listed, then comes the writer
        reader.refresh()
        assert reader.bounds(QueueKey("orders", 0)) == QueueBounds(0, 23)


def test_a_queue_whose_first_file_expires_with_the_first_segment_while_they_are_listed_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, history = tmp_path / "store", AppenderLog(tmp_path / "history")
    settings = replace(DENSE, segments_kept=100, death_chance=0, pause_chance=0, topics=2, queues=1)
    appender = Appender(store, history, Random(1), settings)
    appender.open()
    queue, first_file = QueueKey("topic0", 0), store / "consumequeue/topic0/0" / ("0" * 20)
    for _ in range(ACTS):
        appender.act()
    with StoreReader(str(store)) as reader:
        reader.refresh()
        for _ in range(20):
            appender.act()
        list_queues = reader._list_queues

        def expire_and_list(touched: set[QueueKey] | None) -> object:
            monkeypatch.undo()
            appender._settings = replace(settings, segments_kept=1)
            while first_file.exists():
                appender._expire()
            return list_queues(touched)

        monkeypatch.setattr(reader, "_list_queues", expire_and_list)
        reader.refresh()  # the log was listed when the files expired
        during = reader.bounds(queue)
        reader.refresh()
        after = reader.bounds(queue)
    assert 0 < during.min_offset <= after.min_offset < during.max_offset == after.max_offset
    appender.drop()
    history.close()


def test_a_queue_that_loses_all_messages_a_reader_knows_shows_the_later_ones(tmp_path: Path) -> None:
    store, history = tmp_path / "store", AppenderLog(tmp_path / "history")
    settings = replace(DENSE, segments_kept=1, death_chance=0, pause_chance=0, topics=2, queues=1)
    appender = Appender(store, history, Random(1), settings)
    appender.open()
    queues = [QueueKey("topic0", 0), QueueKey(batch_topic(2), 0)]
    with StoreReader(str(store)) as reader:
        for is_listed in (False, True):
            for _ in range(ACTS):
                appender.act()
            reader.refresh()
            known = dict(reader._log_end.ends)
            newest_files = [max(Path(reader._topics.queues[queue].run.folder).iterdir()) for queue in queues]
            while any(file.exists() for file in newest_files):
                appender.act()
            if is_listed:
                reader._topics.refresh()  # a refresh that finds a new topic lists the queues after the log
            for queue in queues:
                bounds = reader.bounds(queue)
                assert known[queue] <= bounds.min_offset < bounds.max_offset
    appender.drop()
    history.close()
