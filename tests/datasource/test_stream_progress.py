"""stream_progress: where a query begins, at which positions it continues, and which losses it reports."""

import pytest
from support.parsed_options import parse_options

from rmq_spark.datasource.plan.batch_assignment import BatchAssignment
from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.datasource.plan.planning import VANISHED, Loss
from rmq_spark.datasource.plan.stream_progress import ProgressFacts, StartState, queues_to_resolve, resolve_progress
from rmq_spark.store.errors import NotFoundError, OffsetRangeError
from rmq_spark.store.model import QueueBounds, QueueKey

A0, A1, R0 = QueueKey("a", 0), QueueKey("a", 1), QueueKey("%RETRY%g", 0)
BOUNDS = {A0: QueueBounds(0, 10), A1: QueueBounds(5, 20)}
WITH_RETRY = {**BOUNDS, R0: QueueBounds(2, 8)}
NEW = StreamOffset({})
LOST = {"failOnDataLoss": "false"}
GROUP = {"consumerGroup": "g", "subscribeRetry": "false"}
RETRY = {"consumerGroup": "g", "subscribeRetry": "true"}
AT_GROUP = GROUP | {"startingOffsets": "group"}
SHARED = GROUP | {"assignment": "shared"}


def options_of(given):
    return parse_options({"path": "/store", "subscribe": "a"} | given, 0).for_stream()


def expired(queue, begin, end):
    return Loss(queue, begin, end, f"retention has deleted them, the queue now begins at {end}")


def at(**positions):
    """Return a previous offset with positions in the queues of the topic a, by their ids: q0, q1, q2."""
    return StreamOffset({QueueKey("a", int(name[1:])): position for name, position in positions.items()}, {})


STATE = StartState({A0: 3}, [expired(A0, 1, 3)])


@pytest.mark.parametrize(
    ("given", "state", "before", "queues"),
    [
        pytest.param({}, None, NEW, {A0, A1, R0}, id="a new query"),
        pytest.param(RETRY, None, NEW, {A0, A1}, id="the retry topic begins at the group's offset"),
        pytest.param(
            RETRY | {"startingOffsets": '{"%RETRY%g": {"0": 3}}'},
            None,
            NEW,
            {A0, A1, R0},
            id="a queue of the retry topic that startingOffsets names",
        ),
        pytest.param({}, STATE, NEW, set(), id="the starts are known"),
        pytest.param({}, None, at(q0=3), set(), id="a restarted query"),
        pytest.param(AT_GROUP, None, NEW, set(), id="startingOffsets=group"),
        pytest.param(SHARED, None, NEW, set(), id="assignment=shared"),
    ],
)
def test_queues_to_resolve_are_those_of_a_new_query(given, state, before, queues) -> None:
    found = queues_to_resolve(state, before, WITH_RETRY, options_of(given))
    assert found == {queue: WITH_RETRY[queue] for queue in queues}


FIRST = {  # options, offsets by time, starts of the group, begins, losses
    "a query begins after the newest message": ({}, {}, {}, (10, 20, 8), []),
    "startingOffsets as a word": ({"startingOffsets": "earliest"}, {}, {}, (0, 5, 2), []),
    "startingOffsets of a queue": ({"startingOffsets": '{"a": {"1": 7}}'}, {}, {}, (10, 7, 8), []),
    "a time of a queue is preferred": ({"startingOffsets": "earliest"}, {A1: 9}, {}, (0, 9, 2), []),
    "a start below the minimum is a loss": (
        {"startingOffsets": '{"a": {"1": 3}}'},
        {},
        {},
        (10, 5, 8),
        [expired(A1, 3, 5)],
    ),
    "a start beyond the end becomes the end": (
        LOST | {"startingOffsets": '{"a": {"1": 21}}'},
        {},
        {},
        (10, 20, 8),
        [],
    ),
    "the group's offsets do not matter": (GROUP, {}, {A0: 3, R0: 4}, (10, 20, 8), []),
    "except in the retry topic": (RETRY, {}, {A0: 3, R0: 4}, (10, 20, 4), []),
    "the retry topic begins at its minimum without an offset": (RETRY, {}, {}, (10, 20, 2), []),
    "unless startingOffsets names its queue": (
        RETRY | {"startingOffsets": '{"%RETRY%g": {"0": 3}}'},
        {},
        {R0: 4},
        (10, 20, 3),
        [],
    ),
    "a group's offset below the minimum is a loss": (RETRY, {}, {R0: 1}, (10, 20, 2), [expired(R0, 1, 2)]),
    "a group's offset beyond the end becomes the end": (RETRY, {}, {R0: 9}, (10, 20, 8), []),
    "startingOffsets=group begins at the group's offsets": (AT_GROUP, {}, {A0: 3, A1: 6, R0: 4}, (3, 6, 4), []),
    "assignment=shared too, and else at the minimum": (SHARED, {}, {A0: 3}, (3, 5, 2), []),
    "and offsets below the minimum are a loss": (SHARED, {}, {A1: 4}, (0, 5, 2), [expired(A1, 4, 5)]),
}


