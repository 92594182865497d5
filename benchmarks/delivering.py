"""Cost of a delivery tick with a million waiting messages over one with a thousand; lateness; memory.

Two pairs of stores: one with messages at 18 delay levels, one with messages for a time, in random order. Before each
round a thousand messages are sent, and in it the oldest thousand are due, so the number of waiting messages stays the
same. Levels are an hour long and times an hour ahead; each tick gets its time as an argument, so no time is spent
waiting. Then `rmq serve` delivers what another process sends to a store in which a million messages wait. The lateness
of a message is the store time of its delivered copy, less the time at which it was due.
"""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
from figures import Figure, ratio_figure, take_turns
from numpy.typing import NDArray
from sample_stores import BODY_BYTES, TOPIC, SampleStores
from task_memory import peak_mib

import rmq_spark
from rmq_spark.store.delivery.scheduler import DeliveryScheduler
from rmq_spark.store.disk.clock import wall_clock_ms

FEW = 1_000  # messages that wait in the small store, and messages that are due in a round
LEVELS = 18
HOUR_MS = 3_600_000
_IDLE_CALLS = 500
_LOOKS = 5
_SENDING_SECONDS, _SENDS_A_SECOND = 40, 50
_SERVE = "from rmq_spark.command import main; main()"
_SENDER = """
import random, sys, time, rmq_spark
path, topic, seconds, rate = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
chance, begin, number = random.Random(1), time.monotonic(), 0
with rmq_spark.open_store(path) as store:
    while time.monotonic() - begin < seconds:
        now_ms = time.time_ns() // 1_000_000
        if number % 2 == 0:
            store.send(topic, b"x" * 200, keys=f"level-{number}", delay_level=1)
        elif number % 4 == 1:
            due_ms = (now_ms // 1000 + chance.randrange(2, 6)) * 1000
            store.send(topic, b"x" * 200, keys=f"second-{due_ms}-{number}", deliver_at_ms=due_ms)
        else:
            due_ms = now_ms + chance.randrange(2000, 6000)
            store.send(topic, b"x" * 200, keys=f"time-{due_ms}-{number}", deliver_at_ms=due_ms)
        number += 1
        time.sleep(max(begin + (number + chance.random()) / rate - time.monotonic(), 0))
print(number)
"""
_TICKER = """
import sys, time
from pathlib import Path
from rmq_spark.store.delivery.scheduler import DeliveryScheduler
def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
import rmq_spark.store.delivery.timer, rmq_spark.store.delivery.delay_levels
path, times = sys.argv[1], [int(word) for word in sys.argv[2:]]
before = anonymous_bytes()
with DeliveryScheduler(path) as ticker:
    for now_ms in times:
        tick = ticker.tick(now_ms)
        while tick.next_due_ms is not None and tick.next_due_ms <= now_ms:
            tick = ticker.tick(now_ms)
        assert tick.problem is None, tick.problem
print(-before)
"""


def measure_delivering(stores: SampleStores, messages: int, repeats: int) -> Iterable[Figure]:
    """Yield the figures of both kinds of waiting, with a quarter of `messages` (a million) waiting."""
    many = messages // 4
    for kind in (_AtLevels, _ForTimes):
        pair = [kind(stores, count) for count in (FEW, many)]
        yield from _measure_memory(pair)
        yield from _measure_ticks(pair, repeats)
        yield _measure_backlog(pair[1])
    yield from _measure_lateness(stores, many)


class _Waiting:
    """A store in which `count` messages wait, and the moments at which a thousand of them each are due, in order."""

    name = ""
    table = " ".join(["1h"] * LEVELS)

    def __init__(self, stores: SampleStores, count: int) -> None:
        self.count = count
        self.path = str(stores.scratch(f"delivering-{self.name.replace(' ', '-')}-{count}") / "store")
        self.moments: list[int] = []
        self._store = rmq_spark.open_store(self.path, message_delay_level=self.table)
        self._store.create_topic(TOPIC, 4)
        self._fill(count)

    def _fill(self, count: int) -> None:
        raise NotImplementedError

    def send_more(self) -> None:
        """Send a thousand that are due after all others."""
        raise NotImplementedError

    def send_plain(self) -> None:
        """Send one that waits for nothing."""
        self._store.send(TOPIC, b"x" * BODY_BYTES)

    def _send(self, rows: int, **columns: pa.Array) -> pa.Table:
        return self._store.send_many(pa.table({"body": _bodies(rows), **columns}), topic=TOPIC)


