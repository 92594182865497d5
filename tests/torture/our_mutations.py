"""Damage to any file of a store that this project wrote, and then every operation: no crash, no hang, no silent loss.

    python tests/torture/our_mutations.py [--seconds 60] [--seed 7] [--case 3]

The store has all kinds of files: log, queues, index, config, timer, and those in rmq/. A case damages one to three of
them (`tests/support/mutations.py`), all kinds equally often, and runs some operations in a process of its own, with
limits of memory and time. Then

1. each operation ended with an answer or with one of our errors;
2. if only files were damaged that rows do not come from, the rows are the same, or there is an error;
3. messages that were acknowledged after the damage can be read, or reading gives an error;
4. after a successful repair the check finds nothing more to repair. If the log was damaged, a repair that leaves steps
   to people is not successful, because it does not rebuild derived files.

tests/store/test_mutations.py judges rows of damaged logs and queues one by one. Exits with 1 after a fault.
"""

import argparse
import contextlib
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `support`, if this runs as a script

import pyarrow as pa
from support.forked import run_forked
from support.mutations import MutableStore

import rmq_spark
from rmq_spark.store import (
    CommitKey,
    CommitOptions,
    DeliveryScheduler,
    GroupSession,
    GroupTerms,
    RecordBuilderSettings,
    SinkSettings,
    StoreReader,
    TaskStage,
    commit_sink,
)
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.errors import RmqError
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.model import QueueKey
from rmq_spark.store.tools.finding import Action

CASE_S = 60  # ends a hang
ADDRESS_SPACE_BYTES = 4 << 30  # beyond what the process has
# Rows come from these; damage there may change them. `rmq/watermark` records which entries are valid.
SOURCES = ("commitlog", "consumequeue/", "config/topics.json", "checkpoint", "abort", "rmq/watermark")
Rows = Counter[tuple[str, int, int, str]]


def build(store: str, is_closed: bool) -> None:
    """Build a store with files of all kinds."""
    with rmq_spark.open_store(store, segment_bytes=1 << 16, message_delay_level="1s 2s 1h", queues=2) as messages:
        bodies = [f"old{number} {'z' * 300}".encode() for number in range(300)]
        messages.send_many(pa.table({"body": bodies, "keys": [f"k{number}" for number in range(300)]}), topic="orders")
        for number in range(4):
            messages.send("late", f"level{number}", delay_level=3)
            messages.send("late", f"timer{number}", deliver_at_ms=wall_clock_ms() + 3_600_000 + number)
        messages.set_retention(max_bytes=1 << 40)
    with DeliveryScheduler(store) as ticker:
        ticker.tick(wall_clock_ms())
    settings = SinkSettings(
        store,
        record_builder=RecordBuilderSettings(sizes=FileSizes(segment_bytes=1 << 16), queue_count=2),
        commit=CommitOptions(flush="async"),
    )
    for batch in range(2):
        task = TaskStage(settings, CommitKey("query", batch), "0")
        task.write(
            pa.RecordBatch.from_pydict({"topic": ["sunk"] * 20, "body": [f"s{row}".encode() for row in range(20)]})
        )
        staged = task.finish()
        if not batch:
            commit_sink(settings, CommitKey("query", batch), [staged])
    with rmq_spark.open_consumer(store, "puller") as consumer:
        consumer.update_consume_offset(consumer.queues("orders")[0], 5)
        consumer.commit()
    queues = [QueueKey("orders", 0), QueueKey("orders", 1)]
    group = GroupSession(store, GroupTerms("crew", "shared"))
    group.rebalance(queues, {}, 0)
    group.settle()
    group.publish(dict.fromkeys(queues, 3))
    rmq_spark.reset_offsets(store, "puller", "earliest", topics="orders")
    if is_closed:
        rmq_spark.close(store)


def read_rows(store: str) -> Rows:
    """Read every message but those that wait."""
    rows: Rows = Counter()
    with StoreReader(store) as reader:
        reader.refresh()
        for topic in reader.topics():
            for queue in reader.queues(topic):
                bounds = reader.bounds(queue)
                for batch in reader.read(queue, bounds.min_offset, bounds.max_offset, ["queueOffset", "body"]):
                    for offset, body in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                        rows[topic, queue.queue_id, offset, bytes(body).split(b" ")[0].decode(errors="replace")] += 1
    return rows


def send(store: str) -> None:
    """Send a message."""
    with rmq_spark.open_store(store, segment_bytes=1 << 16, lock_timeout_ms=5000) as messages:
        messages.send("orders", "new", queue_id=0)


def tick(store: str) -> None:
    """Deliver what is due."""
    with DeliveryScheduler(store) as ticker:
        problem = ticker.tick(wall_clock_ms()).problem
        if problem:
            raise problem


def pull(store: str) -> None:
    """Pull, and commit."""
    with rmq_spark.open_consumer(store, "puller") as consumer:
        queue = consumer.queues("orders")[0]
        consumer.pull(queue, consumer.fetch_consume_offset(queue) or 0, 5)
        consumer.commit()


def look(store: str) -> None:
    """Ask all that can be asked without Spark."""
    for question in (rmq_spark.groups, rmq_spark.group_lag, rmq_spark.pending_transactions):
        with contextlib.suppress(RmqError):
            question(store)
    with rmq_spark.open_reader(store) as reader:
        reader.refresh()
        reader.summary()
        reader.find_key("orders", "k7")


