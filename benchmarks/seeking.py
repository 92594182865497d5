"""Seeks by time and by key in stores of three sizes, and the end of a big topic by a condition on its time.

A search that halves takes log(large) / log(small) as many steps in the larger queue, and each a little longer.
"""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING

import pyarrow as pa
from figures import Figure, ratio_figure, take_turns
from sample_stores import TOPIC, SampleStores, Shape

from rmq_spark.store import StoreReader, close, open_reader, open_store
from rmq_spark.store.model import QueueKey

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SIZES = (100, 10, 1)  # the stores have 1/100, 1/10 and all of the messages
_SEEKS = 300  # in one measurement
_CHUNK_ROWS = 200_000
_QUEUES = 4
_CACHES = 1.1  # allowance for a larger store, more of which is in memory and not in the processor's caches
_PER_MS = 10  # messages stored in a millisecond: the whole topic took minutes
_SWITCH = "spark.sql.python.filterPushdown.enabled"


def measure_seeking(stores: SampleStores, messages: int, repeats: int) -> Iterable[Figure]:
    """Yield for time and key how much longer a seek takes in a store of a hundred times the messages."""
    sizes = [messages // less for less in SIZES]
    kinds: list[tuple[str, Callable[[StoreReader, int], None], list[str]]] = [
        ("time", _seek_by_time, [str(stores.path(_shape(size))) for size in sizes]),
        ("key", _seek_by_key, [str(_keyed_store(stores, size)) for size in sizes]),
    ]
    for kind, seek, paths in kinds:
        readers = [open_reader(path) for path in paths]
        for reader, size in zip(readers, sizes, strict=True):
            reader.refresh()
            seek(reader, size)
        small, middle, large = take_turns(
            repeats, *(_timed(seek, reader, size) for reader, size in zip(readers, sizes, strict=True))
        )
        for reader in readers:
            reader.close()
        yield ratio_figure(
            f"a seek by {kind}, {SIZES[0]} times the messages",
            large,
            small,
            required=_CACHES * math.log(sizes[-1] / _QUEUES) / math.log(sizes[0] / _QUEUES),
            at_most=True,
            note=" ".join(f"{median(one) / _SEEKS * 1e6:.0f}" for one in (small, middle, large)) + " µs each",
            detail={"seconds": [median(one) / _SEEKS for one in (small, middle, large)], "messages": sizes},
        )


def measure_pushdown(spark: "SparkSession", stores: SampleStores, messages: int, repeats: int) -> Iterable[Figure]:
    """Yield how much longer the last 1 % of a topic takes by a condition on storeTimestamp that is not pushed down."""
    from pyspark.sql import functions as F

    path = str(stores.path(_shape(messages)))
    with open_reader(path) as reader:
        last = reader.proof(QueueKey(TOPIC, 0), reader.bounds(QueueKey(TOPIC, 0)).max_offset - 1)
    wanted = messages // 100
    from_us = (last.store_time_ms - wanted // _PER_MS) * 1000

    def late() -> "DataFrame":
        frame = spark.read.format("rmq").options(path=path, subscribe=TOPIC).load()
        return frame.where(F.col("storeTimestamp") > F.timestamp_micros(F.lit(from_us)))

    def seconds(state: str) -> Callable[[], float]:
        def run() -> float:
            spark.conf.set(_SWITCH, state)
            begin = time.perf_counter()
            (row,) = late().agg(F.count("*"), F.sum(F.length("body"))).collect()
            elapsed = time.perf_counter() - begin
            if not 0.9 * wanted <= row[0] <= 1.1 * wanted:
                raise RuntimeError(f"{row[0]} messages are in the last 1 %, expected about {wanted}")
            return elapsed

        return run

    plain, pushed = seconds("false"), seconds("true")
    plain()
    pushed()
    plain_seconds, pushed_seconds = take_turns(repeats, plain, pushed)
    spark.conf.set(_SWITCH, "true")
    yield ratio_figure(
        "the last 1 % by storeTimestamp, read whole over pushed down",
        plain_seconds,
        pushed_seconds,
        note=f"{median(pushed_seconds) * 1e3:.0f} ms pushed down, {median(plain_seconds) * 1e3:.0f} ms not",
        detail={"seconds": median(pushed_seconds), "plain_seconds": median(plain_seconds)},
    )


def _shape(messages: int) -> Shape:
    return Shape(messages, queues=_QUEUES, messages_per_ms=_PER_MS)


def _keyed_store(stores: SampleStores, messages: int) -> Path:
    """Return a store that our own writer made, key index and all: message n has the key `k<n>`."""
    path = stores.folder / f"{messages}-with-keys"
    if not path.exists():
        print(f"building {path.name} ...", flush=True)
        building = stores.scratch(path.name)
        store = open_store(building / "store", queues=_QUEUES)
        for first in range(0, messages, _CHUNK_ROWS):
            numbers = range(first, min(first + _CHUNK_ROWS, messages))
            columns = {"body": [b"x" * 50] * len(numbers), "keys": [f"k{number}" for number in numbers]}
            store.send_many(pa.table(columns), topic=TOPIC)
        close(building / "store")
        (building / "store").rename(path)
    return path


def _timed(seek: Callable[[StoreReader, int], None], reader: StoreReader, messages: int) -> Callable[[], float]:
    def run() -> float:
        begin = time.perf_counter()
        seek(reader, messages)
        return time.perf_counter() - begin

    return run


def _seek_by_time(reader: StoreReader, messages: int) -> None:
    random, first = Random(1), QueueKey(TOPIC, 0)
    begin_ms = reader.proof(first, 0).store_time_ms
    for _ in range(_SEEKS):
        reader.offset_at_time(
            QueueKey(TOPIC, random.randrange(_QUEUES)), begin_ms + random.randrange(messages // _PER_MS)
        )


def _seek_by_key(reader: StoreReader, messages: int) -> None:
    random = Random(1)
    for _ in range(_SEEKS):
        number = random.randrange(messages)
        if len(reader.find_key(TOPIC, f"k{number}")) != 1:
            raise RuntimeError(f"k{number} was not found once")
