"""Taking over a batch that other sessions have begun: they are fenced, the brokers settle, and the rows are read back.

Earlier owners of the batch may still have requests on their way. So the new owner sends nothing until no broker lists
them any more, and until all that the brokers had read from them is visible. Each owner waits only for owners earlier in
the ledger, so two sessions never wait for each other.
"""

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from rmq_spark.store.cluster.client import now_ms
from rmq_spark.store.cluster.exactly_once.barrier import Barriers
from rmq_spark.store.cluster.exactly_once.ledger import Ledger, LedgerView
from rmq_spark.store.cluster.exactly_once.ledger_rows import Intent, OpenIntent, Take, encode_row
from rmq_spark.store.cluster.exactly_once.read_back import ReadBack
from rmq_spark.store.cluster.exactly_once.registration import Registration
from rmq_spark.store.cluster.exactly_once.sink_place import SinkPlace
from rmq_spark.store.cluster.exactly_once.target_bounds import prove_brokers
from rmq_spark.store.cluster.exactly_once.target_calls import pause
from rmq_spark.store.cluster.exactly_once.written_rows import WrittenRows
from rmq_spark.store.errors import BackendUnavailableError

_LOG = logging.getLogger("rmq_spark")
_LOOK_MS = 500.0  # between two questions whether earlier owners are gone
_LOG_MS = 30_000.0  # between two lines in the log about the same wait
_LEDGER_MS = 1000.0  # between two looks at the ledger while earlier owners are waited for


class OwnersRemainError(BackendUnavailableError):
    """A batch cannot be taken over, because an earlier session that may still send has not ended in time."""


class TakenOver(NamedTuple):
    """A batch that a session has taken over: the newest view of the ledger, and the rows that are stored."""

    view: LedgerView
    found: WrittenRows


class TakeOver:
    """Takes over a batch for one session, whose connections are `calls` and whose id is `session`. For one thread."""

    def __init__(self, place: SinkPlace, ledger: Ledger, calls: Registration, session: str) -> None:
        self._place, self._ledger, self._calls, self._session = place, ledger, calls, session

    def run(self, view: LedgerView, opened: OpenIntent) -> TakenOver | None:
        """Become the only owner of an open batch, and find out which of its rows are stored.

        Return None if an earlier owner finishes the batch meanwhile. Raises the errors of `fence`.
        """
        fenced = self.fence(view, opened)
        if fenced is None:
            return None
        place, intent = self._place, opened.intent
        reading = ReadBack(self._calls, place.client, place.routes.address, place.pull_terms, place.monotonic_ms)
        found = reading.read(intent.runs, dict(intent.floors))
        _LOG.info("rmq: %s: %d of %d rows were stored before", intent.key, sum(found.rows.values()), intent.rows)
        return TakenOver(fenced, found)

    def fence(self, view: LedgerView, opened: OpenIntent) -> LedgerView | None:
        """Become the only owner of an open batch. Return the newest view of the ledger.

        All earlier owners are gone then, and what they have sent is visible or was never executed. Return None if one
        of them finishes the batch meanwhile.

        Raises BackendUnavailableError if a broker is away, OwnersRemainError if an earlier owner does not disappear,
        SessionOverError, and the errors of brokers that refuse.
        """
        place, intent = self._place, opened.intent
        brokers = sorted({queue.broker for queue, _ in intent.floors})
        # A topic that was deleted does not keep its broker out of the list: its queues are found missing later.
        self._calls.register(place.find_masters({broker: {place.terms.stage_topic} for broker in brokers}))
        staging = place.find_blob_brokers(intent.runs)
        self._calls.reach(staging)
        prove_brokers(self._calls, place, {*brokers, *staging})
        self._calls.register_again()  # see `Registration.register_again`
        take = Take(intent.key, self._session, now_ms())
        self._ledger.append(take, encode_row(take))
        view = self._ledger.read_through(view, take)
        now_open = view.state().open
        if now_open is None or now_open.intent != intent:
            return None
        earlier = frozenset(now_open.owners[: now_open.owners.index(self._session)])
        begun = datetime.fromtimestamp(intent.made_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        _LOG.warning(
            "rmq: %s was begun by session %s at %s and is not finished. This commit finishes it when none of its "
            "sessions (%d) is connected to %s any more, and after twice %.1f s (settleTime)",
            intent.key, intent.session, begun, len(earlier), ", ".join(brokers), place.terms.settle_ms / 1000,
        )  # fmt: skip
        view = self._await_ends(view, intent, earlier, brokers)
        if not _is_open(view, intent):
            return None
        barriers = Barriers(self._calls, place.patience_ms, place.monotonic_ms, now_ms)
        barriers.settle(place.barrier_queues(brokers), place.terms.settle_ms)
        _LOG.info("rmq: %s: no earlier session can send any more. Now the stored rows are looked for", intent.key)
        view = self._ledger.read_on(view)
        return view if _is_open(view, intent) else None

    def _await_ends(
        self, view: LedgerView, intent: Intent, earlier: frozenset[str], brokers: Sequence[str]
    ) -> LedgerView:
        """Wait until no broker lists an earlier owner, or the batch is done. Return the newest view of the ledger.

        An answer counts only if it lists this session: one that does not proves nothing about the others.
        """
        monotonic_ms = self._place.monotonic_ms
        waiting = set(brokers)
        began_ms = looked_ms = monotonic_ms()
        logged_ms = began_ms - _LOG_MS
        while True:
            seen = {
                broker: {owner: producers[owner] for owner in earlier & producers.keys()}
                for broker, producers in self._calls.producers(sorted(waiting)).items()
            }
            waiting = {broker for broker, owners in seen.items() if owners}
            if not waiting:
                return view
            if monotonic_ms() - began_ms >= self._place.terms.fence_timeout_ms:
                raise _not_fenced(intent, seen, self._place.terms.fence_timeout_ms)
            if monotonic_ms() - logged_ms >= _LOG_MS:
                logged_ms = monotonic_ms()
                _LOG.warning("rmq: %s waits: %s", intent.key, _describe_owners(seen))
            if monotonic_ms() - looked_ms >= _LEDGER_MS:
                looked_ms, view = monotonic_ms(), self._ledger.read_on(view)
                if not _is_open(view, intent):
                    return view
            pause(self._calls, _LOOK_MS, monotonic_ms)


def _is_open(view: LedgerView, intent: Intent) -> bool:
    opened = view.state().open
    return opened is not None and opened.intent == intent


def _not_fenced(intent: Intent, seen: Mapping[str, Mapping[str, str]], timeout_ms: int) -> OwnersRemainError:
    return OwnersRemainError(
        f"{intent.key} cannot be finished yet, because a session that has begun it may still send: "
        f"{_describe_owners(seen)}; expected "
        f"its connections to end within {timeout_ms / 1000:g} s (fenceTimeout). Stop that process, and start the query "
        "again."
    )


def _describe_owners(seen: Mapping[str, Mapping[str, str]]) -> str:
    return "; ".join(
        f"broker {broker} still lists {', '.join(f'{owner} at {address}' for owner, address in owners.items())}"
        for broker, owners in seen.items()
        if owners
    )
