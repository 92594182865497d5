"""KeyboardInterrupt at every place of an operation where CPython may raise it: is a lock left behind?

    python tests/torture/interrupts.py [--seconds 60] [--seed 7] [--step 1] [--operations send,tick] [--place send:17]

The places are those of `support/interrupts.py`. For each place in the engine's files a process of its own is
interrupted there. Then this process must hold no lock of the store. It must also have no file to lock open, because
that would stay open as long as the process lives; if it is open only to read, it keeps nobody waiting, but is a lost
descriptor. After that the same process must be able to write. The seed chooses the order of places; `--step` takes
every n-th of them, from one that the seed chooses. Exits with 1 after a fault.
"""

import argparse
import fcntl
import itertools
import logging
import os
import shutil
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `support`, if this runs as a script

from support.forked import run_forked
from support.interrupts import Interrupt, interrupted

import rmq_spark
from rmq_spark.store import CommitKey, CommitOptions, DeliveryScheduler, Producer, SinkSettings, TaskStage, commit_sink
from rmq_spark.store.disk.clock import wall_clock_ms

# Locks are taken and released there; elsewhere an interrupt only unwinds.
MODULES = ("store_lock", "locks", "store_writer", "write_session", "member_lease", "scheduler", "contextlib")
LOCK_TIMEOUT_MS = 700
LEAST_PLACES = 20  # however long the places take to count
CASE_S = 60
SESSION_ENDS_WITHIN_S = 3.0
_FLOCK = "hhqqi4x"  # struct flock


class Interrupts:
    """Interrupts operations on one store."""

    def __init__(self, folder: Path) -> None:
        self._store = str(folder / "store")
        with rmq_spark.open_store(self._store) as messages:
            messages.send("orders", "first", queue_id=0)
        self.operations: dict[str, Callable[[Producer], object]] = {
            "send": lambda messages: messages.send("orders", "x", queue_id=0),
            "tick": self._tick,
            "sink": self._sink,
            "expire": lambda messages: messages.expire(max_bytes=1 << 40),
            "close": lambda messages: messages.settle(),
        }
        self._batch = itertools.count()
        with rmq_spark.open_store(self._store) as messages:  # what is imported once is imported before the first fork
            for operate in self.operations.values():
                operate(messages)

    def count(self, operation: str) -> int:
        """Return the number of places in an operation."""
        ended = run_forked(lambda: self._interrupt(operation, 1 << 60).seen, CASE_S)
        assert ended.how == "returned", ended.fault
        return int(ended.value)

    def faults(self, operation: str, at: int) -> list[str]:
        """Interrupt an operation at a place; return what is wrong then."""
        ended = run_forked(lambda: self._try(operation, at), CASE_S)
        if ended.how != "returned":
            return [f"{operation}:{at}: {ended.fault}"]
        found: list[str] = ended.value
        return found

    def _interrupt(self, operation: str, at: int) -> Interrupt:
        messages = rmq_spark.open_store(self._store, lock_timeout_ms=LOCK_TIMEOUT_MS)
        messages.send("orders", "warm", queue_id=0)
        self._messages = messages
        return interrupted(lambda: self.operations[operation](messages), at + 1, MODULES)[0]

    def _try(self, operation: str, at: int) -> list[str]:
        place = self._interrupt(operation, at).place
        # A session that a send has left open ends by itself.
        end_s = time.monotonic() + SESSION_ENDS_WITHIN_S
        while (faults := held(self._store)) and time.monotonic() < end_s:
            time.sleep(0.005)
        try:
            self._messages.send("orders", "again", queue_id=0)
        except BaseException as error:
            faults.append(f"the same process cannot write: {type(error).__name__}: {error}")
        return [f"{operation}:{at} at {place}: {fault}" for fault in faults]

    def _tick(self, messages: Producer) -> None:
        with DeliveryScheduler(self._store) as ticker:
            ticker.tick(wall_clock_ms())

    def _sink(self, messages: Producer) -> None:
        settings = SinkSettings(self._store, commit=CommitOptions(flush="async"))
        key = CommitKey(f"query{os.getpid()}.{next(self._batch)}", 0)
        commit_sink(settings, key, [TaskStage(settings, key, "0").finish()])


def held(store: str) -> list[str]:
    """Return what this process still holds of the files to lock, as a new open file description finds it."""
    found = []
    for name in ("lock", "rmq/turn"):
        try:
            file = os.open(f"{store}/{name}", os.O_RDWR | os.O_NONBLOCK)
        except BlockingIOError:
            found.append(f"{name} has a lease: a broker waits for it")
            continue
        try:
            for at in (0, 1):
                wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
                if struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_OFD_GETLK, wanted))[0] != fcntl.F_UNLCK:
                    found.append(f"byte {at} of {name} is locked: another process cannot lock the store")
        finally:
            os.close(file)
        found += [f"{name} is still open{mode}" for mode in modes_of_open_files(f"{store}/{name}")]
    return found


def modes_of_open_files(path: str) -> list[str]:
    """Return for each descriptor of this process that is open at a path whether it may write, as text."""
    modes = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}") == path:
                is_to_read = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
                modes.append(" to read" if is_to_read else " to write: another process cannot lock the store")
        except OSError:  # the descriptor of the list itself
            continue
    return modes


def main() -> int:
    """Interrupt until all places were tried or the time is over; return 1 after a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--operations", type=lambda names: names.split(","), default=[])
    parser.add_argument("--place", help="one place: operation:number")
    options = parser.parse_args()
    logging.getLogger("rmq_spark").setLevel(logging.CRITICAL)
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # in memory, if possible
    folder = Path(tempfile.mkdtemp(prefix="interrupts-", dir=parent))
    begun, random = time.monotonic(), Random(options.seed)
    interrupts = Interrupts(folder)
    names = options.operations or list(interrupts.operations)
    if options.place:
        name, _, number = options.place.partition(":")
        places, total = [(name, int(number))], 1
    else:
        every = [(name, at) for name in names for at in range(interrupts.count(name))]
        total = len(every)
        places = every[random.randrange(options.step) :: options.step]
        random.shuffle(places)
    tried, bad = 0, Counter[str]()
    for name, at in places:
        if time.monotonic() > begun + options.seconds and tried >= LEAST_PLACES:
            break
        tried += 1
        for fault in interrupts.faults(name, at):
            bad[name] += 1
            print(f"FAULT {fault}", flush=True)
    report = rmq_spark.check(folder / "store")
    damage = [str(one) for one in report.findings if one.severity == "damage"]
    for one in damage:
        print(f"FAULT after all interrupts: {one}")
    print(
        f"interrupts: seed {options.seed}, {tried} of {total} places in {time.monotonic() - begun:.0f} s, "
        f"{bad.total()} faults {dict(bad)}",
        flush=True,
    )
    if bad or damage:
        print(f"interrupts: the store is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
