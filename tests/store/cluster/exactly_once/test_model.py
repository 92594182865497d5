"""The protocol as a model: every interleaving keeps the promise, and every planted mistake breaks it.

The rules of the product for ledger rows and marks are compared with those of the model on the same ledgers.
"""

from collections.abc import Callable

import pytest
from support import exactly_once_ledgers as ledgers
from support import exactly_once_model as model
from support.exactly_once_model import World

from rmq_spark.store.cluster.exactly_once.ledger_rows import (
    Done,
    Intent,
    LastBatch,
    LedgerRow,
    LedgerState,
    PlacedRow,
    Take,
)
from rmq_spark.store.cluster.exactly_once.marks import Mark, Marks, find_old_marks, interpret
from rmq_spark.store.errors import BatchConflictError, IntentStuckError
from rmq_spark.store.model import CommitKey

SMALL = {
    "two drivers": World(sessions=2),
    "a replay with other rows": World(sessions=2, other_rows=True),
    "a replay beside two drivers": World(batches=1, other_rows=True),
    "a queue that breaks, and an operator": World(sessions=2, breaks=True),
    "two drivers and an operator": World(batches=1, breaks=True),
}
LARGE = {
    "three drivers": World(),
    "a replay": World(other_rows=True),
    "an operator": World(breaks=True),
    "four drivers": World(sessions=4, batches=1),
}


def check_sound(world: World) -> None:
    _, _, wrong, _, facts = model.explore(world)
    assert wrong is None
    assert facts["complete"]
    assert facts["taken over"]
    assert bool(facts["skipped"]) is world.breaks


@pytest.mark.parametrize("world", SMALL.values(), ids=SMALL)
def test_every_interleaving_keeps_the_promise(world: World) -> None:
    check_sound(world)


@pytest.mark.slow
@pytest.mark.parametrize("world", LARGE.values(), ids=LARGE)
def test_every_interleaving_of_more_keeps_the_promise(world: World) -> None:
    check_sound(world)


@pytest.mark.parametrize("mistake", model.MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    batches = 2 if mistake == "new-ledger" else 1  # the least that shows it
    assert model.explore(World(batches=batches), mistake)[2] is not None


@pytest.mark.parametrize("mistake", model.MISTAKES_OF_REPLAYS)
def test_a_mistake_with_replays_is_found(mistake: str) -> None:
    assert model.explore(World(batches=1, other_rows=True), mistake)[2] is not None


@pytest.mark.parametrize("mistake", model.MISTAKES_OF_SKIPS)
def test_a_mistake_with_skips_is_found(mistake: str) -> None:
    assert model.explore(World(batches=1, breaks=True), mistake)[2] is not None


def test_a_trace_tells_the_steps_of_a_violation() -> None:
    *_, wrong, steps, _ = model.explore(World(sessions=2, batches=1), "two-in-flight", keeps_trace=True)
    assert steps == [
        "0 starts with batch 0",
        "0 sends its intent for batch 0",
        "the ledger stores 0's intent for batch 0",
        "0 has two requests in flight",
    ]
    assert "is out of order" in str(wrong)


def test_a_second_copy_of_a_row_never_counts() -> None:
    assert ledgers.count_repeats(5) > 10_000


def test_expired_rows_never_mislead() -> None:
    assert ledgers.count_expiries(4) > 10_000
    assert ledgers.count_expiries(3, kinds=WITH_EMPTY) > 2000


def test_old_marks_mislead_only_if_rows_expired_that_nobody_looked_at() -> None:
    count, misled = ledgers.count_old_marks(3)
    assert count > 50_000
    assert misled  # so the condition is needed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "length"), [(ledgers.count_repeats, 6), (ledgers.count_expiries, 5), (ledgers.count_old_marks, 4)]
)
def test_longer_ledgers_never_mislead(count: Callable[[int], object], length: int) -> None:
    count(length)


@pytest.mark.parametrize("mistake", ledgers.MISTAKES_OF_EXPIRY)
def test_a_mistake_with_expired_rows_is_found(mistake: str) -> None:
    case = (3, mistake, WITH_EMPTY) if mistake == "empty-intents-trusted" else (4, mistake)
    with pytest.raises(AssertionError, match="instead of"):
        ledgers.count_expiries(*case)


# The product's rules on the model's ledgers.

QUERY = "q"
WITH_EMPTY = (ledgers.NO_ROWS, model.INTENT, model.TAKE, model.DONE)


def row_of(row: tuple[int, int, int, object, int]) -> LedgerRow:
    """Return the product's row for one of the model."""
    kind, batch, session, floors, variant = row
    key = CommitKey(QUERY, batch)
    if kind == ledgers.NO_ROWS:
        return Intent(key, str(session), 0, 0, 0)
    if kind == model.INTENT:
        return Intent(key, str(session), 0, 4, variant)
    if kind == model.TAKE:
        return Take(key, str(session), 0)
    return Done(key, str(session), 0, 4, variant, missing=1 if floors == model.SKIPPED else None)


