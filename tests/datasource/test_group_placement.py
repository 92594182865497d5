"""group_placement: where a query of a group begins in one queue, and what the user is told about it."""

from dataclasses import replace

import pytest

from rmq_spark.datasource.plan.group_placement import (
    BatchFacts,
    Notice,
    Place,
    QueueFacts,
    Reason,
    Step,
    describe_notices,
    offsets_of,
    place_queue,
)
from rmq_spark.store.errors import GroupConflictError
from rmq_spark.store.model import QueueBounds, QueueKey

BOUNDS = QueueBounds(2, 10)
A0, A1, A2 = QueueKey("a", 0), QueueKey("a", 1), QueueKey("a", 2)

# The first batch after a restart of a query that reads all queues.
RESTARTED = BatchFacts(
    is_first=True,
    is_initial=False,
    is_shared=False,
    begins_at_group=False,
    has_start=False,
    has_time=False,
    on_conflict="checkpoint",
    fallback="latest",
)
RESTARTED_AT_GROUP = replace(RESTARTED, on_conflict="group")
RESTARTED_OR_FAIL = replace(RESTARTED, on_conflict="fail")
NEW = replace(RESTARTED, is_initial=True)
RUNNING = replace(RESTARTED, is_first=False)
# startingOffsets=group, groupFallback=timestamp
NEW_AT_GROUP = replace(NEW, begins_at_group=True, has_start=True, has_time=True, fallback="timestamp")
SHARED = replace(RUNNING, is_shared=True, begins_at_group=True, fallback="earliest")
SHARED_RESTARTED = replace(SHARED, is_first=True)
SHARED_NEW = replace(SHARED, is_first=True, is_initial=True)

KEEP = Place()


def seek(offset, notice=None):
    return Place(Step.SEEK, offset, notice=notice)


def start(offset, notice=None):
    return Place(Step.START, offset, notice=notice)


def move(offset):
    return Place(Step.MOVE, offset)


def find(fallback):
    return Place(Step.FIND, fallback=fallback)


def told(reason, committed, other):
    return Notice(reason, committed, other)


KEPT_OR_FOREIGN = {
    "a queue without a change stays": (SHARED, {"previous": 7}, KEEP),
    "the group's offset does not matter in a kept queue": (SHARED, {"previous": 7, "committed": 9}, KEEP),
    "a suspended queue goes back": (SHARED, {"previous": 7, "resume": 4}, seek(4)),
    "a suspended queue goes back after a restart": (RESTARTED, {"previous": 7, "resume": 4}, seek(4)),
    "a suspended queue of another goes back": (SHARED, {"previous": 7, "resume": 4, "is_owned": False}, move(4)),
    "a reset moves a kept queue": (SHARED, {"previous": 7, "reset": 4}, seek(4)),
    "a reset starts a kept queue that has no position": (SHARED, {"reset": 4}, start(4)),
    "a reset of a kept queue ignores the group's offset": (
        SHARED,
        {"previous": 7, "reset": 4, "committed": 5},
        seek(4),
    ),
    "a reset overrides a suspension": (SHARED, {"previous": 7, "resume": 4, "reset": 6}, seek(6)),
    "a reset below the minimum means the minimum": (SHARED, {"previous": 7, "reset": 1}, seek(2)),
    "a reset beyond the end means the end": (SHARED, {"previous": 7, "reset": 11}, seek(10)),
    "a reset moves the queue of another": (SHARED, {"previous": 7, "reset": 4, "is_owned": False}, move(4)),
    "a reset of the queue of another is within its bounds": (
        SHARED,
        {"previous": 7, "reset": 1, "is_owned": False},
        move(2),
    ),
    "a reset overrides a suspension in the queue of another": (
        SHARED,
        {"previous": 7, "resume": 4, "reset": 6, "is_owned": False},
        move(6),
    ),
    "a reset is not recorded for the queue of another without a position": (
        SHARED,
        {"reset": 4, "is_owned": False},
        KEEP,
    ),
}

