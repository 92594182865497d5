"""The open intents of all queries, for people: batches that were begun and that no row of the ledger ends.

All rows of the ledger are read for the ids of the queries. Each query is then read by its own rules, with its marks.
Nothing is changed. A batch that is being written at this moment is in the list too: its owner may live.
"""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rmq_spark.store.cluster.exactly_once.ledger import Ledger
from rmq_spark.store.cluster.exactly_once.ledger_rows import LedgerState, OpenIntent
from rmq_spark.store.cluster.exactly_once.marks import lost_batch, marks_group, read_from_done
from rmq_spark.store.cluster.exactly_once.read_back import ReadBack
from rmq_spark.store.cluster.exactly_once.registration import Registration
from rmq_spark.store.cluster.exactly_once.sink_place import SinkPlace
from rmq_spark.store.errors import BatchConflictError, IntentStuckError, RmqError
from rmq_spark.store.model import CommitKey


@dataclass(frozen=True, slots=True)
class ListedIntent:
    """An open intent. `query` is its id for `finish_intent` and `skip_intent`: of a query, or of a plain batch write.

    `batch` is None for a plain batch write. `begun_ms` is in ms since the epoch. `owners` are the sessions that may
    publish rows of it, the newest last. `brokers` are the names of those with target queues.

    `written` and `missing` are how many of its rows are stored and how many are not, or None if they were not counted.
    `problem` says why the batch is not clear, or cannot be finished. If its intent has expired, `begun_ms` and `rows`
    are None.
    """

    query: str
    batch: int | None
    begun_ms: int | None = None
    rows: int | None = None
    owners: tuple[str, ...] = ()
    brokers: tuple[str, ...] = ()
    written: int | None = None
    missing: int | None = None
    problem: str = ""


def list_open_intents(place: SinkPlace, *, counts: bool) -> list[ListedIntent]:
    """Return the open intents of all queries that have a row in the ledger, the oldest first.

    With `counts` the target queues are read from each intent on, to count which of its rows are stored. They are a
    lower bound while an owner lives.

    Raises StoreError if a newer version of rmq-spark wrote a row, and the errors of `Ledger.find`.
    """
    ledger = Ledger(place.client, place.terms.ledger_topic)
    found = [
        _count_rows(place, one) if counts else _listed(one) if isinstance(one, OpenIntent) else one
        for one in _find_open(ledger)
    ]
    return sorted(found, key=lambda one: (one.begun_ms or 0, one.query))


def _find_open(ledger: Ledger) -> Iterator[OpenIntent | ListedIntent]:
    """Yield the open intents, and as `ListedIntent` the queries of which it is not clear what is open."""
    plain: dict[str, LedgerState] = {}  # a plain batch write has no marks, so its rows alone decide
    ended: set[str] = set()
    queries: dict[str, None] = {}
    for offset, row in ledger.read_all():
        query_id = row.key.query_id
        if row.key.batch_id is not None:
            queries[query_id] = None
        elif query_id not in ended:
            plain[query_id] = plain.get(query_id, LedgerState()).apply(row, offset)
            if plain[query_id].last is not None:
                ended.add(query_id)
                del plain[query_id]
    yield from (state.open for state in plain.values() if state.open is not None)
    for query_id in queries:
        view = ledger.read(CommitKey(query_id, 0))
        try:
            opened = view.state().open
        except (IntentStuckError, BatchConflictError) as error:
            is_lost = isinstance(error, IntentStuckError)
            batch = lost_batch(view.marks, read_from_done(view.marks, view.rows)) if is_lost else None
            yield ListedIntent(query_id, batch, problem=str(error))
        else:
            if opened is not None:
                yield opened


def _listed(opened: OpenIntent) -> ListedIntent:
    intent = opened.intent
    return ListedIntent(
        intent.key.query_id,
        intent.key.batch_id,
        intent.made_ms,
        intent.rows,
        opened.owners,
        tuple(sorted({queue.broker for queue, _ in intent.floors})),
    )


def _count_rows(place: SinkPlace, opened: OpenIntent | ListedIntent) -> ListedIntent:
    """Return an open intent with the rows that are stored so far. Nobody is fenced."""
    if isinstance(opened, ListedIntent):
        return opened
    intent, listed = opened.intent, _listed(opened)
    # Not registered, so no session takes this one for an owner.
    with Registration(place.address, marks_group(intent.key.query_id), uuid.uuid4().hex) as calls:
        try:
            calls.reach(place.find_masters({broker: {place.terms.stage_topic} for broker in listed.brokers}))
            calls.reach(place.find_blob_brokers(intent.runs))
            reading = ReadBack(calls, place.client, place.routes.address, place.pull_terms, place.monotonic_ms)
            found = reading.read(intent.runs, dict(intent.floors))
        except RmqError as error:
            return replace(listed, problem=str(error))
    written = sum(found.rows.values())
    problem = "; ".join(f"queue {queue}: {reason}" for queue, reason in found.stuck.items())
    return replace(listed, written=written, missing=intent.rows - written, problem=problem)
