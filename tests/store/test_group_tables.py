"""The sum of the lag over queues."""

from typing import Any

import pytest

from rmq_spark.store.group_tables import LagSum, sum_lag


def row(state: str, messages: int | None = None, size: int | None = None, seconds: float | None = None) -> Any:
    return {"state": state, "lagMessages": messages, "lagBytes": size, "secondsBehind": seconds}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("ok", 15, 150, 3.0), row("expired", 2, 20, 9.0)], LagSum(17, 170, 9.0, 0)),
        ([row("ok", 15, 150, 3.0), row("away")], LagSum(15, 150, 3.0, 1)),
        ([row("ok", 15, 150, 3.0), row("gone")], LagSum(15, 150, 3.0, 0)),
        ([row("ok", 15)], LagSum(15, None, None, 0)),
        ([row("gone")], LagSum(0, 0, 0, 0)),
        ([row("away"), row("away")], LagSum(None, None, None, 2)),
        ([row("away"), row("gone")], LagSum(0, 0, 0, 1)),
        ([], LagSum(None, None, None, 0)),
    ],
)
def test_sum_lag_counts_a_gone_queue_as_read_and_names_unknown_ones(rows: list[Any], expected: LagSum) -> None:
    assert sum_lag(rows) == expected
