"""What a watermark says about the key index: its newest file, with everything that its header said.

Its shape and its header stand here because a crash may spoil both: a header half ahead of its slots proves no shape.
"""

from dataclasses import asdict, dataclass

from rmq_spark.store.format.index_file import IndexHeader, IndexShape


@dataclass(frozen=True, slots=True)
class IndexState:
    """The newest file's name, shape and header, flat as in JSON; "" and zeros without a file.

    `slot_count` is 0 for a file whose shape nobody knows: then no key was put into it.
    """

    name: str = ""
    slot_count: int = 0
    unit_count: int = 0
    begin_timestamp: int = 0
    end_timestamp: int = 0
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    used_slot_count: int = 0
    next_unit: int = 0

    @property
    def shape(self) -> IndexShape | None:
        """Return the file's shape."""
        return IndexShape(self.slot_count, self.unit_count) if self.slot_count else None

    @property
    def header(self) -> IndexHeader:
        """Return the file's header."""
        return IndexHeader(
            self.begin_timestamp,
            self.end_timestamp,
            self.begin_physical_offset,
            self.end_physical_offset,
            self.used_slot_count,
            self.next_unit,
        )


def state_of(name: str, shape: IndexShape | None, header: IndexHeader) -> IndexState:
    """Return the state of an index whose newest file this is."""
    slot_count, unit_count = (shape.slot_count, shape.unit_count) if shape else (0, 0)
    return IndexState(name, slot_count, unit_count, **asdict(header))
