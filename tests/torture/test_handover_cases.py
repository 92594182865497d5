"""A member sleeps in its batch, has a long trigger interval, is killed, is stopped: another one gets its queues."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.torture.handover_cases import MESSAGES, QUEUES, Times, killed, long_interval, sleeping_batch, stopped_process

pytestmark = [pytest.mark.spark, pytest.mark.torture(minutes=2)]

# A test that waits for one of these cannot pass by the other one.
HANDOVER_FIRST = Times("3s", "1h", "1m")
LEASE_FIRST = Times("1h", "10s", "1s")
NEITHER = Times("1h", "1h", "1m")


def test_a_batch_that_sleeps_is_fenced_after_handoverTimeout(start: Callable, tmp_path: Path) -> None:
    found = sleeping_batch(start, tmp_path, HANDOVER_FIRST)
    assert found.missing == set()
    assert len(found.taken) == QUEUES // 2
    assert found.twice == {(queue_id, offset) for queue_id in found.taken for offset in range(MESSAGES)}


def test_a_member_with_a_long_trigger_interval_gives_queues_up_when_its_batch_has_ended(
    start: Callable, tmp_path: Path
) -> None:
    found = long_interval(start, tmp_path, NEITHER)
    assert found.missing == set()
    assert len(found.taken) == QUEUES // 2
    assert found.twice == set()
    assert found.second == []


def test_a_killed_members_queues_go_over_without_a_time_that_has_to_pass(start: Callable, tmp_path: Path) -> None:
    found = killed(start, tmp_path, NEITHER)
    assert found.missing == set()
    assert found.twice == {(queue_id, MESSAGES + offset) for queue_id in found.taken for offset in range(MESSAGES)}


def test_a_stopped_members_queues_go_over_after_leaseTimeout_and_it_comes_back(start: Callable, tmp_path: Path) -> None:
    found = stopped_process(start, tmp_path, LEASE_FIRST)
    assert found.missing == set()
    assert found.twice == {(queue_id, MESSAGES + offset) for queue_id in found.taken for offset in range(MESSAGES)}