GAINED_AFTER_A_RESET = {
    "without an offset of the group, the target applies": (SHARED, {"previous": 7, "reset": 4}, seek(4)),
    "without a position, the target is a start": (SHARED, {"reset": 4}, start(4)),
    "the target is within the bounds": (SHARED, {"previous": 7, "reset": 1}, seek(2)),
    "the group is still at the target": (SHARED, {"previous": 7, "reset": 1, "committed": 1}, seek(2)),
    "a member has advanced the group since": (SHARED, {"previous": 7, "reset": 4, "committed": 5}, seek(5)),
    "an advanced group may be beyond the end": (SHARED, {"previous": 7, "reset": 4, "committed": 12}, seek(12)),
    "a restarted query with onOffsetConflict=checkpoint begins at the target": (
        RESTARTED,
        {"previous": 7, "reset": 4, "committed": 5},
        seek(4, told(Reason.RESET, 5, 4)),
    ),
    "a restarted query tells the target, and begins within the bounds": (
        RESTARTED,
        {"reset": 1, "committed": 5},
        start(2, told(Reason.RESET, 5, 1)),
    ),
    "it does so only in its first batch": (RUNNING, {"previous": 7, "reset": 4, "committed": 5}, seek(5)),
    "it tells nothing if the group is at the target": (RESTARTED, {"previous": 7, "reset": 4, "committed": 4}, seek(4)),
    "a restarted query that shares queues follows the group": (
        SHARED_RESTARTED,
        {"previous": 7, "reset": 4, "committed": 5},
        seek(5),
    ),
    "with onOffsetConflict=group it follows the group": (
        RESTARTED_AT_GROUP,
        {"previous": 7, "reset": 4, "committed": 5},
        seek(5),
    ),
    "with onOffsetConflict=fail a reset is no conflict": (
        RESTARTED_OR_FAIL,
        {"previous": 7, "reset": 4, "committed": 9},
        seek(9),
    ),
    "a reset overrides a suspension": (SHARED, {"previous": 7, "resume": 4, "reset": 6}, seek(6)),
    "a reset applies in the retry topic too": (SHARED, {"reset": 4, "is_retry": True}, start(4)),
    "a reset applies in a new query": (NEW, {"reset": 4, "committed": 4}, start(4)),
}

GAINED_WITHOUT_A_POSITION = {
    "a query that shares queues starts with the group": (SHARED, {}, find("earliest")),
    "and so it does in its first batch": (SHARED_NEW, {"committed": 5}, find("earliest")),
    "a new query with startingOffsets=group starts with the group": (NEW_AT_GROUP, {"committed": 5}, find("timestamp")),
    "in a later queue it begins where the options say": (replace(NEW_AT_GROUP, is_initial=False), {}, KEEP),
    "a new query without a group's offset": (NEW, {}, KEEP),
    "the retry topic starts at the group's offset": (NEW, {"is_retry": True, "committed": 5}, find("earliest")),
    "the retry topic starts at its first message": (NEW, {"is_retry": True}, find("earliest")),
    "the retry topic ignores groupFallback": (
        replace(NEW_AT_GROUP, has_time=False),
        {"is_retry": True},
        find("earliest"),
    ),
    "an existing retry topic starts by startingTimestamp": (
        replace(NEW, has_start=True, has_time=True),
        {"is_retry": True},
        find("timestamp"),
    ),
    "a retry topic that appears later starts at its first message": (
        replace(RUNNING, has_start=True, has_time=True),
        {"is_retry": True},
        find("earliest"),
    ),
    "a retry topic that appears before a restart is no conflict": (
        RESTARTED_OR_FAIL,
        {"is_retry": True, "committed": 9},
        find("earliest"),
    ),
    "a new query tells of messages that the group has not read": (
        NEW,
        {"committed": 9},
        Place(notice=told(Reason.UNREAD, 9, 10)),
    ),
    "there are none if the group has read all": (NEW, {"committed": 10}, KEEP),
    "it tells nothing if a start is given": (replace(NEW, has_start=True), {"committed": 9}, KEEP),
    "it tells nothing when it plans its first batch again": (replace(NEW, is_first=False), {"committed": 9}, KEEP),
    "a queue that appears while a query reads all queues": (RUNNING, {"committed": 5}, KEEP),
}

