"""What members of a consumer group do beside their triggers, as it is tried with faults: see `operations.py`.

That is what a driver publishes on behalf of a query, and what a query hands over between two triggers.
"""

import os
from collections.abc import Callable, Iterator
from urllib.parse import unquote

import base_stores
from operations import MoreIsDueError, Operation, Outcome, Session, published, raising_logged_errors

from rmq_spark.store import CommitKey, GroupTerms, QueryGroup, publish_last_offsets
from rmq_spark.store.group import handover
from rmq_spark.store.group.finished_batch import read_finished_batch
from rmq_spark.store.group.group_paths import GroupPaths
from rmq_spark.store.units import QueueKey

GROUP = "crew"
QUEUES = [QueueKey("orders", queue_id) for queue_id in range(base_stores.QUEUES)]
STOOD = 5  # the queue offset at which the first member stands in each queue
BATCH = 2  # the number of the batch that it planned last
_FINISHED = ".finished"
_OFFSETS = "consumerOffset.json"


def _join(session: Session, handover_timeout_ms: int = base_stores.HOUR_MS) -> QueryGroup:
    """Return a new member of the group. No thread hands its queues over: `_hand_over` does what the thread does."""
    handover.LOOK_EVERY_S = base_stores.HOUR_MS / 1000
    return QueryGroup(session.store, GroupTerms(GROUP, "shared", handover_timeout_ms=handover_timeout_ms))


def _plan_batches(session: Session, handover_timeout_ms: int = base_stores.HOUR_MS) -> None:
    """Have one member own all queues and stand at `STOOD` in each, while its batch `BATCH` runs."""
    session.group = _join(session, handover_timeout_ms)
    session.group.step(QUEUES, {}, 0)
    session.group.settle()
    session.group.step(QUEUES, dict.fromkeys(QUEUES, STOOD), 0)
    session.group.publish(dict.fromkeys(QUEUES, STOOD))
    session.group.settle()


def _publish_last_offsets(finished_batch: int | None) -> Callable[[Session, int], None]:
    def act(session: Session, number: int) -> None:
        assert session.group
        offsets = dict.fromkeys(QUEUES, STOOD + number)
        is_there = publish_last_offsets(
            session.store,
            GROUP,
            session.group.member_id,
            offsets,
            0,
            last_batch=CommitKey("q", number),
            finished_batch=finished_batch,
        )
        assert is_there, "the group does not have the offsets, and nothing was raised"
        session.published = offsets

    return act


def _recorded(outcome: Outcome) -> Iterator[str]:
    yield from published(outcome)
    paths = GroupPaths(outcome.store, GROUP)
    names = [unquote(name.removesuffix(_FINISHED)) for name in os.listdir(paths.members) if name.endswith(_FINISHED)]
    found = [read_finished_batch(paths, name) for name in names]
    if outcome.acknowledged() and found != [BATCH]:
        yield f"LOST BATCH: acknowledged the end of batch {BATCH}, found {found}"


def _keep_a_running_batch_from_another(session: Session) -> None:
    """Let a second member wait while the first one's batch runs, for which nobody waits any longer."""
    _plan_batches(session, handover_timeout_ms=0)
    session.other = _join(session)
    session.other.step(QUEUES, {}, 0)


def _keep_a_finished_batch_from_another(session: Session) -> None:
    """Let a second member wait, and record the end of the first one's batch."""
    _plan_batches(session)
    session.other = _join(session)
    session.other.step(QUEUES, {}, 0)
    _publish_last_offsets(BATCH)(session, 0)


def _keep_idle_queues_from_another(session: Session) -> None:
    """Let a second member wait, while the first one has nothing in flight."""
    _plan_batches(session)
    assert session.group
    session.group.step(QUEUES, dict.fromkeys(QUEUES, STOOD), 0)
    session.group.settle(is_batch=False)
    session.other = _join(session)
    session.other.step(QUEUES, {}, 0)


def _hand_over(session: Session, number: int) -> None:
    """Give the second member what it is entitled to, and have it look where it goes on."""
    assert session.group
    assert session.other
    with raising_logged_errors():
        session.group.hand_over()
    step = session.other.step(QUEUES, {}, 0)
    if not step.owned:
        raise MoreIsDueError("hand over: the second member got no queue; expected one. Look again.")
    stands = {queue: step.held.get(queue) for queue in step.gained}
    assert stands == dict.fromkeys(step.owned[:1], STOOD), f"the second member goes on at {stands}"


def _publishing(name: str, finished_batch: int | None, judge: Callable[[Outcome], Iterator[str]]) -> Operation:
    act = _publish_last_offsets(finished_batch)
    return Operation(name, base_stores.settled, act, judge, prepare=_plan_batches, rewritten=_OFFSETS)


def _handing_over(name: str, prepare: Callable[[Session], None]) -> Operation:
    return Operation(name, base_stores.settled, _hand_over, prepare=prepare, rewritten=_OFFSETS)


SHARING = (
    _publishing("publish-last", None, published),
    _publishing("publish-batch", BATCH, _recorded),
    _handing_over("hand-over", _keep_idle_queues_from_another),
    _handing_over("hand-over-finished", _keep_a_finished_batch_from_another),
    _handing_over("hand-over-fenced", _keep_a_running_batch_from_another),
)
