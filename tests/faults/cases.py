"""One case: a copy of a store, an operation of which one system call fails, and the operation again."""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import base_stores
from fault_kinds import FaultKind
from group_operations import SHARING
from operations import WRITING, MoreIsDueError, Operation, Rows, Session
from reading_operations import READING, read_rows
from shim import Hit, Shim
from source_operations import PLANNING
from support.forked import Ended, run_forked

from rmq_spark.store.errors import RmqError
from rmq_spark.store.model import QueueKey

OPERATIONS = {operation.name: operation for operation in (*WRITING, *SHARING, *READING, *PLANNING)}
CASE_S = 90  # ends a hang
TRIES = 3  # of a tick, which delivers a part at a time
_TEXT_CHARS = 1500
# Reading these stores as they are gives an error, or only a part: what they hold is what this store holds.
_HELD_BY = {base_stores.without_a_queue: base_stores.settled, base_stores.cut_commit: base_stores.settled}


@dataclass(frozen=True)
class Ending:
    """How one call ended: "ok", the class of one of our errors, "RAW" with another, "killed" or "hung"."""

    how: str
    text: str = ""


@dataclass(frozen=True)
class Tried:
    """Outcome of a case.

    `answer` is what the operation returned although a call failed, `second_answer` what it returned afterwards.
    """

    hit: Hit
    first: Ending
    second: Ending = Ending("not tried")
    answer: Any = None
    published: dict[QueueKey, int] = field(default_factory=dict)
    second_answer: Any = None


@dataclass(frozen=True)
class Plain:
    """An operation without a fault: its store's rows before it, its answer, the calls that it makes."""

    rows: Rows
    answer: Any
    calls: list[tuple[int, int]]  # kinds and path of each


class Bases:
    """The stores that cases begin with, each built when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        base_stores.write_import_file(folder / "import.parquet")

    def build(self, operation: Operation) -> Path:
        """Return the store on which an operation is tried."""
        return self._build(operation.base)

    def rows(self, operation: Operation) -> Rows:
        """Return the messages that this store holds."""
        if operation.base is base_stores.nothing:
            return Rows()
        store = self._build(_HELD_BY.get(operation.base, operation.base))
        ended = run_forked(lambda: read_rows(str(store)), CASE_S)
        assert ended.how == "returned", ended.fault
        rows: Rows = ended.value
        return rows

    def _build(self, base: Any) -> Path:
        store = self.folder / base.__name__
        if not store.exists() and base is not base_stores.nothing:
            ended = run_forked(lambda: base(str(store)), CASE_S)
            assert ended.how in ("returned", "killed"), f"{base.__name__}: {ended.fault}"
        return store


class CaseRunner:
    """Runs cases in a folder of its own, one at a time. The shim must count the calls on this folder."""

    def __init__(self, bases: Bases, folder: Path) -> None:
        self.folder, self._bases = folder, bases
        self.store = folder / "store"

    def lay_out(self, operation: Operation) -> None:
        """Put a copy of the operation's store, and the files beside it, into the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        shutil.copy(self._bases.folder / "import.parquet", self.folder)
        base = self._bases.build(operation)
        if base.exists():
            subprocess.run(["cp", "-a", "--sparse=always", base, self.store], check=True)

    def run_plain(self, operation: Operation) -> Plain:
        """Do an operation without a fault."""
        self.lay_out(operation)

        def work() -> tuple[Any, list[tuple[int, int]]]:
            shim, session = Shim(), self._session(operation)
            shim.trace()
            answer = operation.act(session, 1)
            calls = shim.traced()
            shim.disarm()
            return view(operation, session, answer), calls

        ended = run_forked(work, CASE_S)
        assert ended.how == "returned", f"{operation.name} without a fault: {ended.fault}"
        return Plain(self._bases.rows(operation), *ended.value)

    def run(self, operation: Operation, kind: FaultKind, number: int) -> Tried:
        """Do an operation of which the `number`-th call fails, then do it again."""
        self.lay_out(operation)
        ended = run_forked(lambda: self._try(operation, kind, number), CASE_S)
        if ended.how == "killed" and kind.kills:
            return Tried(Hit(1, kind.name, ""), Ending("killed"))
        if ended.how != "returned":
            return Tried(Hit(1, "?", ""), Ending("hung" if ended.how == "hung" else "RAW", ended.fault))
        tried: Tried = ended.value
        return tried

    def forked(self, work: Any) -> Ended:
        """Call a function in a process of its own."""
        return run_forked(work, CASE_S)

    def again(self, operation: Operation) -> None:
        """Do an operation in this process as after a restart; raise what it raises."""
        ending = attempt(operation, self._session(operation), 2)[0]
        assert ending.how == "ok", f"after a restart: {ending.how}: {ending.text}"

    def _session(self, operation: Operation) -> Session:
        session = Session(str(self.store), str(self.folder))
        if operation.writer_options is not None:
            session.writer(**operation.writer_options)
        if operation.prepare:
            operation.prepare(session)
        return session

    def _try(self, operation: Operation, kind: FaultKind, number: int) -> Tried:
        shim, session = Shim(), self._session(operation)
        shim.arm(number, kind.calls, kind.effect, kind.error)
        first, answer = attempt(operation, session, 1, tries=1)
        hit = shim.disarm()
        if not hit.count:
            return Tried(hit, first)
        if first.how == "ok":
            answer = view(operation, session, answer)
        second, second_answer = attempt(operation, session, 2)
        if second.how == "ok":
            second_answer = view(operation, session, second_answer)
        return Tried(hit, first, second, answer, session.published, second_answer)


def view(operation: Operation, session: Session, answer: Any) -> Any:
    """Return what the oracle compares of an operation's answer; None for one that writes."""
    if operation.view:
        return operation.view(session)
    return answer if operation.reads else None


def attempt(operation: Operation, session: Session, number: int, tries: int = TRIES) -> tuple[Ending, Any]:
    """Do an operation; return how it ended, and its answer."""
    try:
        for left in range(tries - 1, -1, -1):
            try:
                return Ending("ok"), operation.act(session, number)
            except MoreIsDueError:
                if not left and tries > 1:
                    raise
        return Ending("ok"), None
    except RmqError as error:
        return Ending(type(error).__name__, str(error)[:_TEXT_CHARS]), None
    except BaseException as error:
        return Ending("RAW", f"{error!r} {_places(error)}"[:_TEXT_CHARS]), None


def _places(error: BaseException) -> str:
    """Name the innermost lines that an error came through."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join(found[-5:])


def numbers_of(kind: FaultKind, calls: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the number of each call to which a kind of fault can happen, and how many calls like it came before.

    Calls are alike that are of the same kinds and on the same path.
    """
    alike: Counter[tuple[int, int]] = Counter()
    number = 0
    for call in calls:
        if call[0] & kind.calls:
            yield number, alike[call]
            alike[call] += 1
            number += 1
