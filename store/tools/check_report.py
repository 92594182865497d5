"""Report of a check: its findings, and the numbers of files, records, entries and bytes that were checked."""

from dataclasses import dataclass

import pyarrow as pa

from rmq_spark.store.html_tables import MAX_ROWS, box, number_column, table, text_column
from rmq_spark.store.tools.finding import Finding, Severity

FINDINGS = pa.schema(
    [
        ("severity", pa.string()),
        ("area", pa.string()),
        ("what", pa.string()),
        ("path", pa.string()),
        ("position", pa.int64()),
        ("expected", pa.string()),
        ("found", pa.string()),
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("begin", pa.int64()),
        ("end", pa.int64()),
        ("messages", pa.int64()),
        ("nextStep", pa.string()),
    ]
)
_SHOWN_FINDINGS = 20


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport:
    """The result of a check of the store at `path`. Print it, or use `to_arrow()` to process it.

    A notebook displays it as a table of its findings.

    `state` is one of:

    - "closed": the store was cleanly shut down
    - "live": a broker or a writer is running, or a writer has not closed the store
    - "crashed": the last writer died, or the power failed

    `[log_begin, log_end)` are the physical offsets of the commit log. `files`, `records`, `units`, `index_entries` and
    `bytes` are the numbers of what was checked. `records` are those of the commit log, and `units` are consume-queue
    entries.
    """

    path: str
    state: str
    findings: tuple[Finding, ...]
    files: int
    records: int
    units: int
    index_entries: int
    bytes: int
    log_begin: int
    log_end: int

    @property
    def is_healthy(self) -> bool:
        """Whether the store is sound: every finding is a note, or there are no findings."""
        return all(finding.severity == Severity.NOTE for finding in self.findings)

    def count(self, severity: str) -> int:
        """Return the number of findings with this severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def to_arrow(self) -> pa.Table:
        """Return a table with one row for each finding. The columns are the fields of Finding, in camelCase."""
        rows = [
            {
                **{name: getattr(one, name) for name in FINDINGS.names if name not in ("queueId", "nextStep")},
                "queueId": one.queue_id,
                "nextStep": one.next_step,
            }
            for one in self.findings
        ]
        return pa.Table.from_pylist(rows, FINDINGS)

    def __str__(self) -> str:
        counts = ", ".join(f"{self.count(severity)} {severity}" for severity in Severity)
        lines = [
            f"{self.path}: {'healthy' if self.is_healthy else 'not healthy'} ({counts}), {self.state}. Checked "
            f"{self.files} files, {self.bytes} bytes, {self.records} records, {self.units} consume-queue entries, "
            f"{self.index_entries} index entries; the commit log is [{self.log_begin}, {self.log_end})."
        ]
        lines += [str(finding) for finding in self.findings[:_SHOWN_FINDINGS]]
        if len(self.findings) > _SHOWN_FINDINGS:
            lines.append(f"… and {len(self.findings) - _SHOWN_FINDINGS} more")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        facts = {
            "result": "healthy" if self.is_healthy else "not healthy",
            "findings": ", ".join(f"{self.count(severity)} {severity}" for severity in Severity),
            "state": self.state,
            "checked": f"{self.files:,} files, {self.bytes:,} bytes, {self.records:,} records, "
            f"{self.units:,} consume-queue entries, {self.index_entries:,} index entries",
            "commit log": f"physical offsets [{self.log_begin:,}, {self.log_end:,})",
        }
        shown = self.findings[:MAX_ROWS]
        columns = [
            text_column("severity", [one.severity for one in shown]),
            text_column("what", [one.what for one in shown], is_long=True),
            text_column("file", [one.path for one in shown]),
            number_column("position", [one.position for one in shown]),
            text_column("expected", [one.expected or None for one in shown], is_long=True),
            text_column("found", [one.found or None for one in shown], is_long=True),
            text_column("queue", [None if one.topic is None else f"{one.topic}/{one.queue_id}" for one in shown]),
            number_column("messages", [one.messages or None for one in shown]),
            text_column("next step", [one.next_step or None for one in shown], is_long=True),
        ]
        left_out = len(self.findings) - len(shown)
        more = f"… and {left_out:,} more: to_arrow() has all" if left_out else ""
        return box("check of", self.path, facts, table(columns, more) if shown else "")
