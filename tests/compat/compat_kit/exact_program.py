"""A program that writes to a live cluster exactly once, and stops or dies on demand.

    python exact_program.py FUNCTION NAME_SERVERS TARGET

Its standard input begins with a pickle of the function's arguments by name. It prints events as lines of JSON, each
with the time `at` in s, which is the same for all processes of a machine. It writes the function's result to TARGET as
a pickle. Batches of one query have the same rows whenever they are written, so that a batch can be repeated.
"""

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import rmq_spark
from rmq_spark.store.backend import COLUMNS, CommitTerms, DecodeLimits, SinkTerms
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.exactly_once import taking_over
from rmq_spark.store.cluster.exactly_once.barrier import Barriers
from rmq_spark.store.cluster.exactly_once.read_back import ReadBack
from rmq_spark.store.cluster.exactly_once.sink import ExactSink
from rmq_spark.store.cluster.exactly_once.taking_over import TakeOver
from rmq_spark.store.cluster.exactly_once.target_bounds import ask_bounds
from rmq_spark.store.cluster.requests import Request, TopicStatsRequest
from rmq_spark.store.cluster.ticket import Ticket
from rmq_spark.store.errors import IntentStuckError, RmqError
from rmq_spark.store.model import CommitKey, QueueBounds, QueueRange
from rmq_spark.store.places import locate, locate_cluster

QUERY = "faults-of-brokers"
QUEUES = 4  # of a topic on each broker
TEXT_CHARS = 11  # of the beginning of a body: the batch, and the number of the row in it
_ROWS_A_WRITE = 2_000
_POLL_S = 0.002


def emit(event: str, **fields: object) -> None:
    """Print an event."""
    print(json.dumps({"event": event, "at": time.monotonic(), **fields}), flush=True)


# What happens at a request.


class Moment:
    """What happens at the request number `number`, counted from 1, of the class `request`. Other processes are stopped.

    With `is_before` it happens before the request is sent, else right after. `freezes` are the processes to stop, after
    `delay_s`. Then this process `dies`, or with `waits` it waits for a line on its standard input.
    """

    def __init__(
        self,
        request: str,
        number: int,
        *,
        is_before: bool = False,
        freezes: Sequence[int] = (),
        delay_s: float = 0.0,
        dies: bool = False,
        waits: bool = False,
    ) -> None:
        self._request, self._left, self._is_before = request, number, is_before
        self._freezes, self._delay_s, self._dies, self._waits = freezes, delay_s, dies, waits

    def submit_all(self, requests: Sequence[Request[Any]], submit: Callable[[Request[Any]], Any]) -> list[Ticket[Any]]:
        """Send requests one by one."""
        tickets: list[Ticket[Any]] = []
        for request in requests:
            self._left -= type(request).__name__ == self._request
            is_now = not self._left and type(request).__name__ == self._request
            if is_now and self._is_before:
                self._act()
            tickets += submit(request)
            if is_now and not self._is_before:
                self._act()
        return tickets

    def _act(self) -> None:
        time.sleep(self._delay_s)
        for pid in self._freezes:
            os.kill(pid, signal.SIGSTOP)
        emit("moment", request=self._request)
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._waits:
            sys.stdin.buffer.readline()


def arm(moment: Moment) -> None:
    """Let a moment come in this process."""
    real = ClusterClient.submit_all

    def submit_all(
        client: ClusterClient,
        to: str,
        requests: Sequence[Request[Any]],
        timeout_ms: int | None = None,
        done: list[Ticket[Any]] | None = None,
    ) -> list[Ticket[Any]]:
        return moment.submit_all(requests, lambda request: real(client, to, [request], timeout_ms, done))

    ClusterClient.submit_all = submit_all  # type: ignore[method-assign]


# What a session sees that takes a batch over.


def observe() -> None:
    """Emit an event at each step of a take-over, with the number of messages in the target topic."""
    fence, send, read = TakeOver._await_ends, Barriers.send, ReadBack.read
    count: list[Callable[[], int]] = []
    taking_over._LOOK_MS = 5.0

    def observed_fence(self: TakeOver, view: Any, intent: Any, *given: Any) -> Any:
        topics = sorted({(queue.topic, queue.broker) for queue, _ in intent.floors})
        count[:] = [lambda: sum(one.max_offset for one in ask_bounds(self._calls, self._place, topics).values())]
        emit("taken")
        found = fence(self, view, intent, *given)
        emit("not listed", rows=count[0]())
        return found

    def observed_send(self: Barriers, *given: Any) -> None:
        send(self, *given)
        emit("barrier", rows=count[0]())

    def observed_read(self: ReadBack, *given: Any) -> Any:
        emit("settled", rows=count[0]())
        found = read(self, *given)
        emit("read back", written=sum(found.rows.values()))
        return found

    TakeOver._await_ends = observed_fence  # type: ignore[method-assign]
    Barriers.send = observed_send  # type: ignore[method-assign]
    ReadBack.read = observed_read  # type: ignore[method-assign]


# Functions that the tests call.


