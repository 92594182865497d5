"""The messages of a run that a test of their properties lets through, with what it takes to build their columns.

All records are looked at for their heads and properties; the bodies of those that nobody wants are neither copied nor
decompressed nor compared with their CRCs, and what is wrong with them is nobody's concern.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.heads import RecordFault, RecordRun
from rmq_spark.store.format.rows import DecodeLimits, Rows


class PropertyTest(Protocol):
    """What messages are asked. `matches` takes a column for each name, null where a message lacks the property."""

    @property
    def property_names(self) -> tuple[str, ...]:
        """The properties that are needed."""

    def matches(self, columns: Mapping[str, Any], count: int) -> NDArray[np.bool_]:
        """Return for each of `count` messages whether it is wanted."""


def choose_rows(
    run: RecordRun,
    begin: int,
    end: int,
    limits: DecodeLimits,
    test: PropertyTest,
    *,
    want_bodies: bool,
    want_properties: bool,
    expects_all: bool,
) -> Rows | None:
    """Return the messages that the test wants as `Rows` has them, None where it wants none.

    `expects_all` says that hardly any is not wanted: then all are taken first, and seldom for nothing. Raises
    RecordFault, with the number of the record in `run`, for a record that is not as promised: of one that is not wanted
    only head, topic and properties are looked at.
    """
    if expects_all:
        with suppress(RecordFault):  # perhaps of one that is not wanted
            rows = Rows(run, begin, end, limits, want_bodies=want_bodies, want_properties=True)
            if _ask(rows, test).all():
                return rows
    seen = Rows(run, begin, end, replace(limits, check_crc=False), want_bodies=False, want_properties=True)
    mask = _ask(seen, test)
    if not mask.any():
        return None
    of_row = np.arange(len(run)) if seen.record_of is None else seen.record_of
    records = np.unique(of_row[mask])
    try:
        rows = Rows(run.take(records), begin, end, limits, want_bodies=want_bodies, want_properties=want_properties)
    except RecordFault as fault:
        raise RecordFault(int(records[fault.row]), fault.what, fault.expected, fault.found) from fault
    if rows.record_of is not None:
        rows.keep(mask[np.isin(of_row, records)][: len(rows)])
    elif want_properties and len(rows) == len(seen):
        rows.pairs = seen.pairs  # all are wanted: nothing is split twice
    return rows


def _ask(rows: Rows, test: PropertyTest) -> NDArray[np.bool_]:
    """Return which rows are wanted; only the properties that the test names are decoded."""
    mask = test.matches({name: rows.pairs.column(name) for name in test.property_names}, len(rows))
    assert len(mask) == len(rows), (len(mask), len(rows))  # the test's promise
    return mask
