"""The ledger of `exactly_once_model` alone: rows that come twice, that have expired, or that are newer than the marks.

All ledgers of a few rows are tried that sessions can make. A look in which nothing has expired is part of that model.

Not checked here: how a session notices expiry (the model knows it), and the time between a look and a row. A
session that has read up to the end of the ledger holds on to what it believes.
"""

import itertools

from support import exactly_once_model as model
from support.exactly_once_model import DONE, INTENT, TAKE

MISTAKES_OF_EXPIRY = {
    "from-too-early": "store mark from before it is known that the intent counts",
    "mark-done-ignored": "begin with no last batch where the rows have expired (stuck for no reason)",
    "mark-begun-ignored": "take the last done batch for the last one begun",
    "old-intents-trusted": "believe an intent although rows before it have expired",
    "empty-intents-trusted": "believe an intent for no rows, which is its own done, although rows have expired",
    "void-done-trusted": "let mark from name a row done that does not count",
}

EMPTY = (-1, None, 0)
NO_ROWS = 9  # the kind of an intent of a batch without rows, which is its own done


def read_row(ledger, row):
    """Return the ledger after one more row."""
    if row[0] != NO_ROWS:
        return model.read_row(ledger, row)
    return (row[1], None, 0) if ledger[1] is None and row[1] > ledger[0] else ledger


def ledgers_of(length, ledger=EMPTY, stored=(), kinds=(INTENT, TAKE, DONE)):
    """Yield (rows, what they mean) for all ledgers of at most `length` rows that sessions can make, late rows included.

    A session sends an intent only when it has read the done of the batch before, a take only when it has read an
    intent, and a done only as an owner, or to write a batch again that it has read to be done.
    """
    yield stored, ledger
    if len(stored) == length:
        return
    last, unfinished, _ = ledger
    for kind, batch, session in itertools.product(kinds, range(2), range(3)):
        if kind in (INTENT, NO_ROWS):
            is_sent = last >= batch - 1
        elif unfinished is None or unfinished[0] != batch:
            is_sent = last >= batch
        else:
            is_sent = kind == TAKE or session in unfinished[3]
        if is_sent:
            row = (kind, batch, session, (), 0)
            yield from ledgers_of(length, read_row(ledger, row), (*stored, row), kinds)


def read_rows(rows, last=-1):
    """Return what rows mean after a last batch."""
    ledger = (last, None, 0)
    for row in rows:
        ledger = read_row(ledger, row)
    return ledger


def count_repeats(length):
    """Check that a second copy of a ledger row never counts, wherever it comes. Return how many ledgers were tried."""
    count = 0
    for stored, ledger in ledgers_of(length):
        count += 1
        for row in stored:
            assert read_row(ledger, row) == ledger, f"a second copy of {row} counts after {stored}"
    return count


def starts_of(stored, mistake=None):
    """Return what mark *from* may be: the place of a row that counts, or a place before the first of them.

    Rows that count are an intent that opens its batch, and a done after which its batch is the last and none is open.
    """
    places = set()
    before = EMPTY
    for place in range(len(stored) + 1):
        after = read_row(before, stored[place]) if place < len(stored) else before
        kind, batch = stored[place][:2] if place < len(stored) else (None, None)
        counts = {
            INTENT: (before[1] is None and after[1] is not None) or mistake == "from-too-early",
            NO_ROWS: after != before,
            DONE: after[:2] == (batch, None) or mistake == "void-done-trusted",
        }
        if before == EMPTY or counts.get(kind):
            places.add(place)
        before = after
    return places


def marks_of(ledger):
    """Yield the marks (begun, done) that may belong to a ledger, if no zombie has stored older ones."""
    last, unfinished, _ = ledger
    if unfinished is not None:
        yield unfinished[0] + 1, last + 1
        return
    yield last + 1, last + 1
    yield last + 2, last + 1
    if last >= 0:  # the session died before it stored that its batch is done
        yield last + 1, last


def read_with_marks(stored, oldest, start, begun, done, mistake=None):
    """Return what a session believes, as (last, open), when the rows before `oldest` have expired. None: an error."""
    if begun == done == 0:
        start = 0  # a new query reads everything
    if oldest <= start:
        found = read_rows(stored[start:])[:2]
        return None if done and found == (-1, None) else found
    left = stored[oldest:]
    if mistake != "empty-intents-trusted":
        left = [(INTENT, *row[1:]) if row[0] == NO_ROWS else row for row in left]
    last, unfinished, _ = read_rows(left, -1 if mistake == "mark-done-ignored" else done - 1)
    if mistake != "old-intents-trusted" and unfinished is not None:
        return None
    if mistake != "mark-begun-ignored" and unfinished is None and begun != last + 1:
        return None
    return last, unfinished


def is_right(found, ledger):
    """Return whether a session believes what is true. With an open intent, the batch before it does not matter."""
    return found is not None and found[1] == ledger[1] and (found[1] is not None or found[0] == ledger[0])


def expiries_of(length, mistake=None, kinds=(INTENT, TAKE, DONE)):
    """Yield (rows, what they mean, oldest row, from, begun, done) for all short ledgers, with marks that are right."""
    for stored, ledger in ledgers_of(length, kinds=kinds):
        for start in starts_of(stored, mistake):
            for oldest in range(len(stored) + 1):
                for begun, done in marks_of(ledger):
                    yield stored, ledger, oldest, start, begun, done


def count_expiries(length, mistake=None, kinds=(INTENT, TAKE, DONE)):
    """Check that expired rows lead to an error or to nothing, never to a wrong belief. Return the cases tried."""
    count = 0
    for stored, ledger, oldest, start, begun, done in expiries_of(length, mistake, kinds):
        count += 1
        found = read_with_marks(stored, oldest, start, begun, done, mistake)
        is_clear = ledger[1] is None and begun == done == ledger[0] + 1
        if not is_right(found, ledger) and (found is not None or oldest <= start or is_clear):
            where = f"from {start}, begun {begun}, done {done}, oldest row {oldest}"
            raise AssertionError(f"{stored}, {where}: {found} instead of {ledger}")
    return count


def old_marks_of(length):
    """Yield cases like `expiries_of`, with a place: each mark is that of a ledger that ended there, or later."""
    for stored, ledger in ledgers_of(length):
        ends = range(len(stored) + 1)
        marks = {end: list(marks_of(read_rows(stored[:end]))) for end in ends}
        starts = {end: starts_of(stored[:end]) for end in ends}
        for from_end, begun_end, done_end in itertools.product(ends, ends, ends):
            since = min(from_end, begun_end, done_end)
            cases = {
                (start, begun, done)
                for start in starts[from_end]
                for begun, _ in marks[begun_end]
                for _, done in marks[done_end]
            }
            for oldest in ends:
                for start, begun, done in cases:
                    yield stored, ledger, oldest, start, begun, done, since


def count_old_marks(length):
    """Check that old marks never mislead unless rows have expired that came after the marks were right.

    Return how many cases were tried, and how many of the others mislead.
    """
    count = misled = 0
    for stored, ledger, oldest, start, begun, done, since in old_marks_of(length):
        count += 1
        found = read_with_marks(stored, oldest, start, begun, done)
        if found is None or is_right(found, ledger):
            continue
        where = f"from {start}, begun {begun}, done {done}, oldest row {oldest}"
        assert oldest > since, f"{stored}, {where}, right at {since}: {found} instead of {ledger}"
        misled += 1
    return count, misled
