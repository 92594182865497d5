"""Speed of one core in decoding the log into Arrow columns, over its speed in copying bytes.

Both are measured in processor time of this process, which uses one thread, so other programs do
not count. The page cache is warm and all checks of the reader are on. Log bytes are the sizes of all records read.
"""

import time
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np
import pyarrow as pa
from figures import Figure, ratio_figure, take_turns
from sample_stores import TOPIC, SampleStores, Shape

from rmq_spark.store import COLUMNS, StoreReader, open_reader

COPY_BYTES = 256 << 20
DEFAULT_COLUMNS = list(COLUMNS)[:10]
_HEAD = ["queueId", "queueOffset", "commitLogOffset", "bornTimestamp", "storeTimestamp", "reconsumeTimes"]
# Columns, and the required fraction of memcpy.
COLUMN_SETS: list[tuple[str, list[str], float | None]] = [
    ("body", ["body"], 0.30),
    ("body and 6 of the head", ["body", *_HEAD], 0.18),
    ("default columns", DEFAULT_COLUMNS, None),
    ("every column", list(COLUMNS), 0.08),
]
LAYOUTS = {"message": "queues message by message", "batch": "queues in runs of 32"}


def measure_decoding(stores: SampleStores, messages: int, repeats: int) -> Iterable[Figure]:
    """Yield the figures of both layouts."""
    threads = pa.cpu_count()
    pa.set_cpu_count(1)
    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)

    def copy_rate() -> float:
        begin = time.process_time()
        np.copyto(target, source)
        return COPY_BYTES / (time.process_time() - begin)

    copy_rate()
    for interleave, layout in LAYOUTS.items():
        with open_reader(str(stores.read_into_cache(Shape(messages, interleave=interleave)))) as reader:
            for name, columns, required in COLUMN_SETS:
                scan = _Scan(reader, columns)
                scan.rate()  # initializes everything that is initialized once
                # Two copies around each scan would be no better than one: neighbours differ little.
                rates, copies = take_turns(repeats, scan.rate, copy_rate)
                yield ratio_figure(
                    f"decode {name}, {layout}",
                    rates,
                    copies,
                    required=required,
                    note=f"{scan.log_bytes / scan.messages / median(rates) * 1e9:.0f} ns a message",
                    detail={
                        "log_bytes_per_second": median(rates),
                        "copied_bytes_per_second": median(copies),
                        "bytes_per_message": scan.log_bytes / scan.messages,
                    },
                )
    pa.set_cpu_count(threads)


class _Scan:
    """All messages of the topic, queue by queue."""

    def __init__(self, reader: StoreReader, columns: Sequence[str]) -> None:
        self._reader, self._columns = reader, columns
        reader.refresh()
        self._bounds = {queue: reader.bounds(queue) for queue in reader.queues(TOPIC)}
        self.messages = sum(held.max_offset - held.min_offset for held in self._bounds.values())
        self.log_bytes = sum(
            reader.record_bytes(queue, held.min_offset, held.max_offset) for queue, held in self._bounds.items()
        )

    def rate(self) -> float:
        """Read everything and return log bytes a second."""
        begin, seen = time.process_time(), 0
        for queue, held in self._bounds.items():
            for batch in self._reader.read(queue, held.min_offset, held.max_offset, self._columns):
                seen += batch.num_rows
        seconds = time.process_time() - begin
        if seen != self.messages:
            raise RuntimeError(f"{seen} messages came out of {self.messages}")
        return self.log_bytes / seconds
