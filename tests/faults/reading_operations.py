"""Every public operation that reads: its answer, as plain values that compare equal where the answers do."""

from collections import Counter
from typing import Any

import base_stores
import pyarrow.parquet as pq
from operations import Operation, Rows, Session

from rmq_spark.store import (
    StoreReader,
    check,
    dump,
    export_parquet,
    group_lag,
    group_offsets,
    groups,
    open_reader,
    pending_transactions,
)
from rmq_spark.store.disk.clock import wall_clock_ms

FINDINGS = "findings"  # of an answer of `check`


def read_rows(store: str, read_mode: str = "auto") -> Rows:
    """Read every message of a store; refuse a gap and an end before the queue's maximum offset."""
    rows: Rows = Counter()
    with StoreReader(store, read_mode=read_mode) as reader:
        reader.refresh()
        for topic in reader.topics():
            for queue in reader.queues(topic):
                bounds = reader.bounds(queue)
                expected = bounds.min_offset
                for batch in reader.read(queue, expected, bounds.max_offset, ["queueOffset", "body"]):
                    for offset, body in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                        assert offset == expected, f"GAP in {queue}: offset {offset} follows {expected - 1}"
                        expected += 1
                        rows[topic, bytes(body).split(b" ")[0].decode()] += 1
                assert expected == bounds.max_offset, f"SHORT: {queue} ends at {expected}, maximum {bounds.max_offset}"
    return rows


def _read(session: Session, number: int) -> Rows:
    return read_rows(session.store)


def _read_without_mapping(session: Session, number: int) -> Rows:
    return read_rows(session.store, "pread")


def _look_up(session: Session, number: int) -> list[Any]:
    """Look up by key, by id and by time."""
    with open_reader(session.store) as reader:
        reader.refresh()
        found = reader.find_key("orders", "a-key")
        message = reader.message(*found[0]) if found else None
        queues = reader.queues("orders")
        times = [reader.offset_at_time(queue, wall_clock_ms() + base_stores.HOUR_MS) for queue in queues]
        by_id = reader.find_message_id(message.message_id, ["orders"]) if message else None
        return [found, times, by_id]


def _summary(session: Session, number: int) -> dict[str, Any]:
    with open_reader(session.store) as reader:
        found = reader.summary()
        problems = [text for topic in found.topics for text in topic.problems.values()]
        return {"rows": found.to_arrow().to_pylist(), FINDINGS: problems}


def _check(session: Session, number: int) -> dict[str, Any]:
    report = check(session.store)
    counts = [report.state, report.records, report.units, report.index_entries, report.log_begin, report.log_end]
    return {"counts": counts, FINDINGS: [str(one) for one in report.findings if one.severity != "note"]}


def _export(session: Session, number: int) -> None:
    export_parquet(session.store, f"{session.folder}/export.parquet", topics=["orders"], overwrite=True)


def _exported(session: Session) -> list[tuple[int, str]]:
    table = pq.read_table(f"{session.folder}/export.parquet")
    return sorted(zip(table.column("queueOffset").to_pylist(), map(str, table.column("body").to_pylist()), strict=True))


def _dump(session: Session, number: int) -> list[Any]:
    rows: list[Any] = dump(f"{session.store}/commitlog/{0:020d}").to_arrow().to_pylist()
    return rows


def _groups(session: Session, number: int) -> list[Any]:
    names = groups(session.store)
    return [names, group_offsets(session.store, "crew"), _without_times(group_lag(session.store, "crew").to_pylist())]


def _without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name in ("topic", "queueId", "offset")} for row in rows]


def _pending_transactions(session: Session, number: int) -> list[Any]:
    rows: list[Any] = pending_transactions(session.store).to_pylist()
    return rows


READING = (
    Operation("read", base_stores.in_use, _read, reads=True),
    Operation("read-without-mapping", base_stores.in_use, _read_without_mapping, reads=True),
    Operation("look-up", base_stores.in_use, _look_up, reads=True),
    Operation("summary", base_stores.in_use, _summary, reads=True),
    Operation("check", base_stores.in_use, _check, reads=True),
    Operation("export", base_stores.settled, _export, reads=True, view=_exported),
    Operation("dump", base_stores.settled, _dump, reads=True),
    Operation("groups", base_stores.with_a_group, _groups, reads=True),
    Operation("pending-transactions", base_stores.settled, _pending_transactions, reads=True),
)
