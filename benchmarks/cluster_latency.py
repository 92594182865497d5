"""From a `send` of the Java client to the answer of our long poll, beside a Java push consumer.

Messages are sent singly, alternately to a topic at which our backend waits and to one that the push consumer listens
to, both all the time. So both meet the same broker and the same machine. The time of a message begins just before
`send`. For our backend it ends when the new bounds are known, which is what the source answers to Spark, and when the
rows have arrived; for the push consumer when its listener is called. All processes use the same clock.

And processor time while no message arrives: of our backend and of the push consumer, in seconds a minute.
"""

import random
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

from compat_kit.rocketmq import Java
from decoding import DEFAULT_COLUMNS
from figures import Figure
from grouping import quantile
from real_broker import WAKE_TOPICS, JavaClient, RealBroker, new_folder, write_store

from rmq_spark.store.backend import Backend, DecodeLimits
from rmq_spark.store.model import QueueBounds, QueueKey, QueueRange
from rmq_spark.store.places import locate

_OURS, _THEIRS = WAKE_TOPICS
_WAIT_MS = 200.0  # the longest wait of a stream without a look at other things
_LIMIT_SECONDS = 60
_PAUSES_SECONDS = (0.02, 0.06)
_WARM_UP = 200  # messages: Java compiles while it runs
_IDLE_SECONDS = 20.0
_REQUIRED = 1.5


def measure_cluster_latency(java: Java, folder: Path, sends: int) -> Iterable[Figure]:
    """Yield p50 and p99 over the push consumer's, and the processor time of an idle query."""
    store = new_folder(folder / "latency") / "store"
    write_store(store, 0, ())
    with ExitStack() as stack:
        broker = stack.enter_context(RealBroker(java, store))
        sender, listener = (stack.enter_context(broker.client()) for _ in range(2))
        location = locate({"nameServer": broker.address})
        assert location is not None
        waiter = _Waiter(stack.enter_context(closing(location.open())))
        listener.ask("listen", _THEIRS)
        yield from _latencies(sender, listener, waiter, sends)
        yield from _idle(broker, listener, waiter)


class _Waiter:
    """A backend that waits for messages of one topic, as a stream does on the driver."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        backend.refresh()
        (self._queue,) = backend.queues([_OURS])[_OURS]
        self._end = self._look()

    def wait(self, timeout_s: float) -> tuple[int, int, list[bytes]]:
        """Wait for messages. Return when they were known, when their rows had arrived (µs), and their bodies."""
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            if not self._backend.wait_for_messages({self._queue: self._end}, _WAIT_MS):
                continue
            begin, self._end = self._end, self._look()
            if begin < self._end:
                known_us = _now_us()
                part = QueueRange(self._queue, begin, self._end)
                batches = [found.batch for found in self._backend.read(part, DEFAULT_COLUMNS, DecodeLimits(), None)]
                bodies = [body for batch in batches for body in batch.column("body").to_pylist()]
                return known_us, _now_us(), bodies
        return 0, 0, []

    def _look(self) -> int:
        queue: QueueKey = self._queue
        answer = self._backend.bounds([queue])[queue]
        assert isinstance(answer, QueueBounds), answer
        return answer.max_offset


def _now_us() -> int:
    """Return microseconds since the epoch, by the clock that the Java programs use."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME) // 1000


def _latencies(sender: JavaClient, listener: JavaClient, waiter: _Waiter, sends: int) -> Iterable[Figure]:
    pauses = random.Random(1)
    found: dict[str, list[float]] = {"send": [], "known": [], "rows": [], "push": []}
    for number in range(_WARM_UP + sends):
        if number == _WARM_UP:
            for held in found.values():
                held.clear()
        time.sleep(pauses.uniform(*_PAUSES_SECONDS))
        sender.begin("send", _OURS, text=f"{number}")
        known_us, rows_us, bodies = waiter.wait(_LIMIT_SECONDS)
        sent = sender.next_line()
        if bodies != [f"{number}".encode()]:
            raise RuntimeError(f"the long poll found {bodies}; expected the message {number}")
        found["known"].append((known_us - sent["us"]) / 1e3)
        found["rows"].append((rows_us - sent["us"]) / 1e3)
        time.sleep(pauses.uniform(*_PAUSES_SECONDS))
        sent = sender.ask("send", _THEIRS, text=f"{number}")
        arrived = listener.next_line()
        if arrived["text"] != f"{number}":
            raise RuntimeError(f"the push consumer got {arrived['text']}; expected the message {number}")
        found["push"].append((arrived["us"] - sent["us"]) / 1e3)
        found["send"].append((sent["sentUs"] - sent["us"]) / 1e3)
    for name, until, required in (("known", "the source's answer", _REQUIRED), ("rows", "the rows", None)):
        for share in (0.50, 0.99):
            yield _latency_figure(until, share, found[name], found["push"], found["send"], required)


def _latency_figure(
    until: str,
    share: float,
    ours: Sequence[float],
    push: Sequence[float],
    send: Sequence[float],
    required: float | None,
) -> Figure:
    """Return a quantile over the push consumer's. The extremes are those of ten parts of the run."""
    size = max(len(ours) // 10, 1)
    parts = [
        quantile(share, ours[at : at + size]) / quantile(share, push[at : at + size])
        for at in range(0, len(ours) - size + 1, size)
    ]
    mine, theirs = quantile(share, ours), quantile(share, push)
    return Figure(
        f"from a Java send to {until}, p{share * 100:.0f}, over a push consumer",
        mine / theirs,
        min(parts),
        max(parts),
        required=required,
        at_most=True,
        note=f"{mine:.2f} ms, push {theirs:.2f} ms; {len(ours)} messages each; a send takes {median(send):.2f} ms",
        detail={"ms": mine, "push_ms": theirs},
    )


def _idle(broker: RealBroker, listener: JavaClient, waiter: _Waiter) -> Iterable[Figure]:
    begin = time.process_time(), listener.cpu_seconds(), broker.cpu_seconds()
    waiter.wait(_IDLE_SECONDS)
    end = time.process_time(), listener.cpu_seconds(), broker.cpu_seconds()
    ours, push, both = ((after - before) * 60 / _IDLE_SECONDS for before, after in zip(begin, end, strict=True))
    note = f"a minute; push consumer {push:.2f} s, the broker with both {both:.2f} s"
    yield Figure("processor time of an idle long poll, ms", ours * 1e3, ours * 1e3, ours * 1e3, unit="ms", note=note)
