"""Opening a store and reading its first row: ten full segments over one.

Each opening runs in a new process, after the imports. Run with a store's path, this module is that process: it prints
the seconds.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import TYPE_CHECKING

from figures import Figure, ratio_figure, take_turns
from sample_stores import TOPIC, SampleStores, Shape

from rmq_spark.store import open_reader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEGMENTS = 10
_LEAST_MESSAGES = 1_200_000  # so that a queue of the small store fills more than one batch


def segment_shapes(messages: int) -> tuple[Shape, Shape]:
    """Return two stores whose last segment is nearly full: of one segment, and of ten with ten times the messages."""
    per_segment = max(messages, _LEAST_MESSAGES) // SEGMENTS
    segment_bytes = per_segment * 400 // 4096 * 4096  # records of about 370 bytes fill nine tenths of it
    one = Shape(per_segment, segment_bytes=segment_bytes)
    # A segment takes more records than `per_segment`; so the tenth is reached, and filled as the one is, with these.
    return one, Shape(per_segment + (SEGMENTS - 1) * (segment_bytes // 368), segment_bytes=segment_bytes)


def measure_opening(stores: SampleStores, messages: int, repeats: int) -> Iterable[Figure]:
    """Yield the figure of the engine; at most 1.3."""
    one, ten = (str(stores.path(shape)) for shape in segment_shapes(messages))
    few_seconds, many_seconds = take_turns(repeats, lambda: _opened_apart(one), lambda: _opened_apart(ten))
    yield ratio_figure(
        f"open and first row, {SEGMENTS} segments over 1",
        many_seconds,
        few_seconds,
        required=1.3,
        at_most=True,
        note=f"{median(few_seconds) * 1e3:.1f} ms with one segment",
        detail={"seconds": median(many_seconds), "one_segment_seconds": median(few_seconds)},
    )


def measure_opening_in_spark(
    spark: "SparkSession", stores: SampleStores, messages: int, repeats: int
) -> Iterable[Figure]:
    """Yield the same through Spark, for information."""

    # By an end rather than by first(), which kills a task in the middle of its work.
    queue = {TOPIC: {"0": 1}}
    one_message = {"assign": json.dumps({TOPIC: [0]}), "endingOffsets": json.dumps(queue)}

    def first_row(path: str) -> Callable[[], float]:
        def seconds() -> float:
            begin = time.perf_counter()
            spark.read.format("rmq").options(path=path, **one_message).load().collect()
            return time.perf_counter() - begin

        return seconds

    one, ten = (first_row(str(stores.path(shape))) for shape in segment_shapes(messages))
    one()
    ten()
    few_seconds, many_seconds = take_turns(repeats, one, ten)
    yield ratio_figure(
        f"the same through Spark, {SEGMENTS} segments over 1",
        many_seconds,
        few_seconds,
        note=f"{median(few_seconds) * 1e3:.0f} ms with one segment",
        detail={"seconds": median(many_seconds), "one_segment_seconds": median(few_seconds)},
    )


def _opened_apart(path: str) -> float:
    done = subprocess.run([sys.executable, __file__, path], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout))


def open_and_read(path: str) -> float:
    """Return the seconds from opening a path to the first batch of the first queue."""
    begin = time.perf_counter()
    with open_reader(path) as reader:
        reader.refresh()
        queue = reader.queues(TOPIC)[0]
        held = reader.bounds(queue)
        next(reader.read(queue, held.min_offset, held.max_offset, ["queueOffset", "body"]))
        return time.perf_counter() - begin


if __name__ == "__main__":
    print(json.dumps(open_and_read(sys.argv[1])))
