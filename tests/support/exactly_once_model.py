"""The protocol of the exactly-once sink as a model. `explore` visits every interleaving of some sessions.

Contents of the model
    Two target queues on two brokers. A batch has two runs of one row for queue 0, and one run of two rows for queue 1.
    A ledger; batches; Spark's checkpoint. Sessions run concurrently: each one reads the checkpoint, stages rows of its
    own, commits the batch, and continues with the next batch.

Events, at any moment and in any order
    - A driver crashes, freezes or thaws. To all others these are the same: a session takes no step for a while, or
      never again. The search covers that by not scheduling the session. The next session plays the restarted driver,
      or a second one.
    - A request is applied at once or late. Its answer arrives or is lost together with the connection.
    - A connection closes. The request on it is lost, or the broker had read it and applies it later, or drops it.
    - A broker loses the entry of a session. It is over then, as if its connections had closed.
    - A broker is killed and restarted: its connections close, its requests are lost, a run is stored by half. All of
      that is a sequence of steps of the search.
    - A ledger row is applied late, also long after its session has died.
    - A session reads the ledger without its newest row; reads the checkpoint and continues much later.
    - In a world with `other_rows`: the last session replays batches with other rows, as from a copied checkpoint.
    - In a world with `breaks`: queue 1 refuses everything from some moment on, until it is repaired. Then the intent is
      stuck: sessions give up. The last session is the operator's `rmq intents skip`, at any moment.
    - With a mistake planted: a session has an old route, or takes another broker's ledger for its own.

Repeated rows, expired rows and old marks are checked apart, over all short ledgers: see `exactly_once_ledgers`.

States that behave alike are merged, to keep the search small:
    - A session that publishes always has its next request on the way. A request that is not applied and one that is not
      sent look the same, and a connection that closes may lose it.
    - Connections close only where that matters: while a session fences or publishes, and at a queue that it has not
      finished. Elsewhere nobody waits for them, or a later moment is as good.

Checks in every state
    Each queue holds the batches in order, each row once and in order, and the rows of a batch come from one attempt. A
    batch whose commit has returned is complete in both queues, with the rows of the session whose commit returned.
    Only rows of a batch that the operator has skipped may be missing.

Not in the model
    Torn rows; settling as time (a take-over waits until the requests that were read are gone); transactions, whose
    versions have gaps: a second copy of a row may count there, as a late first copy may; blobs that have expired.
"""

from dataclasses import dataclass

ROWS = 2  # of each batch in each queue
RUN_LENGTH = (1, 2)  # rows in a run, for queue 0 and queue 1
QUEUES = (0, 1)  # queue q is on broker q

NEW, LOOK, INTENT, TAKE, FENCE, PUBLISH, DONE, RETURNED, ENDED = range(9)
NAMES = ["new", "look", "intent", "take", "fence", "publish", "done", "returned", "ended"]
NO_CONNECTION, LISTED, CLOSED, UNLISTED = range(4)
INTACT, BROKEN, MENDED = range(3)

MISTAKES = {
    "no-fence": "take over without waiting for earlier owners",
    "no-settle": "wait for earlier owners, but not for requests that the broker has read already",
    "late-floor": "read back from the max offset at the take-over, not from the intent's floor",
    "no-read-back": "take over and publish all rows again",
    "resend": "send again on a new connection when the outcome of a send is unknown",
    "older-intents-ignored": "ignore the unfinished intent of another session",
    "new-ledger": "create a ledger elsewhere when its broker is away, at a batch > 0",
    "fixed-fence-set": "fence only the brokers that an old route shows, publish to all",
    "second-intent-counts": "publish without reading the ledger through one's own intent",
    "takers-not-fenced": "fence the author of the intent, but not those who took it over",
    "listed-again": "register again when a broker has lost the entry of a session whose row is in the ledger",
    "registered-late": "connect to the target brokers after the intent",
    "not-listed": "do not check that 204 lists the session itself",
    "done-early": "write done before the last answers",
    "two-in-flight": "have two requests in flight for one queue",
}
MISTAKES_OF_REPLAYS = {
    "conflict-ignored": "take a batch with other rows for a repeated one",
    "not-judged": "return after a take-over without a look at whose rows they were",
    "done-with-own-digest": "write done for another session's intent with the digest of one's own rows",
}
MISTAKES_OF_SKIPS = {
    "stuck-is-done": "write done although rows are missing",
    "late-skip-counts": "let a skip count that comes after another session has taken the batch over",
    "skip-without-fence": "skip without waiting for the owners",
    "skip-without-settle": "skip without waiting for requests that the broker has read already",
}


