"""The step from one state of the log's end to the next, as a table of states and facts. No test reads the disk.

All records have 100 bytes. The known store has three: two of queue A at 0 and 100, and one of queue B at 200.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest

from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format.record import MAGIC_V1, TRANSACTION_COMMIT, TRANSACTION_PREPARED, Record
from rmq_spark.store.log.consume_queue import ConsumeQueue, Entries
from rmq_spark.store.log.entry_check import NextEntry, no_entry_error, no_queue_error
from rmq_spark.store.log.log_end_state import (
    MANY_QUEUES,
    AwaitedEntry,
    ChainFacts,
    ChangeToken,
    EndState,
    Facts,
    Lookups,
    NewEntries,
    advance,
    conclude,
    count_agreeing,
    queue_of,
    start_over,
)
from rmq_spark.store.log.record_chain import ShutdownState, StoreState
from rmq_spark.store.model import QueueKey

SIZE = 100
A, B, GONE = QueueKey("T", 0), QueueKey("T", 1), QueueKey("gone", 0)
QUEUES = {key: ConsumeQueue(key, f"consumequeue/{key}") for key in (A, B)}
LIVE, CLOSED, CRASHED = (StoreState(closing, 7) for closing in ShutdownState)
WRONG_FILES = StoreError("the files of the queue are wrong")
DAMAGE = DamageError("an entry of queue T/0", "a file", 40, "a record", "zeros")

KNOWN = EndState(
    base=300,
    end=300,
    ends={A: 2, B: 1},
    last_offsets={A: 100, B: 200},
    newest_ms=30,
    last_record=(200, b"header at 200"),
    token=ChangeToken(300),
)


def record(key: QueueKey, physical_offset: int, queue_offset: int, sys_flag: int = 0) -> Record:
    return Record(
        total_size=SIZE,
        magic=MAGIC_V1,
        body_crc=0,
        queue_id=key.queue_id,
        flag=0,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        sys_flag=sys_flag,
        born_timestamp=0,
        born_host=b"",
        store_timestamp=0,
        store_host=b"",
        reconsume_times=0,
        prepared_transaction_offset=0,
        body=b"",
        topic=key.topic.encode(),
        properties=b"",
    )


def entries(physical_offsets: Iterable[int]) -> Entries:
    places = np.array(list(physical_offsets), np.int64)
    count = len(places)
    return Entries(places, np.full(count, SIZE), np.zeros(count, np.int64), np.arange(count), None)


def new(begin: int, *physical_offsets: int, unconfirmed: int = 0, fault: DamageError | None = None) -> NewEntries:
    """New entries from number `begin`, all of which agree with their records. The last ones are not confirmed."""
    count = len(physical_offsets)
    return NewEntries(begin, entries(physical_offsets), count, count - unconfirmed, fault)


def chain(end: int, *physical_offsets: int, unitless: tuple[Record, ...] = (), refused_ms: int | None = None) -> Any:
    """The chain of the records at these physical offsets, which have entries, and of the records without one."""
    places = np.array(physical_offsets, np.int64)
    return ChainFacts(end, end // 10, places, np.full(len(places), SIZE), unitless, refused_ms)


def facts(
    store: StoreState,
    found: ChainFacts,
    new_entries: Mapping[QueueKey, NewEntries],
    queues: Mapping[QueueKey, ConsumeQueue] = QUEUES,
    unreadable: Iterable[QueueKey] = (),
) -> Facts:
    wrong: dict[QueueKey, tuple[ConsumeQueue, StoreError]] = {key: (queues[key], WRONG_FILES) for key in unreadable}
    return Facts(store, queues, new_entries, wrong, found)


def token(end: int, store: StoreState, *awaited: AwaitedEntry, **others: Any) -> ChangeToken:
    return ChangeToken(end, others.get("refused_ms"), store, awaited, frozenset(others.get("without_folder", ())))


def awaited(key: QueueKey, number: int, *physical_offsets: int) -> AwaitedEntry:
    return AwaitedEntry(QUEUES[key], number, entries(physical_offsets))


@dataclass(frozen=True)
class Row:
    """A state, what a refresh read after it, and the fields of the next state that differ.

    `next_entries` and `topics` are what is looked up. If `restart_at` is not None, the refresh is whole and starts
    there.
    """

    state: EndState
    facts: Facts
    expected: dict[str, Any]
    next_entries: dict[QueueKey, NextEntry] = field(default_factory=dict)
    topics: frozenset[str] = frozenset()
    restart_at: int | None = None


def ending(end: int, base: int, **others: Any) -> dict[str, Any]:
    """The fields of a state in which the log ends at `end`, and its last record with an entry ends at `base`."""
    at = base - SIZE
    usual = {"end": end, "base": base, "newest_ms": end // 10, "last_record": (at, b"header at %d" % at)}
    return {**usual, "token": ChangeToken(end), **others}


LATE_A, LATE_B, COMMITTED = record(A, 300, 2), record(B, 200, 0), record(A, 400, 2, TRANSACTION_COMMIT)
LOST = record(GONE, 300, 0)
FOLDERLESS = tuple(record(QueueKey("gone", n), 300 + SIZE * n, 0) for n in range(MANY_QUEUES + 1))
A_IS_LATE = replace(
    KNOWN, end=400, waiting=(LATE_A,), pending=frozenset({A}), newest_ms=40, token=token(400, LIVE, awaited(A, 2))
)
B_IS_LATE = replace(KNOWN, ends={A: 2, B: 0}, last_offsets={A: 100}, waiting=(LATE_B,), pending=frozenset({B}))
B_IS_WRONG = replace(
    KNOWN,
    ends={A: 2},
    unreadable={B: (QUEUES[B], WRONG_FILES)},
    faults={B: WRONG_FILES},
    token=token(300, LIVE),
)

ENDS = {
    "nothing new": Row(KNOWN, facts(LIVE, chain(300), {}), {}),
    "nothing new in a queue": Row(KNOWN, facts(LIVE, chain(300), {A: new(2)}), {}),
    "new entries, all confirmed": Row(
        KNOWN,
        facts(LIVE, chain(600, 300, 400, 500), {A: new(2, 300, 500), B: new(1, 400)}),
        ending(600, 600, ends={A: 4, B: 2}, last_offsets={A: 500, B: 400}),
    ),
    "entries beyond the log's end": Row(
        KNOWN,
        facts(LIVE, chain(400, 300, 500), {A: NewEntries(2, entries([300, 500]), 1, 1)}),
        ending(400, 400, ends={A: 3, B: 1}, last_offsets={A: 300, B: 200}),
    ),
    "crashed store with a hole": Row(
        KNOWN,
        facts(
            CRASHED,
            chain(600, 300, 500, unitless=(record(A, 400, 3),)),
            {A: NewEntries(2, entries([300, 0, 500]), 1, 1)},
        ),
        ending(
            600,
            600,
            ends={A: 3, B: 1},
            last_offsets={A: 300, B: 200},
            waiting=(record(A, 400, 3),),
            pending=frozenset({A}),
            token=token(600, CRASHED, awaited(A, 3, 0)),
        ),
        next_entries={A: NextEntry(3)},
    ),
    "last entry not confirmed": Row(
        KNOWN,
        facts(LIVE, chain(500, 300, 400), {A: new(2, 300, 400, unconfirmed=1)}),
        ending(
            500,
            400,
            ends={A: 3, B: 1},
            last_offsets={A: 300, B: 200},
            pending=frozenset({A}),
            token=token(500, LIVE, awaited(A, 3, 400)),
        ),
    ),
    "last entries of two queues not confirmed": Row(
        KNOWN,
        facts(LIVE, chain(600, 300, 400, 500), {B: new(1, 400, unconfirmed=1), A: new(2, 300, 500, unconfirmed=1)}),
        ending(
            600,
            400,
            ends={A: 3, B: 1},
            last_offsets={A: 300, B: 200},
            pending=frozenset({A, B}),
            token=token(600, LIVE, awaited(A, 3, 500), awaited(B, 1, 400)),
        ),
    ),
    "stale record at the end": Row(
        KNOWN, facts(CLOSED, chain(300, refused_ms=5), {}), {"token": token(300, CLOSED, refused_ms=5)}
    ),
    "whole refresh forgets": Row(
        replace(A_IS_LATE, ends={A: 2, B: 1, GONE: 9}, last_offsets={GONE: 50}, faults={GONE: DAMAGE}),
        facts(CLOSED, chain(400, 200, 300), {A: new(2, 300), B: new(0, 200)}),
        ending(
            400,
            400,
            begin=200,
            ends={A: 3, B: 1},
            last_offsets={A: 300, B: 200},
            faults={},
            waiting=(),
            pending=frozenset(),
        ),
        restart_at=200,
    ),
    "whole refresh of a log without entries": Row(
        KNOWN,
        facts(LIVE, chain(0), {A: new(0), B: new(0)}),
        ending(0, 0, ends={A: 0, B: 0}, last_offsets={}, last_record=(0, b"")),
        restart_at=0,
    ),
}

WAITING = {
    "record without an entry in a live store": Row(
        KNOWN,
        facts(LIVE, chain(400, unitless=(LATE_A,)), {A: new(2)}),
        ending(400, 300, waiting=(LATE_A,), pending=frozenset({A}), token=token(400, LIVE, awaited(A, 2))),
        next_entries={A: NextEntry(2, (7, 7))},
    ),
    "its entry is written": Row(
        A_IS_LATE,
        facts(LIVE, chain(400, 300), {A: new(2, 300)}),
        ending(400, 400, ends={A: 3, B: 1}, last_offsets={A: 300, B: 200}, waiting=(), pending=frozenset()),
    ),
    "the entry of an earlier record is written": Row(
        B_IS_LATE,
        facts(LIVE, chain(300), {B: new(0, 200)}),
        ending(300, 300, ends={A: 2, B: 1}, last_offsets={A: 100, B: 200}, waiting=(), pending=frozenset()),
        next_entries={B: NextEntry(1)},
    ),
    "an earlier record still waits, and its queue was not read": Row(
        B_IS_LATE, facts(LIVE, chain(300), {A: new(2)}), {"token": None}, next_entries={B: NextEntry(0)}
    ),
    "prepared message, then a committed one": Row(
        KNOWN,
        facts(LIVE, chain(500, unitless=(record(GONE, 300, 0, TRANSACTION_PREPARED), COMMITTED)), {A: new(2)}),
        ending(500, 300, waiting=(COMMITTED,), pending=frozenset({A}), token=token(500, LIVE, awaited(A, 2))),
        next_entries={A: NextEntry(2)},
    ),
    "record of a deleted topic": Row(
        KNOWN,
        facts(LIVE, chain(500, 400, unitless=(LOST,)), {A: new(2, 400)}),
        ending(500, 500, ends={A: 3, B: 1}, last_offsets={A: 400, B: 200}),
    ),
    "record of a topic that may exist": Row(
        KNOWN,
        facts(LIVE, chain(500, 400, unitless=(LOST,)), {A: new(2, 400)}),
        ending(
            500,
            500,
            ends={A: 3, B: 1},
            last_offsets={A: 400, B: 200},
            waiting=(LOST,),
            pending=frozenset({GONE}),
            token=token(500, LIVE, without_folder=[GONE]),
        ),
        topics=frozenset({"gone"}),
    ),
    "last record, of a topic that is not known yet": Row(
        KNOWN,
        facts(LIVE, chain(400, unitless=(LOST,)), {}),
        ending(
            400,
            300,
            waiting=(LOST,),
            pending=frozenset({GONE}),
            token=token(400, LIVE, without_folder=[GONE]),
        ),
    ),
    "record of a topic that was deleted and created again": Row(
        KNOWN,
        facts(LIVE, chain(500, 400, unitless=(record(A, 300, 9),)), {A: new(2, 400)}),
        ending(500, 500, ends={A: 3, B: 1}, last_offsets={A: 400, B: 200}),
        next_entries={A: NextEntry(3)},
    ),
}

FAULTS = {
    "entry missing after a clean shutdown": Row(
        A_IS_LATE,
        facts(CLOSED, chain(500, unitless=(LATE_A, COMMITTED)), {A: new(2)}),
        ending(
            500,
            300,
            faults={A: no_entry_error(LATE_A, A, "a queue file", 40)},
            waiting=(LATE_A, COMMITTED),
            pending=frozenset(),
            token=token(500, CLOSED),
        ),
        next_entries={A: NextEntry(2, None, "a queue file", 40)},
    ),
    "wrong entry after a crash": Row(
        A_IS_LATE,
        facts(CRASHED, chain(500, unitless=(LATE_A, record(A, 400, 3))), {A: new(2)}),
        ending(
            500,
            300,
            faults={A: no_entry_error(LATE_A, A, "a queue file", 40, "(300, 99)")},
            waiting=(LATE_A, record(A, 400, 3)),
            token=token(500, CRASHED, awaited(A, 2)),
        ),
        next_entries={A: NextEntry(2, (300, 99), "a queue file", 40)},
    ),
    "partly written entry after a crash": Row(
        A_IS_LATE,
        facts(CRASHED, chain(400, unitless=(LATE_A,)), {A: new(2)}),
        {"token": token(400, CRASHED, awaited(A, 2))},
        next_entries={A: NextEntry(2, (300, 100), "a queue file", 40)},
    ),
    "entry of an earlier message is wrong after a crash": Row(
        A_IS_LATE,
        facts(CRASHED, chain(400, unitless=(LATE_A,)), {A: new(1)}),
        ending(
            400,
            300,
            ends={A: 1, B: 1},
            pending=frozenset({A}),
            token=token(400, CRASHED, awaited(A, 1)),
        ),
        next_entries={A: NextEntry(1, (7, 7), "a queue file", 20)},
    ),
    "no queue after a clean shutdown": Row(
        KNOWN,
        facts(CLOSED, chain(400, unitless=(LOST,)), {}),
        ending(400, 300, faults={GONE: no_queue_error(LOST, GONE)}, waiting=(LOST,), token=token(400, CLOSED)),
        topics=frozenset({"gone"}),
    ),
    "damage at the end of a queue": Row(
        KNOWN,
        facts(CLOSED, chain(300), {A: new(2, fault=DAMAGE)}),
        {"faults": {A: DAMAGE}, "token": token(300, CLOSED)},
    ),
    "order of faults": Row(
        KNOWN,
        facts(CLOSED, chain(500, unitless=(LOST, record(A, 400, 2))), {A: new(2, fault=DAMAGE)}, unreadable=[B]),
        ending(
            500,
            300,
            ends={A: 2},
            faults={GONE: no_queue_error(LOST, GONE), A: DAMAGE, B: WRONG_FILES},
            unreadable={B: (QUEUES[B], WRONG_FILES)},
            waiting=(LOST, record(A, 400, 2)),
            token=token(500, CLOSED),
        ),
        next_entries={A: NextEntry(2)},
        topics=frozenset({"gone"}),
    ),
    "queue becomes unreadable": Row(
        KNOWN,
        facts(LIVE, chain(400, unitless=(record(B, 300, 1),)), {}, unreadable=[B]),
        ending(
            400,
            300,
            ends={A: 2},
            unreadable={B: (QUEUES[B], WRONG_FILES)},
            faults={B: WRONG_FILES},
            waiting=(record(B, 300, 1),),
            token=token(400, LIVE),
        ),
    ),
    "queue stays unreadable": Row(B_IS_WRONG, facts(LIVE, chain(300), {A: new(2)}), {}),
    "unreadable queue is deleted": Row(
        B_IS_WRONG,
        facts(LIVE, chain(300), {}, queues={A: QUEUES[A]}),
        ending(300, 300, unreadable={}, faults={}),
    ),
    "unreadable queue is readable again": Row(
        B_IS_WRONG,
        facts(LIVE, chain(300, 0, 100, 200), {A: new(0, 0, 100), B: new(0, 200)}),
        ending(300, 300, ends={A: 2, B: 1}, unreadable={}, faults={}),
        restart_at=0,
    ),
}

FEW = SIZE * MANY_QUEUES
TOKENS = {
    "few queues without a folder": Row(
        KNOWN,
        facts(LIVE, chain(300 + FEW, unitless=FOLDERLESS[:-1]), {}),
        ending(
            300 + FEW,
            300,
            waiting=FOLDERLESS[:-1],
            pending=frozenset(map(queue_of, FOLDERLESS[:-1])),
            token=token(300 + FEW, LIVE, without_folder=map(queue_of, FOLDERLESS[:-1])),
        ),
    ),
    "many queues without a folder": Row(
        KNOWN,
        facts(LIVE, chain(400 + FEW, unitless=FOLDERLESS), {}),
        ending(400 + FEW, 300, waiting=FOLDERLESS, pending=frozenset(map(queue_of, FOLDERLESS)), token=None),
    ),
}

ROWS = {**ENDS, **WAITING, **FAULTS, **TOKENS}


def step(row: Row) -> EndState:
    """Return the state after the row's refresh, in which the header of a record names its place."""
    state = row.state if row.restart_at is None else start_over(row.state, row.restart_at)
    moved, needs = advance(state, row.facts)
    assert row.next_entries.keys() <= set(needs.queues), "looks up what is not needed"
    assert {key.topic for key in needs.queues} >= row.topics
    header = b"header at %d" % needs.header_at if needs.header_at is not None else b""
    return conclude(moved, needs, row.facts, Lookups(header, row.next_entries, row.topics))


