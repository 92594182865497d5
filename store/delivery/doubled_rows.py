"""Rows of one write that name the same message: the first of them goes back, the others are left out.

What multiplies rows on their way (an explode, a join) would multiply messages, and again each time that they come. A
task leaves out what it sees twice in one piece of rows; the rest is found when the keys of all tasks are known, and the
files that have some are staged anew without them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.commit.row_slices import merge_records, slice_records
from rmq_spark.store.commit.staged_file import StagedFile
from rmq_spark.store.commit.staging import StageWriter, read_chunks
from rmq_spark.store.delivery.sent_rows import RowKeys
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.format.encoding import EncodedRecords


def first_rows(keys: RowKeys) -> NDArray[np.intp]:
    """Return the numbers, ascending, of the rows whose keys no row before them has."""
    return np.sort(np.unique(keys, return_index=True)[1])


def without_doubles(
    root: str, disk: Disk, key_folder: str, staged: Sequence[tuple[StagedFile, RowKeys]]
) -> list[StagedFile]:
    """Return files that have each row of `staged` once: those that have no other are the same, others are new.

    `staged` has of each file the keys of its rows, in their order. A new file lies beside the old one, which stays
    where it is: until a commit names one of the two nobody believes either. Raises what reading and staging raise.
    """
    counts = [len(keys) for _, keys in staged]
    every = np.concatenate([keys for _, keys in staged]) if staged else np.zeros(0, np.uint64)
    kept = np.zeros(len(every), np.bool_)
    kept[first_rows(every)] = True
    if kept.all():
        return [file for file, _ in staged]
    parts = np.split(kept, np.cumsum(counts)[:-1])
    return [
        file if part.all() else _stage_again(root, disk, key_folder, file, part)
        for (file, _), part in zip(staged, parts, strict=True)
    ]


def _stage_again(root: str, disk: Disk, key_folder: str, file: StagedFile, kept: NDArray[np.bool_]) -> StagedFile:
    assert len(kept) == file.rows, (len(kept), file.rows)
    name = file.name.rpartition("/")[2].removesuffix(".arrow")
    writer = StageWriter(root, disk, key_folder, f"{name}-once")
    try:
        first = 0
        for records in read_chunks(root, [file]):
            chosen = _select(records, kept[first : first + len(records)])
            if chosen is not None:
                writer.write(chosen)
            first += len(records)
        return writer.finish()
    except BaseException:
        writer.discard()
        raise


def _select(records: EncodedRecords, kept: NDArray[np.bool_]) -> EncodedRecords | None:
    """Return the records that are kept, None for none. No batch is compared by their digest, which is 0."""
    if not kept.any():
        return None
    edges = np.flatnonzero(np.diff(kept.astype(np.int8), prepend=0, append=0))
    runs = edges.reshape(-1, 2).tolist()
    return merge_records([slice_records(records, first, last) for first, last in runs])
