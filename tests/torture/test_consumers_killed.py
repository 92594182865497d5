"""A driver whose listener fails, or its workers, are killed again and again: every message is processed or a dead
letter, none is sent back twice, and in order none comes before the one ahead of it.
"""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import rmq_spark

if TYPE_CHECKING:
    from tests.torture.conftest import Life

pytestmark = pytest.mark.spark

Start = Callable[..., "Life"]
QUEUES = 2
LEVELS = " ".join(["1s"] * 18)
ROWS_A_BATCH = 25 * (QUEUES + 1)  # of consumer_life.py, the queue of retries too
WITHIN_S = 600
MASTER = "local[2,100]"  # a task is repeated when its worker was killed
DRIVER, WORKERS = "driver", "workers"


def feed(path: Path, messages: int) -> set[str]:
    """Make the store; return the keys of its messages, of which each tenth always fails."""
    with rmq_spark.open_store(path, segment_bytes=1 << 22, message_delay_level=LEVELS) as store:
        store.create_topic("orders", QUEUES)
        for number in range(messages):
            store.send("orders", "bad" if number % 10 == 7 else "good", queue_id=number % QUEUES, keys=f"key-{number}")
    return {f"key-{number}" for number in range(messages)}


def read_rows(path: Path, topic: str, *columns: str) -> list[dict[str, Any]]:
    """Return all messages of a topic."""
    with rmq_spark.open_reader(path) as store:
        store.refresh()
        if topic not in store.topics():
            return []
        return [
            row
            for queue in store.queues(topic)
            for batch in store.read(queue, 0, store.bounds(queue).max_offset, [*columns])
            for row in batch.to_pylist()
        ]


def read_keys(path: Path, topic: str) -> list[str]:
    """Return the keys of all messages of a topic."""
    return [row["keys"] for row in read_rows(path, topic, "keys")]


class Note(NamedTuple):
    """A note of a listener on a row: "given" or "done", when, and the process of the listener."""

    word: str
    queue_id: int
    offset: int
    topic: str
    key: str
    time_ms: int
    pid: int


def read_notes(path: Path) -> list[Note]:
    """Return what the listeners noted, in the order in which they did."""
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # a line may be written just now
    parts = [line.split() for line in lines]
    return [
        Note(word, int(queue_id), int(offset), topic, key, int(time_ms), int(pid))
        for word, queue_id, offset, topic, key, time_ms, pid in parts
    ]


def check_order(notes: list[Note], dead_ms: dict[str, int]) -> None:
    """A row is given when all before it in its queue are done, or were dead letters in the store by then."""
    checked: dict[int, int] = {}
    keys = {(note.queue_id, note.offset): note.key for note in notes}
    finished: set[tuple[int, int]] = set()
    for note in notes:
        if note.word == "done":
            finished.add((note.queue_id, note.offset))
            continue
        for before in range(checked.get(note.queue_id, 0), note.offset):
            row = note.queue_id, before
            died_ms = dead_ms.get(keys.get(row, ""), 2**62)
            assert row in finished or died_ms <= note.time_ms, f"{note} came before {before} was done, or dead"
        checked[note.queue_id] = max(checked.get(note.queue_id, 0), note.offset)


def count_repeated(notes: list[Note], victims: set[int]) -> int:
    """Return the number of rows that a killed process had done, and that another process got again."""
    done: set[tuple[str, int, int]] = set()
    again: set[tuple[str, int, int]] = set()
    for note in notes:
        row = note.topic, note.queue_id, note.offset
        if note.word == "done" and note.pid in victims:
            done.add(row)
        elif note.word == "given" and note.pid not in victims and row in done:
            again.add(row)
    return len(again)


def check_retries(retries: list[dict[str, Any]]) -> None:
    """Each failure of a message was sent back once."""
    copies = Counter((dict(row["properties"])["ORIGIN_MESSAGE_ID"], row["reconsumeTimes"]) for row in retries)
    assert [copy for copy, count in copies.items() if count > 1] == []


def wait_for_notes(life: "Life", notes: Path, count: int, is_over: Callable[[], bool]) -> None:
    """Wait until there are so many more notes, or all is done, or the driver has ended."""
    wanted, until = len(read_notes(notes)) + count, time.monotonic() + WITHIN_S
    while len(read_notes(notes)) < wanted and not is_over() and life.wait(0) is None:
        assert time.monotonic() < until, life.log.read_text(errors="replace")
        time.sleep(0.01)


def kill_worker(life: "Life", notes: list[Note]) -> set[int]:
    """Kill the process that made the last note if it is a worker of Spark's that still runs. Return it if so."""
    found = {note.pid for note in notes[-1:]} & set(life.members("python", "worker_daemon"))
    life.kill(list(found))
    return found


