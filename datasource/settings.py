"""How a task reads rows: what of the options travels into every task."""

from dataclasses import dataclass

from rmq_spark.datasource.filters import NO_FILTERS, Filters


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """The options that a task needs, and no more, since this is pickled into every one."""

    columns: tuple[str, ...]
    check_crc: bool
    max_decompressed_bytes: int
    read_mode: str
    fail_on_data_loss: bool
    filters: Filters = NO_FILTERS
