"""The ledger on its broker: finding it, reading the rows and marks of a query, and writing them.

The ledger is a topic that exists on one broker only. This module never creates it, and takes care that no broker does:
a second ledger would hide an unfinished batch, whose rows would then be written twice.

| question | rule | reason |
| --- | --- | --- |
| which broker? | all name servers are asked; a second broker is an error | each knows only the brokers that reach it |
| is it that broker? | each new connection is asked for the topic's queues, with the broker's name | addresses move |
| whose rows? | the broker filters by a tag, and the query of each row is compared | brokers compare hashes of tags |
| have rows expired? | after reading, one message is pulled at the offset where reading began | min offsets may be old |
| is a row written? | the same bytes are sent again until the answer is 0 | others will act upon the row |
| what does my row mean? | the ledger is read through it | what was read before may be out of date |

Source: PullMessageProcessor, DefaultMessageStore#getMessage, ConsumerManageProcessor (4.9, 5.3).
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from rmq_spark.store.cluster.answer_rule import UnknownGroupError
from rmq_spark.store.cluster.client import ClusterClient, ask_master, monotonic_ms, now_ms
from rmq_spark.store.cluster.codes import GetMessageStatus, PullStatus, ResponseCode
from rmq_spark.store.cluster.exactly_once.ledger_location import LedgerLocation, find_ledger, prove_broker
from rmq_spark.store.cluster.exactly_once.ledger_messages import (
    AppendRequest,
    half_stored,
    is_row_at,
    not_stored,
    read_rows,
)
from rmq_spark.store.cluster.exactly_once.ledger_rows import (
    Done,
    LedgerRow,
    LedgerState,
    PlacedRow,
    encode_row,
    tag_of,
)
from rmq_spark.store.cluster.exactly_once.marks import (
    Mark,
    Marks,
    find_old_marks,
    interpret,
    marks_group,
    reading_group,
)
from rmq_spark.store.cluster.group_requests import CommitOffsetRequest, CommittedOffsetRequest, CreateGroupRequest
from rmq_spark.store.cluster.member_requests import HeartbeatRequest, UnregisterRequest
from rmq_spark.store.cluster.namespace import wrap_name
from rmq_spark.store.cluster.requests import PullRequest, Request
from rmq_spark.store.cluster.responses import PullResponse, Response
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BatchConflictError,
    BrokerError,
    NoPermissionError,
    NotFoundError,
    RmqError,
    UnknownOutcomeError,
)
from rmq_spark.store.format.config_json import GroupConfig
from rmq_spark.store.model import CommitKey, QueueKey

_LOG = logging.getLogger("rmq_spark")
AnswerT = TypeVar("AnswerT")
ResponseT = TypeVar("ResponseT", bound=Response)

PATIENCE = 10  # times the request timeout: how long a row is sent again, and how long its reading is tried
_PULL_MESSAGES = 32
_RESETS_MAX = 3  # an administrator's reset of the reading group is reported once for each of its queues
_FIRST_PAUSE_MS, _LAST_PAUSE_MS = 1.0, 200.0


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The rows of a query at the ledger offsets [begin, end), as a session has read them, and the marks before them.

    `has_expired` says that a row at or above `begin` has expired, or that this is not known. `base` is what was
    believed of all rows before `begin`. It is None if reading began at the mark *from*.
    """

    key: CommitKey
    marks: Marks
    begin: int
    end: int
    rows: tuple[PlacedRow, ...]
    has_expired: bool
    base: LedgerState | None = None

    def state(self) -> LedgerState:
        """Return what the rows mean. Raises the errors of `interpret`."""
        if self.base is None:
            return interpret(self.key.query_id, self.marks, self.rows, has_expired=self.has_expired)
        if self.has_expired:
            raise BackendUnavailableError(
                f"the ledger cannot be read through a row of {self.key}: rows from ledger offset {self.begin} on have "
                "expired since the last look; expected a look that is newer than the retention. Repeat the write."
            )
        return self.base.apply_all(self.rows)

    def state_before(self, row: LedgerRow) -> LedgerState:
        """Return what the rows before `row` mean, which is among the rows of a view that `read_through` returned."""
        state = self.base or LedgerState()
        for offset, one in self.rows:
            if one == row:
                break
            state = state.apply(one, offset)
        return state