RESTARTED_WITH_ALL_QUEUES = {
    "without an offset of the group the checkpoint applies": (RESTARTED_AT_GROUP, {"previous": 7}, KEEP),
    "checkpoint: a group that is ahead is told": (
        RESTARTED,
        {"previous": 7, "committed": 9},
        Place(notice=told(Reason.AHEAD, 9, 7)),
    ),
    "checkpoint: a group that is not ahead is ignored": (RESTARTED, {"previous": 7, "committed": 6}, KEEP),
    "checkpoint: a group at the checkpoint is not told": (RESTARTED, {"previous": 7, "committed": 7}, KEEP),
    "checkpoint: a queue that it lacks counts as one at its minimum": (
        RESTARTED,
        {"committed": 9},
        Place(notice=told(Reason.AHEAD, 9, 2)),
    ),
    "checkpoint: a suspended queue goes back": (
        RESTARTED,
        {"previous": 7, "resume": 4, "committed": 5},
        seek(4, told(Reason.AHEAD, 5, 4)),
    ),
    "fail: a group that is ahead is an error": (
        RESTARTED_OR_FAIL,
        {"previous": 7, "committed": 9},
        Place(notice=told(Reason.CONFLICT, 9, 7)),
    ),
    "fail: a group that is not ahead is ignored": (RESTARTED_OR_FAIL, {"previous": 7, "committed": 6}, KEEP),
    "group: a group that is ahead is followed": (RESTARTED_AT_GROUP, {"previous": 7, "committed": 9}, seek(9)),
    "group: a group that is not ahead is followed": (RESTARTED_AT_GROUP, {"previous": 7, "committed": 6}, seek(6)),
    "group: a group at the checkpoint changes nothing": (RESTARTED_AT_GROUP, {"previous": 7, "committed": 7}, KEEP),
    "group: a queue that the checkpoint lacks is followed": (RESTARTED_AT_GROUP, {"committed": 9}, start(9)),
    "group: nothing changes at the minimum": (RESTARTED_AT_GROUP, {"committed": 2}, KEEP),
    "group: the group's offset overrides a suspension": (
        RESTARTED_AT_GROUP,
        {"previous": 7, "resume": 4, "committed": 5},
        seek(5),
    ),
    "group: a suspended queue goes back to the group's offset": (
        RESTARTED_AT_GROUP,
        {"previous": 7, "resume": 4, "committed": 4},
        seek(4),
    ),
    "a query that shares queues follows the group instead": (
        replace(SHARED_RESTARTED, on_conflict="fail"),
        {"previous": 7, "committed": 9},
        seek(9),
    ),
}

GAINED_FROM_ANOTHER = {
    "the queue resumes at the group's offset": (SHARED, {"previous": 7, "committed": 9}, seek(9)),
    "in a query that reads all queues too": (RUNNING, {"previous": 7, "committed": 9}, seek(9)),
    "the group is at the position": (SHARED, {"previous": 7, "committed": 7}, KEEP),
    "the group has no offset": (SHARED, {"previous": 7}, KEEP),
    "the group is behind a checkpoint": (
        SHARED,
        {"previous": 7, "committed": 5},
        Place(notice=told(Reason.LAGGING, 5, 7)),
    ),
    "the group is behind a position that this run published": (
        SHARED,
        {"previous": 7, "committed": 5, "was_owned": True},
        seek(5),
    ),
    "a suspended queue goes back": (SHARED, {"previous": 7, "resume": 4}, seek(4)),
    "the group's offset is older than the suspension": (SHARED, {"previous": 7, "resume": 4, "committed": 6}, seek(4)),
    "the group is where the suspended queue resumes": (SHARED, {"previous": 7, "resume": 4, "committed": 4}, seek(4)),
    "the group is behind a suspended queue": (
        SHARED,
        {"previous": 7, "resume": 4, "committed": 3},
        seek(4, told(Reason.LAGGING, 3, 4)),
    ),
    "the group is behind a suspended queue of this run": (
        SHARED,
        {"previous": 7, "resume": 4, "committed": 3, "was_owned": True},
        seek(3),
    ),
}

