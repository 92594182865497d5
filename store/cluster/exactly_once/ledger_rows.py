"""The rows of the ledger: what each contains, its bytes, and what the rows of one query mean together.

A row is one message in queue 0 of the ledger topic. All rows have one order, and the first intent for a batch counts.
So a row that comes late, twice, or from a session that has ended does no harm: by the rules of `LedgerState.apply` it
is void, or it is the first intent for its batch and counts. No row is ever replaced.

| kind | it says | fields of the JSON, beside `v`, `kind`, `query`, `batch`, `session` and `made` |
| --- | --- | --- |
| intent | which runs of a batch go to which queues | `rows`, `digest`, `stage`, `queues`, `runs` |
| take | a session takes over the open intent of the batch | |
| done | all rows of the batch are stored, or it was skipped | `rows`, `digest`; if skipped `written`, `missing` |

`batch` is null for a plain batch write, whose number is 0. `stage` is the topic of the blobs. It is in the row because
the session that finishes a batch may have another option stageTopic than the session that began it. `queues` is
[[topic, broker, queue id, floor], …], and `runs` is Base64 of zlib of the JSON [[index in `queues`, broker, queue id
and offset of the blob, first byte, bytes, CRC-32, first id, rows], …]. Topics are without the namespace.
"""

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from rmq_spark.store.cluster.answer_fields import shorten_line
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRun
from rmq_spark.store.errors import OptionError, StoreError
from rmq_spark.store.format.side_file import digest_of, digest_text, number_of, parse_json, text_of
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES, CommitKey, QueueKey

VERSION = 1
MAX_INTENT_BYTES = 3 << 20  # an intent is one message, and brokers accept 4 MiB unless configured otherwise
_TAG_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Intent:
    """The runs of a batch in their order, and the floor of each target queue: all rows are at or above it.

    `rows` and `digest` are those of the batch (`StagedRows`). `made_ms` is for people, in ms since the epoch.
    """

    key: CommitKey
    session: str
    made_ms: int
    rows: int
    digest: int
    floors: tuple[tuple[QueueKey, int], ...] = ()
    runs: tuple[StagedRun, ...] = ()


@dataclass(frozen=True, slots=True)
class Take:
    """The session becomes an owner of the open intent of the batch."""

    key: CommitKey
    session: str
    made_ms: int


@dataclass(frozen=True, slots=True)
class Done:
    """The batch is finished, with `rows` rows and their `digest` as in its intent.

    For a batch that was skipped, `written` and `missing` are the numbers of its rows that are stored and that are not.
    It counts only while its session is the newest owner: read the ledger through it. If the intent has expired, these
    numbers are not known, and `digest` is None, which is equal to no other.
    """

    key: CommitKey
    session: str
    made_ms: int
    rows: int
    digest: int | None
    written: int | None = None
    missing: int | None = None


LedgerRow: TypeAlias = Intent | Take | Done


class PlacedRow(NamedTuple):
    """A row at a queue offset of the ledger."""

    offset: int
    row: LedgerRow


def batch_of(key: CommitKey) -> int:
    """Return the number of a batch in the ledger. A plain batch write has one batch, 0."""
    return key.batch_id or 0


def tag_of(query_id: str) -> str:
    """Return the tag of a query's rows, by which brokers filter. Two queries may have one tag, so compare the query."""
    return query_digest(query_id)[:_TAG_DIGITS]


def query_digest(query_id: str) -> str:
    """Return a hash of a query's id, which may be any text, as 64 hex digits."""
    return hashlib.sha256(query_id.encode(errors="surrogatepass")).hexdigest()


# What the rows mean.


@dataclass(frozen=True, slots=True)
class LastBatch:
    """The last batch that is done. `rows` and `digest` are None if it is known only by a mark; they equal no others."""

    batch_id: int
    rows: int | None = None
    digest: int | None = None