@pytest.mark.parametrize(("given", "by_time", "starts", "begins", "losses"), FIRST.values(), ids=FIRST)
def test_resolve_progress_begins_a_new_query(given, by_time, starts, begins, losses) -> None:
    facts = ProgressFacts(NEW, WITH_RETRY, BatchAssignment(starts=starts), by_time=by_time)
    progress = resolve_progress(None, facts, options_of(given)).progress
    assert progress.begins == progress.starts == dict(zip((A0, A1, R0), begins, strict=True))
    assert progress.losses == losses


NEXT = {  # previous offset, assignment, begins, starts, losses
    "a query continues at its positions": (at(q0=3, q1=6), BatchAssignment(), {A0: 3, A1: 6}, {}, []),
    "a new queue begins at its minimum": (at(q0=3), BatchAssignment(), {A0: 3, A1: 5}, {A1: 5}, []),
    "a new queue begins where the group says": (
        at(q0=3),
        BatchAssignment(starts={A1: 7}),
        {A0: 3, A1: 7},
        {A1: 7},
        [],
    ),
    "the group's start does not replace a position": (
        at(q0=3, q1=6),
        BatchAssignment(starts={A1: 7}),
        {A0: 3, A1: 6},
        {},
        [],
    ),
    "a start of a queue that the batch does not read is ignored": (
        at(q0=3, q1=6),
        BatchAssignment(starts={R0: 1}),
        {A0: 3, A1: 6},
        {},
        [],
    ),
    "the losses of the positions are first, then those of starts, then those of the group": (
        StreamOffset({A0: 3, QueueKey("a", 2): 4}, {}),
        BatchAssignment(starts={A1: 4}, losses=[Loss(A0, 10, 12, "beyond the end")]),
        {A0: 3, A1: 5},
        {A1: 5},
        [Loss(QueueKey("a", 2), 4, 4, VANISHED), expired(A1, 4, 5), Loss(A0, 10, 12, "beyond the end")],
    ),
}


@pytest.mark.parametrize(("before", "assignment", "begins", "starts", "losses"), NEXT.values(), ids=NEXT)
@pytest.mark.parametrize("state", [None, STATE], ids=["restarted", "running"])
def test_resolve_progress_continues_a_query(state, before, assignment, begins, starts, losses) -> None:
    step = resolve_progress(state, ProgressFacts(before, BOUNDS, assignment), options_of(GROUP))
    assert (step.progress.begins, step.progress.starts, step.progress.losses) == (begins, starts, losses)
    assert step.reports == [losses]
    assert step.state is state
    assert step.warning is None


def test_resolve_progress_reports_the_losses_of_the_start_and_of_the_group_apart() -> None:
    facts = ProgressFacts(NEW, WITH_RETRY, BatchAssignment(starts={R0: 1}))
    step = resolve_progress(None, facts, options_of(RETRY | {"startingOffsets": '{"a": {"1": 3}}'}))
    assert step.state == StartState({A0: 10, A1: 5}, [expired(A1, 3, 5)])
    assert step.reports == [[expired(A1, 3, 5)], [expired(R0, 1, 2)]]
    assert step.progress.losses == [expired(R0, 1, 2), expired(A1, 3, 5)]


def test_resolve_progress_plans_a_first_batch_again_with_the_same_starts() -> None:
    facts = ProgressFacts(NEW, BOUNDS, by_time={A0: 9})
    step = resolve_progress(STATE, facts, options_of({}))
    assert step.progress.begins == {A0: 3, A1: 5}, "a queue that appeared in the meantime begins at its minimum"
    assert step.state is STATE
    assert step.reports == [[]], "the losses were reported"
    assert step.progress.losses == STATE.losses, "they are counted in the offset"


def test_resolve_progress_prefers_the_group_to_known_starts_in_a_retry_topic() -> None:
    state = StartState({A0: 3, A1: 6, R0: 3}, [])
    step = resolve_progress(state, ProgressFacts(NEW, WITH_RETRY, BatchAssignment(starts={R0: 1})), options_of(RETRY))
    assert step.progress.begins == {A0: 3, A1: 6, R0: 2}
    assert step.reports == [[expired(R0, 1, 2)]]


def test_resolve_progress_drops_positions_of_unsubscribed_queues_with_a_warning() -> None:
    other = QueueKey("b", 1)
    before = StreamOffset({A0: 3, A1: 6, other: 4}, {})
    step = resolve_progress(None, ProgressFacts(before, BOUNDS, unsubscribed={other}), options_of(LOST))
    assert step.progress.begins == {A0: 3, A1: 6}
    assert step.progress.losses == []
    assert step.warning == (
        'failOnDataLoss=false: the checkpoint is not one of subscribe="a": it has positions in b (queue 1), to which '
        "the query does not subscribe. The query drops these positions"
    )


@pytest.mark.parametrize(
    ("queue", "offset", "error", "text"),
    [
        ("1", 21, OffsetRangeError, "startingOffsets"),
        ("7", 3, NotFoundError, "startingOffsets: the queue a/7 is not in the store"),
    ],
)
def test_resolve_progress_refuses_a_start_that_does_not_exist(queue, offset, error, text) -> None:
    options = options_of({"startingOffsets": f'{{"a": {{"{queue}": {offset}}}}}'})
    with pytest.raises(error) as caught:
        resolve_progress(None, ProgressFacts(NEW, BOUNDS), options)
    assert text in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
