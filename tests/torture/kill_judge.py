"""Judge of a store: compares it with the ledgers of the workers that wrote to it.

- An acknowledged message is in its topic once, unless retention deleted it (its offset is below the log's begin).
- A batch of a sink is stored completely, once; a batch that was not acknowledged may be missing.
- A delayed message is delivered at most once, and not before its time; after a tick for all of them, once.
- A topic, an import and a group's offset that were acknowledged stay.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from deeds import IMPORTED, PULLING_GROUPS
from ledger import Facts

from rmq_spark.store import StoreReader, check, close, group_offsets

_UNJUDGED = ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer", "undead", "%RETRY%", "%DLQ%")  # copies of other messages
CLOCK_MS = 1  # a store time is cut to milliseconds


class Stored(NamedTuple):
    """A message as it was read."""

    topic: str
    body: str
    commit_log_offset: int
    stored_ms: int


@dataclass(frozen=True)
class Seen:
    """The contents of a store."""

    rows: list[Stored]
    log_begin: int
    topics: set[str]
    offsets: Mapping[str, Mapping[int, int]]  # by group, of the topic orders
    ends: Mapping[int, int]  # of the queues of the topic orders
    faults: list[str]
    state: str


def read_store(store: str) -> tuple[list[Stored], set[str], dict[int, int]]:
    """Read every message; refuse a gap. Return messages, topics, and the ends of the queues of the topic orders."""
    rows: list[Stored] = []
    ends: dict[int, int] = {}
    with StoreReader(store) as reader:
        reader.refresh()
        for topic in reader.topics():
            for queue in reader.queues(topic):
                bounds = reader.bounds(queue)
                expected = bounds.min_offset
                if topic == "orders":
                    ends[queue.queue_id] = bounds.max_offset
                names = ["queueOffset", "commitLogOffset", "storeTimestamp", "body"]
                for batch in reader.read(queue, expected, bounds.max_offset, names):
                    offsets, places, times, bodies = batch.columns
                    for offset, place, time_ms, body in zip(
                        offsets.to_pylist(),
                        places.to_pylist(),
                        times.cast(pa.int64()).to_pylist(),
                        bodies.to_pylist(),
                        strict=True,
                    ):
                        assert offset == expected, f"GAP in {queue}: offset {offset} follows {expected - 1}"
                        expected += 1
                        rows.append(Stored(topic, bytes(body).split(b" ")[0].decode(), place, time_ms // 1000))
                assert expected == bounds.max_offset, f"SHORT: {queue} ends at {expected}, maximum {bounds.max_offset}"
        return rows, set(reader.topics()), ends


def look(store: str) -> Seen:
    """Read a store as its dead writers left it."""
    report = check(store)
    rows, topics, ends = read_store(store)
    faults = [f"DAMAGE {one}" for one in report.findings if one.severity == "damage"]
    return Seen(rows, report.log_begin, topics, {}, ends, faults, report.state)


def close_and_look(store: str) -> Seen:
    """Recover a store and shut it down; then read it, and its groups."""
    close(store)
    report = check(store)
    rows, topics, ends = read_store(store)
    offsets = {group: group_offsets(store, group).get("orders", {}) for group in PULLING_GROUPS}
    faults = [f"UNHEALTHY {one}" for one in report.findings if one.severity != "note"]
    if report.state != "closed" or (Path(store) / "abort").exists():
        faults.append(f"UNHEALTHY the state is {report.state} after a close")
    intents = Path(store) / "rmq" / "intents"
    if intents.is_dir() and any(intents.iterdir()):
        faults.append(f"INTENTS {sorted(path.name for path in intents.iterdir())}")
    return Seen(rows, report.log_begin, topics, offsets, ends, faults, report.state)


class Judge:
    """Judges one store after each burst of kills. It remembers messages seen once: retention may delete them."""

    def __init__(self) -> None:
        self._seen_once: set[object] = set()
        self._told: set[str] = set()

    def faults(self, facts: Facts, seen: Seen, *, is_final: bool = False, is_ticked: bool = False) -> Iterator[str]:
        """Yield what is wrong. `is_final`: after a close; `is_ticked`: after a tick for all that was due, too."""
        yield from seen.faults
        counts: Counter[str] = Counter()
        stored: dict[str, Stored] = {}
        for row in seen.rows:
            if not row.topic.startswith(_UNJUDGED):
                counts[row.body] += 1
                stored[row.body] = row
        yield from (f"DOUBLE {body}: {count} times" for body, count in counts.items() if count > 1)
        yield from _sent_faults(facts, seen, counts)
        yield from self._batch_faults(facts, counts, is_final)
        yield from self._delay_faults(facts, counts, stored, is_ticked)
        yield from (f"LOST topic {name}" for (name,) in facts["topic"] if name not in seen.topics)
        yield from self._import_faults(facts, counts)
        yield from _offset_faults(facts, seen)
        for word in ("damage", "gap"):
            for fact in facts[word]:
                if str(fact) not in self._told:
                    self._told.add(str(fact))
                    yield f"{word.upper()} seen by a worker: {fact}"

    def _batch_faults(self, facts: Facts, counts: Counter[str], is_final: bool) -> Iterator[str]:
        acknowledged = set(facts["committed"])
        have: Counter[tuple[str, int]] = Counter()
        for body in counts:
            if body.startswith("bquery"):
                query, batch = body[1:].split(".")[:2]
                have[query, int(batch)] += 1
        for query, batch, rows in set(facts["batch"]):
            key = (query, batch)
            if have[key] == rows:
                self._seen_once.add(key)
            elif key in self._seen_once:
                continue  # retention has deleted a part
            elif key in acknowledged:
                yield f"LOST of batch {batch} of {query}: {have[key]} of {rows} rows"
            elif is_final and have[key]:
                yield f"PART of batch {batch} of {query}: {have[key]} of {rows} rows"

    def _delay_faults(
        self, facts: Facts, counts: Counter[str], stored: dict[str, Stored], is_ticked: bool
    ) -> Iterator[str]:
        for name, due_ms in facts["delayed"]:
            if counts[name]:
                self._seen_once.add(name)
                if stored[name].stored_ms < due_ms - CLOCK_MS:
                    yield f"EARLY {name}: due at {due_ms}, delivered at {stored[name].stored_ms}"
            elif is_ticked and name not in self._seen_once:
                yield f"LOST delayed message {name}: due at {due_ms}, never delivered"

    def _import_faults(self, facts: Facts, counts: Counter[str]) -> Iterator[str]:
        for (number,) in set(facts["imported"]):
            missing = sum(counts[f"i{number}.{row}"] != 1 for row in range(IMPORTED))
            if not missing:
                self._seen_once.add(("import", number))
            elif ("import", number) not in self._seen_once:
                yield f"LOST of import {number}: {missing} of {IMPORTED} messages"


def _sent_faults(facts: Facts, seen: Seen, counts: Counter[str]) -> Iterator[str]:
    for name, place in facts["sent"]:
        if place >= seen.log_begin and counts[name] != 1:
            yield f"LOST {name}, acknowledged at {place}; the log begins at {seen.log_begin}"
    for name, count, place in facts["sent many"]:
        if place >= seen.log_begin:
            missing = [row for row in range(count) if counts[f"{name}.{row}"] != 1]
            if missing:
                yield f"LOST {len(missing)} of the {count} messages of {name}: {missing[:5]} …"


def _offset_faults(facts: Facts, seen: Seen) -> Iterator[str]:
    furthest: dict[tuple[str, int], int] = {}
    for group, queue_id, offset in facts["offset"]:
        furthest[group, queue_id] = max(offset, furthest.get((group, queue_id), 0))
    for (group, queue_id), offset in furthest.items() if seen.offsets else ():
        found = seen.offsets[group].get(queue_id, -1)
        if found < offset:
            yield f"LOST OFFSET of {group} in orders/{queue_id}: acknowledged {offset}, found {found}"
        if found > seen.ends.get(queue_id, 0):
            yield f"OFFSET of {group} in orders/{queue_id} is {found}, beyond the queue's end {seen.ends.get(queue_id)}"
