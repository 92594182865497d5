"""The offset of a stream: what stands in Spark's checkpoint, as JSON.

    {"orders": {"0": 5, "1": 7}, "@": {"v": 1}}

Topic, queue, next queue offset: what was before it has been delivered. So progress can be pasted into
startingOffsets. The key "@", which no topic can have, keeps what belongs to no queue:

| key | meaning |
| --- | --- |
| v | version of this text; another one is refused |
| start | where each queue began that the offset before this one does not name and that has rows since |
| seek | where each queue went on that the offset before this one names elsewhere: it was reset, or was another's |
| group | the consumer group of which the query was a member last |
| reset | the number of the last reset of that group that was applied |
| suspended | the number of the last change of the queues that an orderly listener stopped, which `seek` sends back |
| ending | true if the query has endingOffsets or endingTimestamp |
| ended | true if every queue has reached its bound |
| lost | messages that planning skipped with failOnDataLoss=false, by queue, since the query began |
| turn | the queue that was served last when a limit was too small for all: the next one goes first |

What goes away after the batch was planned, before its tasks are made or while they read, is not in `lost`: by then
the end of the batch stands in the checkpoint. It is logged.

Spark compares offsets as text. So the text is canonical: topics sorted, queues sorted by number, "@" last and its
keys in the order above; and what has not moved is repeated as it stands, `start` included.

The first offset of a query is not kept by Spark until a batch exists. So it is a constant that names no queue,
and the end of the first batch, which may be empty, fixes where the query began: a queue that is in `start` began
there, and any other at the very position at which the batch ends, so it has no rows. Spark sends this text three
times in every trigger, and nothing else costs as much where queues are many: so what need not be said is not. (Texts
with a `start` that equals the position mean the same.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rmq_spark.datasource.values import MARK
from rmq_spark.store.errors import OptionError
from rmq_spark.store.units import QueueKey

VERSION = 1

_SHOWN_CHARACTERS = 80  # of an offset that is none
_FOREIGN = "the checkpoint holds an offset that is none of ours: {}. Give the query a checkpointLocation of its own."


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """One offset, parsed. `starts` is None where the text has no `start`: no queue that appeared has rows."""

    positions: Mapping[QueueKey, int]
    starts: Mapping[QueueKey, int] | None = None
    ending: bool = False
    ended: bool = False
    lost: Mapping[QueueKey, int] = field(default_factory=dict)
    turn: QueueKey | None = None
    seeks: Mapping[QueueKey, int] = field(default_factory=dict)
    reset: int = 0
    group: str = ""
    suspended: int = 0

    def is_initial(self) -> bool:
        """Say whether this is the constant before the first batch."""
        return not self.positions and self.starts is None


def initial_offset() -> dict[str, Any]:
    """Return the JSON of the constant before the first batch."""
    return {MARK: {"v": VERSION}}


def encode_offset(offset: StreamOffset) -> dict[str, Any]:
    """Return the canonical JSON. It is never the constant of `initial_offset`."""
    mark: dict[str, Any] = {"v": VERSION}
    if offset.starts or not offset.positions:
        mark["start"] = encode_queues(offset.starts or {})
    if offset.seeks:
        mark["seek"] = encode_queues(offset.seeks)
    if offset.group:
        mark["group"] = offset.group
    if offset.reset or offset.group:
        mark["reset"] = offset.reset
    if offset.suspended:
        mark["suspended"] = offset.suspended
    if offset.ending:
        mark["ending"] = True
    if offset.ended:
        mark["ended"] = True
    if offset.lost:
        mark["lost"] = encode_queues(offset.lost)
    if offset.turn is not None:
        mark["turn"] = str(offset.turn)
    return {**encode_queues(offset.positions), MARK: mark}


def encode_queues(numbers: Mapping[QueueKey, int]) -> dict[str, Any]:
    """Return numbers by queue as JSON: topic, queue id as text, number; both sorted."""
    return {
        topic: {str(queue.queue_id): numbers[queue] for queue in queues}
        for topic, queues in groupby(sorted(numbers), key=lambda queue: queue.topic)
    }


def decode_offset(value: Any) -> StreamOffset:
    """Return the offset that a JSON object is. Raises OptionError for a text of another version or shape."""
    if not isinstance(value, dict):  # of a source that counts, for instance
        raise OptionError(_FOREIGN.format(f"{str(value)[:_SHOWN_CHARACTERS]!r} is no JSON object"))
    mark = value.get(MARK)
    version = mark.get("v") if isinstance(mark, dict) else None
    if version != VERSION:
        raise OptionError(
            f"the checkpoint holds an offset of version {version!r}; this release reads version {VERSION}. Use the "
            "release that wrote it, or another checkpointLocation, with the wanted startingOffsets."
        )
    assert isinstance(mark, dict)
    try:
        turn = mark.get("turn")
        return StreamOffset(
            _decode_queues({topic: queues for topic, queues in value.items() if topic != MARK}),
            _decode_queues(mark["start"]) if "start" in mark else None,
            bool(mark.get("ending", False)),
            bool(mark.get("ended", False)),
            _decode_queues(mark.get("lost", {})),
            None if turn is None else _decode_queue(turn),
            _decode_queues(mark.get("seek", {})),
            int(mark.get("reset", 0)),
            str(mark.get("group", "")),
            int(mark.get("suspended", 0)),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise OptionError(_FOREIGN.format(error)) from None


def _decode_queues(value: Mapping[str, Mapping[str, Any]]) -> dict[QueueKey, int]:
    return {
        QueueKey(topic, int(queue_id)): int(number)
        for topic, queues in value.items()
        for queue_id, number in queues.items()
    }


def _decode_queue(text: str) -> QueueKey:
    topic, _, queue_id = text.rpartition("/")
    return QueueKey(topic, int(queue_id))