@dataclass(frozen=True)
class World:
    """The participants. In a world with `other_rows` or `breaks` the last session has a special role, as said above."""

    sessions: int = 3
    batches: int = 2
    other_rows: bool = False
    breaks: bool = False

    def variant(self, session):
        """Return which rows a session stages: 0, or 1 for other ones."""
        return int(self.other_rows and session == self.sessions - 1)

    def is_operator(self, session):
        """Return whether a session is the one that skips."""
        return self.breaks and session == self.sessions - 1


# A session: (phase, batch to commit, batch at work, attempt, floors, earlier owners, rows answered, connections,
#             which ledger). In the phase RETURNED, `attempt` is 1 if the batch was judged to have the session's rows.
# A ledger: (last batch done or -1, None or (batch, attempt, floors, owners), which rows the last batch has)
# What a look sees of a ledger: (last batch done or -1, unfinished batch or None, which rows the last batch has)
# A state: (checkpoint, batches returned, ledgers, older look, queues, requests of closed connections, sessions,
#           queue 1, how many rows of each batch each queue had when it was skipped)
APART = (NO_CONNECTION, NO_CONNECTION)
UNBORN = (NEW, 0, 0, 0, (0, 0), (), (0, 0), APART, 0)
GONE = (ENDED, 0, 0, 0, (0, 0), (), (0, 0), APART, 0)
SKIPPED = -1  # in the place of `rows answered`, and of a row's floors: the row done says that rows are missing


def put(items, index, item):
    """Return a tuple with another item at an index."""
    return (*items[:index], item, *items[index + 1 :])


def read_row(ledger, row, mistake=None):
    """Return the ledger after one more row."""
    last, unfinished, variant = ledger
    kind, batch, session, floors, row_variant = row
    if kind == INTENT:
        is_free = unfinished is None or mistake == "older-intents-ignored"
        counts = is_free and batch > last
        return (last, (batch, session, floors, (session,)), variant) if counts else ledger
    if unfinished is None:
        return (batch, None, row_variant) if kind == DONE and batch >= last else ledger
    if unfinished[0] != batch:
        return ledger
    owners = unfinished[3]
    if kind == DONE:
        # A later owner publishes what a session that skips takes for missing.
        is_void = floors == SKIPPED and session != owners[-1] and mistake != "late-skip-counts"
        return ledger if is_void else (batch, None, row_variant)
    return ledger if session in owners else (last, (*unfinished[:3], (*owners, session)), variant)


def on_the_way(session, queue):
    """Return the rows of the request that a session has on the way to a queue, as (batch, attempt, number)."""
    phase, _, batch, attempt, _, _, answered, connections, _ = session
    first = answered[queue]
    if phase != PUBLISH or first == ROWS or connections[queue] not in (LISTED, UNLISTED):
        return ()
    length = RUN_LENGTH[queue]
    end = first + length - first % length
    return tuple((batch, attempt, number) for number in range(first, end))


def tidy(session, mistake):
    """Return one form for sessions that behave alike: without connections that do not matter, or gone."""
    phase, answered, connections = session[0], session[6], session[7]
    if phase == FENCE:
        return GONE if CLOSED in connections else session
    if phase != PUBLISH:
        return session
    kept = tuple(NO_CONNECTION if answered[q] == ROWS else connections[q] for q in QUEUES)
    goes_on = mistake == "resend" or any(answered[q] < ROWS and kept[q] != CLOSED for q in QUEUES)
    return put(session, 7, kept) if goes_on else GONE