def rows_of(stored: tuple[tuple[int, int, int, object, int], ...], begin: int = 0) -> list[PlacedRow]:
    return [PlacedRow(offset, row_of(stored[offset])) for offset in range(begin, len(stored))]


def brief(state: LedgerState) -> tuple[int, tuple[int, str, tuple[str, ...]] | None]:
    """Return a state as the model has it."""
    opened = state.open
    return (
        -1 if state.last is None else state.last.batch_id,
        None if opened is None else (opened.batch, opened.intent.session, opened.owners),
    )


def as_texts(found: tuple[int, tuple[int, int, object, tuple[int, ...]] | None]) -> object:
    """Return a ledger of the model with sessions as texts."""
    last, opened = found
    return last, None if opened is None else (opened[0], str(opened[1]), tuple(map(str, opened[3])))


def test_ledger_state_reads_rows_as_the_model_does() -> None:
    for stored, ledger in [*ledgers.ledgers_of(5), *ledgers.ledgers_of(4, kinds=WITH_EMPTY)]:
        assert brief(LedgerState().apply_all(rows_of(stored))) == as_texts(ledger[:2])


def test_ledger_state_reads_the_ledgers_of_the_explored_worlds_as_the_model_does() -> None:
    """Each row that the search stores is applied to the product's state too."""
    for world in (World(sessions=2), World(sessions=2, breaks=True), World(batches=1, breaks=True)):
        seen: dict[tuple[object, ...], tuple[object, ...]] = {}
        read = model.read_row
        with pytest.MonkeyPatch.context() as patch:

            def note(ledger, row, mistake=None, seen=seen, read=read):  # type: ignore[no-untyped-def]
                seen[ledger, row] = read(ledger, row, mistake)
                return seen[ledger, row]

            patch.setattr(model, "read_row", note)
            model.explore(world)
        assert len(seen) > 20
        for (ledger, row), after in seen.items():
            assert brief(state_of(ledger).apply(row_of(row), 0)) == as_texts(after[:2])  # type: ignore[arg-type]


def state_of(ledger: tuple[object, ...]) -> LedgerState:
    """Return the product's state for a ledger of the model, by rows that lead to it."""
    last, opened, variant = ledger
    state = LedgerState(None if last == -1 else LastBatch(last, 4, variant))  # type: ignore[arg-type]
    if opened is not None:
        batch, session, _, owners = opened  # type: ignore[misc]
        state = state.apply(row_of((model.INTENT, batch, session, (), 0)), 0)
        for owner in owners[1:]:
            state = state.apply(row_of((model.TAKE, batch, owner, (), 0)), 0)
    return state


def believe(stored: tuple[tuple[int, int, int, object, int], ...], oldest: int, marks: Marks) -> object:
    """Return what the product believes, as the model has it. None: an error."""
    begin = marks.read_begin
    rows = rows_of(stored, max(begin, oldest))
    try:
        return brief(interpret(QUERY, marks, rows, has_expired=oldest > begin))
    except (IntentStuckError, BatchConflictError):
        return None


def test_interpret_believes_what_the_model_believes() -> None:
    cases = [*ledgers.expiries_of(3), *ledgers.expiries_of(2, kinds=WITH_EMPTY)]
    cases += [case[:-1] for case in ledgers.old_marks_of(2)]
    for stored, _, oldest, start, begun, done in cases:
        found = ledgers.read_with_marks(stored, oldest, start, begun, done)
        marks = Marks.of_offsets({Mark.FROM: start, Mark.BEGUN: begun, Mark.DONE: done})
        expected = None if found is None else as_texts(found)
        assert believe(stored, oldest, marks) == expected, (stored, oldest, marks)


def test_marks_that_a_look_stores_again_are_right() -> None:
    """After a look in which nothing had expired, marks are such that expired rows cannot mislead."""
    for stored, ledger, _, start, begun, done, _ in ledgers.old_marks_of(2):
        marks = Marks.of_offsets({Mark.FROM: start, Mark.BEGUN: begun, Mark.DONE: done})
        rows = rows_of(stored, marks.read_begin)
        try:
            state = interpret(QUERY, marks, rows, has_expired=False)
        except BatchConflictError:
            continue
        for mark, value in find_old_marks(state, marks).items():
            marks = marks.with_mark(mark, value)
        for oldest in range(len(stored) + 1):
            found = believe(stored, oldest, marks)
            assert found is None or ledgers.is_right(found, as_texts(ledger[:2])), (stored, oldest, marks)
