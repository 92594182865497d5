"""The offset of a stream, as JSON in Spark's checkpoint.

    {"orders": {"0": 5, "1": 7}, "@": {"v": 1}}

The position of each queue, by topic and queue id, is the queue offset of the next message to read. If the place has
broker names, the queue id follows that of its broker, as in "broker-a:0", and the version is 2. All earlier messages
were delivered, so an offset from a progress report can be used as startingOffsets. The key "@", which cannot be the
name of a topic, has the metadata:

| key | meaning |
| --- | --- |
| v | version of this format; other versions are refused |
| start | begin of the batch in each queue that has rows in it and is not in the previous offset |
| seek | begin of the batch in each queue that did not continue at its previous position, as after a reset |
| group | the consumer group of which the query was last a member |
| reset | the number of that group's last reset that the query has applied |
| suspended | the number of the last change of the group's suspended queues that the query has applied |
| published | for each queue the offsets at which the group may be if only this query has moved it; see below |
| ending | true if the query has endingOffsets or endingTimestamp |
| ended | true if every queue has reached its end |
| lost | the number of messages, by queue, that planning has skipped with failOnDataLoss=false since the query began |
| since | queues that appear later begin at the first message stored at or after this time (ms since the epoch) |
| turn | the queue that was served last, if a limit was too small to serve all; the next batch begins after this queue |
| read | for each topic and broker a message before a position: queue offset, physical offset and store time (ms) |

`since` exists only in a place with broker names, and not if the query begins at earliest or at a group's offsets. It is
fixed by the first batch: a broker that was away then is read from the same point in time when it comes back. Without
`since` such a queue begins at its first message.

`read` exists only in a place with broker names. By it a restarted query recognises the stores of brokers (see
`ReadRecords`). A text without it is valid, as earlier releases wrote it. `startingOffsets` ignores it, like every key
of "@": a new query begins at the given offsets of the stores that exist.

`published` exists only in a place whose resets have no numbers. A query that is stopped there recognises a reset, or
the work of another consumer, by the group's offset alone. So the text has, for each queue of the query, the group's
offset as the query knows it and the begin of the batch, as `[40, 55]`, or one number if they are equal. A queue in
which both are the position itself is left out. One whose broker is away keeps what was known. See `own_offsets`.

A group moves a queue (`seek`) after a reset, when the queue comes from another member, and when an orderly listener
suspended it. `lost` does not include messages that disappear after their batch was planned, because the end of the
batch is then already in the checkpoint. Those messages are only logged.

Spark compares offsets as texts, so equal offsets must have equal texts. Topics are sorted by name, queues by number,
"@" is last, and its keys are in the order above. If nothing has moved, the previous offset is returned unchanged,
including its `start`.

Spark does not store the initial offset of a query until the first batch exists. So the initial offset is a constant
without queues, and the end of the first batch, which may be empty, records where the query began. A queue in `start`
began there. Any other queue began at its position, and has no rows in the batch. (So a `start` that equals the position
could be left out.) Spark passes the text three times in every trigger, which is the largest cost if there are many
queues, so redundant keys are omitted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rmq_spark.datasource.options.option_parsers import MARK
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey, RecordProof

VERSION, VERSION_WITH_BROKERS = 1, 2

_SHOWN_CHARACTERS = 80  # of an invalid offset
_FOREIGN = (
    "the checkpoint is not one of rmq: found {}; expected offsets by topic and queue. Give the query a "
    "checkpointLocation of its own."
)


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """A decoded offset; the fields are described in the module's docstring.

    `starts` is None if the text has no `start`, because the batch has no rows of a new queue.
    """

    positions: Mapping[QueueKey, int]
    starts: Mapping[QueueKey, int] | None = None
    ending: bool = False
    ended: bool = False
    lost: Mapping[QueueKey, int] = field(default_factory=dict)
    cursor: QueueKey | None = None  # `turn` in the text
    seeks: Mapping[QueueKey, int] = field(default_factory=dict)
    reset: int = 0
    group: str = ""
    suspended: int = 0
    since_ms: int | None = None
    records: Mapping[tuple[QueueKey, int], RecordProof] = field(default_factory=dict)  # `read` in the text
    published: Mapping[QueueKey, tuple[int, ...]] = field(default_factory=dict)

    def is_initial(self) -> bool:
        """Return whether this is the initial offset, which is the constant before the first batch."""
        return not self.positions and self.starts is None

    @property
    def has_brokers(self) -> bool:
        """Whether this is an offset of a place with broker names."""
        return self.since_ms is not None or any(queue.broker for queue in self.positions)


def version_of(*, has_brokers: bool) -> int:
    """Return the version of the offsets of a place with or without broker names."""
    return VERSION_WITH_BROKERS if has_brokers else VERSION


def initial_offset() -> dict[str, Any]:
    """Return the JSON of the initial offset, which is the constant before the first batch."""
    return {MARK: {"v": VERSION}}


def encode_offset(offset: StreamOffset) -> dict[str, Any]:
    """Return an offset as JSON, in the one form that has a given content. It never equals the initial offset."""
    metadata: dict[str, Any] = {"v": version_of(has_brokers=offset.has_brokers)}
    if offset.starts or not offset.positions:
        metadata["start"] = encode_queues(offset.starts or {})
    if offset.seeks:
        metadata["seek"] = encode_queues(offset.seeks)
    if offset.group:
        metadata["group"] = offset.group
    if offset.reset or offset.group:
        metadata["reset"] = offset.reset
    others = {
        "suspended": offset.suspended,
        "published": encode_queues(
            {queue: list(some) if len(some) > 1 else some[0] for queue, some in offset.published.items()}
        ),
        "ending": offset.ending,
        "ended": offset.ended,
        "lost": encode_queues(offset.lost),
    }
    metadata |= {name: value for name, value in others.items() if value}
    if offset.since_ms is not None:
        metadata["since"] = offset.since_ms
    if offset.cursor is not None:
        metadata["turn"] = str(offset.cursor)
    if offset.records:
        metadata["read"] = encode_queues(
            {
                queue: [position, proof.physical_offset, proof.store_time_ms]
                for (queue, position), proof in offset.records.items()
            }
        )
    return {**encode_queues(offset.positions), MARK: metadata}


def encode_queues(numbers: Mapping[QueueKey, Any]) -> dict[str, Any]:
    """Return values by queue as JSON, in the form {topic: {queue id: value}}, sorted by topic and queue id."""
    return {
        topic: {queue.id_text: numbers[queue] for queue in queues}
        for topic, queues in groupby(sorted(numbers), key=lambda queue: queue.topic)
    }


def decode_offset(value: Any, *, has_brokers: bool = False) -> StreamOffset:
    """Return the offset in a JSON value. `has_brokers` is whether the place has broker names.

    Raises OptionError if the offset is that of the other kind of place, has an unknown version, or is not one of rmq.
    """
    offset = _decode(value)
    is_foreign = not all(queue.broker for queue in offset.positions) if has_brokers else offset.has_brokers
    if is_foreign:
        raise OptionError(_describe_other_place(offset, has_brokers=has_brokers))
    return offset


def _describe_other_place(offset: StreamOffset, *, has_brokers: bool) -> str:
    """Return the error text for a checkpoint of a directory in a cluster, or the reverse."""
    brokers = {queue.broker for queue in offset.positions}
    if has_brokers:
        found, expected, change = "a store directory", "one of a cluster", "write each queue id with its broker's name"
        pasted = offset.positions
    else:
        found, expected, change = (
            "a cluster",
            "one of a store directory",
            "keep only the queues of its broker, without the name",
        )
        pasted = {
            QueueKey(queue.topic, queue.queue_id, "" if len(brokers) == 1 else queue.broker): position
            for queue, position in offset.positions.items()
        }
    return (
        f"the checkpoint is one of {found}; expected {expected}. Give the query a checkpointLocation of its own. To "
        f"continue at the same messages, if they have the same queue offsets here, add "
        f"startingOffsets={json.dumps(encode_queues(pasted), separators=(',', ':'))} ({change}, where necessary)."
    )


def _decode(value: Any) -> StreamOffset:
    if not isinstance(value, dict):  # such as the number of a source that counts
        raise OptionError(_FOREIGN.format(f"{str(value)[:_SHOWN_CHARACTERS]!r}"))
    metadata = value.get(MARK)
    version = metadata.get("v") if isinstance(metadata, dict) else None
    if version not in (VERSION, VERSION_WITH_BROKERS):
        raise _other_version(version, f"{VERSION} or {VERSION_WITH_BROKERS}")
    assert isinstance(metadata, dict)
    try:
        cursor = metadata.get("turn")
        offset = StreamOffset(
            decode_queues({topic: queues for topic, queues in value.items() if topic != MARK}),
            decode_queues(metadata["start"]) if "start" in metadata else None,
            bool(metadata.get("ending", False)),
            bool(metadata.get("ended", False)),
            decode_queues(metadata.get("lost", {})),
            None if cursor is None else _decode_queue(cursor),
            decode_queues(metadata.get("seek", {})),
            int(metadata.get("reset", 0)),
            str(metadata.get("group", "")),
            int(metadata.get("suspended", 0)),
            int(metadata["since"]) if "since" in metadata else None,
            _decode_records(metadata.get("read", {})),
            decode_published(metadata.get("published", {})),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise OptionError(_FOREIGN.format(error)) from None
    expected = version_of(has_brokers=offset.has_brokers)
    if version != expected:
        raise _other_version(version, str(expected))
    return offset


def _other_version(found: Any, expected: str) -> OptionError:
    return OptionError(
        f"the checkpoint has offsets of version {found!r}; expected version {expected}. Use the release that wrote it, "
        "or another checkpointLocation with startingOffsets."
    )


def decode_queues(value: Mapping[str, Mapping[str, Any]]) -> dict[QueueKey, int]:
    """Return the numbers by queue in a JSON value that `encode_queues` has made."""
    return {
        QueueKey.of_text(topic, text): int(number) for topic, queues in value.items() for text, number in queues.items()
    }


def read_reported(offset: object) -> Mapping[str, Any]:
    """Return an offset of Spark's progress as a mapping. Return {} if it is not one, as in another kind of source."""
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return {}
    return offset if isinstance(offset, Mapping) else {}


def decode_reported(offset: Mapping[str, Any]) -> dict[QueueKey, int]:
    """Return the numbers by queue in an offset that `read_reported` has returned, without its mark."""
    return decode_queues({topic: queues for topic, queues in offset.items() if topic != MARK})


def decode_published(value: Mapping[str, Mapping[str, Any]]) -> dict[QueueKey, tuple[int, ...]]:
    """Return the offsets by queue in the JSON value of `published`."""
    return {
        QueueKey.of_text(topic, text): tuple(map(int, found)) if isinstance(found, list) else (int(found),)
        for topic, queues in value.items()
        for text, found in queues.items()
    }


def _decode_records(value: Mapping[str, Mapping[str, Any]]) -> dict[tuple[QueueKey, int], RecordProof]:
    records = {}
    for topic, queues in value.items():
        for text, numbers in queues.items():
            position, physical_offset, store_time_ms = map(int, numbers)
            records[QueueKey.of_text(topic, text), position] = RecordProof(physical_offset, store_time_ms)
    return records


def _decode_queue(text: str) -> QueueKey:
    topic, _, queue = text.partition("/")  # a broker's name may have a slash, and a topic's may not
    return QueueKey.of_text(topic, queue)
