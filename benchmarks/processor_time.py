"""Processor time of other processes, from /proc."""

import os
from pathlib import Path


def cpu_seconds(process_id: int) -> float:
    """Return the processor time of a process and its threads, without its children."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def family_cpu_seconds(process_id: int) -> float:
    """Return the processor time of a process and all its descendants, including ended ones."""
    parents, ticks = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    family = [process_id]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return sum(ticks[member] for member in family) / os.sysconf("SC_CLK_TCK")
