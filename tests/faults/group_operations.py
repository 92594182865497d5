"""Work of group members outside their triggers, as operations to try with faults: see `operations.py`.

A driver publishes offsets on behalf of a query, and a query hands over queues between two triggers.
"""

import os
from collections.abc import Callable, Iterator
from urllib.parse import unquote

import base_stores
from operations import MoreIsDueError, Operation, Outcome, Session, published, raising_logged_errors

from rmq_spark.store import CommitKey, GroupSession, GroupTerms, commit_final_offsets
from rmq_spark.store.group import handover
from rmq_spark.store.group.group_files import GroupPaths, read_finished_batch
from rmq_spark.store.model import QueueKey

GROUP = "crew"
QUEUES = [QueueKey("orders", queue_id) for queue_id in range(base_stores.QUEUES)]
STOOD = 5  # the queue offset of the first member in each queue
BATCH = 2  # the number of the batch that it planned last
_FINISHED = ".finished"


def _join(session: Session, handover_timeout_ms: int = base_stores.HOUR_MS) -> GroupSession:
    """Return a new member of the group. No thread hands its queues over: `_hand_over` does what the thread does."""
    handover.LOOK_EVERY_S = base_stores.HOUR_MS / 1000
    return GroupSession(session.store, GroupTerms(GROUP, "shared", handover_timeout_ms=handover_timeout_ms))


def _plan_batches(session: Session, handover_timeout_ms: int = base_stores.HOUR_MS) -> None:
    """Have one member own all queues, at offset `STOOD` in each, while its batch `BATCH` runs."""
    session.group = _join(session, handover_timeout_ms)
    session.group.rebalance(QUEUES, {}, 0)
    session.group.settle()
    session.group.rebalance(QUEUES, dict.fromkeys(QUEUES, STOOD), 0)
    session.group.publish(dict.fromkeys(QUEUES, STOOD))
    session.group.settle()


def _publish_last_offsets(finished_batch: int | None) -> Callable[[Session, int], None]:
    def act(session: Session, number: int) -> None:
        assert session.group
        offsets = dict.fromkeys(QUEUES, STOOD + number)
        is_there = commit_final_offsets(
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
    session.other.rebalance(QUEUES, {}, 0)


def _keep_a_finished_batch_from_another(session: Session) -> None:
    """Let a second member wait, and record the end of the first one's batch."""
    _plan_batches(session)
    session.other = _join(session)
    session.other.rebalance(QUEUES, {}, 0)
    _publish_last_offsets(BATCH)(session, 0)


def _keep_idle_queues_from_another(session: Session) -> None:
    """Let a second member wait, while the first one has nothing in flight."""
    _plan_batches(session)
    assert session.group
    session.group.rebalance(QUEUES, dict.fromkeys(QUEUES, STOOD), 0)
    session.group.settle(is_batch=False)
    session.other = _join(session)
    session.other.rebalance(QUEUES, {}, 0)


def _hand_over(session: Session, number: int) -> None:
    """Give the second member its share of the queues, and check the offsets at which it resumes."""
    assert session.group
    assert session.other
    with raising_logged_errors():
        session.group.hand_over()
    step = session.other.rebalance(QUEUES, {}, 0)
    if not step.owned:
        raise MoreIsDueError("hand over: the second member got no queue; expected one. Look again.")
    stands = {queue: step.held.get(queue) for queue in step.gained}
    assert stands == dict.fromkeys(step.owned[:1], STOOD), f"the second member resumes at {stands}"


def _publishing(name: str, finished_batch: int | None, judge: Callable[[Outcome], Iterator[str]]) -> Operation:
    act = _publish_last_offsets(finished_batch)
    return Operation(name, base_stores.settled, act, judge, prepare=_plan_batches)


def _handing_over(name: str, prepare: Callable[[Session], None]) -> Operation:
    return Operation(name, base_stores.settled, _hand_over, prepare=prepare)


SHARING = (
    _publishing("publish-last", None, published),
    _publishing("publish-batch", BATCH, _recorded),
    _handing_over("hand-over", _keep_idle_queues_from_another),
    _handing_over("hand-over-finished", _keep_a_finished_batch_from_another),
    _handing_over("hand-over-fenced", _keep_a_running_batch_from_another),
)
