"""Random traces of `exactly_once_model`, and their replay: real commits in threads and brokers that a trace controls.

The replay holds each append to the ledger and each send to a target queue at its broker until the trace says what
becomes of it, and each commit before and after it looks at the ledger. After each step it waits until each session has
come where the model has it, with the same rows on the way, and compares the queues.

Traces are those of the model, with these limits:

- A session continues by itself after its *take*: the trace says when it is fenced and settled, or its batch is done.
- When a connection of a session ends, the session ends: what becomes of its other request comes next.
- A session that reads the ledger without its newest row has done so before that row was stored.
- No session finds a later batch than its own done. The model returns then, and the product refuses the old batch.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from support import exact_commits as commits
from support import exactly_once_model as model
from support.exact_commits import LEDGER, STAGE, TOPIC, A, B, Death
from support.exactly_once_model import World

from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.exactly_once.commit_session import CommitSession
from rmq_spark.store.cluster.exactly_once.ledger import Ledger
from rmq_spark.store.cluster.exactly_once.ledger_rows import Done, Intent, Take, decode_row
from rmq_spark.store.cluster.exactly_once.marks import marks_group
from rmq_spark.store.cluster.exactly_once.session_attempts import SessionAttempts
from rmq_spark.store.errors import BatchConflictError
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.brokers import Broker, RunningCluster
from rmq_spark.store.testing.brokers.sent_message import read_items
from rmq_spark.store.testing.brokers.wire import Call

QUEUES = (A, B)  # queue 0 and queue 1 of the model
KINDS = {Intent: model.INTENT, Take: model.TAKE, Done: model.DONE}
STEPS_MAX = 60
_LATE = "before the newest row of the ledger"


@dataclass(frozen=True)
class Step:
    """A step of a trace: what happens, and the state after it. A look that is `early` comes before an earlier step."""

    what: str
    state: Any
    is_early: bool = False


# Traces.


def make_trace(world: World, random: Random) -> list[Step]:
    """Return a random trace of the model."""
    state = model.first_state(world)
    steps: list[Step] = []
    looking_since = dict.fromkeys(range(world.sessions), 0)
    stored_at = 0  # the number of the last step that stored a row
    while len(steps) < STEPS_MAX:
        choices = forced_steps(state, world) or list(model.next_states(state, world, None))
        fresh = {what for what, _ in model.next_states(model.put(state, 3, model.look_at(state[2][0])), world, None)}
        usable = []
        for what, after in choices:
            who = looker(state, after)
            is_early = who is not None and what not in fresh
            if who is not None and is_passed(after[6][who]):
                continue
            if not is_early or looking_since[who] < stored_at:  # type: ignore[index]
                usable += [Step(what, after, is_early)] * weight(what)
        if not usable:
            break
        step = random.choice(usable)
        steps.append(step)
        if step.what.startswith("the ledger stores"):
            stored_at = len(steps)
        for who in range(world.sessions):
            if step.state[6][who][:2] != state[6][who][:2]:
                looking_since[who] = len(steps)
        state = step.state
    return steps


def weight(what: str) -> int:
    """Return how likely a step is. Events that end sessions are rare, so that traces come far."""
    return 1 if "closes" in what or "lost" in what or "killed" in what else 3


def is_passed(session: Any) -> bool:
    """Return whether a session has found a later batch done when it looked for its own."""
    return bool(session[0] == model.RETURNED and not session[3])


def looker(state: Any, after: Any) -> int | None:
    """Return which session looks at the ledger in a step, if one does."""
    for who, session in enumerate(state[6]):
        if session[0] == model.LOOK and after[6][who] != session:
            return who
    return None


def forced_steps(state: Any, world: World) -> list[tuple[str, Any]]:
    """Return the steps of which one comes next in a replay, because the real session does not wait."""
    for who, session in enumerate(state[6]):
        if session[0] == model.FENCE:
            steps = list(model.fences(model.Step(state, who, world, None), session))
            for found in ("sees that batch", "has fenced"):
                chosen = [step for step in steps if found in step[0]]
                if chosen:
                    return chosen
        elif session[0] == model.PUBLISH and model.CLOSED in session[7]:
            steps = list(model.publishes(model.Step(state, who, world, None), session))
            return [step for step in steps if "closes" in step[0] or "lost" in step[0] or "killed" in step[0]]
    return []


# Replay.


@dataclass(eq=False)
class Held:
    """A request that a broker has read and holds. `who` has sent it."""

    call: Call
    serve: Callable[[], None]
    who: int
    content: Any  # (kind, batch) of a row; rows of a queue as the model has them

    @property
    def is_orphan(self) -> bool:
        """Whether its connection is closed."""
        return self.call.connection.is_closed


@dataclass(eq=False)
class Driver:
    """One session of the model: a thread that commits batches. `place` is where it waits for the trace."""

    who: int
    first: int
    place: str = ""
    passes: set[str] = field(default_factory=set)
    error: BaseException | None = None
    has_ended: bool = False


class Replay:
    """Replays one trace. `patience_s` is how long a session may take to come where the model has it."""

    def __init__(self, cluster: RunningCluster, world: World, query: str, patience_s: float = 60) -> None:
        self._cluster, self._world, self._query, self._patience_s = cluster, world, query, patience_s
        self._since = commits.ends(cluster)
        self._changed = threading.Condition()
        self._rows: list[Held] = []
        self._sends: tuple[list[Held], list[Held]] = [], []
        self._barriers: tuple[list[Held], list[Held]] = [], []
        self._drivers: dict[int, Driver] = {}
        self._threads: list[threading.Thread] = []
        self._by_thread: dict[int, Driver] = {}
        self._sessions: dict[str, int] = {}  # which driver a session belongs to
        self._is_over = False

    def run(self, steps: list[Step]) -> None:
        """Replay a trace, and compare the queues after each step."""
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            self._hold_requests()
            try:
                state = model.first_state(self._world)
                for number, step in enumerate(steps):
                    self._look_early(steps, number)
                    self._act(step, state)
                    state = step.state
                    self._await_sessions(state, step.what)
                    self._compare(state, step.what)
            finally:
                self._end()

    # The drivers' threads.

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        commits.hurry(patch)
        read, start, wait = Ledger.read, CommitSession.__init__, SessionAttempts._wait

        def gated_read(ledger: Ledger, key: CommitKey, begin: int | None = None) -> Any:
            driver = self._by_thread.get(threading.get_ident())
            if driver is None:
                return read(ledger, key, begin)
            self._pass(driver, "before a look")
            view = read(ledger, key, begin)
            self._pass(driver, "after a look")
            return view

        def named_start(session: CommitSession, *rest: Any) -> None:
            start(session, *rest)
            driver = self._by_thread.get(threading.get_ident())
            if driver is not None:
                self._sessions[session.id] = driver.who

        def end_instead(attempts: SessionAttempts, error: Exception) -> None:
            if threading.get_ident() in self._by_thread:
                raise error
            wait(attempts, error)  # type: ignore[arg-type]

        patch.setattr(Ledger, "read", gated_read)
        patch.setattr(CommitSession, "__init__", named_start)
        patch.setattr(SessionAttempts, "_wait", end_instead)

    def _start(self, who: int, first: int) -> None:
        driver = self._drivers[who] = Driver(who, first)
        thread = threading.Thread(target=self._drive, args=(driver,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _drive(self, driver: Driver) -> None:
        self._by_thread[threading.get_ident()] = driver
        try:
            sink = commits.make_sink(self._cluster, timeout_ms=600_000)
            digest = 7 + self._world.variant(driver.who)
            for batch in range(driver.first, self._world.batches):
                key = CommitKey(self._query, batch)
                commits.commit(sink, commits.stage(self._cluster, key, digest=digest, label=driver.who))
                self._pass(driver, "returned")
        except BaseException as error:
            driver.error = error
        finally:
            with self._changed:
                driver.has_ended = True
                self._changed.notify_all()

    def _pass(self, driver: Driver, place: str) -> None:
        """Wait in the thread of a driver until the trace lets it pass."""
        with self._changed:
            driver.place = place
            self._changed.notify_all()
            self._changed.wait_for(lambda: place in driver.passes or self._is_over)
            if self._is_over:
                raise Death
            driver.passes.remove(place)
            driver.place = ""

    def _let_pass(self, who: int, place: str) -> None:
        """Let a driver pass when it comes to a place."""
        with self._changed:
            self._drivers[who].passes.add(place)
            self._changed.notify_all()

    # The brokers' thread.

    def _hold_requests(self) -> None:
        for number, queue in enumerate(QUEUES):
            broker = self._cluster.brokers[queue.broker]

            def hold(call: Call, serve: Callable[[], None], number: int = number, broker: Broker = broker) -> None:
                self._hold(call, serve, number, broker)

            for code in (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE):
                broker.fail(code, hold)

    def _hold(self, call: Call, serve: Callable[[], None], number: int, broker: Broker) -> None:
        topic = call.command.fields["b"]
        body = bytes(call.command.body)
        with self._changed:
            if topic == LEDGER:
                row = decode_row(body)
                assert row is not None
                content = KINDS[type(row)], row.key.batch_id
                self._rows.append(Held(call, serve, self._sessions[row.session], content))
            elif topic == TOPIC:
                rows = tuple(tuple(map(int, item.body.split())) for item in read_items(body))
                self._sends[number].append(Held(call, serve, self._sender(call, broker), rows))
            else:
                assert topic == STAGE, topic
                self._barriers[number].append(Held(call, serve, -1, None))
                self._pass_barriers(number)
            self._changed.notify_all()

    def _sender(self, call: Call, broker: Broker) -> int:
        for one in broker.producers.of(marks_group(self._query)) or ():
            if one.connection is call.connection:
                return self._sessions[one.client_id]
        return -1  # a session that is not listed

    def _pass_barriers(self, number: int) -> None:
        """Serve barriers, which come after all that the broker has read on connections that are closed."""
        if not any(held.is_orphan for held in self._sends[number]):
            while self._barriers[number]:
                self._barriers[number].pop().serve()

    # Steps.

    def _look_early(self, steps: list[Step], number: int) -> None:
        """Let sessions read the ledger whose look misses the row that step `number` stores."""
        if not steps[number].what.startswith("the ledger stores"):
            return
        for later in range(number + 1, len(steps)):
            step = steps[later]
            if step.what.startswith("the ledger stores"):
                return
            if step.is_early:
                who = int(step.what[0])
                self._await(lambda who=who: self._drivers[who].place == "before a look", f"{step.what} {_LATE}")  # type: ignore[misc]
                self._let_pass(who, "before a look")
                self._await(lambda who=who: self._drivers[who].place == "after a look", f"{step.what} {_LATE}")  # type: ignore[misc]

    def _act(self, step: Step, before: Any) -> None:
        who = looker(before, step.state)
        if who is not None:
            if not step.is_early:
                self._let_pass(who, "before a look")
            self._let_pass(who, "after a look")
            return
        for pattern, act in ACTS.items():
            if found := re.match(pattern, step.what):
                act(self, *map(int, found.groups()), step.what)
                return
        raise AssertionError(step.what)

    def _start_driver(self, who: int, first: int, _: str) -> None:
        self._start(who, first)

    def _store_row(self, who: int, _: str) -> None:
        self._in_loop(self._take(self._rows, who).serve)

    def _publish(self, who: int, what: str) -> None:
        self._in_loop(self._take(self._sends[int(what[-1])], who).serve)

    def _record(self, who: int, _: str) -> None:
        self._let_pass(who, "returned")

    def _drop(self, q: int, what: str) -> None:
        self._store_late(q, int(what[-1]), 0)

    def _store_some(self, q: int, what: str) -> None:
        self._store_late(q, int(what[-1]), what.count("(") - 1)

    def _note_fenced(self, what: str) -> None:
        """End the connections of owners that have nothing left but their row done: the model has none for them."""
        for who in re.findall(r"\d", what[what.index("[") : what.index("]")]):
            for q in model.QUEUES:
                self._in_loop(lambda q=q, who=who: self._close_at(q, int(who)))  # type: ignore[misc]

    def _do_nothing(self, _: str) -> None:
        """Let a session see in the ledger that a batch is done."""

    def _take(self, held: list[Held], who: int) -> Held:
        with self._changed:
            one = next(one for one in held if one.who == who)
            held.remove(one)
            return one

    def _store_late(self, q: int, who: int, count: int) -> None:
        """Store the first rows of a request whose connection is closed, and let the broker continue."""
        held = self._take(self._sends[q], who)

        def store() -> None:
            if count:
                cut_items(held.call, count)
                held.serve()
            self._pass_barriers(q)

        self._in_loop(store)

    def _cut(self, q: int, who: int, what: str) -> None:
        """Close a connection of a session. `what` says what becomes of the request that the broker has read."""
        held = [one for one in self._sends[q] if one.who == who]
        if held and "keeps" not in what:
            self._sends[q].remove(held[0])

        def cut() -> None:
            if "stores" in what:
                held[0].call.send = lambda data: None
                if "killed" in what:
                    cut_items(held[0].call, 1)
                held[0].serve()
            self._close_at(q, who)
            self._pass_barriers(q)  # they may have come when the session had ended, before this step

        self._in_loop(cut)

    def _close_at(self, q: int, who: int) -> None:
        """Close the registered connections of a driver's sessions at a broker. In the brokers' thread."""
        broker = self._cluster.brokers[QUEUES[q].broker]
        for one in list(broker.producers.of(marks_group(self._query)) or ()):
            if self._sessions.get(one.client_id) == who and one.connection is not None:
                one.connection.close()

    def _in_loop(self, act: Callable[[], object]) -> None:
        self._cluster.loop.run(act)

    # Waiting and comparing.

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            found = self._changed.wait_for(condition, self._patience_s)
        assert found, f"after {what!r} the real sessions do not come where the model has them: {self._describe()}"

    def _await_sessions(self, state: Any, what: str) -> None:
        """Wait until each session is where the model has it."""
        for who, session in enumerate(state[6]):
            if who in self._drivers:
                self._await(lambda who=who, session=session: self._is_there(who, session), f"{what}, session {who}")  # type: ignore[misc]

    def _is_there(self, who: int, session: Any) -> bool:
        driver = self._drivers[who]
        phase, _, batch = session[:3]
        if phase == model.ENDED:
            return driver.has_ended
        is_closing = phase == model.PUBLISH and model.CLOSED in session[7]
        assert is_closing or not driver.has_ended, f"session {who} has ended: {driver.error!r}"
        if is_closing:
            return True
        for q in model.QUEUES:
            expected = model.on_the_way(session, q)
            found = [one.content for one in self._sends[q] if one.who == who and not one.is_orphan]
            assert not found or found == [expected], f"session {who} sends {found} to queue {q} instead of {expected}"
            if expected and not found:
                return False
        if phase == model.LOOK:
            return driver.place in ("before a look", "after a look")
        if phase == model.RETURNED:
            return driver.place == "returned"
        if phase in (model.INTENT, model.TAKE, model.DONE):
            rows = [one.content for one in self._rows if one.who == who]
            assert rows in ([], [(phase, batch)]), f"session {who} appends {rows} in the phase {model.NAMES[phase]}"
            return bool(rows)
        return True

    def _compare(self, state: Any, what: str) -> None:
        found = commits.stored(self._cluster, self._since)
        rows = tuple(tuple(tuple(map(int, body.split())) for body in found[queue]) for queue in QUEUES)
        assert rows == state[4], f"after {what!r} the queues have {rows} instead of {state[4]}"

    def _describe(self) -> str:
        drivers = {one.who: (one.place, one.error) for one in self._drivers.values()}
        rows = [(one.who, one.content) for one in self._rows]
        sends = [[(one.who, one.content, one.is_orphan) for one in held] for held in self._sends]
        return f"drivers {drivers}, rows {rows}, sends {sends}"

    # The end.

    def _end(self) -> None:
        """Let all drivers die. Of their requests only rows of the ledger are executed from now on."""
        for broker in self._cluster.brokers.values():
            broker.heal()
            broker.close_connections()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), self._describe()
        # What a process that has died had sent to the ledger may come later.
        for held in self._rows:
            self._in_loop(held.serve)


ACTS: dict[str, Callable[..., None]] = {
    r"(\d) starts with batch (\d)": Replay._start_driver,
    r"the ledger stores (\d)'s": Replay._store_row,
    r"(\d) publishes": Replay._publish,
    r"broker (\d) stores late": Replay._store_some,
    r"broker (\d) drops": Replay._drop,
    r"broker (\d) (?:closes|stores|is killed: stores) (\d)'s": Replay._cut,
    r"Spark records batch \d of (\d)": Replay._record,
    r"\d has fenced": Replay._note_fenced,
    r"\d sees that batch": Replay._do_nothing,
}


def cut_items(call: Call, count: int) -> None:
    """Leave only the first items of a batch."""
    body = bytes(call.command.body)
    size = sum(item.size for item in read_items(body)[:count])
    call.command = replace(call.command, body=body[:size])


def finish(cluster: RunningCluster, world: World, query: str) -> None:
    """Commit the batches again, as a driver does that was started again. A batch that was passed is refused."""
    sink = commits.make_sink(cluster)
    for batch in range(world.batches):
        try:
            commits.commit(sink, commits.stage(cluster, CommitKey(query, batch), label=9))
        except BatchConflictError:
            assert batch < world.batches - 1 or world.other_rows