# In a cluster: the group may be at `own_offsets` or at the position if only this query has moved it.
OWN_OFFSETS_KNOWN = {
    "the group is at the position": (SHARED_RESTARTED, {"previous": 7, "committed": 7}, KEEP),
    "the group is where the query published last": (
        SHARED_RESTARTED,
        {"previous": 7, "committed": 4, "own_offsets": (4, 6)},
        KEEP,
    ),
    "the group is where the last batch began": (
        SHARED_RESTARTED,
        {"previous": 7, "committed": 6, "own_offsets": (4, 6)},
        KEEP,
    ),
    "a running query meets its broker again, which lost its last commits": (
        SHARED,
        {"previous": 7, "committed": 4, "own_offsets": (4, 6), "was_owned": True},
        KEEP,
    ),
    "another member has advanced the group": (SHARED_RESTARTED, {"previous": 7, "committed": 9}, seek(9)),
    "the group was reset to a smaller offset": (
        SHARED_RESTARTED,
        {"previous": 7, "committed": 3, "own_offsets": (4, 6)},
        seek(3, told(Reason.SET_BACK, 3, 7)),
    ),
    "the group was reset between the last batch and the position": (
        SHARED_RESTARTED,
        {"previous": 7, "committed": 5, "own_offsets": (4, 6)},
        seek(5, told(Reason.SET_BACK, 5, 7)),
    ),
    "the group is at one that the checkpoint does not have": (
        SHARED_RESTARTED,
        {"previous": 7, "committed": 5, "own_offsets": (4, 6), "has_own_between": True},
        KEEP,
    ),
    "the group was reset to an offset before those of the checkpoint": (
        SHARED_RESTARTED,
        {"previous": 7, "committed": 3, "own_offsets": (6, 4), "has_own_between": True},
        seek(3, told(Reason.SET_BACK, 3, 7)),
    ),
    "another member has advanced the group beyond those of the checkpoint": (
        SHARED_RESTARTED,
        {"previous": 7, "committed": 8, "own_offsets": (4, 6), "has_own_between": True},
        seek(8),
    ),
    "the group is not at the position, and the checkpoint has no other": (
        SHARED_RESTARTED,
        {"previous": 7, "committed": 6, "own_offsets": (), "has_own_between": True},
        seek(6, told(Reason.SET_BACK, 6, 7)),
    ),
    "a running query meets its broker again, and the group was set back": (
        SHARED,
        {"previous": 7, "committed": 3, "own_offsets": (4,), "was_owned": True},
        seek(3, told(Reason.SET_BACK, 3, 7)),
    ),
    "a query that was set back stays although the group was ahead": (
        SHARED_RESTARTED,
        {"previous": 4, "committed": 9, "own_offsets": (9, 3)},
        KEEP,
    ),
    "the group has no offset": (SHARED_RESTARTED, {"previous": 7}, KEEP),
    "a reset that waits at the broker applies": (
        SHARED_RESTARTED,
        {"previous": 7, "committed": 3, "reset": 3},
        seek(3),
    ),
    "a reset applies although the group has not moved yet": (
        SHARED_RESTARTED,
        {"previous": 7, "committed": 4, "reset": 3, "own_offsets": (4, 6)},
        seek(3),
    ),
    "a queue that the query never read begins at the group's offset": (
        SHARED_RESTARTED,
        {"committed": 5},
        find("earliest"),
    ),
}


def rows(table):
    return pytest.mark.parametrize(("batch", "given", "place"), table.values(), ids=table)


@rows(KEPT_OR_FOREIGN)
def test_place_queue_in_a_queue_that_is_not_gained(batch, given, place) -> None:
    assert place_queue(QueueFacts(BOUNDS, **given), batch) == place


@rows(GAINED_AFTER_A_RESET)
def test_place_queue_in_a_gained_queue_after_a_reset(batch, given, place) -> None:
    assert place_queue(QueueFacts(BOUNDS, is_gained=True, **given), batch) == place


@rows(GAINED_WITHOUT_A_POSITION)
def test_place_queue_in_a_gained_queue_that_is_not_in_the_previous_offset(batch, given, place) -> None:
    assert place_queue(QueueFacts(BOUNDS, is_gained=True, **given), batch) == place


@rows(RESTARTED_WITH_ALL_QUEUES)
def test_place_queue_in_a_query_that_is_restarted(batch, given, place) -> None:
    assert place_queue(QueueFacts(BOUNDS, is_gained=True, **given), batch) == place


