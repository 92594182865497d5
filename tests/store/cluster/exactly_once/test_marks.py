"""Which rows and marks of a query a session may trust, and the errors for the others."""

import pytest

from rmq_spark.store.cluster.exactly_once.ledger_rows import (
    Done,
    Intent,
    LastBatch,
    LedgerRow,
    LedgerState,
    OpenIntent,
    PlacedRow,
)
from rmq_spark.store.cluster.exactly_once.marks import (
    Mark,
    Marks,
    check_first_batch,
    find_old_marks,
    interpret,
    lost_batch,
    marks_group,
    read_from_done,
)
from rmq_spark.store.errors import BatchConflictError, IntentStuckError
from rmq_spark.store.model import CommitKey

Q = "5b2c1f6e"


def intent(batch: int, session: str = "e1") -> Intent:
    return Intent(CommitKey(Q, batch), session, 0, 4, 9)


def done(batch: int, digest: int | None = 9) -> Done:
    return Done(CommitKey(Q, batch), "e1", 0, 4, digest)


def placed(begin: int, *rows: LedgerRow) -> list[PlacedRow]:
    return [PlacedRow(begin + number, row) for number, row in enumerate(rows)]


def lost_of(marks: Marks, rows: list[PlacedRow] | None = None) -> int:
    return lost_batch(marks, read_from_done(marks, rows or []))


def test_a_group_is_of_the_query_and_a_valid_name() -> None:
    assert marks_group("a") == "RMQ_SPARK_ca978112ca1bbdcafac231b39a23dc4d"
    assert len(marks_group("txn:\ud800 b")) == 42


def test_0_is_no_mark_where_a_broker_answers_it_for_an_empty_queue() -> None:
    marks = Marks.of_offsets({Mark.FROM: 0, Mark.BEGUN: 0, Mark.DONE: 0})
    assert marks == Marks(0, None, None)
    assert marks.is_new


def test_rows_are_read_from_the_mark_but_of_a_new_query_from_the_beginning() -> None:
    assert Marks(7, 1, None).read_begin == 7
    assert Marks(7, None, None).read_begin == 0
    assert Marks(None, 3, 3).read_begin == 0
    assert Marks(7, is_kept=False).read_begin == 7
    assert Marks(is_kept=False).read_begin == 0


def test_rows_decide_while_none_has_expired_whatever_the_marks() -> None:
    rows = placed(5, intent(3), done(3), intent(4))
    for begun, done_mark in ((1, 1), (9, 9), (5, 4)):
        state = interpret(Q, Marks(5, begun, done_mark), rows, has_expired=False)
        assert state == LedgerState(LastBatch(3, 4, 9), OpenIntent(intent(4), ("e1",)), 7)


def test_after_expiry_the_marks_tell_the_last_batch_with_an_unknown_digest() -> None:
    assert interpret(Q, Marks(5, 4, 4), [], has_expired=True) == LedgerState(LastBatch(3))


def test_after_expiry_a_row_done_tells_the_digest_of_the_last_batch() -> None:
    assert interpret(Q, Marks(5, 4, 4), placed(9, done(3)), has_expired=True).last == LastBatch(3, 4, 9)
    assert interpret(Q, Marks(5, 4, 3), placed(9, done(3)), has_expired=True).last == LastBatch(3, 4, 9)


def test_after_expiry_no_intent_is_known_to_count() -> None:
    """The one that is left may be void. The mark *from* must not name it."""
    state = interpret(Q, Marks(5, 5, 4), placed(9, intent(4, "e2"), done(4)), has_expired=True)
    assert state == LedgerState(LastBatch(4, 4, 9), None, None)


def test_after_expiry_an_intent_that_is_left_is_stuck() -> None:
    with pytest.raises(IntentStuckError, match="an intent for batch 4 is left") as error:
        interpret(Q, Marks(5, 5, 4), placed(9, intent(4, "e2")), has_expired=True)
    assert "begun before the oldest ledger row: rows from ledger offset 5 on have expired" in str(error.value)
    assert lost_of(Marks(5, 5, 4), placed(9, intent(4, "e2"))) == 4


def test_after_expiry_an_empty_intent_that_is_left_ends_nothing() -> None:
    """An earlier intent with rows may count, and the empty one of a repeated batch is void then."""
    empty = Intent(CommitKey(Q, 4), "e2", 0, 0, 0)
    with pytest.raises(IntentStuckError, match="an intent for batch 4 is left"):
        interpret(Q, Marks(5, 5, 4), placed(9, empty), has_expired=True)
    assert lost_of(Marks(5, 5, 4), placed(9, empty)) == 4
    assert interpret(Q, Marks(5, 5, 5), placed(9, empty), has_expired=True).last == LastBatch(4)
    assert interpret(Q, Marks(5, 5, 4), placed(9, empty), has_expired=False).last == LastBatch(4, 0, 0)


