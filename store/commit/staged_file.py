"""What is told of a staged file: small, and without what writes and reads one (`staging.py`).

Who only reads promises, as `check` does, needs no more than this.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rmq_spark.store.commit.keys import STAGING, side_path


@dataclass(frozen=True, slots=True)
class StagedFile:
    """What a task tells the commit of its file. Small, and it pickles: it travels in Spark's commit message.

    `name` is the path below `rmq/staging/`. A task without rows has no file: `file_bytes` is 0 then.
    """

    name: str
    rows: int
    bytes: int  # of the records: what the log will grow by, fillers aside
    digest: int  # of the rows as their user gave them, 0 .. 2^64-1
    topics: Mapping[str, int] = field(default_factory=dict)  # what `row_slices.named_topics` says of its rows
    largest_bytes: int = 0  # the longest record
    file_bytes: int = 0  # length of the file


def staged_path(root: str, name: str) -> str:
    """Return the path of a staged file in the store at `root`."""
    return side_path(root, STAGING, name)
