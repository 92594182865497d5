"""The retry policy: every vector of the specification, and a twin that decides one message at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.retry_twin import decide_one

from rmq_spark.store.delivery.retry_policy import decide
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS

DEAD = 0
# reconsumeTimes r of the failed copy -> level and delay in seconds, with header 0 and max 16.
LADDER = (
    (3, 10), (4, 30), (5, 60), (6, 120), (7, 180), (8, 240), (9, 300), (10, 360), (11, 420), (12, 480), (13, 540),
    (14, 600), (15, 1200), (16, 1800), (17, 3600), (18, 7200),
)  # fmt: skip


def one(reconsume_times: int, asked_level: int, limit: int, level_count: int = 18) -> int:
    """Return the level of one message, DEAD for a dead letter."""
    found = decide(np.array([reconsume_times]), np.array([asked_level]), limit, level_count)
    assert found.are_dead[0] == (found.levels[0] == DEAD)
    return int(found.levels[0])


@pytest.mark.parametrize(("reconsume_times", "level", "delay_s"), [(r, *step) for r, step in enumerate(LADDER)])
def test_decide_waits_longer_after_each_failure(reconsume_times: int, level: int, delay_s: int) -> None:
    assert one(reconsume_times, 0, 16) == level
    assert DEFAULT_DELAY_LEVELS.due_after_ms(level) == delay_s * 1000


@pytest.mark.parametrize("reconsume_times", [16, 17])
def test_decide_dead_letter_after_seventeen_deliveries(reconsume_times: int) -> None:
    assert one(reconsume_times, 0, 16) == DEAD


@pytest.mark.parametrize(
    ("reconsume_times", "asked_level", "limit", "level"),
    [
        (0, 0, 16, 3),
        (0, -1, 16, DEAD),
        (0, 5, 16, 5),
        (7, 5, 16, 5),
        (0, 25, 16, 18),
        (0, 0, 0, DEAD),
        (3, 0, 3, DEAD),
        (2, 0, 3, 5),
        (20, 0, 100, 18),
        # A client that sends the message itself: 5.x compares its RECONSUME_TIME, one more, by "more than".
        (14, 0, 16, 17),
        (15, 0, 16, 18),
    ],
)
def test_decide_levels_limits_and_requested_levels(
    reconsume_times: int, asked_level: int, limit: int, level: int
) -> None:
    assert one(reconsume_times, asked_level, limit) == level


def test_decide_uses_the_last_level_for_higher_ones() -> None:
    assert [one(times, 0, 16, level_count=4) for times in range(4)] == [3, 4, 4, 4]
    assert one(0, 0, 16, level_count=2) == 2


NUMBERS = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), NUMBERS), min_size=1), st.integers(0, 40), st.integers(1, 30))
def test_decide_agrees_with_the_twin(rows: list[tuple[int, int]], limit: int, level_count: int) -> None:
    times, asked = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    found = decide(times, asked, limit, level_count)
    wanted = [decide_one(r, level, limit, level_count) for r, level in rows]
    assert found.are_dead.tolist() == [level is None for level in wanted]
    assert found.levels.tolist() == [level or DEAD for level in wanted]