class _AtLevels(_Waiting):
    name = "at levels"

    def _fill(self, count: int) -> None:
        for _ in range(count // FEW):
            self.send_more()

    def send_more(self) -> None:
        levels = pa.array(np.arange(FEW) % LEVELS + 1, pa.int32())
        sent = self._send(FEW, delayLevel=levels).column("storeTimestamp").cast(pa.int64()).to_numpy()
        due_ms = int(sent.max()) + HOUR_MS
        if self.moments and self.moments[-1] >= due_ms:
            self.moments.pop()  # stored in the same ms: they are due together
        self.moments.append(due_ms)
        time.sleep(0.001)


class _ForTimes(_Waiting):
    name = "for times"

    def _fill(self, count: int) -> None:
        self._first_s = wall_clock_ms() // 1000 + HOUR_MS // 1000
        seconds = np.arange(count) // FEW
        np.random.default_rng(1).shuffle(seconds)
        for begin in range(0, count, 50 * FEW):
            self._send_for(seconds[begin : begin + 50 * FEW])
        self.moments = [(self._first_s + second) * 1000 for second in range(count // FEW)]

    def send_more(self) -> None:
        second = self.moments[-1] // 1000 + 1
        self._send_for(np.full(FEW, second - self._first_s))
        self.moments.append(second * 1000)

    def _send_for(self, seconds: NDArray[np.int64]) -> None:
        self._send(len(seconds), deliverTimestamp=pa.array((self._first_s + seconds) * 1000))


def _bodies(count: int) -> pa.Array:
    return pa.repeat(pa.scalar(b"x" * BODY_BYTES), count)


@dataclass
class _Turns:
    """Durations of the ticks of one store, in seconds, one per round."""

    idle: list[float] = field(default_factory=list)
    look: list[float] = field(default_factory=list)
    due: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)


def _measure_ticks(pair: list[_Waiting], repeats: int) -> Iterator[Figure]:
    """Yield the cost of a tick in the large store over the small one."""
    turns = [_Turns(), _Turns()]
    tickers = [DeliveryScheduler(waiting.path) for waiting in pair]

    def measure(number: int) -> Callable[[], float]:
        def run() -> float:
            _take_turn(pair[number], tickers[number], turns[number])
            return 0.0

        return run

    try:
        take_turns(repeats, measure(0), measure(1))
    finally:
        for ticker in tickers:
            ticker.close()
    name, many = pair[0].name, pair[1].count
    for what, kind, required in (
        ("tick, nothing due, nothing new", "idle", 1.5),
        ("tick, nothing due, the store has moved", "look", 1.5),
        ("tick, 1,000 due", "due", 3.0),
        ("tick, 1,000 new", "taken", None),
    ):
        few_s, many_s = (getattr(one, kind) for one in turns)
        yield ratio_figure(
            f"{what}, {many:,} waiting {name}, over 1,000",
            many_s,
            few_s,
            required=required,
            at_most=True,
            note=f"{_time(median(many_s))}, with 1,000 {_time(median(few_s))}",
            detail={"seconds": median(many_s), "seconds_with_few": median(few_s)},
        )


def _take_turn(waiting: _Waiting, ticker: DeliveryScheduler, turns: _Turns) -> None:
    """Send a thousand, tick in each way, and have the oldest thousand delivered."""
    waiting.send_more()
    due_ms = waiting.moments.pop(0)
    before_ms = due_ms - 10_000
    gc.collect()
    turns.taken.append(_timed(lambda: ticker.tick(before_ms)))
    turns.idle.append(_timed(lambda: [ticker.tick(before_ms) for _ in range(_IDLE_CALLS)]) / _IDLE_CALLS)
    looks = []
    for _ in range(_LOOKS):
        waiting.send_plain()
        looks.append(_timed(lambda: ticker.tick(before_ms)))
    turns.refresh.append(median(looks))
    ticks = []
    turns.due.append(_timed(lambda: ticks.append(ticker.tick(due_ms))))
    if ticks[0].delivered != FEW:
        raise RuntimeError(f"{ticks[0].delivered} messages were delivered: {ticks[0].problem}")


def _timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _measure_memory(pair: list[_Waiting]) -> Iterator[Figure]:
    """In a separate process take in the waiting messages and deliver a thousand; yield the growth of its memory."""
    if not Path("/proc/self/status").exists():
        return
    grown = []
    for waiting in pair:
        waiting.send_more()
        due_ms = waiting.moments.pop(0)
        grown.append(peak_mib("-c", _TICKER, waiting.path, str(due_ms - 10_000), str(due_ms)))
    few, many = grown
    yield Figure(
        f"memory of a ticker, {pair[1].count:,} waiting {pair[1].name}",
        many,
        many,
        many,
        unit="MiB",
        note=f"beyond its imports, in its first tick and in one with 1,000 due; {few:.0f} MiB where 1,000 wait",
        detail={"mib_with_few": few},
    )


def _measure_backlog(waiting: _Waiting) -> Figure:
    """Have all that waits be due at once."""
    seconds: list[float] = []
    grown = 0.0

    def drain() -> None:
        nonlocal grown
        grown = peak_mib("-c", _TICKER, waiting.path, str(waiting.moments[-1] + 1000))

    seconds.append(_timed(drain))
    return Figure(
        f"all {waiting.count:,} due at once, {waiting.name}",
        waiting.count / seconds[0] / 1000,
        waiting.count / seconds[0] / 1000,
        waiting.count / seconds[0] / 1000,
        unit="thousand a second",
        note=f"{seconds[0]:.1f} s with a process's start; its memory grew by {grown:.0f} MiB",
        detail={"seconds": seconds[0], "mib": grown},
    )


class _Mixed(_Waiting):
    """Half of the messages wait at all levels but the first, which is a second long, half for times."""

    name = "both"
    table = " ".join(["1s", *["1h"] * (LEVELS - 1)])

    def _fill(self, count: int) -> None:
        first_ms = wall_clock_ms() + HOUR_MS
        for begin in range(0, count // 2, 50 * FEW):
            rows = min(50 * FEW, count // 2 - begin)
            self._send(rows, delayLevel=pa.array(np.arange(rows) % (LEVELS - 1) + 2, pa.int32()))
            times_ms = first_ms + np.random.default_rng(begin).integers(0, 24 * HOUR_MS, rows)
            self._send(rows, deliverTimestamp=pa.array(times_ms))
        self._store.close()


def _measure_lateness(stores: SampleStores, many: int) -> Iterator[Figure]:
    """Yield how late messages are that another process sends while `rmq serve` delivers."""
    waiting = _Mixed(stores, many)
    serving = subprocess.Popen([sys.executable, "-c", _SERVE, "serve", waiting.path], stderr=subprocess.PIPE, text=True)
    told: list[str] = []
    assert serving.stderr is not None
    reading = threading.Thread(target=lambda stream=serving.stderr: told.extend(stream))
    reading.start()
    try:
        with DeliveryScheduler(waiting.path) as ticker:  # takes in new messages before the measurement
            while ticker.tick_now() == 0 or ticker.tick_now() is None:
                time.sleep(0.1)
        arguments = [waiting.path, TOPIC, str(_SENDING_SECONDS), str(_SENDS_A_SECOND)]
        sent = int(subprocess.run([sys.executable, "-c", _SENDER, *arguments], stdout=-1, check=True).stdout)
        time.sleep(7)
        if serving.poll() is not None:
            raise RuntimeError(f"rmq serve ended with {serving.returncode}: {''.join(told)}")
    finally:
        serving.terminate()
        serving.wait()
        reading.join()
    late_ms = _lateness(waiting.path)
    if sum(map(len, late_ms.values())) != sent:
        raise RuntimeError(f"{sent} messages were sent, delivered were {sum(map(len, late_ms.values()))}")
    for name, key in (("a level", "level"), ("a whole second", "second"), ("any ms", "time")):
        ordered = np.sort(late_ms[key])
        p50, p99, last = (int(ordered[int(share * (len(ordered) - 1))]) for share in (0.5, 0.99, 1))
        yield Figure(
            f"late under rmq serve, p99, {name}, {many:,} waiting",
            p99,
            int(ordered[0]),
            last,
            unit="ms",
            note=f"p50 {p50} ms, {len(ordered)} messages",
            detail={"p50_ms": p50, "messages": len(ordered)},
        )


def _lateness(path: str) -> Mapping[str, NDArray[np.int64]]:
    """Return by how many ms each message was late that was sent while `rmq serve` ran, by its kind."""
    due_ms = {key: stored + 1000 for key, stored in _stored_ms(path, "SCHEDULE_TOPIC_XXXX", 0)}
    late: dict[str, list[int]] = {"level": [], "second": [], "time": []}
    for queue_id in range(4):
        for key, stored in _stored_ms(path, TOPIC, queue_id):
            kind, when, *_ = key.split("-")
            late[kind].append(stored - (due_ms[key] if kind == "level" else int(when)))
    return {kind: np.array(values, np.int64) for kind, values in late.items()}


def _stored_ms(path: str, topic: str, queue_id: int) -> Iterator[tuple[str, int]]:
    """Yield key and store time of each message of a queue."""
    with rmq_spark.open_reader(path) as reader:
        reader.refresh()
        for queue in reader.queues(topic):
            if queue.queue_id == queue_id:
                bounds = reader.bounds(queue)
                for batch in reader.read(queue, bounds.min_offset, bounds.max_offset, ["keys", "storeTimestamp"]):
                    times_ms = batch.column("storeTimestamp").cast(pa.timestamp("ms")).cast(pa.int64())
                    yield from zip(batch.column("keys").to_pylist(), times_ms.to_pylist(), strict=True)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
