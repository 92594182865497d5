"""When a group's offsets were last published, and by whom: `rmq/groups/<group>/published.json`.

For people and lag tables only. So it waits for no disk, and what cannot be read is as good as nothing.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

from rmq_spark.store.commit.side_file import encode_side_file, number_of, read_side_file, text_of
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import StoreError
from rmq_spark.store.group.group_paths import GroupPaths


@dataclass(frozen=True, slots=True)
class Published:
    """The last time (ms since the epoch) that offsets of the group were published, and who did it, for people."""

    group: str
    time_ms: int
    by: str


_NEXT_STEP = "Remove the file: it is written again when offsets are."


def write_published(paths: GroupPaths, disk: Disk, time_ms: int, by: str) -> None:
    """Note that the group's offsets were published. For who has the group's turn; a power cut may lose it.

    The offsets are published by then: a note that cannot be written, on a full disk say, fails nothing.
    """
    fields = {"group": paths.group, "timeMs": time_ms, "by": by}
    with contextlib.suppress(StoreError):
        disk.replace_unsynced(paths.published, encode_side_file(fields))


def read_published(path: str) -> Published | None:
    """Return what the file (`GroupPaths.published`) says, None without one.

    None, too, for one that a power cut left broken, of a newer version, or not to be read.
    """
    try:
        return read_side_file(path, "when a group's offsets were published", _NEXT_STEP, _build)
    except StoreError:
        return None


def _build(fields: dict[str, Any]) -> Published:
    return Published(text_of(fields, "group"), number_of(fields, "timeMs"), text_of(fields, "by"))