def run_consumers(
    start: Start, folder: Path, seed: int, model: str, messages: int, kills: int, threads: int = 1, victim: str = DRIVER
) -> None:
    """Kill the driver, or one of its Python workers, `kills` times, and let the last driver finish."""
    random, path = Random(seed), folder / "store"
    keys = feed(path, messages)
    notes, stop = folder / "notes", folder / "stop"
    arguments = [str(path), str(notes), str(folder / "checkpoint"), str(stop), model, str(threads)]
    life: Life | None = None
    victims: set[int] = set()

    def is_over() -> bool:
        return {note.key for note in read_notes(notes) if note.word == "done"} | set(
            read_keys(path, "%DLQ%crew")
        ) == keys

    def restarted() -> "Life":
        """Return the driver that runs, or a new one."""
        if life is not None and life.wait(0) is None:
            return life
        made = start("consumer_life.py", MASTER, *arguments)
        assert made.wait_for("started", WITHIN_S), made.log.read_text(errors="replace")
        return made

    for _ in range(kills):
        life = restarted()
        wait_for_notes(life, notes, random.randrange(1, messages // 4), is_over)
        if victim == DRIVER:
            time.sleep(random.random())
            life.end()
        elif not is_over():
            victims |= kill_worker(life, read_notes(notes))
    until = time.monotonic() + WITHIN_S
    while not is_over():
        life = restarted()
        assert time.monotonic() < until, life.log.read_text(errors="replace")
        time.sleep(0.1)
    life = restarted()
    stop.touch()
    assert life.wait_for("stopped", WITHIN_S), life.log.read_text(errors="replace")
    noted, letters = read_notes(notes), read_rows(path, "%DLQ%crew", "keys", "storeTimestamp")
    dead = [row["keys"] for row in letters]
    done = [note.key for note in noted if note.word == "done"]
    retries = read_rows(path, "%RETRY%crew", "properties", "reconsumeTimes")
    again, repeated = len(done) - len(set(done)), count_repeated(noted, victims)
    print(
        f"seed {seed}, {model}: {messages} messages, {kills} kills: {len(set(done))} processed, "
        f"{len(dead)} dead letters, {len(set(done) & set(dead))} both; {len(retries)} retries; "
        f"{sum(note.word == 'given' for note in noted)} times given, {again} times processed again"
        f"; {len(victims)} workers killed, {repeated} rows of theirs repeated"
    )
    assert victim == DRIVER or (len(victims) > kills // 2 and repeated), f"seed {seed}: too few kills, or no repetition"
    # What a batch did that the death cut off is done again with it.
    assert again <= ROWS_A_BATCH * kills, f"seed {seed}: a death costs one batch at most"
    assert len(dead) == len(set(dead)), f"seed {seed}: a dead letter came twice"
    check_retries(retries)
    bad = {f"key-{number}" for number in range(messages) if number % 10 == 7}
    assert bad <= set(dead)
    if model == "orderly":
        check_order(noted, {row["keys"]: round(row["storeTimestamp"].timestamp() * 1000) for row in letters})
        assert retries == []


def note(word: str, offset: int, time_ms: int, pid: int = 1) -> Note:
    return Note(word, 0, offset, "orders", f"key-{offset}", time_ms, pid)


def test_the_check_of_order_sees_a_row_that_came_before_the_one_ahead_of_it_was_a_dead_letter() -> None:
    notes = [note("given", 0, 10), note("given", 1, 20), note("done", 1, 21)]
    check_order(notes, {"key-0": 20})
    with pytest.raises(AssertionError, match="came before 0 was done"):
        check_order(notes, {"key-0": 21})
    with pytest.raises(AssertionError, match="came before 0 was done"):
        check_order(notes, {})
    check_order([note("given", 0, 10), note("done", 0, 11), *notes[1:]], {})


def test_rows_that_a_killed_process_had_done_count_as_repeated_when_another_gets_them() -> None:
    notes = [note("given", 0, 10), note("done", 0, 11), note("given", 1, 12), note("given", 0, 20, 2)]
    assert count_repeated(notes, {1}) == 1
    assert count_repeated(notes, {2}) == 0, "process 1 was not killed"
    assert count_repeated([*notes[:3], note("given", 1, 20, 2)], {1}) == 0, "row 1 may have failed"
    assert count_repeated([*notes[:3], note("given", 0, 20)], {1}) == 0


def test_the_check_of_retries_sees_a_copy_that_came_twice() -> None:
    copies: list[dict[str, Any]] = [
        {"properties": {"ORIGIN_MESSAGE_ID": origin}, "reconsumeTimes": times}
        for origin, times in [("a", 1), ("a", 2), ("b", 1)]
    ]
    check_retries(copies)
    with pytest.raises(AssertionError):
        check_retries([*copies, copies[1]])


@pytest.mark.torture(minutes=1.5)
@pytest.mark.parametrize("threads", [1, 20])
@pytest.mark.parametrize("model", ["concurrently", "orderly"])
def test_a_listener_that_fails_in_a_driver_that_is_killed(
    start: Start, tmp_path: Path, run_seed: int, model: str, threads: int
) -> None:
    run_consumers(start, tmp_path, run_seed, model, 60, 2, threads)


@pytest.mark.torture(minutes=5)
@pytest.mark.parametrize("threads", [1, 20])
@pytest.mark.parametrize("model", ["concurrently", "orderly"])
def test_a_listener_that_fails_in_a_driver_that_is_killed_ten_times(
    start: Start, tmp_path: Path, model: str, threads: int
) -> None:
    run_consumers(start, tmp_path, 1, model, 1_000, 10, threads)


@pytest.mark.torture(minutes=5)
@pytest.mark.parametrize("model", ["concurrently", "orderly"])
def test_a_listener_in_threads_of_workers_that_are_killed_ten_times(start: Start, tmp_path: Path, model: str) -> None:
    run_consumers(start, tmp_path, 2, model, 1_000, 10, 20, WORKERS)
