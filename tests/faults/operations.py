"""Every public operation that writes, as it is tried with faults: on which store, what it does, what must be true then.

`act` does the operation; the same function does it again after the fault. `judge` yields what is wrong in the store in
the end, beyond what `oracle.py` asks of every operation.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import base_stores
import pyarrow as pa
from base_stores import SINK_BODIES, SINK_FILES, SINK_ROWS, opened, sink_settings, stage

from rmq_spark.store import (
    CommitKey,
    CommitOptions,
    DeliveryScheduler,
    GroupSession,
    GroupTerms,
    Producer,
    SendBackSettings,
    SendBackTask,
    SendBackTerms,
    StoreReader,
    abort_sink,
    close,
    commit_copies,
    commit_sink,
    create_store,
    group_offsets,
    import_parquet,
    open_consumer,
    plan_repair,
    repair,
    republish_dead_letters,
    reset_offsets,
    serve_store,
)
from rmq_spark.store.delivery import serve as serving
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.errors import StoreError
from rmq_spark.store.model import QueueKey

Rows = Counter[tuple[str, str]]  # how often a store has a message, by topic and body
SENT_AT_ONCE = 250
SENT_BACK = 10
PULLED = 10
SENDS_BACK = pa.int32()
SERVED_SLEEPS = 5  # of a server: after a tick that failed some are left in which all is delivered


class MoreIsDueError(StoreError):
    """A tick delivered only a part of what is due, as it may: call it again."""


@dataclass
class Session:
    """State of one process between the operation and its repetition."""

    store: str
    folder: str  # for files beside the store
    messages: Producer | None = None
    ticker: DeliveryScheduler | None = None
    group: GroupSession | None = None
    other: GroupSession | None = None  # a second member of the group
    reader: Any = None  # of a streaming query
    planned: Any = None  # the end of the batch that it planned
    offsets: dict[QueueKey, int] = field(default_factory=dict)  # of the group's queues
    published: dict[QueueKey, int] = field(default_factory=dict)  # the last that were acknowledged

    def writer(self, **options: Any) -> Producer:
        """Return the open store; open it first if it is not."""
        if self.messages is None:
            self.messages = opened(self.store, **options)
        return self.messages


@dataclass
class Outcome:
    """How the two calls ended ("ok", an error's class, or "killed"), and the store's rows in the end."""

    store: str
    rows: Rows
    first: str
    second: str
    published: dict[QueueKey, int]  # of the group

    def acknowledged(self) -> list[int]:
        """Return which of the two calls returned: 1, 2."""
        return [number for number, how in ((1, self.first), (2, self.second)) if how == "ok"]

    def count(self, topic: str) -> int:
        """Return how many messages a topic has."""
        return sum(count for (name, _), count in self.rows.items() if name == topic)


def _nothing_more(outcome: Outcome) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class Operation:
    """One operation.

    `prepare` comes before calls fail. `reads`: its answer is compared with the answer without a fault. Where the answer
    is a file, `view` reads it, after calls no longer fail.
    """

    name: str
    base: Callable[[str], None]
    act: Callable[[Session, int], object]
    judge: Callable[[Outcome], Iterator[str]] = _nothing_more
    writer_options: dict[str, Any] | None = None  # not None: the store is opened before calls fail
    done_again_after_death: bool = False  # the judge expects the whole of it in the end
    deletes: bool = False  # messages may be gone in the end
    is_durable: bool = True  # when it returns, a power cut takes nothing of it
    reads: bool = False
    view: Callable[[Session], object] | None = None
    prepare: Callable[[Session], None] | None = None


class _ErrorsLogged(logging.Handler):
    """Keeps the errors that are logged, whatever the level of the logger."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what of the record is an error."""
        found = record.args if isinstance(record.args, tuple) else ()
        self.errors += [part for part in found if isinstance(part, BaseException)]


@contextlib.contextmanager
def raising_logged_errors() -> Iterator[None]:
    """Raise, at the end of the block, the first error that was only logged within it."""
    handler, logger = _ErrorsLogged(), logging.getLogger("rmq_spark")
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        logger.setLevel(level)
    for error in handler.errors:
        raise error


def _send(session: Session, number: int) -> None:
    session.writer().send("orders", f"sent{number}", keys="k")


def _send_to_a_new_topic(session: Session, number: int) -> None:
    session.writer().send(f"topic{number}", f"sent{number}")


def _sent(topic: str) -> Callable[[Outcome], Iterator[str]]:
    def judge(outcome: Outcome) -> Iterator[str]:
        for number in outcome.acknowledged():
            count = outcome.rows[topic.format(number), f"sent{number}"]
            if count != 1:
                yield f"LOST message {number}: acknowledged, stored {count} times"

    return judge


def _send_many(session: Session, number: int) -> None:
    bodies = [f"sent{number}.{row} {'w' * 300}".encode() for row in range(SENT_AT_ONCE)]
    session.writer().send_many(pa.table({"body": bodies}), topic="orders")


def _sent_whole(outcome: Outcome) -> Iterator[str]:
    for number in (1, 2):
        stored = sum(outcome.rows["orders", f"sent{number}.{row}"] for row in range(SENT_AT_ONCE))
        if stored not in (0, SENT_AT_ONCE) or (number in outcome.acknowledged() and not stored):
            yield f"PART of send_many {number}: {stored} of {SENT_AT_ONCE}"


def _send_delayed(session: Session, number: int) -> None:
    session.writer().send("late", f"sent{number}", deliver_at_ms=wall_clock_ms() + base_stores.HOUR_MS)


def _sent_delayed(outcome: Outcome) -> Iterator[str]:
    for number in outcome.acknowledged():
        if outcome.rows["rmq_sys_wheel_timer", f"sent{number}"] != 1:
            yield f"LOST delayed message {number}: acknowledged, and it does not wait in the timer's topic"


def _close(session: Session, number: int) -> None:
    close(session.store)


def _sink(flush: str) -> Callable[[Session, int], None]:
    def act(session: Session, number: int) -> None:
        settings, key = sink_settings(session.store, flush), CommitKey("q", 0)
        staged: list[Any] = []
        try:
            staged = stage(settings, key)
            commit_sink(settings, key, staged)
        except BaseException:
            abort_sink(settings, key, staged)
            raise

    return act


def _sunk(outcome: Outcome) -> Iterator[str]:
    stored = sum(outcome.rows[body] for body in SINK_BODIES)
    if stored != SINK_FILES * SINK_ROWS and (stored or outcome.acknowledged()):
        yield f"PART of a batch: {stored} of {SINK_FILES * SINK_ROWS}"


def _recovered(outcome: Outcome) -> Iterator[str]:
    stored = sum(outcome.rows[body] for body in SINK_BODIES)
    if stored != SINK_FILES * SINK_ROWS:
        yield f"PART of a batch that was promised: {stored} of {SINK_FILES * SINK_ROWS}"


def _recovered_and_sent(outcome: Outcome) -> Iterator[str]:
    yield from _recovered(outcome)
    yield from _sent("orders")(outcome)


def _tick(session: Session, number: int) -> None:
    session.ticker = session.ticker or DeliveryScheduler(session.store)
    ticked = session.ticker.tick(wall_clock_ms())
    if ticked.problem:
        raise ticked.problem
    if ticked.next_due_ms is not None and ticked.next_due_ms < wall_clock_ms():
        session.ticker = None
        raise MoreIsDueError("tick: messages are still due; expected none. Call it again.")


def _ticked(outcome: Outcome) -> Iterator[str]:
    levels = {f"level{number}" for number in range(base_stores.LEVEL_MESSAGES)}
    timers = {f"timer{number}" for number in range(base_stores.TIMER_MESSAGES)}
    for body in sorted({"first"} | levels | timers):
        if outcome.rows["late", body] != 1:
            yield f"TICK: {body} was delivered {outcome.rows['late', body]} times"


def _serve(session: Session, number: int) -> None:
    """Serve for some ticks. Later ticks must deliver the messages that one tick could not deliver."""
    slept = 0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += 1

    clock = SimpleNamespace(sleep=sleep)
    with (
        mock.patch.object(serving, "time", clock),
        mock.patch.object(serving, "RETRY_MS", serving.LOOK_MS),
        raising_logged_errors(),
    ):
        serve_store(session.store, lambda: slept >= SERVED_SLEEPS)
        with DeliveryScheduler(session.store) as ticker:
            left = ticker.tick(wall_clock_ms())
            assert not left.delivered, f"the server left {left.delivered} messages that were due"


def _expire(session: Session, number: int) -> None:
    session.writer().expire(max_bytes=1)


def _expire_some(session: Session, number: int) -> None:
    session.writer().expire(max_bytes=1 << 17)


def _still_waiting(outcome: Outcome) -> Iterator[str]:
    waiting = sum(outcome.count(topic) for topic in base_stores.WAITING_TOPICS)
    if waiting != 10:
        yield f"DELETED: {waiting} of 10 messages still wait for their time"


def _set_retention(session: Session, number: int) -> None:
    session.writer().set_retention(max_bytes=1 << 30)


def _create_topic(session: Session, number: int) -> None:
    session.writer().create_topic(f"new{number}", 3)


def _created_topics(outcome: Outcome) -> Iterator[str]:
    with StoreReader(outcome.store) as reader:
        reader.refresh()
        for number in outcome.acknowledged():
            if f"new{number}" not in reader.topics():
                yield f"LOST topic {number}"


def _create_store(session: Session, number: int) -> None:
    create_store(session.store, topics=["orders"], segment_bytes=base_stores.SEGMENT_BYTES)


def _repair(session: Session, number: int) -> None:
    repair(plan_repair(session.store))


def _send_back(session: Session, number: int) -> None:
    terms = SendBackTerms("crew", 3, "error")
    settings = SendBackSettings(session.store, terms, commit=CommitOptions(chunk_bytes=1 << 14))
    key, queue = CommitKey("bq", 0), QueueKey("orders", 0)
    names = ["commitLogOffset", "physicalTopic", "queueId", "queueOffset", "reconsumeTimes"]
    with StoreReader(session.store) as reader:
        reader.refresh()
        begin = reader.bounds(queue).min_offset
        rows = pa.Table.from_batches(list(reader.read(queue, begin, begin + SENT_BACK, names))).combine_chunks()
    rows = rows.append_column("delayLevel", pa.array([-1] * len(rows), SENDS_BACK))
    task = SendBackTask(settings, key, f"r{wall_clock_ms()}-{number}")
    task.write(rows.to_batches()[0])
    commit_copies(settings, key, [task.finish()])


def _has(topic: str, count: int) -> Callable[[Outcome], Iterator[str]]:
    def judge(outcome: Outcome) -> Iterator[str]:
        if outcome.count(topic) != count:
            yield f"WRONG COUNT: {topic} has {outcome.count(topic)} messages, expected {count}"

    return judge


def _republish(session: Session, number: int) -> None:
    republish_dead_letters(session.store, "crew", topic="again")


def _import(session: Session, number: int) -> None:
    import_parquet(session.store, f"{session.folder}/import.parquet")


def _group_step(session: Session, number: int) -> None:
    session.group = session.group or GroupSession(session.store, GroupTerms("crew", "shared"))
    queues = [QueueKey("orders", queue_id) for queue_id in range(base_stores.QUEUES)]
    step = session.group.rebalance(queues, session.offsets, 0)
    session.offsets |= {queue: step.held.get(queue, 0) for queue in step.gained}
    session.group.settle()
    session.offsets = {queue: session.offsets[queue] + 1 for queue in step.owned}
    session.group.publish(session.offsets)
    session.published = dict(session.offsets)


def _group_leave(session: Session, number: int) -> None:
    _group_step(session, number)
    assert session.group
    session.group.leave(session.offsets)
    session.group = None


def published(outcome: Outcome) -> Iterator[str]:
    held = group_offsets(outcome.store, "crew").get("orders", {})
    for queue, offset in outcome.published.items():
        if held.get(queue.queue_id, -1) < offset:
            yield f"LOST OFFSET of {queue}: acknowledged {offset}, found {held}"


def _reset(session: Session, number: int) -> None:
    reset_offsets(session.store, "crew", "latest", topics="orders")


def _pull(session: Session, number: int) -> None:
    with open_consumer(session.store, "bill") as consumer:
        queue = consumer.queues("orders")[0]
        found = consumer.pull(queue, 0, PULLED)
        assert found.messages.num_rows == PULLED, f"pull: {found}"
        consumer.update_consume_offset(queue, found.next_begin_offset)
        consumer.commit()


def _pulled(outcome: Outcome) -> Iterator[str]:
    held = group_offsets(outcome.store, "bill").get("orders", {})
    if outcome.acknowledged() and held.get(0) != PULLED:
        yield f"LOST OFFSET: committed {PULLED}, found {held}"


_ASYNC: dict[str, Any] = {}
_SYNC = {"flush": "sync"}

WRITING = (
    Operation("send", base_stores.settled, _send, _sent("orders"), _ASYNC, is_durable=False),
    Operation("send-sync", base_stores.in_use, _send, _sent("orders"), _SYNC),
    Operation("send-new-topic", base_stores.settled, _send_to_a_new_topic, _sent("topic{}"), _SYNC),
    Operation("send-many", base_stores.settled, _send_many, _sent_whole, _ASYNC, is_durable=False),
    Operation("send-delayed", base_stores.settled, _send_delayed, _sent_delayed, _ASYNC, is_durable=False),
    Operation("close", base_stores.in_use, _close),
    Operation("sink", base_stores.settled, _sink("sync"), _sunk, done_again_after_death=True),
    Operation("sink-async", base_stores.settled, _sink("async"), _sunk, done_again_after_death=True, is_durable=False),
    Operation("tick", base_stores.due, _tick, _ticked, done_again_after_death=True),
    Operation("serve", base_stores.due, _serve, _ticked, done_again_after_death=True),
    Operation("expire", base_stores.settled, _expire, writer_options=_ASYNC, deletes=True),
    Operation("expire-beside-levels", base_stores.waiting_by_level, _expire_some, _still_waiting, _ASYNC, deletes=True),
    Operation("expire-beside-timer", base_stores.waiting_by_timer, _expire_some, _still_waiting, _ASYNC, deletes=True),
    Operation(
        "expire-beside-wheel", base_stores.waiting_in_the_wheel, _expire_some, _still_waiting, _ASYNC, deletes=True
    ),
    Operation("set-retention", base_stores.settled, _set_retention, writer_options=_ASYNC),
    Operation("create-topic", base_stores.settled, _create_topic, _created_topics, _ASYNC),
    Operation("create-store", base_stores.nothing, _create_store, done_again_after_death=True),
    Operation("repair", base_stores.without_a_queue, _repair, done_again_after_death=True),
    Operation("send-back", base_stores.settled, _send_back, _has("%DLQ%crew", SENT_BACK), done_again_after_death=True),
    Operation("group", base_stores.settled, _group_step, published),
    Operation("group-leave", base_stores.settled, _group_leave, published),
    Operation("reset-offsets", base_stores.with_a_group, _reset),
    Operation("pull", base_stores.settled, _pull, _pulled),
    Operation(
        "import",
        base_stores.settled,
        _import,
        _has("imported", base_stores.IMPORT_MESSAGES),
        done_again_after_death=True,
    ),
    Operation(
        "republish",
        base_stores.with_dead_letters,
        _republish,
        _has("again", base_stores.DEAD_LETTERS),
        done_again_after_death=True,
    ),
    Operation("recover", base_stores.cut_commit, _close, _recovered),
    Operation("recover-and-send", base_stores.cut_commit, _send, _recovered_and_sent, is_durable=False),
)