def look_at(ledger):
    """Return what a session acts upon that reads a ledger before it has a row of its own there."""
    last, unfinished, variant = ledger
    return last, None if unfinished is None else unfinished[0], variant


class Step:
    """The state before a step of one session, from which the states after it are made."""

    def __init__(self, state, who, world, mistake):
        self.state, self.who, self.world, self.mistake = state, who, world, mistake

    def after(self, session, **parts):
        """Return the state after the session has become `session`. `parts` are other parts that have changed."""
        names = ("checkpoint", "returned", "ledgers", "older", "queues", "requests", "sessions", "queue_1", "skipped")
        values = dict(zip(names, self.state, strict=True)) | parts
        values["sessions"] = put(values["sessions"], self.who, tidy(session, self.mistake))
        return tuple(values[name] for name in names)


def next_states(state, world, mistake):
    """Yield (what happens, next state) for each step that anybody can take."""
    for who, session in enumerate(state[6]):
        if session[0] in STEPS:
            yield from STEPS[session[0]](Step(state, who, world, mistake), session)
    yield from late_requests(state)
    if world.breaks and state[7] != MENDED:
        yield f"queue 1 is {('broken', 'mended')[state[7]]}", put(state, 7, state[7] + 1)


def late_requests(state):
    """Yield what may become of the requests that brokers have read and whose connections are closed."""
    queues, requests, queue_1 = state[4], state[5], state[7]
    for one in dict.fromkeys(requests):
        rest = list(requests)
        rest.remove(one)
        _, q, rows = one
        before, behind = state[:4], state[6:]
        yield f"broker {q} drops {rows} of {one[0]}", (*before, queues, tuple(rest), *behind)
        if q == 1 and queue_1 == BROKEN:
            continue
        for count in range(1, len(rows) + 1):  # fewer: the broker is killed meanwhile
            stored = put(queues, q, queues[q] + rows[:count])
            yield f"broker {q} stores late {rows[:count]} of {one[0]}", (*before, stored, tuple(rest), *behind)


def closings(step, session):
    """Yield the steps in which a broker closes a connection of a session."""
    connections = session[7]
    for q in QUEUES:
        if connections[q] in (LISTED, UNLISTED):
            cut = put(session, 7, put(connections, q, CLOSED))
            yield f"broker {q} closes {step.who}'s connection", step.after(cut)


def returns(step, session):
    """Yield the step in which Spark records a batch, and the driver continues with the next one."""
    wanted = session[1]
    goes_on = wanted + 1 < step.world.batches
    new = (LOOK, wanted + 1, 0, 0, (0, 0), (), (0, 0), APART, session[8]) if goes_on else GONE
    recorded = max(step.state[0], wanted + 1)
    yield f"Spark records batch {wanted} of {step.who}", step.after(new, checkpoint=recorded)


def starts(step, _session):
    """Yield the steps of a driver that does not run yet, or of the operator."""
    checkpoint, sessions, who = step.state[0], step.state[6], step.who
    born = (LOOK, checkpoint, 0, 0, (0, 0), (), (0, 0), APART, 0)
    if step.world.is_operator(who):
        yield "the operator skips", step.after(put(born, 1, 0))
    elif (who == 0 or sessions[who - 1][0] != NEW) and checkpoint < step.world.batches:
        yield f"{who} starts with batch {checkpoint}", step.after(born)
        if step.mistake == "new-ledger" and checkpoint > 0:
            yield f"{who} starts with batch {checkpoint} and a new ledger", step.after(put(born, 8, 1))