@rows(GAINED_FROM_ANOTHER)
def test_place_queue_in_a_queue_that_another_member_may_have_read(batch, given, place) -> None:
    assert place_queue(QueueFacts(BOUNDS, is_gained=True, **given), batch) == place


@rows(OWN_OFFSETS_KNOWN)
def test_place_queue_in_a_query_that_knows_its_own_offsets(batch, given, place) -> None:
    assert place_queue(QueueFacts(BOUNDS, is_gained=True, **{"own_offsets": (), **given}), batch) == place


def test_offsets_of_selects_one_step() -> None:
    places = {A0: seek(3), A1: start(4), A2: seek(5)}
    assert offsets_of(places, Step.SEEK) == {A0: 3, A2: 5}
    assert offsets_of(places, Step.MOVE) == {}


@pytest.mark.parametrize(
    ("reason", "begin", "end"),
    [
        (
            Reason.RESET,
            "the consumer group billing is at 9 in queue a/0, and was reset to 7 after this checkpoint: another",
            "onOffsetConflict=checkpoint: reads the messages between again",
        ),
        (
            Reason.UNREAD,
            "the consumer group billing is at 9 in queue a/0, and this query begins at 7, after the newest message,",
            "startingOffsets=group begins at the group's offsets",
        ),
        (
            Reason.AHEAD,
            "the consumer group billing is at 9 in queue a/0, and this query's checkpoint at 7; onOffsetConflict=",
            "checkpoint: the messages between are read again",
        ),
        (
            Reason.LAGGING,
            "the consumer group billing is at 9 in queue a/0, and this query's checkpoint at 7: it resumes at its",
            "reset the group to read the messages between",
        ),
        (
            Reason.SET_BACK,
            "the consumer group billing is at 9 in queue a/0, and this query at 7: the group's offset was reset, or ",
            "The query follows the group, and reads the messages between again",
        ),
    ],
)
def test_describe_notices_returns_a_warning(reason, begin, end) -> None:
    (text,) = describe_notices({A0: Place(notice=Notice(reason, 9, 7)), A1: KEEP}, "billing")
    assert text.startswith(begin)
    assert text.endswith(end)


@pytest.mark.parametrize(
    ("reason", "found"),
    [
        (Reason.UNREAD, "is at 9 in queue a/0 (and 2 more queues), and this query begins at 7,"),
        (Reason.AHEAD, "is at 9 in queue a/0, and this query's checkpoint at 7 (and 2 more queues); onOffset"),
        (Reason.LAGGING, "is at 9 in queue a/0, and this query's checkpoint at 7 (and 2 more queues): it resumes"),
    ],
)
def test_describe_notices_names_the_first_queue_and_counts_the_others(reason, found) -> None:
    numbers = {A2: (3, 1), A0: (9, 7), A1: (5, 2)}
    places = {queue: Place(notice=Notice(reason, *pair)) for queue, pair in numbers.items()}
    (text,) = describe_notices(places, "billing")
    assert found in text


def test_describe_notices_returns_the_warnings_of_all_resets_first() -> None:
    places = {
        A2: Place(notice=Notice(Reason.AHEAD, 9, 7)),
        A1: seek(4, Notice(Reason.RESET, 6, 4)),
        A0: seek(3, Notice(Reason.RESET, 5, 3)),
    }
    texts = describe_notices(places, "billing")
    assert [text.split(",")[0].split(" is ")[1] for text in texts] == [
        "at 5 in queue a/0",
        "at 6 in queue a/1",
        "at 9 in queue a/2",
    ]


def test_describe_notices_returns_nothing_without_notices() -> None:
    assert describe_notices({A0: KEEP, A1: seek(4)}, "billing") == []


def test_describe_notices_raises_for_a_conflict() -> None:
    places = {queue: Place(notice=Notice(Reason.CONFLICT, 9, 7)) for queue in (A1, A0)}
    with pytest.raises(GroupConflictError) as caught:
        describe_notices(places, "billing")
    assert str(caught.value) == (
        "the consumer group billing is at 9 in queue a/0, and this query's checkpoint at 7 (and 1 more queues): "
        "another consumer of the group advanced, or its offsets were set. Set onOffsetConflict=checkpoint to resume at "
        "the checkpoint and read these messages again, or onOffsetConflict=group to resume at the group's offsets."
    )
