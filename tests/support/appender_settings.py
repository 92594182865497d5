"""How an appender behaves, and how it dies."""

from dataclasses import dataclass

from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT, QUEUE_UNIT


class WriterDeathError(Exception):
    """The writer dies here: only the bytes written so far remain, and the lock is released."""


@dataclass(frozen=True, slots=True)
class AppenderSettings:
    """How an appender behaves. Sizes in bytes, waits in seconds, chances per step (a step is a piece written)."""

    segment_bytes: int = 1 << 16
    queue_file_bytes: int = 50 * QUEUE_UNIT.itemsize
    batch_queue_file_bytes: int = 30 * BATCH_UNIT.itemsize
    topics: int = 5  # of which the last has batch consume queues; one more is used every few hundred messages
    queues: int = 3
    segments_kept: int = 8
    death_chance: float = 1e-4
    pause_chance: float = 0.03
    pause_seconds: float = 0.002  # at most
    batch_chance: float = 0.2
