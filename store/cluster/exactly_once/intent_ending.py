"""The end of an open intent at the demand of an operator: it is finished, or its missing rows are given up.

Both take the intent over in sessions of their own, as the next commit of the query would. Only `skip_intent` gives rows
up: first it publishes what can be published, and then it needs the number of the missing rows as confirmation.

A batch is *lost* if the rows of the ledger have expired that would tell what became of it. Nothing of it can be found
or published any more. A row `done` with an unknown digest ends it.
"""

from dataclasses import replace
from typing import Literal, TypeAlias

from rmq_spark.store.cluster.client import now_ms
from rmq_spark.store.cluster.exactly_once.commit_session import SkippedRows
from rmq_spark.store.cluster.exactly_once.ledger import Ledger, LedgerView
from rmq_spark.store.cluster.exactly_once.ledger_rows import Done, LedgerState, OpenIntent, batch_of, encode_row
from rmq_spark.store.cluster.exactly_once.marks import Mark, lost_batch, read_from_done
from rmq_spark.store.cluster.exactly_once.session_attempts import SessionAttempts
from rmq_spark.store.cluster.exactly_once.sink_place import SinkPlace
from rmq_spark.store.errors import IntentStuckError, NotFoundError
from rmq_spark.store.model import CommitKey

UNKNOWN: Literal["unknown"] = "unknown"  # the number of missing rows of a lost batch
Missing: TypeAlias = int | Literal["unknown"] | None


class IntentEnding:
    """Ends the open intent of one query, or of one plain batch write. `query_id` is its id. For one thread.

    With `batch_id`, only the intent of this batch is ended.
    """

    def __init__(self, place: SinkPlace, query_id: str, batch_id: int | None = None) -> None:
        self._place, self._query_id, self._batch_id = place, query_id, batch_id
        self._attempts = SessionAttempts(place, f"the open intent of {query_id}")
        self._ledger = Ledger(place.client, place.terms.ledger_topic, self._attempts.keep_alive)
        self._key: CommitKey | None = None  # of the intent that was found open

    def finish(self) -> CommitKey:
        """Store all rows of the intent, and record it as done. Return its batch.

        Raises NotFoundError if the query has no open intent or another one, IntentStuckError if it cannot be finished,
        BackendUnavailableError if nothing moved for brokerDownTimeout, and the errors of brokers that refuse.
        """
        return self._attempts.run(self._try_to_finish)

    def skip(self, missing: Missing) -> SkippedRows:
        """Publish what can be published of the intent, and give up the rest. Return what became of its rows.

        `missing` is the number of rows that is accepted as lost, "unknown" for a lost batch, or None. Raises
        IntentStuckError if it is another one; the error has the number, and the intent stays open. Raises the errors of
        `finish`.
        """
        return self._attempts.run(lambda: self._try_to_skip(missing))

    def _try_to_finish(self) -> CommitKey | None:
        """Run one session. Return the batch if it is done by now, None if another session must look again."""
        view = self._read()
        opened = self._find_open(view, view.state())
        if opened is None:
            return self._key
        with self._attempts.open_session(self._ledger, opened.intent.key) as session:
            session.take_over(view, opened)
        return None

    def _try_to_skip(self, missing: Missing) -> SkippedRows | None:
        """Run one session. Return the end of the batch, or None if another session must look again."""
        view = self._read()
        try:
            state = view.state()
        except IntentStuckError:
            if missing != UNKNOWN:
                raise
            return self._give_up_lost(view)
        opened = self._find_open(view, state)
        if opened is None:
            assert self._key is not None
            return SkippedRows(self._key)
        with self._attempts.open_session(self._ledger, opened.intent.key) as session:
            return session.skip(view, opened, missing if isinstance(missing, int) else None)

    def _find_open(self, view: LedgerView, state: LedgerState) -> OpenIntent | None:
        """Return the open intent that this call ends, or None if that is done by now.

        Raises NotFoundError if there is none, or if the caller wants that of another batch.
        """
        self._attempts.note_state(state)
        opened = state.open
        if self._key is not None and (opened is None or opened.intent.key != self._key):
            return None
        self._ledger.repair_marks(view, state)
        if opened is None:
            last = "no row" if state.last is None else f"batch {state.last.batch_id} as its last one, which is done,"
            raise NotFoundError(
                f"query {self._query_id} has no open intent: found {last} in the ledger; expected a batch that was "
                "begun and is not done. `rmq intents` lists them."
            )
        self._note_key(opened.intent.key)
        return opened

    def _read(self) -> LedgerView:
        """Read the rows of the query. If they are of a plain batch write, its marks do not matter."""
        view = self._ledger.read(CommitKey(self._query_id, 0))
        is_plain = any(one.row.key.batch_id is None for one in view.rows)
        return self._ledger.read(CommitKey(self._query_id)) if is_plain else view

    def _give_up_lost(self, view: LedgerView) -> SkippedRows | None:
        """End the lost batch of a query. Return None if another session has finished it.

        An intent of it may be left. Nobody can know whether it counts, so none of its rows is published. But its owners
        may live and still publish: they are fenced first.
        """
        left = read_from_done(view.marks, view.rows)
        key = CommitKey(self._query_id, lost_batch(view.marks, left))
        self._note_key(key)
        with self._attempts.open_session(self._ledger, key) as session:
            if left.open is not None:
                read = replace(view, begin=view.end, rows=(), has_expired=False, base=left)
                if not session.fence(read, left.open):
                    return None
            done = Done(key, session.id, now_ms(), 0, None)
            self._ledger.append(done, encode_row(done))
        for mark in (Mark.BEGUN, Mark.DONE):
            known = view.marks.begun if mark is Mark.BEGUN else view.marks.done
            if (known or 0) <= batch_of(key):
                self._ledger.store_mark(self._query_id, mark, batch_of(key) + 1)
        return SkippedRows(key, is_lost=True)

    def _note_key(self, key: CommitKey) -> None:
        """Note the batch that this call ends. Raises NotFoundError if the caller wants another one."""
        if self._batch_id is not None and key.batch_id != self._batch_id:
            raise NotFoundError(
                f"batch {self._batch_id} of query {self._query_id} is not open any more: found batch {key.batch_id}; "
                "expected the batch whose loss was accepted. Nothing was given up. Look at the open batch first: rmq "
                "intents."
            )
        self._key = key