def looks(step, session):
    """Yield the steps of a session that reads the ledger, with or without its newest row."""
    _, returned, ledgers, older, queues, *_ = step.state
    who, mistake, where = step.who, step.mistake, session[8]
    wanted = session[1]
    seen = look_at(ledgers[where])
    lengths = (len(queues[0]), len(queues[1]))
    for last, unfinished, variant in dict.fromkeys((seen, older if where == 0 else seen)):
        if where == 1 and last < wanted - 1:
            last = wanted - 1  # no row for this query: taken for its first batch
        if unfinished is not None and mistake != "older-intents-ignored":
            new = (TAKE, wanted, unfinished, 0, lengths, (), (0, 0), (LISTED, LISTED), where)
            yield f"{who} finds batch {unfinished} unfinished", step.after(new)
        elif step.world.is_operator(who):
            yield "the operator finds nothing to skip", step.after(GONE)
        elif last == wanted and variant != step.world.variant(who) and mistake != "conflict-ignored":
            yield f"{who} finds batch {wanted} with other rows", step.after(GONE)
        elif last >= wanted:
            new = (RETURNED, wanted, 0, int(last == wanted), (0, 0), (), (0, 0), APART, where)
            yield f"{who} finds batch {wanted} done", step.after(new, returned=max(returned, wanted + 1))
        elif last == wanted - 1:
            opened = APART if mistake == "registered-late" else (LISTED, LISTED)
            new = (INTENT, wanted, wanted, who, lengths, (), (0, 0), opened, where)
            yield f"{who} sends its intent for batch {wanted}", step.after(new)
            if mistake == "not-listed":
                unlisted = put(new, 7, (UNLISTED, LISTED))
                yield f"{who} sends its intent, not listed at broker 0", step.after(unlisted)
        else:
            yield f"{who} refuses: batches are missing", step.after(GONE)


def stores_row(step, session):
    """Yield the step in which the ledger stores a session's row, and the session reads the ledger through it."""
    _, returned, ledgers, _, queues, _, _, _, skipped = step.state
    who, mistake, world = step.who, step.mistake, step.world
    phase, wanted, batch, attempt, floors, _, answered, connections, where = session
    variant = world.variant(who if mistake == "done-with-own-digest" else attempt)
    extra = floors if phase == INTENT else SKIPPED if answered == SKIPPED else ()
    row = (phase, batch, who, extra, variant)
    before, ledger = ledgers[where], read_row(ledgers[where], row, mistake)
    unfinished = ledger[1]
    again = (LOOK, wanted, 0, 0, (0, 0), (), (0, 0), APART, where)
    parts = {"ledgers": put(ledgers, where, ledger)}
    if where == 0:
        parts["older"] = look_at(before)
    if phase == INTENT:
        is_mine = unfinished is not None and unfinished[:2] == (batch, who)
        if is_mine or mistake == "second-intent-counts":
            new = (PUBLISH, wanted, batch, who, (0, 0), (), (0, 0), connections, where)
        else:
            new = again
    elif phase == TAKE:
        if unfinished is not None and unfinished[0] == batch and who in unfinished[3]:
            owners = unfinished[3]
            earlier = owners[: owners.index(who)]
            if mistake == "takers-not-fenced":
                earlier = earlier[:1]
            since = floors if mistake == "late-floor" else unfinished[2]
            new = (FENCE, wanted, batch, unfinished[1], since, earlier, (0, 0), connections, where)
        else:
            new = again
    elif world.is_operator(who):
        new = GONE
        counts = before[1] is not None and before[1][0] == batch and unfinished is None
        if answered == SKIPPED and counts:
            stored = tuple(sum(one[0] == batch for one in queues[q]) for q in QUEUES)
            parts["skipped"] = put(skipped, batch, stored)
    elif attempt == who or (mistake == "not-judged" and batch >= wanted):
        new = (RETURNED, wanted, 0, int(batch == wanted), (0, 0), (), (0, 0), APART, where)
        parts["returned"] = max(returned, batch + 1)
    else:
        new = again  # whose rows they were is judged
    yield f"the ledger stores {who}'s {NAMES[phase]} for batch {batch}", step.after(new, **parts)


