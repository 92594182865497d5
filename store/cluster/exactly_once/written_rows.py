"""The state of a begun batch: how many rows each target queue has, and which queues cannot be finished."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.errors import IntentStuckError
from rmq_spark.store.model import CommitKey, QueueKey


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """The rows of a batch that are stored.

    `rows` has for each target queue how many of its rows are stored: they are the first ones, in order, each once.
    `stuck` has a reason for each queue that cannot be finished. `damaged` has the queue offsets of damaged copies of
    rows, which a broker stored in part when it was killed; they do not count in `rows`.

    For a queue in `stuck`, `rows` counts what was recognised. Nothing may be sent to it.
    """

    rows: Mapping[QueueKey, int]
    stuck: Mapping[QueueKey, str] = field(default_factory=dict)
    damaged: Mapping[QueueKey, tuple[int, ...]] = field(default_factory=dict)

    def require(self, key: CommitKey, runs: Iterable[StagedRun], confirmed: int | None = None) -> None:
        """Raise IntentStuckError if a queue of the batch `key` cannot be finished, or has a damaged copy of a row.

        `runs` are all runs of the batch. `confirmed` is the number of missing rows that somebody has confirmed wrongly.
        """
        reasons = {queue: _describe(offsets) for queue, offsets in self.damaged.items() if offsets} | dict(self.stuck)
        for queue, reason in reasons.items():
            written = sum(self.rows.values())
            missing = sum(run.rows for run in runs) - written
            others = len(reasons) - 1
            more = f". {others} more queue{'s' if others > 1 else ''} cannot be finished either" if others else ""
            if confirmed is not None:
                more += f". The confirmed number of missing rows is {confirmed}; expected {missing}"
            reason = reason.removesuffix(".") + more
            raise IntentStuckError(str(key), str(queue), reason, written, missing, key.batch_id)


def count_rows(runs: Iterable[StagedRun]) -> Counter[QueueKey]:
    """Return how many rows each target queue gets."""
    counts: Counter[QueueKey] = Counter()
    for run in runs:
        counts[run.queue] += run.rows
    return counts


def _describe(offsets: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, offsets[:3]))
    more = f" and {len(offsets) - 3} more" if len(offsets) > 3 else ""
    return (
        f"the message at queue offset {shown}{more} is a row of the batch without its last properties, which a broker "
        "stores if it is killed in the middle of a batch; expected complete rows, and nobody can repair this one"
    )