def expire(store: str) -> None:
    """Delete nothing, but look for what is old."""
    with rmq_spark.open_store(store, segment_bytes=1 << 16, lock_timeout_ms=5000) as messages:
        messages.expire(max_bytes=1 << 40)


OPERATIONS: dict[str, Callable[[str], Any]] = {
    "read": read_rows,
    "look": look,
    "check": rmq_spark.check,
    "repair": lambda store: rmq_spark.repair(rmq_spark.plan_repair(store)),
    "close": rmq_spark.close,
    "send": send,
    "tick": tick,
    "pull": pull,
    "expire": expire,
    "reset": lambda store: rmq_spark.reset_offsets(store, "puller", "latest", topics="orders"),
}


class Mutations:
    """Cases on one store of ours that was closed, and one that is in use."""

    def __init__(self, folder: Path) -> None:
        self._copy = folder / "case"
        self._stores: list[tuple[MutableStore, Rows]] = []
        for name, is_closed in (("closed", True), ("in-use", False)):
            pristine = folder / name
            build(str(pristine), is_closed)
            names = {path.relative_to(pristine).parts[0] for path in pristine.rglob("*") if path.is_file()}
            store = MutableStore(pristine, folder / f"{name}-damaged", (), dict.fromkeys(names, 1))
            self._stores.append((store, read_rows(str(pristine))))

    def run(self, seed: str) -> tuple[str, list[str]]:
        """Run a case; return what it did, and the faults."""
        random = Random(seed)
        store, rows = random.choice(self._stores)
        damages = store.mutate(random)
        changed = store.changed()
        shutil.rmtree(self._copy, ignore_errors=True)
        subprocess.run(["cp", "-a", "--sparse=always", store.path, self._copy], check=True)
        store.restore()
        names = ["read", *random.choices(list(OPERATIONS), k=random.randint(1, 4)), "read"]
        if random.random() < 0.3:
            names += ["repair", "check", "read"]
        ended = run_forked(lambda: self._operate(names, rows, changed), CASE_S)
        story = f"{'; '.join(damages)}; then {', '.join(names)}"
        return story, ended.value if ended.how == "returned" else [ended.fault]

    def _operate(self, names: list[str], plain: Rows, changed: set[str]) -> list[str]:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE_BYTES, -1))
        faults: list[str] = []
        sent, is_repaired = 0, False
        is_log_damaged = any(path.startswith("commitlog/") for path in changed)
        for name in names:
            try:
                answer = OPERATIONS[name](str(self._copy))
            except RmqError as error:
                if not str(error):
                    faults.append(f"{name}: an error without evidence")
                is_repaired = is_repaired and name != "repair"
                continue
            except BaseException as error:
                faults.append(f"RAW of {name}: {error!r} at {_places(error)}")
                continue
            sent += name == "send"
            if name == "repair":
                is_repaired = not (is_log_damaged and answer.left)
            elif name not in ("read", "look", "check"):
                is_repaired = False
            if name == "read":
                faults += self._row_faults(plain, answer, changed, sent)
            if name == "check" and is_repaired:
                # What a repair leaves to people, as files of the timer, stays a finding.
                faults += [
                    f"REPAIRABLE after a repair: {one}"
                    for one in answer.findings
                    if one.severity == "repairable" and one.action != Action.LEAVE
                ]
        return faults

    def _row_faults(self, plain: Rows, rows: Rows, changed: set[str], sent: int) -> list[str]:
        new = sum(count for (topic, _, _, body), count in rows.items() if (topic, body) == ("orders", "new"))
        faults = [f"LOST: {sent} messages acknowledged after the damage, {new} stored"] if new < sent else []
        if not any(path.startswith(SOURCES) for path in changed):
            missing = plain - rows
            if missing:
                faults.append(f"SILENT: {missing.total()} rows are missing, as {next(iter(missing))}")
        return faults


def _places(error: BaseException) -> str:
    """Name the innermost lines that an error came through."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join(found[-4:])


def main() -> int:
    """Run cases until the time is over; return 1 after a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case")
    options = parser.parse_args()
    logging.getLogger("rmq_spark").setLevel(logging.CRITICAL)
    warnings.simplefilter("error")
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # in memory, if possible
    folder = Path(tempfile.mkdtemp(prefix="mutations-", dir=parent))
    begun = time.monotonic()
    mutations = Mutations(folder)
    tried, faults, number = 0, 0, options.case or 0
    while not tried or (options.case is None and time.monotonic() < begun + options.seconds):
        story, found = mutations.run(f"{options.seed}.{number}")
        for fault in found:
            print(f"FAULT case {number} of seed {options.seed} ({story}) | {' '.join(fault.split())[:900]}", flush=True)
        faults += len(found)
        tried, number = tried + 1, number + 1
    print(
        f"mutations of ours: seed {options.seed}, {tried} cases in {time.monotonic() - begun:.0f} s, {faults} faults",
        flush=True,
    )
    if not faults or options.case is None:
        shutil.rmtree(folder)  # a case is repeated by its number
    else:
        print(f"mutations of ours: the store is in {folder}/case")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
