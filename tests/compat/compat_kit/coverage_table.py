"""How many messages were compared: by kind of record, state of the store and version. Printed at the end of a run."""

from collections.abc import Iterable

from compat_kit.build import VERSIONS
from compat_kit.kinds import KINDS, kinds_of
from compat_kit.rows import Rows

STATES = ("live", "clean", "killed", "trimmed")
_counts: dict[tuple[str, str], dict[str, int]] = {}  # by version and state


def note(version: str, state: str, rows: Rows, extended: set[int]) -> list[str]:
    """Count rows that were compared; return the kinds of which there was none though the version can write them."""
    counts = _counts.setdefault((version, state), dict.fromkeys(KINDS, 0))
    for held in rows.values():
        for row in held:
            for kind in kinds_of(row, row["commitLogOffset"] in extended):
                counts[kind] += 1
    return [name for name, kind in KINDS.items() if not counts[name] and kind.why_not(version) is None]


def encode_counts() -> list[tuple[str, str, dict[str, int]]]:
    """Return the counts of this process in types that another process can be sent."""
    return [(version, state, counts) for (version, state), counts in _counts.items()]


def add_counts(encoded: Iterable[tuple[str, str, dict[str, int]]]) -> None:
    """Add the counts of another process."""
    for version, state, found in encoded:
        counts = _counts.setdefault((version, state), dict.fromkeys(KINDS, 0))
        for kind, number in found.items():
            counts[kind] += number


def table_lines() -> Iterable[str]:
    """Yield the lines of the table, none if nothing was compared."""
    if not _counts:
        return
    columns = [(version, state) for version in VERSIONS for state in STATES]
    yield "Messages compared:".ljust(18) + "".join(f"{version:>8} {state:<8}"[-15:] for version, state in columns)
    notes: dict[str, None] = {}
    for name, kind in KINDS.items():
        cells = []
        for version, state in columns:
            why = kind.why_not(version)
            if why is not None:
                notes[f"{name} on {version}: n/a, {why}"] = None
            found = _counts.get((version, state))
            cells.append("n/a" if why else "-" if found is None else str(found[name]))
        yield name.ljust(18) + "".join(f"{cell:>15}" for cell in cells)
    yield from notes