class _Page(NamedTuple):
    """Rows that one pull has found, and how far the ledger was read. `is_gone`: a file was missing at its begin."""

    rows: list[PlacedRow]
    end: int
    is_gone: bool


class Ledger:
    """The ledger topic of a cluster. For one thread.

    `topic` is without the namespace. `on_wait` is called before each pause, so that the caller can keep its own
    connections alive; what it raises ends the call. Every method but `find` finds the broker if that is not known, and
    again if it does not answer. Raises the errors of `find` then, and those of refused requests.
    """

    def __init__(self, client: ClusterClient, topic: str, on_wait: Callable[[], None] = lambda: None) -> None:
        self._client, self._topic, self._on_wait = client, topic, on_wait
        address = client.address
        self._namespace, self._timeout_ms = address.namespace, address.request_timeout_ms
        self._stored_topic = wrap_name(self._namespace, topic)
        self._reading_group = wrap_name(self._namespace, reading_group(address.pull_group))
        self._location: LedgerLocation | None = None
        self._proved = 0  # the number of the connection on which the broker has told its name

    def find(self) -> LedgerLocation:
        """Find the ledger's broker by new routes, and return where it is.

        Raises BackendUnavailableError if no name server lists it with a master, or if it does not answer: its broker
        is away, so the caller may wait. Raises BrokerError if there are two, and NoPermissionError if the topic cannot
        be read or written.
        """
        known = None if self._location is None else self._location.broker
        self._location, self._proved = None, 0
        location = find_ledger(self._client, self._topic, known)
        self._prove(location)
        self._location = location
        return location

    def end(self) -> int:
        """Return the ledger offset that the next row gets, or a lower one: rows of the last moment may be missing."""
        queues = self._ask(lambda location: prove_broker(self._client, self._stored_topic, location))
        return queues.get(0, 0)

    def read(self, key: CommitKey, begin: int | None = None) -> LedgerView:
        """Read the marks and the rows of the query of `key`.

        A plain batch write has no marks; its rows are read from `begin` on, which is the `end` when the write began.
        Raises StoreError if a newer version of rmq-spark wrote one of the rows, and BatchConflictError if the ledger
        ends before it should.
        """
        assert begin is None or key.batch_id is None, key
        if key.batch_id is None:
            return self._read(key, Marks(begin, is_kept=False), begin or 0, None)
        marks = self.read_marks(key.query_id)
        return self._read(key, marks, marks.read_begin, None)

    def read_all(self) -> Iterator[PlacedRow]:
        """Yield the rows of all queries, in their order. Raises the errors of `read`."""
        for page in self._pull_pages(None, 0):
            yield from page.rows

    def read_on(self, view: LedgerView) -> LedgerView:
        """Read the rows that came after a view. Raises the errors of `read`, and those of `LedgerView.state`."""
        return self._read(view.key, view.marks, view.end, view.state())

    def read_through(self, view: LedgerView, row: LedgerRow) -> LedgerView:
        """Read from a view on until `row` is among the rows, which the caller has appended after that view.

        The first copy of a row decides what it means. Raises BackendUnavailableError if the broker does not show it in
        time, and the errors of `read_on`.
        """
        until_ms, pause_ms = monotonic_ms() + PATIENCE * self._timeout_ms, _FIRST_PAUSE_MS
        while True:
            view = self.read_on(view)
            if any(one.row == row for one in view.rows):
                return view
            if monotonic_ms() >= until_ms:
                raise BackendUnavailableError(
                    f"the ledger does not show a row of {row.key} that its broker has stored: found none up to ledger "
                    f"offset {view.end} within {PATIENCE * self._timeout_ms} ms; expected the row. Check the log of "
                    "the broker. Repeat the write."
                )
            pause_ms = self._pause(pause_ms)

    def restate(self, view: LedgerView, session: str) -> LedgerView:
        """Write the last batch of a view again, after rows have expired, and let the mark *from* name this row.

        Call it before a batch begins. Otherwise the mark *from* would still name an expired row when the intent of the
        batch is in the ledger, and a session that died before it stored the mark would leave an intent that nobody may
        believe. Returns a later view, in which another session may have begun the batch. Raises the errors of `append`
        and `read_through`.
        """
        last = view.state().last
        if last is None:
            self.store_mark(view.key.query_id, Mark.FROM, view.end)
            return replace(view, marks=view.marks.with_mark(Mark.FROM, view.end))
        key = CommitKey(view.key.query_id, last.batch_id)
        row = Done(key, session, now_ms(), last.rows or 0, last.digest)
        self.append(row, encode_row(row))
        view = self.read_through(view, row)
        place = next(offset for offset, one in view.rows if one == row)
        state = view.state_before(row).apply(row, place)
        if state.open is None and state.last is not None and state.last.batch_id == last.batch_id:
            # The row counts: a session that reads from here learns the last batch, and that no intent is open.
            self.store_mark(view.key.query_id, Mark.FROM, place)
            return replace(view, marks=view.marks.with_mark(Mark.FROM, place))
        return view

    def append(self, row: LedgerRow, encoded: bytes) -> None:
        """Store a row whose body is `encoded` (`encode_row`), and return when the broker has answered 0.

        Codes 10, 11 and 12 are not enough, because others will act upon the row: a row that exists only on a master
        whose slave takes over would be one that some sessions have seen and others never see. After any other result
        the same bytes are sent again, because a row that is stored twice does no harm.

        Raises BrokerError after ten times the request timeout if the last answer was such a code, UnknownOutcomeError
        if the row may be stored nevertheless, and BackendUnavailableError if it is not.
        """
        until_ms, pause_ms = monotonic_ms() + PATIENCE * self._timeout_ms, _FIRST_PAUSE_MS
        request: AppendRequest | None = None
        last: RmqError | None = None
        may_be_stored = False
        while True:
            try:
                location = self._find_proved(renews=last is not None)
                if request is None:
                    queue = QueueKey(self._stored_topic, 0, location.broker)
                    request = AppendRequest.of_row(queue, row, encoded, now_ms())
                status = self._client.call(location.address, request).status
                if status == ResponseCode.SUCCESS:
                    return
                may_be_stored = True
                last = half_stored(row, status, PATIENCE * self._timeout_ms)
            except (BackendUnavailableError, NotFoundError) as error:
                # Not found: another broker has the address, and `find` tells where the ledger's is.
                last = error
            except UnknownOutcomeError as error:
                may_be_stored, last = True, error
            if monotonic_ms() >= until_ms:
                raise last if isinstance(last, BrokerError) else not_stored(row, last, may_be_stored=may_be_stored)
            pause_ms = self._pause(pause_ms)

    def read_marks(self, query_id: str) -> Marks:
        """Return the marks of a query."""
        return Marks.of_offsets(self._ask(lambda location: self._read_marks(location, query_id, tuple(Mark))))

    def store_mark(self, query_id: str, mark: Mark, value: int) -> None:
        """Store a mark. A group that does not exist is created.

        *Begun* is read back, because only this mark keeps a batch from being written again after its intent has
        expired. Raises BrokerError if it was not stored: then an administrator has reset the group, and a broker of 5.x
        drops marks though it answers 0.
        """
        is_reset = self._ask(lambda location: self._store_mark(location, query_id, mark, value))
        if mark is not Mark.BEGUN:
            return
        found = self._ask(lambda location: self._read_marks(location, query_id, (mark,)))[mark]
        # A larger one is that of a later batch, which another session has begun: the ledger tells what this one may do.
        if found is None or found < value or (is_reset and found != value):
            why = ' (the broker answered: "Offset has been previously reset")' if is_reset else ""
            raise BrokerError(
                ResponseCode.SUCCESS,
                f"the mark of batch {value - 1} of query {query_id} was not stored: the offset of group "
                f"{marks_group(query_id)} in queue {Mark.BEGUN:d} of topic {self._topic} is {found}{why}; expected "
                f"{value}. This attempt has written nothing. Nobody may reset or delete the offsets of this group: "
                "look whether a batch is open (rmq intents) and finish it, compare the target topics with the "
                "checkpoint, and start the query with a new checkpoint.",
            )

    def repair_marks(self, view: LedgerView, state: LedgerState) -> None:
        """Store the marks again that are older than the rows of a view, which mean `state`.

        Raises BrokerError as `store_mark`, unless a batch is open: to finish it needs its rows only. The next batch
        needs the mark.
        """
        for mark, value in find_old_marks(state, view.marks).items():
            try:
                self.store_mark(view.key.query_id, mark, value)
            except BrokerError as error:
                if state.open is None:
                    raise
                _LOG.warning("rmq: %s is finished without a mark: %s", state.open.intent.key, error)

    # Reading.

    def _read(self, key: CommitKey, marks: Marks, begin: int, base: LedgerState | None) -> LedgerView:
        """Read rows from `begin` on, and then find out whether any has expired.

        In this order: rows expire from the oldest on, so a row that still exists at `begin` after the reading proves
        that no later one had expired.
        """
        until_ms, pause_ms = monotonic_ms() + self._timeout_ms, _FIRST_PAUSE_MS
        while True:
            pages = list(self._pull_pages(key.query_id, begin))
            end = pages[-1].end
            if end >= begin:
                break
            if monotonic_ms() >= until_ms:
                raise BatchConflictError(
                    f"the ledger {self._topic} was replaced: it ends at ledger offset {end}; expected at least "
                    f"{begin}, up to which rows for {key} were read earlier. Compare the target topics with the "
                    "checkpoint, then start the query with a new checkpoint. This attempt has written nothing."
                )
            pause_ms = self._pause(pause_ms)  # a broker that has just started may still be reading its log
        has_expired = begin < end and (pages[0].is_gone or not self._has_row(begin))
        return LedgerView(key, marks, begin, end, tuple(row for page in pages for row in page.rows), has_expired, base)

    def _pull_pages(self, query_id: str | None, begin: int) -> Iterator[_Page]:
        """Yield the rows of a query, or of all, from an offset on."""
        offset, tag = begin, "*" if query_id is None else tag_of(query_id)
        has_entries = False
        while True:
            answer = self._pull(offset, _PULL_MESSAGES, tag)
            rows: list[PlacedRow] = []
            if answer.status is PullStatus.FOUND:
                place = f"queue {self._topic}/0 of broker {self._broker}"
                rows = read_rows(answer.records, self._stored_topic, offset, query_id, place)
            # Files expire from the first one on, and a broker of 4.9 may not know it.
            is_gone = answer.reason == GetMessageStatus.OFFSET_FOUND_NULL
            if is_gone and has_entries:
                raise BackendUnavailableError(
                    f"cannot read the ledger {self._topic}: its broker {self._broker} has no file with the entry at "
                    f"ledger offset {offset} of its queue; expected one. Restart the broker, which repairs its queues, "
                    "and repeat the write."
                )
            if answer.max_offset < begin or (offset >= answer.max_offset and answer.next_offset <= offset):
                yield _Page(rows, answer.max_offset, is_gone)
                return
            if answer.next_offset <= offset:
                raise BackendUnavailableError(
                    f"cannot read the ledger {self._topic}: its broker {self._broker} answered {answer.status.name} "
                    f"{answer.reason} for ledger offset {offset}, with the next offset {answer.next_offset}; expected "
                    "a later one. Repeat the write."
                )
            offset, has_entries = min(answer.next_offset, answer.max_offset), not is_gone
            yield _Page(rows, offset, is_gone)
            if offset >= answer.max_offset:
                return

    def _has_row(self, offset: int) -> bool:
        """Return whether the ledger has a row, of any query, at an offset.

        Only the row itself proves it. The queue's min offset of 4.9 stays too low when all rows have expired, and a
        pull from an expired offset may find later rows.
        """
        answer = self._pull(offset, 1, "*")
        return answer.status is PullStatus.FOUND and is_row_at(answer.records, self._stored_topic, offset)

    def _pull(self, offset: int, max_messages: int, subscription: str) -> PullResponse:
        """Pull messages of the ledger. A reset of the reading group says nothing about the ledger: it is ignored."""
        for _ in range(_RESETS_MAX):
            answer = self._ask(
                lambda location: self._call(
                    location,
                    PullRequest(
                        QueueKey(self._stored_topic, 0, location.broker),
                        offset,
                        max_messages,
                        self._reading_group,
                        subscription,
                    ),
                    self._reading_group,
                )
            )
            if answer.reason != GetMessageStatus.OFFSET_RESET:
                return answer
        raise BackendUnavailableError(
            f"cannot read the ledger {self._topic}: somebody resets the offsets of group {self._reading_group} again "
            "and again; expected no resets. Leave the group alone, and repeat the write."
        )

    # Marks.

    def _read_marks(self, location: LedgerLocation, query_id: str, marks: tuple[Mark, ...]) -> dict[Mark, int | None]:
        group = wrap_name(self._namespace, marks_group(query_id))
        calls = [
            (location.address, CommittedOffsetRequest(group, QueueKey(self._stored_topic, mark, location.broker)))
            for mark in marks
        ]
        found: dict[Mark, int | None] = {}
        for mark, answer in zip(marks, self._client.call_all(calls), strict=True):
            if isinstance(answer, RmqError):
                raise answer
            found[mark] = answer.offset
        return found

    def _store_mark(self, location: LedgerLocation, query_id: str, mark: Mark, value: int) -> bool:
        """Store a mark. Return whether the broker has dropped it."""
        group = wrap_name(self._namespace, marks_group(query_id))
        queue = QueueKey(self._stored_topic, mark, location.broker)
        return self._call(location, CommitOffsetRequest(group, queue, value), group).is_reset

    def _call(self, location: LedgerLocation, request: Request[ResponseT], group: str) -> ResponseT:
        """Send a request in the name of a group, and again after the group was created if the broker does not know it.

        A broker of 5.x accepts no offset of an unknown group, and no pull unless it creates groups by itself.
        """
        try:
            return self._client.call(location.address, request)
        except UnknownGroupError as error:
            try:
                self._create_group(location, group)
            except BackendUnavailableError:
                raise  # the broker may be back soon, and has not refused
            except RmqError as refusal:
                error.add_note(f"rmq: group {group} cannot be created either: {refusal}")
                raise error from None
        return self._client.call(location.address, request)

    def _create_group(self, location: LedgerLocation, group: str) -> None:
        """Create a group: as an administrator, or else by one heartbeat. The group needs no members afterwards."""
        try:
            self._client.call(location.address, CreateGroupRequest(GroupConfig(group)))
        except (NoPermissionError, BrokerError):
            self._client.call(location.address, HeartbeatRequest(group, group, (), now_ms()))
            self._client.call(location.address, UnregisterRequest(group, group))
        _LOG.info("rmq: created group %s at broker %s", group, location.broker)

    # The broker.

    @property
    def _broker(self) -> str:
        return "?" if self._location is None else self._location.broker

    def _ask(self, ask: Callable[[LedgerLocation], AnswerT]) -> AnswerT:
        """Return what `ask` returns for the location of the ledger. Ask again by new routes if it does not answer."""

        def find_address(renews: bool) -> str:
            return self._find_proved(renews=renews).address

        def ask_there(_address: str) -> AnswerT:
            assert self._location is not None, self._topic
            return ask(self._location)

        return ask_master(find_address, ask_there)

    def _find_proved(self, *, renews: bool) -> LedgerLocation:
        """Return where the ledger is, after its broker has told its name on the newest connection."""
        if self._location is None or renews:
            return self.find()
        if self._client.connection_number(self._location.address) != self._proved:
            try:
                self._prove(self._location)
            except BackendUnavailableError:
                return self.find()
        return self._location

    def _prove(self, location: LedgerLocation) -> None:
        prove_broker(self._client, self._stored_topic, location)
        self._proved = self._client.connection_number(location.address)

    def _pause(self, pause_ms: float) -> float:
        """Wait, and return how long to wait the next time."""
        self._on_wait()
        self._client.take_done([], pause_ms)
        return min(2 * pause_ms, _LAST_PAUSE_MS)