def shown(state: EndState) -> dict[str, Any]:
    """Return the fields of a state such that they can be compared."""
    found = {one.name: getattr(state, one.name) for one in fields(state)}
    found["faults"] = [(key, str(fault)) for key, fault in state.faults.items()]
    if state.token is not None:
        late = {one.queue.key: (one.number, one.previous.physical_offsets.tolist()) for one in state.token.awaited}
        found["token"] = (state.token.end, state.token.refused_ms, state.token.store, late, state.token.without_folder)
    return found


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_log_end_state_follows_from_the_facts(row: Row) -> None:
    before = shown(replace(row.state, ends=dict(row.state.ends), last_offsets=dict(row.state.last_offsets)))
    state = step(row)
    assert shown(state) == shown(replace(row.state, **row.expected))
    assert shown(row.state) == before, "a state never changes"


@pytest.mark.parametrize(
    ("agree", "log_end", "closing", "count"),
    [
        ([], 0, ShutdownState.LIVE, 0),
        ([True, True, True], 300, ShutdownState.LIVE, 3),
        ([True, True, True], 299, ShutdownState.LIVE, 2),
        ([False, False, False], 300, ShutdownState.CLOSED, 0),
        ([True, False, True], 300, ShutdownState.LIVE, 3),
        ([True, False, True], 300, ShutdownState.CLOSED, 3),
        ([True, False, True], 300, ShutdownState.CRASHED, 1),
        ([True, True, True], 300, ShutdownState.CRASHED, 3),
        ([True, True, False], 300, ShutdownState.CRASHED, 2),
        ([False, True, True], 300, ShutdownState.CRASHED, 0),
    ],
)
def test_count_agreeing_ends_with_a_valid_record(
    agree: list[bool], log_end: int, closing: ShutdownState, count: int
) -> None:
    found = entries(SIZE * number for number in range(len(agree)))
    assert count_agreeing(np.array(agree, np.bool_), found, log_end, closing) == count


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (EndState(), 0),
        (KNOWN, 300),
        (replace(KNOWN, end=900, waiting=(record(A, 500, 2), record(A, 400, 3))), 300),
        (replace(KNOWN, base=700, end=900, waiting=(record(A, 500, 2), record(A, 400, 3))), 400),
        (replace(KNOWN, base=900, end=800), 800),
    ],
)
def test_first_unitless_is_at_or_below_the_first_waiting_record(state: EndState, expected: int) -> None:
    assert state.first_unitless() == expected