@dataclass(frozen=True, slots=True)
class OpenIntent:
    """The intent of a batch that is not done, and the sessions that may publish it: its author, and then takers."""

    intent: Intent
    owners: tuple[str, ...]

    @property
    def batch(self) -> int:
        """The number of the batch."""
        return batch_of(self.intent.key)


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The meaning of the rows of a query: the last batch that is done, and the open intent.

    `counted` is the ledger offset of the newest intent that counts, as far as it was read. It is None before one.
    """

    last: LastBatch | None = None
    open: OpenIntent | None = None
    counted: int | None = None

    def apply(self, row: LedgerRow, offset: int) -> "LedgerState":
        """Return the state after one more row, which is at this ledger offset. A row without effect is void."""
        batch, opened, last = batch_of(row.key), self.open, self.last
        is_open_batch = opened is not None and opened.batch == batch
        if isinstance(row, Intent):
            if opened is not None or (last is not None and batch <= last.batch_id):
                return self  # another intent came first: two intents of one batch must never both be published
            if row.rows == 0:  # nothing will be published, so it needs no row `done`
                return LedgerState(LastBatch(batch, 0, row.digest), None, offset)
            return LedgerState(last, OpenIntent(row, (row.session,)), offset)
        if isinstance(row, Take):
            if opened is None or not is_open_batch or row.session in opened.owners:
                return self
            return replace(self, open=replace(opened, owners=(*opened.owners, row.session)))
        if is_open_batch and row.missing is not None and opened is not None and row.session != opened.owners[-1]:
            return self  # a later owner may be publishing the rows that this session has found missing
        # A `done` of the last batch counts again, because a mark has only the number of that batch.
        if is_open_batch or (opened is None and (last is None or batch >= last.batch_id)):
            return replace(self, last=LastBatch(batch, row.rows, row.digest), open=None)
        return self

    def apply_all(self, rows: Iterable[PlacedRow]) -> "LedgerState":
        """Return the state after these rows, in their order."""
        state = self
        for offset, row in rows:
            state = state.apply(row, offset)
        return state


# The bytes of rows.


def encode_row(row: LedgerRow) -> bytes:
    """Return the body of a row's message: JSON with sorted keys, in ASCII.

    Raises OptionError for an intent of more than 3 MiB, about 150,000 runs. Nothing is promised at this time.
    """
    fields = {
        "v": VERSION,
        "kind": _KINDS[type(row)],
        "query": row.key.query_id,
        "batch": row.key.batch_id,
        "session": row.session,
        "made": row.made_ms,
    }
    if isinstance(row, Intent):
        fields |= {"rows": row.rows, "digest": digest_text(row.digest)} | _plan_fields(row)
    elif isinstance(row, Done):
        fields |= {"rows": row.rows, "digest": None if row.digest is None else digest_text(row.digest)}
        counts = {"written": row.written, "missing": row.missing}
        fields |= {name: count for name, count in counts.items() if count is not None}
    body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    if isinstance(row, Intent) and len(body) > MAX_INTENT_BYTES:
        raise OptionError(
            f"{row.key} is too large for one intent: its {len(row.runs)} runs take {len(body)} bytes in the ledger; "
            f"expected at most {MAX_INTENT_BYTES} bytes, about 150,000 runs. Nothing was written. Write smaller "
            "batches, or fewer partitions, or to fewer queues."
        )
    return body


def decode_row(body: bytes, query_id: str | None = None, place: str = "a row of the ledger") -> LedgerRow | None:
    """Return the row in a body. With `query_id`, return None for a row of another query.

    `place` names the row in errors. Raises StoreError if a newer version wrote the row, or if it is none.
    """
    try:
        fields = parse_json(body)
        if not isinstance(fields, dict):
            raise TypeError("not an object")
        # The query is compared before the version: a row of another query, which has the same tag, must not matter.
        if query_id is not None and text_of(fields, "query") != query_id:
            return None
        version, kind = fields["v"], fields["kind"]
        if version == VERSION and kind in _READERS:
            batch = None if fields["batch"] is None else number_of(fields, "batch")
            key = CommitKey(text_of(fields, "query"), batch)
            return _READERS[kind](fields, key, text_of(fields, "session"), number_of(fields, "made"))
    except (KeyError, TypeError, ValueError, IndexError, binascii.Error, zlib.error) as error:
        shown = shorten_line(bytes(body[:80]).decode("utf-8", "replace"))
        raise StoreError(
            f"{place} cannot be read ({error!r}): found {shown!r}; expected JSON of version {VERSION}. Only rmq-spark "
            "may write to the ledger topic. Find out who sent this message."
        ) from error
    raise StoreError(
        f"{place} has version {shorten_line(repr(version))} and kind {shorten_line(repr(kind))}: found a row of a "
        f"newer rmq-spark; expected version {VERSION} and one of the kinds {', '.join(_READERS)}. Run this query with "
        "the newer one."
    )


def _plan_fields(intent: Intent) -> dict[str, Any]:
    """Return the fields of an intent that say what goes where."""
    numbers = {queue: number for number, (queue, _) in enumerate(intent.floors)}
    stages = sorted({run.stage.topic for run in intent.runs})
    assert len(stages) <= 1, stages
    assert len(numbers) == len(intent.floors), intent.floors
    runs = [
        [
            numbers[run.queue],
            run.stage.broker,
            run.stage.queue_id,
            run.offset,
            run.begin,
            run.size,
            run.crc32,
            run.first_id,
            run.rows,
        ]
        for run in intent.runs
    ]
    packed = zlib.compress(json.dumps(runs, separators=(",", ":")).encode())
    return {
        "stage": stages[0] if stages else "",
        "queues": [[queue.topic, queue.broker, queue.queue_id, floor] for queue, floor in intent.floors],
        "runs": base64.b64encode(packed).decode(),
    }


def _read_intent(fields: dict[str, Any], key: CommitKey, session: str, made_ms: int) -> Intent:
    floors = tuple(
        (QueueKey(_text(topic), _number(queue_id), _text(broker)), _number(floor))
        for topic, broker, queue_id, floor in fields["queues"]
    )
    stage = fields["stage"]
    runs = tuple(
        StagedRun(
            floors[_number(number)][0],
            QueueKey(_text(stage), _number(queue_id), _text(broker)),
            _number(offset),
            _number(begin),
            _number(size),
            _number(crc32),
            _text(first_id),
            _number(rows),
        )
        for number, broker, queue_id, offset, begin, size, crc32, first_id, rows in _unpack(text_of(fields, "runs"))
    )
    return Intent(key, session, made_ms, number_of(fields, "rows"), digest_of(fields), floors, runs)


def _unpack(text: str) -> list[Any]:
    """Return the runs of an intent. The size is bounded, so that a damaged row cannot exhaust the memory."""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_DECOMPRESSED_BYTES)
    if not unpacker.eof:
        raise ValueError(f"runs: more than {MAX_DECOMPRESSED_BYTES} bytes, or incomplete")
    runs = parse_json(data)
    if not isinstance(runs, list):
        raise TypeError("runs: not a list")
    return runs


def _read_take(_fields: dict[str, Any], key: CommitKey, session: str, made_ms: int) -> Take:
    return Take(key, session, made_ms)


def _read_done(fields: dict[str, Any], key: CommitKey, session: str, made_ms: int) -> Done:
    digest = None if fields["digest"] is None else digest_of(fields)
    written, missing = (number_of(fields, name) if name in fields else None for name in ("written", "missing"))
    return Done(key, session, made_ms, number_of(fields, "rows"), digest, written, missing)


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"expected a number of at least 0, found {value!r}")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"expected a text, found {value!r}")
    return value


_KINDS: dict[type[LedgerRow], str] = {Intent: "intent", Take: "take", Done: "done"}
_READERS: dict[str, Callable[[dict[str, Any], CommitKey, str, int], LedgerRow]] = {
    "intent": _read_intent,
    "take": _read_take,
    "done": _read_done,
}
