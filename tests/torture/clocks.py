"""One process whose clock is wrong uses a store among others whose clocks are right.

    python tests/torture/clocks.py [--seconds 60] [--seed 7] [--case 3]

A case: a store with messages; a process whose clock is in 1970, in 2106, 30 days ahead or a day back does some random
things to it; then processes with the right clock continue. Then

1. no process ended with an error that is not one of ours;
2. every message that was acknowledged is stored once, and the check finds no damage;
3. a delayed message of a right clock is delivered soon after its time; or the check reports the clock, and the
   message is delivered after a repair;
4. none of the delayed messages is lost: it waits, or was delivered.

Exits with 1 after a fault, with 2 without a C compiler for the shim.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `support`, if this runs as a script

from support.preload import NoCompilerError, compile_preload, preloaded

import rmq_spark
from rmq_spark.store import DeliveryScheduler, StoreReader
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.errors import RmqError
from rmq_spark.store.model import is_in_another_unit

SOURCE = Path(__file__).resolve().parent / "wall_clock.c"
SHIFT_VARIABLE = "WALL_CLOCK_SHIFT_S"
DAY_S = 86_400
BEGIN_OF_2106_S = 4_291_747_200  # seconds since the epoch
WAITING_TOPICS = ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer")
SHIFTS: dict[str, Callable[[int], int]] = {
    "1970": lambda now_s: 1 - now_s,
    "2106": lambda now_s: BEGIN_OF_2106_S - now_s,
    "30 days ahead": lambda now_s: 30 * DAY_S,
    "a day back": lambda now_s: -DAY_S,
}
STEP_S = 120  # ends a hang
TICKS_S = 6.0
NO_COMPILER = 2


def opened(store: str) -> Any:
    """Open the store with small files and short levels."""
    return rmq_spark.open_store(store, segment_bytes=1 << 16, message_delay_level="1s 2s 3s")


def send(store: str, name: str) -> None:
    """Send a message."""
    with opened(store) as messages:
        messages.send("orders", name)


def send_with_level(store: str, name: str) -> None:
    """Send a message of a delay level."""
    with opened(store) as messages:
        messages.send("late", name, delay_level=1)


def send_with_time(store: str, name: str) -> None:
    """Send a message for a time soon; by level where the clock is so far back that a time would pass for seconds."""
    time_ms = wall_clock_ms() + 1500
    with opened(store) as messages:
        if is_in_another_unit(time_ms):
            messages.send("late", name, delay_level=1)
        else:
            messages.send("late", name, deliver_at_ms=time_ms)


def tick(store: str, name: str) -> None:
    """Deliver what is due for some seconds, or until nothing waits."""
    until = time.monotonic() + TICKS_S
    with DeliveryScheduler(store) as ticker:
        while time.monotonic() < until:
            ticked = ticker.tick(wall_clock_ms())
            if ticked.problem:
                raise ticked.problem
            if ticked.next_due_ms is None:
                return
            time.sleep(0.05)


def settle(store: str, name: str) -> None:
    """Shut the store down."""
    rmq_spark.close(store)


def pull(store: str, name: str) -> None:
    """Pull a message, and commit the offset."""
    with rmq_spark.open_consumer(store, "crew") as consumer:
        queue = consumer.queues("orders")[0]
        consumer.update_consume_offset(queue, consumer.pull(queue, 0, 1).next_begin_offset)
        consumer.commit()


DEEDS = {deed.__name__: deed for deed in (send, send_with_level, send_with_time, tick, settle, pull)}
DELAYS = ("send_with_level", "send_with_time")


class ClockCase:
    """One case, by its number."""

    def __init__(self, folder: Path, library: Path, seed: int, number: int) -> None:
        self._random, self._number = Random(f"{seed}.{number}"), number
        self._library, self.store = library, str(folder / f"case-{number}" / "store")
        shutil.rmtree(folder / f"case-{number}", ignore_errors=True)
        os.makedirs(folder / f"case-{number}")
        self.faults: list[str] = []
        self._sent: set[str] = set()
        self._delayed: set[str] = set()  # by a right clock
        self._delayed_wrongly: set[str] = set()
        self.story: list[str] = []

    def run(self) -> None:
        """Use the store with a right, a wrong, and a right clock; then judge."""
        for deed in ("send", *self._random.sample(DELAYS, self._random.randint(0, 2))):
            self._do(deed)
        clock = list(SHIFTS)[self._number % len(SHIFTS)]
        for deed in self._random.choices(list(DEEDS), k=self._random.randint(1, 3)):
            self._do(deed, clock)
        for deed in ("send", *DELAYS, "tick"):
            self._do(deed)
        rows, report = self._refresh()
        late = {name for name in self._delayed if not rows["late", name]}
        if late and not any("clock" in str(one) for one in report.findings):
            self.faults.append(f"STUCK {sorted(late)} are not delivered, and the check does not name the clock")
        elif late:
            rmq_spark.repair(rmq_spark.plan_repair(self.store))
            self._do("tick")
            rows, report = self._refresh()
            late = {name for name in self._delayed if not rows["late", name]}
            self.faults += [f"STUCK after a repair: {sorted(late)}"] if late else []
        self._judge(rows, report)

    def _do(self, deed: str, clock: str = "") -> None:
        name = f"m{len(self.story)}"
        self.story.append(f"{deed}{f' in {clock}' if clock else ''}")
        environment = dict(os.environ)
        if clock:
            shift = SHIFTS[clock](wall_clock_ms() // 1000)
            environment = preloaded(self._library, **{SHIFT_VARIABLE: str(shift)})
        command = [sys.executable, __file__, "--deed", deed, self.store, name]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=STEP_S)
        except subprocess.TimeoutExpired:
            self.faults.append(f"HANG of {self.story[-1]}")
            return
        answer = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {"raw": done.stderr[-600:]}
        if "raw" in answer:
            self.faults.append(f"RAW {self.story[-1]}: {answer['raw']}")
        elif "error" in answer:
            self.story[-1] += f" ({answer['error']})"
            if not clock:
                self.faults.append(f"REFUSED to a right clock: {self.story[-1]}: {answer['text']}")
        elif deed == "send":
            self._sent.add(name)
        elif deed in DELAYS:
            (self._delayed_wrongly if clock else self._delayed).add(name)

    def _refresh(self) -> tuple[Counter[tuple[str, str]], Any]:
        rows: Counter[tuple[str, str]] = Counter()
        with StoreReader(self.store) as reader:
            reader.refresh()
            for topic in reader.topics():
                for queue in reader.queues(topic):
                    bounds = reader.bounds(queue)
                    for batch in reader.read(queue, bounds.min_offset, bounds.max_offset, ["body"]):
                        rows.update((topic, bytes(body).decode()) for body in batch.column("body").to_pylist())
        return rows, rmq_spark.check(self.store)

    def _judge(self, rows: Counter[tuple[str, str]], report: Any) -> None:
        for name in self._sent:
            if rows["orders", name] != 1:
                self.faults.append(f"LOST or DOUBLE {name}: acknowledged, stored {rows['orders', name]} times")
        for name in self._delayed | self._delayed_wrongly:
            if rows["late", name] > 1:
                self.faults.append(f"DOUBLE {name}: delivered {rows['late', name]} times")
            if not any(rows[topic, name] for topic in ("late", *WAITING_TOPICS)):
                self.faults.append(f"LOST delayed message {name}")
        self.faults += [f"DAMAGE {one}" for one in report.findings if one.severity == "damage"]


def do_deed(deed: str, store: str, name: str) -> None:
    """Do a deed in this process, and print how it ended."""
    logging.getLogger("rmq_spark").setLevel(logging.CRITICAL)
    try:
        DEEDS[deed](store, name)
    except RmqError as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)[:400]}))
    except Exception as error:
        print(json.dumps({"raw": repr(error)[:600]}))
    else:
        print(json.dumps({}))


def main() -> int:
    """Try cases until the time is over; return 1 after a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case")
    parser.add_argument("--deed", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.deed:
        do_deed(*options.deed)
        return 0
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # in memory, if possible
    folder = Path(tempfile.mkdtemp(prefix="clocks-", dir=parent))
    begun = time.monotonic()
    try:
        library = compile_preload(SOURCE, folder)
    except NoCompilerError as error:
        print(f"clocks: {error}")
        return NO_COMPILER
    tried, bad, number = 0, 0, options.case or 0
    while not tried or (options.case is None and time.monotonic() < begun + options.seconds):
        case = ClockCase(folder, library, options.seed, number)
        case.run()
        for fault in case.faults:
            print(f"FAULT case {number} of seed {options.seed} ({', '.join(case.story)}) | {fault[:900]}", flush=True)
        if not case.faults:
            shutil.rmtree(folder / f"case-{number}")
        bad += bool(case.faults)
        tried, number = tried + 1, number + 1
    print(f"clocks: seed {options.seed}, {tried} cases in {time.monotonic() - begun:.0f} s, {bad} with faults")
    if bad:
        print(f"clocks: the stores of these are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
