"""Which rows of a begun batch are in a target queue, by the messages that were pulled from it. Pure.

A row of the sink has its id as the first property: UNIQ_KEY, 20 characters that all rows of one attempt of a task have,
and a number of 12 hex digits that counts up. `RowSearch` looks at the first properties of all messages at once and
decodes the last row that it found. Texts that look like an id elsewhere in a message do not count.

The rows found must be the beginning of the queue's rows, in order, each once. A run that was found as a whole is
recognised by the id of its first row and by the number of its rows. For a run that was found in part, the ids are
compared with those in its blob.

**Torn rows.** A broker that is killed in the middle of a batch keeps a beginning of its items. It may keep the last one
as a record whose properties end in the middle, with zeros in the place of the rest: body, topic and sizes are right.
The row is judged by the bytes that were written:

| written of the properties | the row |
| --- | --- |
| all that the sink has sent; only properties that the broker adds are missing | counts as stored |
| the whole id, and not all that the sink has sent | is torn, and is the last one found |
| less than the whole id | is torn, and follows the last one found |

The broker's own properties are the last ones, so a torn record ends with a zero byte, and a whole one never does. That
finds torn rows also among the messages of others, without a look at each of them. Without a key a torn row is
recognised by the next missing item: the same body and flag, room for the same properties, and the same beginning of
them. A foreign message that is torn and equal in all of this counts as a torn row, because nobody can tell.

After a torn row was sent again (`rmq intents skip`), the whole copy follows the torn one with the same id.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.cluster.exactly_once.blobs import NoBlob, read_items
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.cluster.pull_pipeline import Pulled
from rmq_spark.store.cluster.pulled_records import NotARecordError, find_records
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.byte_ranges import Bytes, Positions, gather_bytes
from rmq_spark.store.format.consume_queue_entry import Item
from rmq_spark.store.format.content_ids import ID_CHARS
from rmq_spark.store.format.message_ids import NUMBER_CHARS
from rmq_spark.store.format.properties import UNIQ_KEY
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.format.record_batch import NotWholeError, WholeRecords
from rmq_spark.store.model import QueueKey

_BEFORE, _AFTER = f"{UNIQ_KEY}\x01".encode(), b"\x02"
_KEY_BYTES = len(_BEFORE) + ID_CHARS + len(_AFTER)
PREFIX_CHARS = ID_CHARS - NUMBER_CHARS
_RANDOM_CHARS = 8  # at the end of a prefix: one word for a quick comparison
_HEX = np.full(256, -1, np.int64)
_HEX[np.frombuffer(b"0123456789ABCDEF", np.uint8)] = np.arange(16)
_POWERS = 16 ** np.arange(NUMBER_CHARS - 1, -1, -1)
_NEXT_STEP = "Compare the broker's store with a copy of it; the batch cannot be finished before the queue can be read."


@dataclass(frozen=True, slots=True)
class FoundRows:
    """The first `rows` rows of a queue are stored, each once. `damaged` are the queue offsets of torn copies.

    With a reason in `stuck` the queue cannot be finished, and `rows` counts what was recognised.
    """

    rows: int
    damaged: tuple[int, ...] = ()
    stuck: str | None = None


@dataclass(frozen=True, slots=True)
class _Sightings:
    """Rows with ids of the batch in the order of the queue.

    `records` are their indices among the records that were pulled together. `are_cut` says which end with a zero byte.
    """

    records: NDArray[np.intp]
    prefixes: NDArray[np.bytes_]
    numbers: NDArray[np.int64]
    offsets: NDArray[np.int64]
    are_cut: NDArray[np.bool_]

    def take(self, rows: NDArray[np.bool_] | slice) -> "_Sightings":
        """Return some of the rows."""
        return _Sightings(*(getattr(self, name)[rows] for name in _COLUMNS))

    def followed_by(self, others: "_Sightings") -> "_Sightings":
        """Return these rows and then others."""
        return _Sightings(*(np.append(getattr(self, name), getattr(others, name)) for name in _COLUMNS))


_COLUMNS = ("records", "prefixes", "numbers", "offsets", "are_cut")


class RowSearch:
    """The search for the rows of a batch in one queue.

    `queue` has the cluster's name of the topic. `runs` are the runs for the queue in the order of the intent. Give all
    messages of the queue from its floor to its end to `add`, in order, or call `note_gap` where some are missing. Then
    `judge`, with the bytes of the runs that `needed_runs` names.
    """

    def __init__(self, queue: QueueKey, runs: Sequence[StagedRun]) -> None:
        self.queue, self.runs = queue, list(runs)
        assert runs, queue
        assert all(len(run.first_id) == ID_CHARS and run.rows > 0 for run in runs), queue
        self._firsts = [int(run.first_id[-NUMBER_CHARS:], 16) for run in runs]
        self._prefixes = np.array([run.first_id[:PREFIX_CHARS] for run in runs], f"S{PREFIX_CHARS}")
        self._own = np.unique(self._prefixes)
        randoms = [run.first_id[PREFIX_CHARS - _RANDOM_CHARS : PREFIX_CHARS].encode() for run in runs]
        self._words = np.unique(np.frombuffer(b"".join(randoms), "<u8"))
        self.rows = 0  # found in order and counted
        self._run = 0  # the number of the run that the next row belongs to
        self._in_run: list[NDArray[np.int64]] = []  # the numbers of the rows found of it
        self._last: Record | None = None  # the last row found
        self._waiting: _Sightings | None = None  # the same row, unless it was counted
        self._cut: dict[int, Record] = {}  # rows found that end with a zero byte, by their number in the queue
        self._keyless: list[Record] = []  # after the last row: records that end with a zero byte and have no whole id
        self._damaged: list[int] = []
        self._gap: int | None = None  # the first queue offset that was missing
        self._fault: str | None = None

    @property
    def count(self) -> int:
        """How many rows the queue gets."""
        return sum(run.rows for run in self.runs)

    def note_gap(self, offset: int) -> None:
        """Note that messages from the queue offset `offset` are missing."""
        if self._gap is None:
            self._gap = offset

    def add(self, pulled: Sequence[Pulled]) -> None:
        """Look at the messages of adjacent answers without a filter.

        Raises DamageError if what came is not made of records of the queue in their order.
        """
        data = b"".join([part.body for part in pulled])
        ends = np.cumsum([len(part.body) for part in pulled])
        try:
            positions = find_records(data, np.append(0, ends[:-1]), ends)
            record_ends = np.append(positions[1:], len(data))
            whole = WholeRecords.of(np.frombuffer(data, np.uint8), positions, record_ends)
        except (NotARecordError, NotWholeError) as error:
            raise self._damage(pulled, "records", "complete records", "other bytes") from error
        offsets = whole.field("queue_offset").astype(np.int64)
        self._check_places(pulled, whole, offsets)
        text_sizes = record_ends - whole.text_begins
        rows = self._find_rows(whole, text_sizes)
        are_cut = (whole.data[record_ends - 1] == 0) & (text_sizes > 0)
        if len(rows) and self._fault is None:
            for number, at in self._follow(self._sight(whole, rows, offsets, are_cut)).items():
                record = self._last if at < 0 else _decode(data, positions, at)
                assert record is not None, number
                self._cut[number] = record
            self._last, self._keyless = _decode(data, positions, int(rows[-1])), []
        for at in np.setdiff1d(np.flatnonzero(are_cut), rows).tolist():
            if not len(rows) or at > rows[-1]:
                record = _decode(data, positions, at)
                if _BEFORE.startswith(_written(record)[: len(_BEFORE)]):
                    self._keyless.append(record)

    def _check_places(self, pulled: Sequence[Pulled], whole: WholeRecords, offsets: NDArray[np.int64]) -> None:
        """Check topic, queue and order of the records, and note a gap between them."""
        are_of = whole.are_of(self.queue.topic, self.queue.queue_id)
        if not are_of.all():
            at = int(offsets[int(np.argmin(are_of))])
            raise self._damage(pulled, "topic and queue", str(self.queue), f"another one, at queue offset {at}")
        begin, end = pulled[0].offset, pulled[-1].next_offset
        expected = np.append(begin, offsets[:-1] + 1)
        if (offsets < expected).any() or offsets[-1] >= end:
            found = f"{offsets[0]} to {offsets[-1]}"
            raise self._damage(pulled, "queue offsets", f"ascending offsets in [{begin}, {end})", found)
        if (offsets != expected).any():
            self.note_gap(int(expected[int(np.argmax(offsets != expected))]))
        elif offsets[-1] + 1 != end:
            self.note_gap(int(offsets[-1]) + 1)

    def _damage(self, pulled: Sequence[Pulled], what: str, expected: str, found: str) -> DamageError:
        path = f"the answers of broker {self.queue.broker} for [{pulled[0].offset}, {pulled[-1].next_offset}) of queue "
        return DamageError(what, path + str(self.queue), 0, expected, found, _NEXT_STEP)

    def _find_rows(self, whole: WholeRecords, text_sizes: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the indices of the records whose first property is an id with one of our prefixes."""
        data, begins = whole.data, whole.text_begins
        rows = np.flatnonzero(text_sizes >= _KEY_BYTES)
        words = gather_bytes(data, begins[rows] + len(_BEFORE) + PREFIX_CHARS - _RANDOM_CHARS, _RANDOM_CHARS)
        rows = rows[_are_among(self._words, words.view("<u8"))]
        keys = _as_matrix(data, begins[rows], _KEY_BYTES)
        is_key = (keys[:, : len(_BEFORE)] == np.frombuffer(_BEFORE, np.uint8)).all(axis=1)
        is_key &= keys[:, -len(_AFTER)] == _AFTER[0]
        is_key &= _are_among(self._own, _texts(keys[:, len(_BEFORE) : len(_BEFORE) + PREFIX_CHARS]))
        found: NDArray[np.intp] = rows[is_key]
        return found

    def _sight(
        self,
        whole: WholeRecords,
        rows: NDArray[np.intp],
        offsets: NDArray[np.int64],
        are_cut: NDArray[np.bool_],
    ) -> _Sightings:
        ids = _as_matrix(whole.data, whole.text_begins[rows] + len(_BEFORE), ID_CHARS)
        digits = _HEX[ids[:, PREFIX_CHARS:]]
        numbers = np.where((digits < 0).any(axis=1), -1, digits @ _POWERS)
        return _Sightings(rows, _texts(ids[:, :PREFIX_CHARS]), numbers, offsets[rows], are_cut[rows])

    # Order.

    def _follow(self, found: _Sightings) -> dict[int, int]:
        """Count all rows except the last one, which a whole copy may follow.

        Return the records of those that end with a zero byte, by the number of the row in the queue. -1 is the record
        of the last row before.
        """
        if self._waiting is not None:
            found = self._waiting.followed_by(found)
        is_torn = np.append(
            found.are_cut[:-1]
            & (found.numbers[1:] == found.numbers[:-1])
            & (found.prefixes[1:] == found.prefixes[:-1]),
            [False],
        )
        self._damaged += found.offsets[is_torn].tolist()
        found = found.take(~is_torn)
        self._waiting = replace(found.take(slice(-1, None)), records=np.array([-1]))
        found, first = found.take(slice(-1)), self.rows
        self._count_next(found)
        at = np.flatnonzero(found.are_cut[: self.rows - first])
        return dict(zip((at + first).tolist(), found.records[at].tolist(), strict=True))

    def _count_last(self) -> None:
        """Count the last row, because no other one follows."""
        if self._waiting is not None and self._fault is None:
            waiting, self._waiting = self._waiting, None
            self._count_next(waiting)

    def _count_next(self, found: _Sightings) -> None:
        """Count the rows that come next in the batch, up to the first other one, which is a fault."""
        begin, count = 0, len(found.numbers)
        while begin < count:
            if self._run == len(self.runs):
                self._refuse(found, begin, "no row, because all rows were found before")
                return
            run, known = self.runs[self._run], sum(map(len, self._in_run))
            part = slice(begin, min(begin + run.rows - known, count))
            numbers = found.numbers[part]
            least = self._firsts[self._run] if not known else int(self._in_run[-1][-1]) + 1
            is_next = (found.prefixes[part] == self._prefixes[self._run]) & (np.diff(numbers, prepend=least - 1) > 0)
            is_next &= numbers < self._end_of(self._run)
            if not known:
                is_next[0] &= numbers[0] == least
            good = len(numbers) if is_next.all() else int(np.argmin(is_next))
            self.rows += good
            if good < len(numbers):
                self._refuse(found, begin + good, f"row {known + good} of the run that begins with {run.first_id}")
                return
            self._in_run.append(numbers)
            if known + good == run.rows:
                self._run, self._in_run = self._run + 1, []
            begin = part.stop

    def _end_of(self, number: int) -> int:
        """Return the number of the first id that belongs to a later run of the same attempt, as far as it is known."""
        following = number + 1
        if following < len(self.runs) and self._prefixes[following] == self._prefixes[number]:
            return self._firsts[following]
        return int(16**NUMBER_CHARS)

    def _refuse(self, found: _Sightings, at: int, expected: str) -> None:
        text = f"{found.prefixes[at].decode()}{found.numbers[at]:012X}"
        self._fault = (
            f"the rows of the batch in the queue are not its first rows in order: the message at queue offset "
            f"{found.offsets[at]} is the row {text}; expected {expected}"
        )

    # Judgement.

    def needed_runs(self) -> tuple[int, ...]:
        """Return the numbers of the runs whose bytes `judge` needs.

        These are the runs of the last row found and of the next one, and of each row that ends with a zero byte.
        """
        self._count_last()
        numbers = {self._place_of(row)[0] for row in (self.rows - 1, self.rows, *self._cut)}
        return tuple(sorted(numbers - {-1}))

    def _place_of(self, row: int) -> tuple[int, int]:
        """Return the number of the run of a row, and its index in it. (-1, 0) if the queue has no such row."""
        if row >= 0:
            for number, run in enumerate(self.runs):
                if row < run.rows:
                    return number, row
                row -= run.rows
        return -1, 0

    def judge(self, data: Mapping[int, memoryview | NoBlob]) -> FoundRows:
        """Return which rows are stored. `data` has the bytes of each run in `needed_runs`, by its number."""
        self._count_last()
        found = FoundRows(self.rows, tuple(self._damaged))
        if self._gap is not None and self.rows < self.count:
            first = f"; {self._fault}" if self._fault else ""
            return self._stuck(
                found, f"messages from queue offset {self._gap} have expired while rows are missing{first}"
            )
        if self._fault is not None:
            return self._stuck(found, self._fault)
        items = {
            number: None if isinstance(one, NoBlob) else read_items(self.runs[number], one)
            for number, one in data.items()
        }
        fault = self._compare_ids(items)
        if fault is not None:
            return self._stuck(found, fault)
        found = self._judge_last(self._judge_cut(found, items), items)
        if found.stuck is not None or self.rows == self.count:
            return found
        number, row = self._place_of(self.rows)
        one, rows = data[number], items[number]
        if isinstance(one, NoBlob):
            return self._stuck(found, one.reason)
        assert rows is not None
        torn = tuple(record.queue_offset for record in self._keyless if may_be_torn(record, rows[row]))
        return FoundRows(found.rows, found.damaged + torn)

    def _stuck(self, found: FoundRows, reason: str) -> FoundRows:
        return FoundRows(found.rows, found.damaged, reason)

    def _compare_ids(self, items: Mapping[int, Sequence[Item] | None]) -> str | None:
        """Compare the rows found of a part of a run with those in its blob. Return the fault, or None."""
        rows = items.get(self._run)
        if not self._in_run or rows is None:
            return None  # rows are missing, so a blob that is gone is an error anyway
        numbers = np.concatenate(self._in_run).tolist()
        for number, item in zip(numbers, rows, strict=False):
            text = f"{self.runs[self._run].first_id[:PREFIX_CHARS]}{number:012X}"
            if not item.properties.startswith(_BEFORE + text.encode() + _AFTER):
                own = item.properties[len(_BEFORE) : len(_BEFORE) + ID_CHARS].decode("ascii", "replace")
                return (
                    "the rows of the batch in the queue are not its first rows in order: row "
                    f"{text} was found; expected the row {own}"
                )
        return None

    def _judge_cut(self, found: FoundRows, items: Mapping[int, Sequence[Item] | None]) -> FoundRows:
        """Compare rows that end with a zero byte, except the last one, with their items. They have no whole copy."""
        torn = []
        for row, record in self._cut.items():
            number, index = self._place_of(row)
            rows = items[number]
            if rows is None or not is_stored(record, rows[index]):
                torn.append(record.queue_offset)
        return FoundRows(found.rows, tuple(sorted([*found.damaged, *torn])))

    def _judge_last(self, found: FoundRows, items: Mapping[int, Sequence[Item] | None]) -> FoundRows:
        """Compare the last row found with its item. Without its blob, a zero byte at its end shows that it is torn."""
        last = self._last
        if last is None:
            return found
        number, row = self._place_of(self.rows - 1)
        rows = items[number]
        if rows is None:
            is_torn = _is_cut(last)
        elif is_stored(last, rows[row]):
            return found
        else:
            is_torn = _is_cut(last) and is_beginning(last, rows[row])
        if is_torn:
            return FoundRows(found.rows - 1, (*found.damaged, last.queue_offset))
        if rows is None and last.crc_matches:
            return found
        return self._stuck(
            found,
            f"the message at queue offset {last.queue_offset} has the id of row {_id_of(last).decode()}, and another "
            "content; expected the row as it was staged",
        )


