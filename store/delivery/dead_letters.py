"""Dead letters sent to the topic that they came from, to be consumed anew; each once, however often that is called.

What is different in the message that is consumed anew: topic and queue; reconsumeTimes, which is 0; and of its
properties RETRY_TOPIC, DELAY, REAL_TOPIC, REAL_QID and what was noted of times are gone. ORIGIN_MESSAGE_ID and
CONSUME_ERROR stay, and REPUBLISHED_FROM says which dead letter it was: topic, queue and queue offset.

A call goes on where the last one of the same name ended: that is in the ledger, in the note of its last commit, which
is there when the messages are. What the filter does not choose is passed over.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.commit.arguments import check_number, check_topic
from rmq_spark.store.commit.commits import CommitOptions, commit_staged
from rmq_spark.store.commit.finishing import IntentFinisher
from rmq_spark.store.commit.keys import CommitKey
from rmq_spark.store.commit.ledger import Ledger
from rmq_spark.store.commit.staged_file import StagedFile
from rmq_spark.store.commit.staging import StageWriter
from rmq_spark.store.delivery.originals import read_originals
from rmq_spark.store.delivery.originals_reader import OriginalsReader
from rmq_spark.store.delivery.retry_topics import check_retrying_group
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import random_bits, wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import BatchConflictError, NotFoundError, OptionError, StoreChangedError
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.format.filenames import check_sent_topic, dlq_topic
from rmq_spark.store.format.message_columns import Given, RowFault, Texts, Topics
from rmq_spark.store.format.outgoing_properties import ENGINE_OWNED, SHARDING_KEY
from rmq_spark.store.format.properties import RETRY_TOPIC
from rmq_spark.store.format.property_edits import edit_properties
from rmq_spark.store.format.rebuilt_records import rebuild_records
from rmq_spark.store.format.routing import QueueRouter
from rmq_spark.store.format.whole_records import WholeRecords
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.log.topic_writer import TopicWriter
from rmq_spark.store.units import QueueBounds, QueueKey

REPUBLISHED_FROM = "REPUBLISHED_FROM"
# Says of a batch of dead letters, with all columns of the source, which are to be consumed anew.
Chooser = Callable[[pa.RecordBatch], Any]

_NEXT = "next"  # in the note of a commit: the queue offset of the first dead letter that was not looked at
_KEPT = frozenset({"ORIGIN_MESSAGE_ID", "UNIQ_KEY", "__BORNHOST", "BORN_TIMESTAMP", "EXTEND_UNIQ_INFO"})
_DROPPED = tuple(sorted(ENGINE_OWNED - _KEPT))


@dataclass(frozen=True, slots=True)
class Republished:
    """What became of dead letters: how many were sent, how many the filter passed over, and where the next call begins.

    `next_offset` is the queue offset of the first dead letter that was not looked at.
    """

    sent: int
    passed_over: int
    next_offset: int


def republish_dead_letters(
    path: str,
    group: str,
    filter: "pc.Expression | Chooser | None" = None,
    *,
    topic: str | None = None,
    begin: int | None = None,
    progress: str | None = "default",
    commit_log_path: str | None = None,
    lock_timeout_ms: int = 60_000,
    allow_network_store: bool = False,
) -> Republished:
    """Send the group's dead letters that `filter` chooses to the topics that they came from, to be consumed anew.

    `filter` is an Arrow expression over the source's columns, or is given each batch of them and returns a mask; None
    chooses all. `topic` sends them elsewhere. All that there is when it is called is looked at, from where the last
    call with the same name in `progress` ended, or from `begin`, a queue offset. With None no progress is kept, and
    each call sends what it sends. Messages reach every group that subscribes to their topic, not only this one.

    A dead letter is sent once by calls of one name, whoever dies where. Raises OptionError for what is no group, filter
    or topic, NotFoundError for dead letters whose topic is not there any more, BatchConflictError where another call of
    the name is at work, StorePathError and LockTimeoutError, and what the filter raises. What was sent before that
    counts as sent.
    """
    check_retrying_group(group)
    if topic is not None:
        check_sent_topic(check_topic(topic))
    if begin is not None:
        check_number("begin", begin, 0)
    if progress is not None and (not isinstance(progress, str) or not progress):
        raise OptionError(f"progress={progress!r} is no name: a text, or None to keep none.")
    work = _Republishing(files.absolute(path), group, _chooser(filter), topic, progress, commit_log_path)
    with work.reader, work.open_writer(lock_timeout_ms, allow_network_store) as writer:
        return work.run(writer, begin)


class _Republishing:
    """One call. The reader looks at the store once."""

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
        self.reader = OriginalsReader(root, commit_log_path=commit_log_path)
        self._topics = TopicWriter(self._disk, root)
        self._router = QueueRouter(self._write_queues, random_bits())
        self._query_id = f"rmq:republish:{group}:{progress}"

    def open_writer(self, lock_timeout_ms: int, allow_network_store: bool) -> StoreWriter:
        """Return a writer of the store, which finishes what dead ones promised."""
        settings = WriterSettings("rmq-spark republish", lock_timeout_ms, allow_network_store, self._commit_log_path)
        finisher = IntentFinisher(self._root, self._disk, wall_clock_ms)
        return StoreWriter(self._root, self._disk, settings, wall_clock_ms, time.sleep, (finisher,))

    def run(self, writer: StoreWriter, begin: int | None) -> Republished:
        """Do it, a batch of dead letters at a time: each is one commit, with where the next one begins in its note."""
        with writer.section():
            pass  # what a dead call promised is finished by then, and the ledger says so
        number, reached = self._reached()
        self.reader.refresh()
        there = self._bounds()
        at = max(there.min_offset, reached if begin is None else begin)
        sent = passed = 0
        for batch in self.reader.read(self._queue, min(at, there.max_offset), there.max_offset, list(COLUMNS)):
            mask = self._mask(batch)
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
                    f"another call with progress={self._progress!r} sends dead letters of {self._queue}. Call again "
                    "when it is done, or give this one a name of its own."
                )
            sent, passed = sent + int(mask.sum()), passed + int((~mask).sum())
        return Republished(sent, passed, max(at, reached))

    def _reached(self) -> tuple[int, int]:
        """Return number and end of the last commit of this name."""
        row = Ledger(self._root, self._disk).read(self._query_id) if self._progress else None
        return (-1, 0) if row is None else (row.batch_id, row.note.get(_NEXT, 0))

    def _bounds(self) -> QueueBounds:
        """Return what there is of dead letters, nothing where there never was one."""
        try:
            return self.reader.bounds(self._queue)
        except NotFoundError:
            return QueueBounds(0, 0)

    def _mask(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        found = self._choose(batch)
        mask = pa.array(found) if not isinstance(found, pa.Array | pa.ChunkedArray) else found
        if not pa.types.is_boolean(mask.type) or len(mask) != batch.num_rows:
            raise OptionError(
                f"the filter gave {len(mask)} values of type {mask.type} for {batch.num_rows} dead letters. Expected "
                "is true or false for each."
            )
        return np.asarray(pc.fill_null(mask, False).to_numpy(zero_copy_only=False), np.bool_)

    def _records(self, batch: pa.RecordBatch, rows: NDArray[np.intp]) -> EncodedRecords | None:
        """Return the messages of some dead letters, None for none."""
        if not len(rows):
            return None
        places = batch.column("commitLogOffset").to_numpy()[rows]
        offsets = batch.column("queueOffset").to_numpy()[rows]
        found = read_originals(self.reader.log, places)
        if not found.is_whole.all():
            gone = int(offsets[np.argmin(found.is_whole)])
            raise StoreChangedError(f"the dead letter at queue offset {gone} of {self._queue} went away. Call again.")
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
                f"the dead letter at queue offset {offset} of {self._queue} does not say which topic it came from "
                f"({RETRY_TOPIC}). Give topic=, or leave it out with a filter."
            )
        try:
            return Topics.of(retried)
        except RowFault as fault:
            raise OptionError(f"the dead letter at queue offset {offsets[fault.row]}: {fault.what}") from None

    def _write_queues(self, topic: str) -> int:
        count = self._topics.write_queues(topic)
        if count is None:
            raise NotFoundError(
                f'dead letters came from topic "{topic}", which is not in the store any more. Create it, give topic= '
                "to send them elsewhere, or leave them out with a filter."
            )
        return count

    def _stage(self, key: CommitKey, records: EncodedRecords | None) -> StagedFile:
        stage = StageWriter(self._root, self._disk, key.folder, f"{random_bits():08x}")
        if records is not None:
            stage.write(records)
        return stage.finish()


def _chooser(filter: "pc.Expression | Chooser | None") -> Chooser:
    if filter is None:
        return lambda batch: pa.repeat(pa.scalar(True), batch.num_rows)
    if isinstance(filter, pc.Expression):
        expression = filter

        def choose(batch: pa.RecordBatch) -> Any:
            numbered = pa.table({**dict(zip(batch.schema.names, batch.columns, strict=True)), "@": range(len(batch))})
            try:
                kept = numbered.filter(expression)["@"].to_numpy()
            except (pa.ArrowException, KeyError) as error:
                raise OptionError(f"filter: {error}. Columns are: {', '.join(COLUMNS)}.") from None
            return np.isin(np.arange(len(batch)), kept)

        return choose
    if not callable(filter):
        raise OptionError(
            f"filter={filter!r} is neither an Arrow expression, such as pyarrow.compute.field('tags') == 'A', nor a "
            "function of a batch of dead letters."
        )
    return filter
