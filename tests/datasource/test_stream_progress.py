"""stream_progress: where a query begins, at which positions it continues, and which losses it reports."""

import json

import pytest
from support.parsed_options import parse_options

from rmq_spark.datasource.options import read_options
from rmq_spark.datasource.plan.batch_assignment import BatchAssignment
from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.datasource.plan.planning import VANISHED, Loss
from rmq_spark.datasource.plan.stream_progress import (
    ProgressFacts,
    StartState,
    frozen_since,
    later_times,
    queues_to_resolve,
    resolve_progress,
)
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


UNNAMED = (
    "startingOffsets names 1 queue only: the stream begins at latest in a (queue 1), and does not read the 15 messages "
    "that are there. To read them, start a new query whose startingOffsets has these queues too, with -2 (earliest); "
    "-1 (latest) skips them without this warning"
)


@pytest.mark.parametrize(
    ("given", "bounds", "warning"),
    [
        pytest.param({"startingOffsets": '{"a": {"0": 3}}'}, BOUNDS, UNNAMED, id="one queue is missing"),
        pytest.param({"startingOffsets": '{"a": {"0": 3, "1": -1}}'}, BOUNDS, None, id="all are named"),
        pytest.param({"startingOffsets": "latest"}, BOUNDS, None, id="a word"),
        pytest.param({}, BOUNDS, None, id="none"),
        pytest.param(
            {"startingOffsets": '{"a": {"0": 3}}'},
            BOUNDS | {A1: QueueBounds(7, 7)},
            None,
            id="the other queue has no messages",
        ),
    ],
)
def test_resolve_progress_warns_of_queues_that_starting_offsets_omits(given, bounds, warning) -> None:
    step = resolve_progress(None, ProgressFacts(NEW, bounds), options_of(given))
    assert step.warning == warning
    again = resolve_progress(step.state, ProgressFacts(NEW, bounds), options_of(given))
    assert again.warning is None


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


# In a place with broker names.
B0, B1 = QueueKey("a", 0, "b"), QueueKey("a", 1, "b")
BROKER_BOUNDS = {B0: QueueBounds(0, 10), B1: QueueBounds(5, 20)}
NOW_MS, SINCE_MS = 1_700_000_000_000, 1_700_000_000_000 - 60_000
EARLY_MS = SINCE_MS - 3_600_000
AT_NOW = json.dumps({"a": NOW_MS})


@pytest.mark.parametrize(
    ("given", "since_ms"),
    [
        pytest.param({}, SINCE_MS, id="latest"),
        pytest.param({"startingOffsets": '{"a": {"b:0": 3}}'}, SINCE_MS, id="latest for queues that the JSON omits"),
        pytest.param({"startingOffsets": "earliest"}, None, id="earliest"),
        pytest.param({"startingTimestamp": str(EARLY_MS)}, EARLY_MS, id="a time before the query"),
        pytest.param({"startingTimestamp": str(NOW_MS + 5)}, SINCE_MS, id="a time in the future"),
        pytest.param({"startingTimestamp": '{"a": 0}'}, SINCE_MS, id="a time by topic"),
        pytest.param(AT_GROUP, None, id="startingOffsets=group"),
        pytest.param(SHARED, None, id="assignment=shared"),
    ],
)
def test_frozen_since_is_the_begin_of_the_query_less_a_minute(given, since_ms) -> None:
    assert frozen_since(options_with_brokers(given), NOW_MS) == since_ms


@pytest.mark.parametrize(("fallback", "since_ms"), [("latest", SINCE_MS), ("earliest", None)])
def test_frozen_since_of_a_query_that_begins_at_a_group_without_joining_it(fallback, since_ms) -> None:
    given = {"nameServer": "ns1:9876", "subscribe": "a", "groupFallback": fallback, "consumerGroup": "g"}
    given |= {"startingOffsets": "group"}
    assert frozen_since(parse_options(given | {"commitOffsets": "off"}, NOW_MS), NOW_MS) == since_ms
    assert frozen_since(parse_options(given, NOW_MS), NOW_MS) is None, "a member"


def options_with_brokers(given):
    """Parse options without a location, so that broker names are valid."""
    return read_options.parse_options({"subscribe": "a"} | given, NOW_MS, lambda _: None)


