"""The checks of integers that a program passes."""

from typing import Any

import numpy as np
import pytest

from rmq_spark.store.argument_checks import check_integer, check_setting
from rmq_spark.store.errors import OptionError


def test_check_integer_returns_an_int_of_any_integer_type() -> None:
    assert [type(check_integer("n", value, 0)) for value in (3, np.int64(3), np.uint8(3))] == [int, int, int]


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 1 << 63])
def test_check_integer_refuses_other_values(value: Any) -> None:
    with pytest.raises(OptionError, match=r"n=.* must be an integer ≥ 0\.$"):
        check_integer("n", value, 0)


def test_check_setting_has_no_upper_limit_unless_one_is_given() -> None:
    check_setting("lock_timeout_ms", 10**20, 0)
    with pytest.raises(OptionError, match=r"queues=10 must be an integer from 1 to 9\.$"):
        check_setting("queues", 10, 1, 9)


@pytest.mark.parametrize("value", [True, np.int64(1), 1.0, -1])
def test_check_setting_refuses_what_is_no_int(value: Any) -> None:
    with pytest.raises(OptionError, match=r"must be an integer ≥ 0\. Times are ms"):
        check_setting("lock_timeout_ms", value, 0)