def write_batch(
    address: str,
    topic: str,
    batch: int,
    rows: int,
    *,
    body_bytes: int = 100,
    property_chars: int = 0,
    broker: str | None = None,
    tasks: int = 2,
    settle_ms: int = 1_000,
    timeout_ms: int = 3_000,
    moment: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a batch of the query of `topic`, as the tasks and the commit of Spark do. Return what `_outcome` returns.

    With `broker` all rows go to this one. `property_chars` is the length of a property of each row.
    """
    given = {"request_timeout_ms": timeout_ms, "broker_down_timeout_ms": 240_000}
    terms = CommitTerms(settle_ms=settle_ms)
    sink = ExactSink(locate_cluster(address, given), SinkTerms(topic, creates_topics=False), terms)
    key = CommitKey(f"{QUERY}-{topic}", batch)
    token = sink.prepare()
    receipts = []
    for number in range(tasks):
        task = sink.open_task(token, key, f"task-{number}", number)
        for begin in range(rows * number // tasks, rows * (number + 1) // tasks, _ROWS_A_WRITE):
            end = min(begin + _ROWS_A_WRITE, rows * (number + 1) // tasks)
            task.write(_make_rows(topic, batch, range(begin, end), body_bytes, property_chars, broker))
        receipts.append(task.finish())
    emit("staged", rows=sum(receipt.rows for receipt in receipts))
    if moment is not None:
        arm(Moment(**moment))
    observe()
    return _outcome(lambda: sink.commit(key, receipts, lambda: emit("promised")))


def finish(
    address: str, topic: str, settle_ms: int = 1_000, timeout_ms: int = 3_000, moment: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Finish the open batch of the query of `topic`, as its next commit would. Return what `_outcome` returns."""
    if moment is not None:
        arm(Moment(**moment))
    observe()
    given = {"request_timeout_ms": timeout_ms, "settle_time_ms": settle_ms, "broker_down_timeout_ms": 240_000}
    return _outcome(lambda: rmq_spark.finish_intent(address, f"{QUERY}-{topic}", **given))


def _outcome(run: Callable[[], object]) -> dict[str, Any]:
    """Return what a call came to: the error, "" without one, its text, and the rows that it names."""
    try:
        done = run()
    except RmqError as error:
        emit("failed", error=str(error))
        counts = (error.written, error.missing, error.queue) if isinstance(error, IntentStuckError) else (None,) * 3
        names = dict(zip(("written", "missing", "queue"), counts, strict=True))
        return {"error": type(error).__name__, "text": str(error), "skipped": False, **names}
    emit("committed")
    return {"error": "", "text": "", "skipped": getattr(done, "skipped", False)}


def _make_rows(
    topic: str, batch: int, numbers: range, body_bytes: int, property_chars: int, broker: str | None
) -> pa.RecordBatch:
    bodies = [f"{batch:03}-{number:07}".encode().ljust(body_bytes, b".") for number in numbers]
    columns: dict[str, list[Any]] = {"topic": [topic] * len(bodies), "body": bodies}
    if property_chars:
        columns["properties"] = [[("filling", "x" * property_chars)]] * len(bodies)
    if broker is not None:
        columns |= {"brokerName": [broker] * len(bodies), "queueId": [number % QUEUES for number in numbers]}
    return pa.record_batch({name: pa.array(values, COLUMNS[name]) for name, values in columns.items()})


def read_texts(address: str, topic: str) -> dict[tuple[str, int], list[tuple[int, str]]]:
    """Return queue offset and beginning of the body of each message, by broker and queue id."""
    location = locate({"nameServer": address})
    assert location is not None
    backend = location.open()
    found: dict[tuple[str, int], list[tuple[int, str]]] = {}
    try:
        backend.refresh()
        queues = [queue for some in backend.queues([topic]).values() for queue in some]
        for queue, bounds in backend.bounds(queues).items():
            assert isinstance(bounds, QueueBounds), (queue, bounds)
            rows = found.setdefault((queue.broker, queue.queue_id), [])
            part = QueueRange(queue, bounds.min_offset, bounds.max_offset)
            for some in backend.read(part, ["queueOffset", "body"], DecodeLimits(check_crc=True), None):
                for row in some.batch.to_pylist():
                    rows.append((row["queueOffset"], row["body"][:TEXT_CHARS].decode()))
    finally:
        backend.close()
    return found


def watch(address: str, topic: str, brokers: dict[str, str]) -> None:
    """Emit the number of visible messages of a topic whenever it has changed, until somebody kills this process.

    `brokers` has the addresses of brokers by name. One that does not answer counts with what it showed before.
    """
    client = ClusterClient(locate_cluster(address, {"request_timeout_ms": 200}))
    shown = dict.fromkeys(brokers, 0)
    last = -1
    while True:
        requests = [(to, TopicStatsRequest(topic, name)) for name, to in brokers.items()]
        for name, answer in zip(brokers, client.call_all(requests), strict=True):
            if not isinstance(answer, RmqError):
                shown[name] = sum(one.max_offset for one in answer.queues.values())
        if (rows := sum(shown.values())) != last:
            emit("visible", rows=rows)
            last = rows
        time.sleep(_POLL_S)


if __name__ == "__main__":
    function, name_servers, target = sys.argv[1:]
    answer = globals()[function](name_servers, **pickle.load(sys.stdin.buffer))
    Path(target).write_bytes(pickle.dumps(answer))
