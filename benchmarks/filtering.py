"""A filter that keeps one message in a hundred, over no filter: time of the engine and of Spark, and bytes of the log.

All messages of the queue count, whether they match or not: the rate is the speed of reading through a backlog. The tags
are scattered, so that matching messages are far apart.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
from decoding import DEFAULT_COLUMNS
from figures import Figure, ratio_figure, take_turns
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from sample_stores import BODY_BYTES, TOPIC, SampleStores

from rmq_spark.store import StoreReader, open_reader, open_store
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.mapped_window import MappedWindow

KEPT = 100  # one message in KEPT has the tag of the filter
_AT_ONCE = 200_000
FILTERS = {
    "tags": ({"tags": "rare"}, 5.0),
    "sql92 over a property": ({"sql92": "amount = 7"}, None),
}


def build_filtered_store(stores: SampleStores, messages: int) -> str:
    """Return a store of the topic with tags `rare` (one in KEPT) and TagA to TagG, and amounts of which one is 7."""
    path = str(stores.scratch("filter") / "store")
    random = np.random.default_rng(1)
    bodies = pa.array([random.bytes(BODY_BYTES) for _ in range(1000)], pa.binary())
    tags = pa.array(["rare", *(f"Tag{letter}" for letter in "ABCDEFG")])
    with open_store(path, queues=4) as store:
        for begin in range(0, messages, _AT_ONCE):
            count = min(_AT_ONCE, messages - begin)
            is_rare = random.integers(0, KEPT, count) == 0
            amounts = np.where(is_rare, 7, random.integers(10, 99, count)).astype(str)
            properties = pa.MapArray.from_arrays(
                pa.array(np.arange(count + 1, dtype=np.int32)), pa.repeat(pa.scalar("amount"), count), pa.array(amounts)
            )
            table = {
                "body": bodies.take(pa.array(np.arange(count) % len(bodies))),
                "tags": tags.take(pa.array(np.where(is_rare, 0, random.integers(1, 8, count)))),
                "keys": pa.array(np.arange(begin, begin + count).astype(str)),
                "properties": properties,
            }
            store.send_many(pa.table(table), topic=TOPIC)
    return path


def measure_filtering(stores: SampleStores, spark: SparkSession, messages: int, repeats: int) -> Iterable[Figure]:
    """Yield bytes touched, then the engine's figures, then Spark's."""
    messages //= 2
    path = build_filtered_store(stores, messages)
    yield from _measure_bytes(path, messages)
    with open_reader(path) as reader:
        for name, (given, required) in FILTERS.items():
            whole, part = _timed_read(reader), _timed_read(reader, **given)
            yield _compare(f"read of 1 % by {name}, over no filter", whole, part, messages, repeats, required)
    for name, (given, _) in FILTERS.items():
        whole, part = _timed_scan(spark, path), _timed_scan(spark, path, **given)
        yield _compare(f"Spark scan of 1 % by {name}, over no filter", whole, part, messages, repeats, None)


def _compare(
    name: str,
    whole: Callable[[], float],
    part: Callable[[], float],
    messages: int,
    repeats: int,
    required: float | None,
) -> Figure:
    for warm_up in (whole, part):
        warm_up()
    whole_s, part_s = take_turns(repeats, whole, part)
    rates = [messages / median(seconds) / 1e6 for seconds in (part_s, whole_s)]
    note = f"{rates[0]:.1f} over {rates[1]:.1f} million messages a second"
    detail = {"seconds": median(part_s), "whole_seconds": median(whole_s)}
    return ratio_figure(name, whole_s, part_s, required=required, note=note, detail=detail)


def _timed_read(reader: StoreReader, **given: str) -> Callable[[], float]:
    def seconds() -> float:
        begin = time.process_time()
        _read(reader, **given)
        return time.process_time() - begin

    return seconds


def _read(reader: StoreReader, **given: str) -> int:
    rows = 0
    for queue in reader.queues(TOPIC):
        held = reader.bounds(queue)
        for batch in reader.read(queue, held.min_offset, held.max_offset, DEFAULT_COLUMNS, **given):
            rows += batch.num_rows
    return rows


def _timed_scan(spark: SparkSession, path: str, **given: str) -> Callable[[], float]:
    frame = spark.read.format("rmq").options(path=path, subscribe=TOPIC, **given).load()

    def seconds() -> float:
        begin = time.perf_counter()
        frame.agg(F.count("*"), F.sum(F.length("body"))).collect()
        return time.perf_counter() - begin

    return seconds


def _measure_bytes(path: str, messages: int) -> Iterable[Figure]:
    """Yield the share of the log that a filtered read requests, and the share in a cold page cache afterwards."""
    with open_reader(path) as reader:
        log_bytes = sum(
            reader.record_bytes(queue, reader.bounds(queue).min_offset, reader.bounds(queue).max_offset)
            for queue in reader.queues(TOPIC)
        )
        asked = _Asked()
        rows = _read(reader, tags="rare")
        asked_bytes = asked.end()
        kept = rows / messages
        yield Figure(
            "bytes of the log asked for by that filter",
            100 * asked_bytes / log_bytes,
            100 * asked_bytes / log_bytes,
            100 * asked_bytes / log_bytes,
            required=2,
            at_most=True,
            unit="%",
            note=f"{100 * kept:.2f} % of the messages match; {asked_bytes:,} of {log_bytes:,} bytes",
            detail={"asked_bytes": asked_bytes, "log_bytes": log_bytes, "kept": kept},
        )
    segments = sorted((Path(path) / "commitlog").iterdir())
    with open_reader(path) as reader:
        bounds = [(queue, reader.bounds(queue)) for queue in reader.queues(TOPIC)]
    for segment in segments:
        _drop(segment)
    before = sum(map(_resident_pages, segments))
    with open_reader(path) as reader:  # like a task, without bounds, which would read the end of the log
        for queue, held in bounds:
            list(reader.read(queue, held.min_offset, held.max_offset, DEFAULT_COLUMNS, tags="rare"))
    pages = sum(map(_resident_pages, segments)) - before
    share = 100 * pages * mmap.PAGESIZE / log_bytes
    note = f"{pages:,} pages for {rows:,} messages of {log_bytes // messages} bytes"
    yield Figure("pages of the log that it leaves in a cold cache", share, share, share, unit="%", note=note)


class _Asked:
    """Counts the bytes of the commit log that are read or mapped, from now to `end`."""

    def __init__(self) -> None:
        self._bytes = 0
        self._real = OpenFile.read, OpenFile.read_into, MappedWindow.__init__
        read, read_into, init = self._real

        def count(path: str, size: int) -> None:
            self._bytes += size if "/commitlog/" in path else 0

        def counted_read(file: OpenFile, position: int, size: int) -> bytes:
            count(file.path, size)
            return read(file, position, size)

        def counted_read_into(file: OpenFile, position: int, target: memoryview) -> None:
            count(file.path, len(target))
            read_into(file, position, target)

        def counted_init(window: MappedWindow, file: OpenFile, begin: int, end: int, *, mapped: bool) -> None:
            count(file.path, end - begin if mapped else 0)
            init(window, file, begin, end, mapped=mapped)

        OpenFile.read, OpenFile.read_into, MappedWindow.__init__ = counted_read, counted_read_into, counted_init  # type: ignore[method-assign]

    def end(self) -> int:
        """Stop counting and return the bytes."""
        OpenFile.read, OpenFile.read_into, MappedWindow.__init__ = self._real  # type: ignore[method-assign]
        return self._bytes


def _drop(path: Path) -> None:
    """Have the kernel forget a file's pages."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _resident_pages(path: Path) -> int:
    """Return how many pages of a file are in the page cache."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        count = -(-len(mapping) // mmap.PAGESIZE)
        states = (ctypes.c_ubyte * count)()
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        if ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), states):
            return 0
        return int((np.frombuffer(states, np.uint8) & 1).sum())
