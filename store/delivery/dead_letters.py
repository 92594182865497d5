"""Republishing of dead letters to the topics that they came from; and a table of pending transactions.

A republished message differs from its dead letter in these points: topic and queue; reconsumeTimes, which is 0; and
properties. RETRY_TOPIC, DELAY, REAL_TOPIC, REAL_QID and recorded times are removed. ORIGIN_MESSAGE_ID and CONSUME_ERROR
are kept. REPUBLISHED_FROM is added; it contains topic, queue and queue offset of the dead letter.

Each dead letter is republished once, because a call resumes where the last call with the same progress name ended. That
queue offset is in the metadata of the last commit in the ledger, so it is stored together with the messages. Dead
letters that the filter does not select are skipped.

A pending transaction is neither committed nor rolled back yet. Its half message waits in a system topic until the
producer decides. When it does, the broker appends an op message with the queue offset of the half message, so a half
message without an op is pending. Reading starts at the offsets of the broker's group CID_RMQ_SYS_TRANS in both queues,
because earlier messages were decided or given up.

| what a broker does | what follows |
| --- | --- |
| asks the producer again | it appends a copy of the half message, which has the number of checks; the newest is shown |
| writes an op for any copy | the transaction is decided |
| writes the body of an op | it has one queue offset (4.9, 5.0), or several, each followed by a comma (5.1 and newer) |
| gives up after too many checks | it moves the message to TRANS_CHECK_MAX_TIME_TOPIC, a topic that can be read |

Source: TransactionalMessageServiceImpl#check, TransactionalMessageBridge (4.9, 5.3).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.argument_checks import check_setting
from rmq_spark.store.delivery.delay_levels import HALF_TOPIC
from rmq_spark.store.delivery.record_lookup import RecordLookup, read_originals
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import random_bits, wall_clock_ms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import BatchConflictError, DamageError, NotFoundError, OptionError, StoreChangedError
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.letter_choice import Chooser, LetterFilter, choose_letters, make_chooser
from rmq_spark.store.format.message_columns import Given, RowFault, Texts, Topics
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.message_table import check_topic
from rmq_spark.store.format.properties import RETRY_TOPIC, edit_properties
from rmq_spark.store.format.property_encoder import ENGINE_OWNED, SHARDING_KEY
from rmq_spark.store.format.queue_router import QueueRouter
from rmq_spark.store.format.record_batch import WholeRecords
from rmq_spark.store.format.record_rewrite import rebuild_records
from rmq_spark.store.group.offset_file import read_group_offsets
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.log.topics import TopicWriter
from rmq_spark.store.model import CommitKey, QueueBounds, QueueKey
from rmq_spark.store.names import check_retrying_group, check_sent_topic, dlq_topic
from rmq_spark.store.transaction.commit import CommitOptions, commit_staged
from rmq_spark.store.transaction.intents import StagedFile
from rmq_spark.store.transaction.ledger import Ledger, folder_of
from rmq_spark.store.transaction.roll_forward import IntentRollForward
from rmq_spark.store.transaction.staging import StageWriter

REPUBLISHED_FROM = "REPUBLISHED_FROM"
_NEXT = "next"  # key in a commit's metadata: the queue offset of the first dead letter that is not processed yet
_KEPT = frozenset({"ORIGIN_MESSAGE_ID", "UNIQ_KEY", "__BORNHOST", "BORN_TIMESTAMP", "EXTEND_UNIQ_INFO"})
_DROPPED = tuple(sorted(ENGINE_OWNED - _KEPT))


@dataclass(frozen=True, slots=True)
class Republished:
    """The result of a call: `sent` dead letters were republished, and `passed_over` ones were skipped by the filter.

    The next call starts at `next_offset`, the queue offset of the first dead letter that is not processed yet.
    """

    sent: int
    passed_over: int
    next_offset: int


def republish_dead_letters(
    path: str,
    group: str,
    filter: LetterFilter = None,
    *,
    topic: str | None = None,
    begin: int | None = None,
    progress: str | None = "default",
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
) -> Republished:
    """Republish dead letters in the store at `path`. See `store.republishing.republish_dead_letters`."""
    check_retrying_group(group)
    if topic is not None:
        check_sent_topic(check_topic(topic))
    if begin is not None:
        check_setting("begin", begin, 0)
    if progress is not None and (not isinstance(progress, str) or not progress):
        raise OptionError(
            f"progress={progress!r} is not a name; expected a non-empty text, or None to record no progress."
        )
    work = _Republishing(files.store_folder(path), group, make_chooser(filter), topic, progress, commit_log_path)
    with work.reader, work.open_writer(lock_timeout_ms, allow_network_store) as writer:
        return work.run(writer, begin)


class _Republishing:
    """The work of one `republish_dead_letters` call. The reader refreshes its view of the store once."""

    def __init__(
        self,
        root: str,
        group: str,
        choose: Chooser,
        topic: str | None,
        progress: str | None,
        commit_log_path: str | None,
    ) -> None:
        self._root, self._choose, self._topic, self._progress = root, choose, topic, progress
        self._queue = QueueKey(dlq_topic(group), 0)
        self._commit_log_path, self._disk = commit_log_path, Disk()
        self.reader = RecordLookup(root, commit_log_path=commit_log_path)
        self._topics = TopicWriter(self._disk, root)
        self._router = QueueRouter(self._write_queues, random_bits())
        self._query_id = f"rmq:republish:{group}:{progress}"

    def open_writer(self, lock_timeout_ms: int, allow_network_store: bool) -> StoreWriter:
        """Return a writer of the store that also rolls the commits of dead processes forward."""
        settings = WriterSettings("rmq-spark republish", lock_timeout_ms, allow_network_store, self._commit_log_path)
        finisher = IntentRollForward(self._root, self._disk, wall_clock_ms)
        return StoreWriter(self._root, self._disk, settings, wall_clock_ms, time.sleep, (finisher,))

    def run(self, writer: StoreWriter, begin: int | None) -> Republished:
        """Republish batch by batch. Each batch is one commit, and its metadata says where the next batch begins."""
        with writer.section():
            pass  # a write session rolls the commit of a dead call forward, so that the ledger contains it
        row = Ledger(self._root, self._disk).read(self._query_id) if self._progress else None
        number, reached = (-1, 0) if row is None else (row.batch_id, row.note.get(_NEXT, 0))
        self.reader.refresh()
        try:
            bounds = self.reader.bounds(self._queue)
        except NotFoundError:
            bounds = QueueBounds(0, 0)  # the group has never had a dead letter
        at = max(bounds.min_offset, reached if begin is None else begin)
        sent = skipped = 0
        for batch in self.reader.read(self._queue, min(at, bounds.max_offset), bounds.max_offset, list(COLUMNS)):
            mask = choose_letters(self._choose, batch)
            at += batch.num_rows
            records = self._records(batch, np.flatnonzero(mask))
            number += 1
            key = (
                CommitKey(self._query_id, number) if self._progress else CommitKey(f"{self._query_id}:{random_bits()}")
            )
            reached = max(reached, at)
            options = CommitOptions(is_transaction=True, create_topics=False, note={_NEXT: reached})
            if commit_staged(writer, key, [self._stage(key, records)], options).skipped:
                raise BatchConflictError(
                    f"dead letters of {self._queue} were not republished: another call with "
                    f"progress={self._progress!r} runs; expected none. Call again when it has ended, or use another "
                    "name."
                )
            sent, skipped = sent + int(mask.sum()), skipped + int((~mask).sum())
        return Republished(sent, skipped, max(at, reached))

    def _records(self, batch: pa.RecordBatch, rows: NDArray[np.intp]) -> EncodedRecords | None:
        """Return the records that republish some `rows` of a batch of dead letters, or None without rows."""
        if not len(rows):
            return None
        physical_offsets = batch.column("commitLogOffset").to_numpy()[rows]
        offsets = batch.column("queueOffset").to_numpy()[rows]
        found = read_originals(self.reader.log, physical_offsets)
        if not found.is_whole.all():
            gone = int(offsets[np.argmin(found.is_whole)])
            raise StoreChangedError(
                f"the dead letter at queue offset {gone} of {self._queue} was deleted during the call. Call again."
            )
        originals = WholeRecords.of(found.data, found.positions, found.ends)
        pairs = originals.pairs()
        topics = self._topics_of(pairs.column(RETRY_TOPIC), offsets)
        sharding = Texts.of(pairs.column(SHARDING_KEY))
        given = np.ones(len(rows), np.bool_) if sharding.given is None else sharding.given
        routes = self._router.route(topics, len(rows), None, Given(sharding.hashes.java(), given))
        text = pa.array(offsets).cast(pa.string())
        prefix = pa.scalar(f"{self._queue}/")
        froms = pc.binary_join_element_wise(prefix, text, "").cast(pa.binary())
        try:
            records = rebuild_records(
                found.data,
                found.positions,
                found.ends,
                topics=topics,
                queue_ids=routes.queue_ids,
                properties=edit_properties(originals.texts(), _DROPPED, {REPUBLISHED_FROM: froms}),
                reconsume_times=np.zeros(len(rows), np.int64),
            )
        except RowFault as fault:
            raise OptionError(f"the dead letter at queue offset {offsets[fault.row]}: {fault.what}") from None
        return replace(records, digest=int(offsets.astype(np.uint64).sum()))

    def _topics_of(self, retried: pa.StringArray, offsets: NDArray[np.int64]) -> Topics:
        if self._topic is not None:
            return Topics((self._topic,), None)
        if retried.null_count:
            offset = int(offsets[retried.is_null().index(True).as_py()])
            raise OptionError(
                f"the dead letter at queue offset {offset} of {self._queue} has no property {RETRY_TOPIC}, the topic "
                "that it came from. Set topic=, or leave the message out with a filter."
            )
        try:
            return Topics.of(retried)
        except RowFault as fault:
            raise OptionError(f"the dead letter at queue offset {offsets[fault.row]}: {fault.what}") from None

    def _write_queues(self, topic: str) -> int:
        count = self._topics.write_queues(topic)
        if count is None:
            raise NotFoundError(
                f'dead letters came from topic "{topic}", which does not exist any more. Create it, set topic= to send '
                "them to another one, or leave them out with a filter."
            )
        return count

    def _stage(self, key: CommitKey, records: EncodedRecords | None) -> StagedFile:
        stage = StageWriter(self._root, self._disk, folder_of(key), f"{random_bits():08x}")
        if records is not None:
            stage.write(records)
        return stage.finish()


HALF_QUEUE = QueueKey(HALF_TOPIC, 0)
OP_QUEUE = QueueKey("RMQ_SYS_TRANS_OP_HALF_TOPIC", 0)
TRANSACTION_GROUP = "CID_RMQ_SYS_TRANS"  # its offsets are a broker's progress in both queues
_TIME = pa.timestamp("us", tz="UTC")
# The columns of the result of `pending_transactions`.
PENDING = pa.schema(
    [
        ("topic", pa.string()),  # the topic of the message when the transaction is committed
        ("queueId", pa.int32()),
        ("transactionId", pa.string()),
        ("producerGroup", pa.string()),
        ("checks", pa.int32()),  # how often a broker has asked the producer for a decision
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
_SHOWN_BYTES = 40  # of the invalid body of an op, in an error text


def pending_transactions(path: str | PurePath, *, commit_log_path: str | None = None) -> pa.Table:
    """Return the transactions of the store at `path` that wait for a decision of their producers.

    The result is a table with the columns PENDING. Its rows are in the order in which the messages were stored. The
    call changes nothing on disk and may run while a broker uses the store. A transaction that is decided during the
    call may still be in the result. Raises StorePathError if there is no store at `path`, and DamageError if one of its
    files is damaged.
    """
    root = files.store_folder(path)
    # Read the progress before the store. Otherwise the progress may already be after an op that was not read.
    progress = read_group_offsets(root, TRANSACTION_GROUP, time.sleep)
    with StoreReader(root, commit_log_path=commit_log_path) as reader:
        reader.refresh()
        batches = list(_batches(reader, HALF_QUEUE, progress.get(HALF_QUEUE, 0), _COLUMNS))
        reader.refresh()  # read the ops later than the half messages, because they are stored later
        ops = _batches(reader, OP_QUEUE, progress.get(OP_QUEUE, 0), ("tags", "body"))
        decided = pa.concat_arrays([pa.array([], pa.int64()), *map(_op_offsets, ops)])
    if batches:
        halves = pa.Table.from_batches(batches)
    else:
        halves = pa.schema([(name, COLUMNS[name]) for name in _COLUMNS]).empty_table()
    return _build(_without_decided(halves, decided))


def _op_offsets(ops: pa.RecordBatch) -> pa.Array:
    """Return the queue offsets of the half messages that these ops decide.

    The body of an op may have either form (see the module). Raises DamageError if it has another one.
    """
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
            "Without it pending and decided transactions cannot be distinguished. Restore the log from a copy.",
        )
    return texts.cast(pa.string()).cast(pa.int64())


def _without_decided(halves: pa.Table, decided: pa.Array) -> pa.Table:
    """Return the newest copy of each half message of which no copy is decided, in the order of the table.

    `decided` has the queue offsets of decided copies.
    """
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
    """Return the texts as numbers. A text that is not a number, or null, becomes `default`."""
    are_numbers = pc.fill_null(pc.match_substring_regex(texts, r"^\d{1,9}$"), False)
    return pc.if_else(are_numbers, pc.if_else(are_numbers, texts, "0").cast(pa.int32()), pa.scalar(default, pa.int32()))


def _batches(reader: StoreReader, queue: QueueKey, begin: int, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Yield the messages of the queue, starting at queue offset `begin`. Yields nothing if there is no such queue."""
    if queue.topic not in reader.topics() or queue not in reader.queues(queue.topic):
        return
    bounds = reader.bounds(queue)
    yield from reader.read(queue, max(begin, bounds.min_offset), bounds.max_offset, columns)
