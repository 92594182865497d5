"""Transactions that are neither committed nor rolled back: half messages without an op.

A half message waits in a system topic until its producer decides; then an op names its queue offset. Which of both to
look at, a broker's own progress says (the group CID_RMQ_SYS_TRANS): what lies before it is decided, or was given up.

| what a broker does | what is seen |
| --- | --- |
| asks the producer again | appends a copy of the half message; the newest one is shown, and counts the checks |
| an op of any copy | the transaction is decided |
| ops | one queue offset a message (4.9, 5.0), or a list of them with a comma behind each (5.1 and newer) |
| too many checks | moves it to TRANS_CHECK_MAX_TIME_TOPIC, which is read like any topic |

All by columns. Source: TransactionalMessageServiceImpl#check, TransactionalMessageBridge (4.9, 5.3).
"""

import time
from collections.abc import Iterator
from pathlib import PurePath

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.group.offset_file import read_group_offsets
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.units import QueueKey

HALF_QUEUE = QueueKey("RMQ_SYS_TRANS_HALF_TOPIC", 0)
OP_QUEUE = QueueKey("RMQ_SYS_TRANS_OP_HALF_TOPIC", 0)
TRANSACTION_GROUP = "CID_RMQ_SYS_TRANS"  # a broker's progress in both queues

_TIME = pa.timestamp("us", tz="UTC")
# What `pending_transactions` returns, in the order in which the messages were stored.
PENDING = pa.schema(
    [
        ("topic", pa.string()),  # where it goes when it is committed
        ("queueId", pa.int32()),
        ("transactionId", pa.string()),
        ("producerGroup", pa.string()),
        ("checks", pa.int32()),  # how often a broker asked its producer
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("body", pa.binary()),
        ("bornTimestamp", _TIME),
        ("storeTimestamp", _TIME),  # of the newest copy
        ("halfQueueOffset", pa.int64()),
        ("commitLogOffset", pa.int64()),
    ]
)

_COLUMNS = (
    "queueOffset",
    "commitLogOffset",
    "msgId",
    "tags",
    "keys",
    "body",
    "bornTimestamp",
    "storeTimestamp",
    "properties",
)
_OP_TAG = "d"
_SHOWN_BYTES = 40  # of a body that is none of an op


def pending_transactions(path: str | PurePath, *, commit_log_path: str | None = None) -> pa.Table:
    """Return the transactions of the store at `path` that wait for their producer's decision; the columns of PENDING.

    Changes nothing on disk, and may run beside a broker: what is decided meanwhile may still be there. Raises
    StorePathError for a path that holds no store, DamageError.
    """
    root = files.absolute(path)
    # Before the store: an op that the progress has passed is then not missed.
    progress = read_group_offsets(root, TRANSACTION_GROUP, time.sleep)
    with StoreReader(root, commit_log_path=commit_log_path) as reader:
        reader.refresh()
        halves = _read(reader, HALF_QUEUE, progress.get(HALF_QUEUE, 0), _COLUMNS)
        reader.refresh()  # ops come after their half messages
        ops = _batches(reader, OP_QUEUE, progress.get(OP_QUEUE, 0), ("tags", "body"))
        decided = pa.concat_arrays([pa.array([], pa.int64()), *map(_op_offsets, ops)])
    return _build(_without_decided(halves, decided))


def _op_offsets(ops: pa.RecordBatch) -> pa.Array:
    """Return the half messages' queue offsets that ops name, in both forms. Raises DamageError for other bodies."""
    bodies = ops.column("body").filter(pc.fill_null(pc.equal(ops.column("tags"), _OP_TAG), False))
    texts = pc.list_flatten(pc.split_pattern(bodies, b","))
    texts = texts.filter(pc.not_equal(texts, b""))
    are_numbers = pc.match_substring_regex(texts, rb"^\d{1,18}$")
    if not pc.all(are_numbers, min_count=0).as_py():
        found = texts.filter(pc.invert(are_numbers))[0].as_py()
        raise DamageError(
            "body of an op of a transaction",
            str(OP_QUEUE),
            0,
            "queue offsets",
            found[:_SHOWN_BYTES],
            "Transactions that are pending cannot be told from decided ones without it; restore the log from a copy.",
        )
    return texts.cast(pa.string()).cast(pa.int64())


def _without_decided(halves: pa.Table, decided: pa.Array) -> pa.Table:
    """Return the newest copy of each half message of which no copy is decided, in order."""
    keys = halves.append_column("decided", pc.is_in(halves["queueOffset"], decided)).select(
        ["msgId", "queueOffset", "decided"]
    )
    copies = keys.group_by("msgId").aggregate([("queueOffset", "max"), ("decided", "any")])
    newest = copies.filter(pc.invert(copies["decided_any"]))["queueOffset_max"]
    return halves.filter(pc.is_in(halves["queueOffset"], newest.combine_chunks()))


def _build(halves: pa.Table) -> pa.Table:
    maps = halves["properties"]

    def named(name: str) -> pa.ChunkedArray:
        return pc.map_lookup(maps, pa.scalar(name), "last")

    columns = {
        "topic": named("REAL_TOPIC"),
        "queueId": _numbers(named("REAL_QID"), None),
        "transactionId": pc.coalesce(named("__transactionId__"), halves["msgId"]),
        "producerGroup": named("PGROUP"),
        "checks": _numbers(named("TRANSACTION_CHECK_TIMES"), 0),
        "halfQueueOffset": halves["queueOffset"],
    }
    return pa.table([columns[name] if name in columns else halves[name] for name in PENDING.names], schema=PENDING)


def _numbers(texts: pa.ChunkedArray, default: int | None) -> pa.ChunkedArray:
    """Return texts as numbers, `default` for what is none."""
    are_numbers = pc.fill_null(pc.match_substring_regex(texts, r"^\d{1,9}$"), False)
    return pc.if_else(are_numbers, pc.if_else(are_numbers, texts, "0").cast(pa.int32()), pa.scalar(default, pa.int32()))


def _read(reader: StoreReader, queue: QueueKey, begin: int, columns: tuple[str, ...]) -> pa.Table:
    batches = list(_batches(reader, queue, begin, columns))
    if batches:
        return pa.Table.from_batches(batches)
    return pa.schema([(name, COLUMNS[name]) for name in columns]).empty_table()


def _batches(reader: StoreReader, queue: QueueKey, begin: int, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Yield what the queue holds from `begin` on, nothing where there is no such queue."""
    if queue.topic not in reader.topics() or queue not in reader.queues(queue.topic):
        return
    held = reader.bounds(queue)
    yield from reader.read(queue, max(begin, held.min_offset), held.max_offset, columns)
