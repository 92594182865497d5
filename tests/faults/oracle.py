"""Assertions after a case. The text of each fault begins with a word for its kind, in capital letters.

1. The error is one of ours (RAW) and names the path of the call that failed (UNNAMED).
2. The same operation afterwards succeeds, in the same process (SECOND). If it reads, it answers as without a fault
   (AGAIN).
3. An operation that reads answers as without a fault, or fails (SILENT). A check may report what it could not read,
   but no other fault (FALSE-ALARM); so may a summary, as the problem of a queue.
4. An operation that promises durability does not succeed when a sync failed (SWALLOWED), unless it writes the file
   again then.
5. A reader can read the store (UNREADABLE). After a close the store is closed and healthy (UNHEALTHY).
6. No earlier message is missing (GONE), none is duplicated (DOUBLE), and the operation's own judge finds its promise
   kept. No intent of a commit is left open (INTENTS).
"""

import errno
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import base_stores
from cases import CaseRunner, Plain, Tried
from fault_kinds import FaultKind
from operations import Operation, Outcome, Rows
from reading_operations import FINDINGS, read_rows
from shim import Effect, Hit

from rmq_spark.store import check, close

_SYSTEM_TOPICS = (*base_stores.WAITING_TOPICS, "%DLQ%")  # a topic of messages that wait; dead letters may be doubled
# If a sync of these fails, `Disk.make_durable` replaces the file by a new one, so the operation may succeed.
_WRITTEN_AGAIN = ("topics.json", "consumerOffset.json")
_TEXT_CHARS = 600


def ending_faults(operation: Operation, kind: FaultKind, plain: Plain, tried: Tried) -> Iterator[str]:
    """Yield what is wrong with how the two calls ended."""
    first, second = tried.first, tried.second
    if first.how in ("RAW", "hung"):
        yield f"{first.how.upper()} {first.text}"
    elif first.how not in ("ok", "killed") and not names(first.text, tried.hit):
        yield f"UNNAMED {tried.hit.path}: {first.how}: {first.text}"
    if first.how != "killed" and second.how not in ("ok", "not tried"):
        yield f"SECOND {second.how}: {second.text}"
    if first.how == "ok" and operation.reads:
        yield from answer_faults(plain.answer, tried.answer, tried.hit)
    if second.how == "ok" and operation.reads and tried.second_answer != plain.answer:
        yield f"AGAIN {difference(plain.answer, tried.second_answer)}"
    is_sync = kind.effect == Effect.FAIL and tried.hit.call in ("fsync", "fdatasync")
    is_repeated = os.path.basename(tried.hit.path) in _WRITTEN_AGAIN
    # A writer continues if it cannot prepare the rest of another application's batch, and logs that: the disk is full,
    # or the topics of the batch cannot be made durable.
    is_unprepared = kind.error == errno.ENOSPC or os.path.basename(tried.hit.path) == "config"
    is_left = operation.name == "recover" and is_unprepared
    if first.how == "ok" and is_sync and operation.is_durable and not is_repeated and not is_left:
        yield f"SWALLOWED {tried.hit}: the operation returned"


def names(text: str, hit: Hit) -> bool:
    """Say whether an error names the file of the call that failed; a file without a name goes by its folder."""
    folder, name = os.path.split(hit.path.removesuffix(" (deleted)"))
    return (folder if name.startswith("#") else hit.path) in text


def answer_faults(plain: Any, answer: Any, hit: Hit) -> Iterator[str]:
    """Yield what is wrong with an answer that came although a call failed."""
    if isinstance(answer, dict) and FINDINGS in answer:
        foreign = [one for one in answer[FINDINGS] if one not in plain[FINDINGS] and not names(one, hit)]
        if foreign:
            yield f"FALSE-ALARM {foreign[0]}"
        if answer[FINDINGS] != plain[FINDINGS]:
            return
    if answer != plain:
        yield f"SILENT {difference(plain, answer)}"


def difference(plain: Any, answer: Any) -> str:
    """Describe how two answers differ."""
    if isinstance(plain, Counter) and isinstance(answer, Counter):
        return f"{plain.total()} rows without a fault, {answer.total()} with one"
    return f"{str(plain)[:200]} without a fault, {str(answer)[:200]} with one"


def row_faults(operation: Operation, before: Rows, outcome: Outcome) -> Iterator[str]:
    """Yield what is wrong with the messages of the store in the end."""
    for (topic, body), count in before.items():
        stored = outcome.rows[topic, body]
        if stored != count and not operation.deletes and topic not in base_stores.WAITING_TOPICS:
            yield f"GONE {topic} {body}: {count} before, {stored} now"
            break
    for (topic, body), count in outcome.rows.items():
        if count > max(1, before[topic, body]) and not topic.startswith(_SYSTEM_TOPICS):
            yield f"DOUBLE {topic} {body}: {count} times"
            break
    yield from operation.judge(outcome)


def store_faults(runner: CaseRunner, operation: Operation, plain: Plain, tried: Tried) -> list[str]:
    """Look at the store that a case left: read it, close it, check it. Changes it, so in a process of its own."""
    store, faults = str(runner.store), []
    if operation.base not in (base_stores.without_a_queue, base_stores.nothing):
        try:
            read_rows(store)
        except Exception as error:
            faults.append(f"UNREADABLE {error!r}"[:_TEXT_CHARS])
    if tried.first.how == "killed" and operation.done_again_after_death:
        runner.again(operation)
    close(store)
    report = check(store)
    faults += [f"UNHEALTHY {one}"[:_TEXT_CHARS] for one in report.findings if one.severity != "note"]
    if report.state != "closed":
        faults.append(f"UNHEALTHY the state is {report.state} after a close")
    outcome = Outcome(store, read_rows(store), tried.first.how, tried.second.how, tried.published)
    faults += row_faults(operation, plain.rows, outcome)
    intents = f"{store}/rmq/intents"
    if os.path.isdir(intents) and os.listdir(intents):
        faults.append(f"INTENTS {os.listdir(intents)}")
    return faults


def judge(runner: CaseRunner, operation: Operation, kind: FaultKind, plain: Plain, tried: Tried) -> list[str]:
    """Return everything that is wrong after a case."""
    faults = list(ending_faults(operation, kind, plain, tried))
    ended = runner.forked(lambda: store_faults(runner, operation, plain, tried))
    if ended.how != "returned":
        return [*faults, f"AUDIT {ended.fault[-2 * _TEXT_CHARS :]}"]
    return faults + ended.value
