"""Which batch of a query may follow which: the rules that every sink with exactly-once writing has. Pure."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from rmq_spark.store.errors import BatchConflictError
from rmq_spark.store.format.side_file import digest_text
from rmq_spark.store.model import CommitKey


class LastBatch(Protocol):
    """The last batch of a query that is stored. `rows` and `digest` are None if only its number is known."""

    @property
    def batch_id(self) -> int:
        """The number of the batch."""

    @property
    def rows(self) -> int | None:
        """How many rows it has."""

    @property
    def digest(self) -> int | None:
        """The digest of its rows."""


_GAP_CAUSES = (
    "the store was restored from a copy older than the query's checkpoint, or another store is at this path, or a "
    "power cut lost batches that were written with flush=async. Restore a newer copy"
)


@dataclass(frozen=True, slots=True)
class BatchRules:
    """The user's choice for a batch that is not the next one of its query: `onBatchConflict` and `onBatchGap`.

    If `is_transaction` is True, batch ids are versions. They may have gaps, and a version below the last one is treated
    as stored already. `gap_causes` is a clause that says how batches of the place can be missing.
    """

    on_conflict: str = "fail"  # or "skip"
    on_gap: str = "fail"  # or "continue"
    is_transaction: bool = False
    gap_causes: str = _GAP_CAUSES


class Verdict(Enum):
    """The decision about a batch: APPEND it, or skip it for one of the other reasons. Values are texts for the log."""

    APPEND = "append"
    REPEATED = "it is in the store already"
    PASSED = (
        "a later version of this txnAppId is in the store. If these rows are new, another writer or an earlier "
        "checkpoint has used the name: give every one its own txnAppId"
    )
    OVERRULED = "the store has another batch of that number, and onBatchConflict=skip"


def judge_batch(last: LastBatch | None, key: CommitKey, rows: int, digest: int, rules: BatchRules) -> Verdict:
    """Decide whether a batch of `rows` rows with this `digest` is appended or skipped, and for which reason.

    `last` is the last batch of the query, None if it has none. Raises BatchConflictError if, by the `rules`, the batch
    conflicts with it or would leave a gap after it.
    """
    if last is None or key.batch_id is None:
        return Verdict.APPEND
    if key.batch_id == last.batch_id:
        if (rows, digest) == (last.rows, last.digest):
            return Verdict.REPEATED
        return _conflict(last, key, f"the batch to write has {rows} rows with the digest {digest_text(digest)}", rules)
    if key.batch_id < last.batch_id:
        if rules.is_transaction:
            return Verdict.PASSED
        return _conflict(last, key, "batches are written once and in order", rules)
    if key.batch_id > last.batch_id + 1 and not rules.is_transaction and rules.on_gap != "continue":
        missing = f"{last.batch_id + 1}"
        if key.batch_id > last.batch_id + 2:
            missing = f"{last.batch_id + 1} to {key.batch_id - 1}"
        raise BatchConflictError(
            f"{key} cannot be written: the last one in the store is {last.batch_id}, so {missing} would be missing. "
            f"Either {rules.gap_causes}; or set onBatchGap=continue to skip the missing batches; or start the query "
            "with a new checkpoint. Nothing was written."
        )
    return Verdict.APPEND


def _conflict(last: LastBatch, key: CommitKey, why: str, rules: BatchRules) -> Verdict:
    if rules.on_conflict == "skip":
        return Verdict.OVERRULED
    what = "version" if rules.is_transaction else "batch"
    remedy = (
        "Give every write of an application a txnVersion of its own, larger than the one before"
        if rules.is_transaction
        else "Either the query's checkpoint was copied, deleted in part or rolled back, or its source returned other "
        "rows for the same batch. Start the query with a new checkpoint"
    )
    found = ", whose rows are not known any more"
    if last.digest is not None:
        found = f" with {last.rows} rows and the digest {digest_text(last.digest)}"
    elif key.batch_id == last.batch_id:
        remedy = f"If Spark repeats the batch after a long break, start once with onBatchConflict=skip. {remedy}"
    raise BatchConflictError(
        f"{key} cannot be written: the last {what} in the store is {last.batch_id}{found}; {why}. {remedy}; or set "
        "onBatchConflict=skip to skip such batches. Nothing was written."
    )