LATER = {  # options, previous offset, times
    "a new query has no later queue": ({}, StreamOffset({}, since_ms=SINCE_MS), {}),
    "a known queue continues": ({}, StreamOffset({B0: 3, B1: 6}, {}, since_ms=SINCE_MS), {}),
    "a later queue begins at the time in the offset": (
        {},
        StreamOffset({B0: 3}, {}, since_ms=SINCE_MS),
        {B1: SINCE_MS},
    ),
    "even if no queue was known before": ({}, StreamOffset({}, {}, since_ms=7), {B0: 7, B1: 7}),
    "without a time at its first message": ({}, StreamOffset({B0: 3}, {}), {}),
    "a directory has no later queue by time": ({"startingTimestamp": "0"}, StreamOffset({A0: 3}, {}), {}),
    "the time of the options is earlier": (
        {"startingTimestamp": str(EARLY_MS)},
        StreamOffset({B0: 3}, {}, since_ms=SINCE_MS),
        {B1: EARLY_MS},
    ),
    "the time of the options is later": (
        {"startingTimestamp": AT_NOW},
        StreamOffset({B0: 3}, {}, since_ms=SINCE_MS),
        {B1: SINCE_MS},
    ),
    "the time of a topic, the rest begins at earliest": (
        {"startingTimestamp": AT_NOW, "startingOffsets": "earliest"},
        StreamOffset({B0: 3}, {}),
        {B1: NOW_MS},
    ),
    "startingOffsets of the queue is earliest": (
        {"startingOffsets": '{"a": {"b:1": -2}}'},
        StreamOffset({B0: 3}, {}, since_ms=SINCE_MS),
        {},
    ),
}


@pytest.mark.parametrize(("given", "before", "times"), LATER.values(), ids=LATER)
def test_later_times_are_those_of_queues_that_the_query_did_not_know(given, before, times) -> None:
    assert later_times(before, BROKER_BOUNDS, options_with_brokers(given)) == times


ABSENT = {  # previous offset, other facts, begins, losses
    "a queue that is away keeps its position": (
        StreamOffset({B0: 3, B1: 6}, {}),
        {"bounds": {B0: QueueBounds(0, 10)}, "away": {B1}},
        {B0: 3, B1: 6},
        [],
    ),
    "a queue that is away and unknown has none": (
        StreamOffset({B0: 3}, {}),
        {"bounds": {B0: QueueBounds(0, 10)}, "away": {B1}},
        {B0: 3},
        [],
    ),
    "a later queue begins at its time": (
        StreamOffset({B0: 3}, {}),
        {"bounds": BROKER_BOUNDS, "later": {B1: 12}},
        {B0: 3, B1: 12},
        [],
    ),
    "a queue that is gone is a loss": (
        StreamOffset({B0: 3, B1: 6}, {}),
        {"bounds": {B0: QueueBounds(0, 10)}, "gone": {B1: "the topic was deleted"}},
        {B0: 3},
        [Loss(B1, 6, 6, "the topic was deleted")],
    ),
    "a queue of a retired broker is dropped": (
        StreamOffset({B0: 3, B1: 6}, {}),
        {"bounds": {B0: QueueBounds(0, 10)}, "retired": {B1}},
        {B0: 3},
        [],
    ),
}


@pytest.mark.parametrize(("before", "facts", "begins", "losses"), ABSENT.values(), ids=ABSENT)
def test_resolve_progress_of_queues_that_do_not_answer(before, facts, begins, losses) -> None:
    progress = resolve_progress(None, ProgressFacts(before, **facts), options_with_brokers({})).progress
    assert progress.begins == begins
    assert progress.losses == losses


@pytest.mark.parametrize(
    ("starts", "begins"),
    [
        pytest.param('{"a": {"b:1": 500}}', {B0: 10, B1: 500}, id="an offset is kept until the broker is back"),
        pytest.param('{"a": {"b:1": -2}}', {B0: 10}, id="earliest is resolved when the broker is back"),
    ],
)
def test_resolve_progress_begins_in_a_queue_that_is_away_at_its_offset(starts, begins) -> None:
    facts = ProgressFacts(NEW, {B0: QueueBounds(0, 10)}, away={B1})
    progress = resolve_progress(None, facts, options_with_brokers({"startingOffsets": starts})).progress
    assert progress.begins == progress.starts == begins


def test_resolve_progress_refuses_a_named_queue_that_is_neither_there_nor_away() -> None:
    facts = ProgressFacts(NEW, {B0: QueueBounds(0, 10)}, away=())
    with pytest.raises(NotFoundError, match="startingOffsets: the queue a/b:1 is not in the store"):
        resolve_progress(None, facts, options_with_brokers({"startingOffsets": '{"a": {"b:1": 500}}'}))
