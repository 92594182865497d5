"""What `check` returns: findings, and how much was looked at."""

from dataclasses import dataclass

import pyarrow as pa

from rmq_spark.store.explore.finding import DAMAGE, NOTE, SEVERITIES, Finding

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
_SHOWN = 20


@dataclass(slots=True)
class Looked:
    """How much was looked at."""

    files: int = 0
    records: int = 0
    units: int = 0
    index_entries: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found in the store at `path`. `str` of it is for people, `to_arrow` for all else.

    `state` is how the store was left: "closed" in order, "live" (a broker or writer is at it, or appended and did not
    settle), "crashed". `[log_begin, log_end)` are physical offsets. Counts are of what was looked at: files, records of
    the log, units of queues, entries of the key index, bytes.
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
        """Say whether nothing is damaged and nothing waits for a repair: notes alone are healthy."""
        return all(finding.severity == NOTE for finding in self.findings)

    @property
    def messages_at_risk(self) -> int:
        """Return how many messages damage concerns."""
        return sum(finding.messages for finding in self.findings if finding.severity == DAMAGE)

    def count(self, severity: str) -> int:
        """Return how many findings have a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def to_arrow(self) -> pa.Table:
        """Return the findings as a table, a row for each: the fields of Finding, in camelCase."""
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
        counts = ", ".join(f"{self.count(severity)} {severity}" for severity in SEVERITIES)
        lines = [
            f"{self.path}: {'healthy' if self.is_healthy else 'not healthy'} ({counts}), {self.state}. Looked at "
            f"{self.files} files, {self.bytes} bytes, {self.records} records, {self.units} units, "
            f"{self.index_entries} index entries; the log is [{self.log_begin}, {self.log_end})."
        ]
        lines += [str(finding) for finding in self.findings[:_SHOWN]]
        if len(self.findings) > _SHOWN:
            lines.append(f"… and {len(self.findings) - _SHOWN} more")
        return "\n".join(lines)
