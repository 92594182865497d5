"""Delay levels: the table's text, the level and delay of a message, and the delays in a store's settings."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, MAX_LEVELS, DelayLevels
from rmq_spark.store.format.own_files import DelayTerms, StoreSettings, decode_settings, encode_settings

DEFAULT_TEXT = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


def test_default_delay_levels_are_rocketmqs_eighteen() -> None:
    assert DEFAULT_DELAY_LEVELS.text == DEFAULT_TEXT
    assert len(DEFAULT_DELAY_LEVELS) == 18
    assert [DEFAULT_DELAY_LEVELS.due_after_ms(level) for level in (1, 3, 5, 18)] == [1000, 10_000, 60_000, 7_200_000]


@pytest.mark.parametrize(
    ("asked", "waits"), [(19, 18), (25, 18), (18, 18), (3, 3), (1, 1), (0, 0), (-1, 0), (2**31 - 1, 18)]
)
def test_clamp_limits_a_level_to_the_table(asked: int, waits: int) -> None:
    assert DEFAULT_DELAY_LEVELS.clamp(asked) == waits


def test_due_after_ms_is_a_second_for_an_unknown_level() -> None:
    table = DelayLevels.parse("10s 1d")
    assert [table.due_after_ms(level) for level in (-1, 0, 1, 2, 3)] == [1000, 1000, 10_000, 86_400_000, 1000]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("60s 90s", "1m 90s"), ("  1s\t2m ", "1s 2m"), ("24h 36h 0s", "1d 36h 0s"), ("5d", "5d")],
)
def test_text_uses_the_largest_units(text: str, canonical: str) -> None:
    assert DelayLevels.parse(text).text == canonical


@given(st.lists(st.tuples(st.integers(0, 10**9 - 1), st.sampled_from("smhd")), min_size=1, max_size=40))
def test_parse_restores_a_table_from_its_text(delays: list[tuple[int, str]]) -> None:
    table = DelayLevels.parse(" ".join(f"{number}{unit}" for number, unit in delays))
    assert DelayLevels.parse(table.text) == table
    assert len(table) == len(delays)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", ""), ("  ", ""), (None, ""), (7, ""), (["1s"], ""),
        ("1s 5", "'5'"), ("1s,5s", "'1s,5s'"), ("1s 5S", "'5S'"), ("-1s", "'-1s'"), ("1.5s", "'1.5s'"), ("s", "'s'"),
        ("1s 5w", "'5w'"), ("\u0661s", "s'"), ("1s 5 s", "'5'"), ("1000000000s", "'1000000000s'"), ("1ms", "'1ms'"),
    ],
)  # fmt: skip
def test_parse_refuses_an_invalid_text(text: object, wrong: str) -> None:
    with pytest.raises(OptionError, match=r"is not a table of delay levels.*an integer and s, m, h or d") as caught:
        DelayLevels.parse(text)
    assert f"{wrong} is not a delay" in str(caught.value) or not wrong


def test_parse_refuses_too_many_levels() -> None:
    assert len(DelayLevels.parse("1s " * MAX_LEVELS)) == MAX_LEVELS
    with pytest.raises(OptionError, match="expected 1 to 65536") as caught:
        DelayLevels.parse("1s " * (MAX_LEVELS + 1))
    assert len(str(caught.value)) < 500


def test_decode_settings_restores_the_delays() -> None:
    plain = StoreSettings("id")
    assert decode_settings(encode_settings(plain)) == plain
    assert (plain.levels, plain.timer_max_delay_ms) == (DEFAULT_DELAY_LEVELS, 259_200_000)
    told = StoreSettings("id", delay_levels="3s 1h", timer_max_delay_s=60, broker_version="4.9")
    assert decode_settings(encode_settings(told)) == told
    assert (told.levels.delays_ms, told.timer_max_delay_ms) == ((3000, 3_600_000), 60_000)


def test_decode_settings_reads_old_settings_without_delays() -> None:
    assert decode_settings(b'{"v": 1, "storeId": "id"}') == StoreSettings("id")


@pytest.mark.parametrize(
    "bad",
    [{"messageDelayLevel": "1x"}, {"messageDelayLevel": 5}, {"timerMaxDelaySec": -1}, {"timerMaxDelaySec": "60"},
     {"timerMaxDelaySec": True}, {"brokerVersion": "6"}, {"brokerVersion": 5}],
)  # fmt: skip
def test_decode_settings_refuses_invalid_delays(bad: dict[str, object]) -> None:
    text = json.dumps({"v": 1, "storeId": "id", **bad}).encode()
    with pytest.raises(ValueError, match="invalid settings of a store"):
        decode_settings(text)


def test_delay_terms_change_only_the_given_settings_that_differ() -> None:
    held = StoreSettings("id", 5, delay_levels="3s 1h", broker_version="5")
    assert DelayTerms().applied_to(held) is held
    same = DelayTerms(DelayLevels.parse("3s 60m"), 259_200, "5")
    assert same.applied_to(held) is held
    assert DelayTerms(DEFAULT_DELAY_LEVELS).applied_to(StoreSettings("id")) == StoreSettings("id")
    changed = DelayTerms(DelayLevels.parse("3s 2h"), 60, "4.9").applied_to(held)
    assert changed == StoreSettings("id", 5, delay_levels="3s 2h", timer_max_delay_s=60, broker_version="4.9")
