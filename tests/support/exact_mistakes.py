"""Mistakes of the model's list, planted in the real commit: each function plants one."""

from dataclasses import replace
from typing import Any

import pytest

from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.exactly_once.barrier import Barriers
from rmq_spark.store.cluster.exactly_once.blobs import BlobKey
from rmq_spark.store.cluster.exactly_once.commit_session import CommitSession
from rmq_spark.store.cluster.exactly_once.ledger import Ledger
from rmq_spark.store.cluster.exactly_once.ledger_rows import Done, Intent, LedgerState, PlacedRow, encode_row
from rmq_spark.store.cluster.exactly_once.publishing import Publishing
from rmq_spark.store.cluster.exactly_once.read_back import ReadBack
from rmq_spark.store.cluster.exactly_once.registration import Registration
from rmq_spark.store.cluster.exactly_once.taking_over import TakeOver
from rmq_spark.store.cluster.exactly_once.written_rows import WrittenRows
from rmq_spark.store.errors import BackendUnavailableError, UnknownOutcomeError


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """Take over without waiting for earlier owners."""
    patch.setattr(TakeOver, "_await_ends", lambda session, view, *rest: view)


def takers_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """Wait for the author of the intent, and not for those who took it over."""
    real = TakeOver._await_ends
    patch.setattr(
        TakeOver,
        "_await_ends",
        lambda session, view, intent, earlier, brokers: real(
            session, view, intent, earlier & {intent.session}, brokers
        ),
    )


def no_settle(patch: pytest.MonkeyPatch) -> None:
    """Wait for earlier owners, and not for requests that a broker has read already."""
    patch.setattr(Barriers, "settle", lambda *_: None)


def no_read_back(patch: pytest.MonkeyPatch) -> None:
    """Take over and publish all rows again."""
    patch.setattr(ReadBack, "read", lambda *_: WrittenRows({}))


def late_floor(patch: pytest.MonkeyPatch) -> None:
    """Read back from the end at the take-over, and not from the floor."""
    real = ReadBack.read

    def read(reading: ReadBack, runs: Any, floors: Any) -> WrittenRows:
        answers = reading._ask_bounds(sorted({(queue.broker, queue.topic) for queue in floors}))
        now = {
            queue: answers[queue.broker, queue.topic].queues[reading._terms.stored_queue(queue)].max_offset
            for queue in floors
        }
        return real(reading, runs, now)

    patch.setattr(ReadBack, "read", read)


def second_intent_counts(patch: pytest.MonkeyPatch) -> None:
    """Publish although another intent counts."""
    real = Ledger.read_through

    def read_through(ledger: Ledger, view: Any, row: Any) -> Any:
        view = real(ledger, view, row)
        if not isinstance(row, Intent):
            return view
        place = next(one.offset for one in view.rows if one.row == row)
        return replace(view, base=LedgerState(), rows=(PlacedRow(place, row),))

    patch.setattr(Ledger, "read_through", read_through)


def not_listed(patch: pytest.MonkeyPatch) -> None:
    """Do not check that a broker lists the session itself."""
    patch.setattr(Registration, "_await_listing", lambda *_: None)
    patch.setattr(Registration, "producers", Registration._ask_for_producers)


def listed_again(patch: pytest.MonkeyPatch) -> None:
    """Register again when a broker does not list the session any more, although its row is in the ledger."""

    def producers(registration: Registration, brokers: Any) -> Any:
        registration._await_listing(brokers)
        return registration._ask_for_producers(brokers)

    patch.setattr(Registration, "producers", producers)


def registered_late(patch: pytest.MonkeyPatch) -> None:
    """Register at the target brokers after the intent."""
    write, register = CommitSession.write, Registration.register

    def write_first(session: CommitSession, *rest: Any) -> bool:
        calls: Any = session._calls
        late: dict[str, str] = {}
        publish = session._publish

        def note(brokers: Any) -> None:
            late.update(brokers)
            calls.reach(brokers)

        def publish_late(*given: Any) -> None:
            register(calls, late)
            publish(*given)

        calls.register, calls.register_again, calls.check = note, lambda: None, lambda: None
        session._publish = publish_late  # type: ignore[method-assign]
        return write(session, *rest)

    patch.setattr(CommitSession, "write", write_first)


def done_early(patch: pytest.MonkeyPatch) -> None:
    """Write done before anything is published."""
    real = CommitSession._publish

    def publish(session: CommitSession, intent: Intent, found: WrittenRows) -> None:
        done = Done(intent.key, session.id, 0, intent.rows, intent.digest)
        session._ledger.append(done, encode_row(done))
        real(session, intent, found)

    patch.setattr(CommitSession, "_publish", publish)


def resend(patch: pytest.MonkeyPatch) -> None:
    """Send again on a new connection when the outcome of a send is unknown."""
    take, start = Publishing._take, Registration.__init__

    def take_again(publishing: Publishing, ticket: Any, of: Any) -> None:
        if isinstance(of, BlobKey) or not isinstance(ticket.error, UnknownOutcomeError | BackendUnavailableError):
            take(publishing, ticket, of)
            return
        publishing._brokers[of.queue.broker].in_flight_bytes -= len(of.request.content)
        publishing._repeat(of)

    def start_for_ever(registration: Registration, *rest: Any) -> None:
        start(registration, *rest)
        registration._client.connects_once = False

    patch.setattr(Publishing, "_take", take_again)
    patch.setattr(Registration, "__init__", start_for_ever)
    patch.setattr(Registration, "check", lambda registration: registration._client.work(0))
    patch.setattr(ClusterClient, "find_end", lambda *_: None)
