"""How large the files of a store are that has none yet."""

from dataclasses import dataclass, field

from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.format.queue_unit import QUEUE_UNIT


@dataclass(frozen=True, slots=True)
class FileSizes:
    """Sizes for files of a store that has none yet, RocketMQ's defaults: segments and queue files in bytes."""

    segment_bytes: int = 1 << 30
    queue_file_bytes: int = 300_000 * QUEUE_UNIT.itemsize
    batch_queue_file_bytes: int = 300_000 * BATCH_UNIT.itemsize
    index: IndexShape = field(default_factory=IndexShape)