def is_stored(record: Record, item: Item) -> bool:
    """Return whether a record has flag, body and all properties of an item, followed by those that a broker adds."""
    if (record.flag, record.body) != (item.flag, item.body):
        return False
    return record.properties == item.properties or record.properties.startswith(_ended(item.properties))


def is_beginning(record: Record, item: Item) -> bool:
    """Return whether a record has flag and body of an item, and a beginning of its properties in the place of all."""
    return (
        (record.flag, record.body) == (item.flag, item.body)
        and len(record.properties) >= len(item.properties)
        and _ended(item.properties).startswith(_written(record))
    )


def may_be_torn(record: Record, item: Item) -> bool:
    """Return whether a record that ends with a zero byte may be what a kill has left of an item, without its id."""
    return len(_written(record)) < _KEY_BYTES and is_beginning(record, item)


def _ended(properties: bytes) -> bytes:
    """Return the properties of an item as they are before others: a separator follows the last one."""
    return properties if properties.endswith(_AFTER) else properties + _AFTER


def _written(record: Record) -> bytes:
    """Return the properties of a record without the zeros at their end."""
    return record.properties.rstrip(b"\0")


def _is_cut(record: Record) -> bool:
    return record.properties.endswith(b"\0")


def _id_of(record: Record) -> bytes:
    return record.properties[len(_BEFORE) : len(_BEFORE) + ID_CHARS]


def _decode(data: bytes, positions: Positions, number: int) -> Record:
    record = decode_record(memoryview(data)[int(positions[number]) :])
    assert isinstance(record, Record), record
    return record


def _are_among(known: NDArray[Any], values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each value whether it is one of `known`, which ascend."""
    are_known: NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values
    return are_known


def _as_matrix(data: Bytes, begins: Positions, size: int) -> Bytes:
    """Return the `size` bytes at each position, one row for each."""
    return gather_bytes(data, begins, size).view(np.uint8).reshape(len(begins), size)


def _texts(columns: Bytes) -> NDArray[np.bytes_]:
    """Return the rows of a matrix of bytes as an array of texts."""
    texts: NDArray[np.bytes_] = np.ascontiguousarray(columns).view(f"S{columns.shape[1]}")[:, 0]
    return texts