def fences(step, session):
    """Yield the steps of a session that waits until earlier owners have disappeared."""
    yield from closings(step, session)
    _, _, ledgers, _, queues, requests, sessions, *_ = step.state
    who, mistake = step.who, step.mistake
    _, wanted, batch, attempt, floors, earlier, _, connections, where = session
    if ledgers[where][1] is None or ledgers[where][1][0] != batch:
        again = (LOOK, wanted, 0, 0, (0, 0), (), (0, 0), APART, where)
        yield f"{who} sees that batch {batch} is done", step.after(again)
    is_operator = step.world.is_operator(who)
    if mistake == "listed-again" and LISTED in connections:
        yield f"the brokers lose {who}'s entry", step.after(put(session, 7, (UNLISTED, UNLISTED)))
    brokers = (0,) if mistake == "fixed-fence-set" else QUEUES
    skips_fence = mistake == "no-fence" or (is_operator and mistake == "skip-without-fence")
    skips_settling = skips_fence or mistake == "no-settle" or (is_operator and mistake == "skip-without-settle")
    is_fenced = skips_fence or all(sessions[one][7][b] != LISTED for one in earlier for b in brokers)
    is_settled = skips_settling or not any(one in earlier and broker in brokers for one, broker, _ in requests)
    if not is_fenced or not is_settled:
        return
    if mistake == "no-read-back":
        found = (0, 0)
    else:
        found = tuple(sum(row[:2] == (batch, attempt) for row in queues[q][floors[q] :]) for q in QUEUES)
        found = tuple(min(count, ROWS) for count in found)
    if found == (ROWS, ROWS):
        new = (DONE, wanted, batch, attempt, (0, 0), (), (0, 0), APART, where)
    else:
        new = (PUBLISH, wanted, batch, attempt, (0, 0), (), found, connections, where)
    yield f"{who} has fenced {list(earlier)}, found {found} rows", step.after(new)


def publishes(step, session):
    """Yield the steps of a session that publishes."""
    yield from closings(step, session)
    queues, requests, queue_1 = step.state[4], step.state[5], step.state[7]
    who, mistake = step.who, step.mistake
    _, wanted, batch, attempt, _, _, answered, connections, where = session
    finished = (DONE, wanted, batch, attempt, (0, 0), (), (0, 0), APART, where)
    for q in QUEUES:
        rows = on_the_way(session, q)
        if rows and q == 1 and queue_1 == BROKEN:
            yield from gets_stuck(step, session)
        elif rows:
            stored = put(queues, q, queues[q] + rows)
            count = put(answered, q, answered[q] + len(rows))
            new = finished if count == (ROWS, ROWS) else put(session, 6, count)
            yield f"{who} publishes {rows} in queue {q}", step.after(new, queues=stored)
            cut = put(session, 7, put(connections, q, CLOSED))
            yield f"broker {q} stores {who}'s {rows}, the answer is lost", step.after(cut, queues=stored)
            if len(rows) > 1:
                half = put(queues, q, queues[q] + rows[:1])
                yield f"broker {q} is killed: stores {who}'s {rows[:1]}", step.after(cut, queues=half)
            kept = tuple(sorted((*requests, (who, q, rows))))
            yield f"broker {q} closes {who}'s connection, keeps {rows}", step.after(cut, requests=kept)
            if mistake == "two-in-flight" and answered[q] == 0 and q == 0:
                both = queues[q] + ((batch, attempt, 1), (batch, attempt, 0))
                yield f"{who} has two requests in flight", step.after(session, queues=put(queues, q, both))
        elif mistake == "resend" and connections[q] == CLOSED and answered[q] < ROWS:
            again = put(session, 7, put(connections, q, LISTED))
            yield f"{who} sends again to queue {q}", step.after(again)
        elif mistake == "registered-late" and connections[q] == NO_CONNECTION:
            again = put(session, 7, put(connections, q, LISTED))
            yield f"{who} connects to broker {q}", step.after(again)
    if mistake == "done-early" and all(answered[q] + len(on_the_way(session, q)) == ROWS for q in QUEUES):
        yield f"{who} does not wait for the last answers", step.after(finished)


def gets_stuck(step, session):
    """Yield the steps of a session whose request queue 1 refuses. Its connection to broker 0 closes."""
    requests, who = step.state[5], step.who
    finished = (DONE, *session[1:4], (0, 0), (), (0, 0), APART, session[8])
    if step.world.is_operator(who):
        if session[6][0] == ROWS:  # everything else is published
            yield "the operator has found what cannot be published", step.after(put(finished, 6, SKIPPED))
        return
    yield f"{who} is stuck", step.after(finished if step.mistake == "stuck-is-done" else GONE)
    rows = on_the_way(session, 0)
    if rows:
        kept = tuple(sorted((*requests, (who, 0, rows))))
        yield f"{who} is stuck, broker 0 keeps {rows}", step.after(GONE, requests=kept)


