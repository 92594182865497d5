"""Arrow batches from a reader as plain rows that a test can compare: times as microseconds, properties as a dict."""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

Row = dict[str, Any]


def arrow_rows(batches: Iterable[pa.RecordBatch]) -> list[Row]:
    """Return the rows of the batches. Raises AssertionError for a map with one name twice, which Spark refuses."""
    rows: list[Row] = []
    for batch in batches:
        columns = [_plain(column) for column in batch.columns]
        names = batch.schema.names
        rows += [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    return rows


def _plain(column: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        return list(column.view(pa.int64()).to_pylist())
    if pa.types.is_map(column.type):
        maps = [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]
        sizes = [None if pairs is None else len(pairs) for pairs in column.to_pylist()]
        assert sizes == [None if found is None else len(found) for found in maps], "a name twice in one map"
        return maps
    return list(column.to_pylist())
