"""KeyboardInterrupt at every place of an operation where CPython may raise it: is a lock left behind?

    python tests/torture/interrupts.py [--seconds 60] [--seed 7] [--step 1] [--operations send,tick] [--place send:17]

CPython looks for signals after a call, at the begin of a function and at a jump back. For each such place in the
engine's files a process of its own is interrupted there. Then the same process writes again, and another one must be
able to lock the store: an interrupt must not hold a lock as long as the process lives. The seed chooses the order of
places; `--step` takes every n-th of them, from one that the seed chooses. Exits with 1 after a fault.
"""

import argparse
import dis
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
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `support`, if this runs as a script

from support.forked import run_forked

import rmq_spark
from rmq_spark.store import CommitKey, CommitOptions, DeliveryScheduler, Producer, SinkSettings, TaskStage, commit_sink
from rmq_spark.store.disk.clock import wall_clock_ms

LOOKS_FOR_SIGNALS = {"CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}
# Locks are taken and released there; elsewhere an interrupt only unwinds.
FILES = (
    *("store_lock.py", "locks.py", "store_writer.py", "write_session.py", "member_lease.py", "scheduler.py"),
    "contextlib.py",
)
LOCK_TIMEOUT_MS = 700
LEAST_PLACES = 20  # however long the places take to count
CASE_S = 60
_FLOCK = "hhqqi4x"  # struct flock


class Interrupter:
    """A trace function that raises KeyboardInterrupt at the `at`-th place, or counts the places."""

    def __init__(self, at: int) -> None:
        self.at, self.seen, self.place = at, 0, ""
        self._opcodes: dict[CodeType, dict[int, str]] = {}
        self._last: dict[int, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> "Interrupter | None":
        """Look at one event of a frame."""
        code = frame.f_code
        name = os.path.basename(code.co_filename)
        if name not in FILES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event != "opcode":
            return self
        if code not in self._opcodes:
            self._opcodes[code] = {one.offset: one.opname for one in dis.get_instructions(code)}
        before = self._last.get(id(frame))
        self._last[id(frame)] = self._opcodes[code].get(frame.f_lasti)
        if before in LOOKS_FOR_SIGNALS:
            self.seen += 1
            if self.seen == self.at + 1:
                self.place = f"{name}:{frame.f_lineno} {code.co_name}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


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

    def _interrupt(self, operation: str, at: int) -> Interrupter:
        messages = rmq_spark.open_store(self._store, lock_timeout_ms=LOCK_TIMEOUT_MS)
        messages.send("orders", "warm", queue_id=0)
        self._messages = messages
        interrupter = Interrupter(at)
        try:
            sys.settrace(interrupter)
            self.operations[operation](messages)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return interrupter

    def _try(self, operation: str, at: int) -> list[str]:
        place = self._interrupt(operation, at).place
        faults = []
        if is_locked(self._store):
            faults.append("another process cannot lock the store")
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


def is_locked(store: str) -> bool:
    """Say whether a lock of the store is held, as another process sees it: by a new open file description."""
    for name in ("lock", "rmq/turn"):
        file = os.open(f"{store}/{name}", os.O_RDWR)
        try:
            for at in (0, 1):
                wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
                if struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_OFD_GETLK, wanted))[0] != fcntl.F_UNLCK:
                    return True
            if name == "lock":
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            return True
        finally:
            os.close(file)
    return False


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