STEPS = {
    NEW: starts,
    LOOK: looks,
    INTENT: stores_row,
    TAKE: stores_row,
    FENCE: fences,
    PUBLISH: publishes,
    DONE: stores_row,
    RETURNED: returns,
}


def what_is_wrong(state, world):
    """Return what the promise forbids in a state, or None."""
    _, returned, _, _, queues, _, sessions, _, skipped = state
    for q in QUEUES:
        rows = queues[q]
        counts = [sum(row[0] == batch for row in rows) for batch in range(world.batches)]
        wrong = what_is_out_of_order(rows, skipped)
        if wrong is not None:
            return f"queue {q} {wrong}: {rows}"
        for batch, count in enumerate(counts):
            if skipped[batch] is not None and skipped[batch][q] != count:
                return f"batch {batch} was skipped with {skipped[batch]} rows, but queue {q} has {rows}"
            if batch < returned and count < ROWS and skipped[batch] is None:
                return f"the commit of batch {batch} has returned, but queue {q} has only {rows}"
    attempts = {row[:2] for rows in queues for row in rows}
    if len(attempts) > len({batch for batch, _ in attempts}):
        return f"a batch has rows of two attempts: {queues}"
    for who, session in enumerate(sessions):
        is_judged = session[0] == RETURNED and session[3]
        if is_judged and any(
            batch == session[1] and world.variant(attempt) != world.variant(who) for batch, attempt in attempts
        ):
            return f"{who} takes batch {session[1]} for its own: {queues}"
    return None


def what_is_out_of_order(rows, skipped):
    """Return what is wrong with the rows of a queue, or None."""
    counts = dict.fromkeys(range(len(skipped)), 0)
    for batch, _, number in rows:
        if number < counts[batch]:
            return "has a row twice"
        is_early = any(counts[one] < ROWS and skipped[one] is None for one in range(batch))
        is_late = any(count for one, count in counts.items() if one > batch)
        if number > counts[batch] or is_early or is_late:
            return "is out of order or lacks a row"
        counts[batch] += 1
    return None


def first_state(world):
    """Return the state before anything has happened."""
    empty = (-1, None, 0)
    sessions = (UNBORN,) * world.sessions
    return 0, 0, (empty, empty), look_at(empty), ((), ()), (), sessions, INTACT, (None,) * world.batches


def explore(world, mistake=None, *, keeps_trace=False):
    """Search breadth first. Return (states, depth, what is wrong or None, steps, facts about the states)."""
    start = first_state(world)
    parents = {start: None} if keeps_trace else None
    seen = {start}
    edge, depth, facts = [start], 0, {"complete": 0, "taken over": 0, "skipped": 0}
    checked = {}
    while edge:
        next_edge = []
        for state in edge:
            facts["complete"] += state[1] == world.batches
            facts["taken over"] += any(one[0] == FENCE for one in state[6])
            facts["skipped"] += any(state[8])
            for what, after in next_states(state, world, mistake):
                if after in seen:
                    continue
                seen.add(after)
                if keeps_trace:
                    parents[after] = (state, what)
                judged = tuple((one[0] == RETURNED and one[3] and one[1] + 1) or 0 for one in after[6])
                key = after[1], after[4], after[8], judged
                if key not in checked:
                    checked[key] = what_is_wrong(after, world)
                if checked[key] is not None:
                    return len(seen), depth + 1, checked[key], steps_to(after, parents), facts
                next_edge.append(after)
        edge, depth = next_edge, depth + 1
    return len(seen), depth - 1, None, [], facts


def steps_to(state, parents):
    """Return what happened up to a state."""
    steps = []
    while parents and parents[state] is not None:
        state, what = parents[state]
        steps.append(what)
    return steps[::-1]