def test_after_expiry_a_batch_that_began_and_is_not_done_is_stuck() -> None:
    with pytest.raises(IntentStuckError, match="began last is 4, and the last one that is done is batch 3"):
        interpret(Q, Marks(5, 5, 4), [], has_expired=True)
    with pytest.raises(IntentStuckError, match="began last is 0, and the last one that is done is none"):
        interpret(Q, Marks(5, 1, None), [], has_expired=True)
    assert lost_of(Marks(5, 5, 4)) == 4
    assert lost_of(Marks(5, 1, None)) == 0


def test_a_row_done_of_the_lost_batch_ends_the_loss() -> None:
    assert interpret(Q, Marks(5, 5, 4), placed(9, done(4, None)), has_expired=True) == LedgerState(
        LastBatch(4, 4, None)
    )


def test_without_any_mark_rows_are_believed_although_others_have_expired() -> None:
    """Every row of a query came after its marks. They were lost with the last seconds of a broker."""
    state = interpret(Q, Marks(), placed(9, intent(0)), has_expired=True)
    assert state.open == OpenIntent(intent(0), ("e1",))


def test_a_new_query_has_nothing_to_lose() -> None:
    assert interpret(Q, Marks(3), [], has_expired=True) == LedgerState()
    with pytest.raises(IntentStuckError):
        interpret(Q, Marks(3), placed(9, intent(0)), has_expired=True)


def test_a_mark_from_that_is_newer_than_the_rows_is_an_error() -> None:
    with pytest.raises(BatchConflictError, match=r"batch 3 is done, and from ledger offset 90 on there is no row"):
        interpret(Q, Marks(90, 5, 4), [], has_expired=False)


def test_a_plain_write_believes_nothing_after_its_rows_have_expired() -> None:
    rows = [PlacedRow(3, Intent(CommitKey(Q), "e1", 0, 4, 9))]
    assert interpret(Q, Marks(3, is_kept=False), rows, has_expired=False).open is not None
    for left in (rows, []):
        with pytest.raises(
            IntentStuckError, match=r"longer than the retention.* rmq intents finish ID stores"
        ) as caught:
            interpret(Q, Marks(3, is_kept=False), left, has_expired=True)
        assert "skip" not in str(caught.value), "nobody else can have finished it, so its intent counts"
    # An operator who finishes it does not know where it began.
    assert interpret(Q, Marks(is_kept=False), rows, has_expired=True).open is not None


@pytest.mark.parametrize(
    ("batch", "marks", "accepts_gap", "is_refused"),
    [
        (0, Marks(), False, False),
        (5, Marks(), False, True),
        (5, Marks(2, 5), False, True),
        (5, Marks(2, 6), False, False),
        (5, Marks(), True, False),
    ],
)
def test_the_first_batch_of_a_query_is_0_unless_it_was_accepted(
    batch: int, marks: Marks, accepts_gap: bool, is_refused: bool
) -> None:
    key = CommitKey(Q, batch)
    if is_refused:
        with pytest.raises(BatchConflictError, match="expected batch 4 to be done"):
            check_first_batch(LedgerState(), marks, key, accepts_gap=accepts_gap)
    else:
        check_first_batch(LedgerState(), marks, key, accepts_gap=accepts_gap)
    check_first_batch(LedgerState(LastBatch(1)), marks, key, accepts_gap=False)  # `judge_batch` compares them


def test_marks_that_are_older_than_the_rows_are_stored_again() -> None:
    state = LedgerState(LastBatch(3, 4, 9), OpenIntent(intent(4), ("e1",)), 7)
    assert find_old_marks(state, Marks(7, 5, 4)) == {}
    assert find_old_marks(state, Marks(5, 4, 3)) == {Mark.FROM: 7, Mark.BEGUN: 5, Mark.DONE: 4}
    assert find_old_marks(LedgerState(LastBatch(3), None, 0), Marks()) == {Mark.FROM: 0, Mark.BEGUN: 4, Mark.DONE: 4}
    assert find_old_marks(LedgerState(), Marks()) == {}
    assert find_old_marks(LedgerState(LastBatch(3)), Marks(9, 9, 9)) == {}  # they never move back
    assert find_old_marks(state, Marks(is_kept=False)) == {}
