"""How large the files of a store are that has none yet."""

from collections.abc import Mapping
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

    def by_name(self) -> dict[str, int]:
        """Return the sizes as the store's settings keep them."""
        return {
            "segmentBytes": self.segment_bytes,
            "queueFileBytes": self.queue_file_bytes,
            "batchQueueFileBytes": self.batch_queue_file_bytes,
            "indexSlots": self.index.slot_count,
            "indexUnits": self.index.unit_count,
        }

    def or_those(self, named: Mapping[str, int]) -> "FileSizes":
        """Return the sizes that `named` has, as `by_name` gives them, and these for the rest."""
        sizes = {**self.by_name(), **named}
        index = IndexShape(sizes["indexSlots"], sizes["indexUnits"])
        return FileSizes(sizes["segmentBytes"], sizes["queueFileBytes"], sizes["batchQueueFileBytes"], index)
