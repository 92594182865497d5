"""Unique ids: distinct, ascending, and with the parts of a client's UNIQ_KEY."""

from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pytest

from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.message_ids import UniqueIds, parse_unique_key

NOW = datetime(2026, 3, 17, 12, 0, 0, 345_000, UTC)
NOW_MS = int(NOW.timestamp() * 1000)
SPAN_MS = NOW_MS - int(datetime(2026, 3, 1, tzinfo=UTC).timestamp() * 1000)
MONTH_END_MS = int(datetime(2026, 4, 1, tzinfo=UTC).timestamp() * 1000)


def unique_ids(random_bits: int = 0xDEADBEEF) -> UniqueIds:
    return UniqueIds("10.1.2.3", 0x1234F, random_bits, UTC)


def keys(ids: UniqueIds, count: int, now_ms: int = NOW_MS) -> list[str]:
    return [row.tobytes().decode() for row in ids.take(count, now_ms).texts()]


def test_unique_ids_contain_address_process_and_time() -> None:
    first, second = keys(unique_ids(), 2)
    key = parse_unique_key(first)
    assert (key.ip, key.pid, key.class_hash) == ("10.1.2.3", 0x234F, 0xDEADBEEF)
    assert (key.month_ms, key.counter) == (SPAN_MS, 0)
    assert second == str(key.advance(1))
    assert len(first) == unique_ids().take(1, NOW_MS).width == 32


def test_unique_ids_with_an_ipv6_address_are_longer() -> None:
    (key,) = keys(UniqueIds("2001:db8::1", 1, 2, UTC), 1)
    assert parse_unique_key(key).ip == "2001:db8::1"
    assert len(key) == 56


def test_unique_ids_of_one_millisecond_are_distinct_and_ascend() -> None:
    found = keys(unique_ids(), 100_000)
    assert len(set(found)) == 100_000
    assert found == sorted(found)
    assert parse_unique_key(found[-1]).month_ms == SPAN_MS + 1, "65536 fit into one"


def test_unique_ids_continue_in_the_next_batch() -> None:
    ids = unique_ids()
    found = [key for _ in range(5) for key in keys(ids, 30_000)]
    assert found == sorted(set(found))
    assert len(found) == 150_000


def test_unique_ids_follow_the_clock() -> None:
    ids = unique_ids()
    keys(ids, 10)
    assert parse_unique_key(keys(ids, 1, NOW_MS + 5)[0]).month_ms == SPAN_MS + 5


@pytest.mark.parametrize("later_ms", [NOW_MS - 10_000, MONTH_END_MS + 3], ids=["clock stepped back", "month began"])
def test_unique_ids_advance_when_the_clock_steps_back(later_ms: int) -> None:
    ids = unique_ids()
    before = keys(ids, 70_000)
    after = keys(ids, 70_000, later_ms)
    assert after[0] > before[-1]
    assert len({*before, *after}) == 140_000


def test_unique_ids_differ_by_random_bits() -> None:
    assert not {*keys(unique_ids(1), 1000)} & {*keys(unique_ids(2), 1000)}


@pytest.mark.parametrize("hours", [-11, 0, 8])
def test_unique_ids_count_from_the_local_month(hours: int) -> None:
    zone = timezone(timedelta(hours=hours))
    ids = UniqueIds("10.1.2.3", 1, 2, zone)
    moment = datetime(2026, 4, 1, 0, 0, 1, tzinfo=zone)
    assert parse_unique_key(keys(ids, 1, int(moment.timestamp() * 1000))[0]).month_ms == 1000


@pytest.mark.parametrize("count", [1, 2, 40_000, 70_000])
def test_unique_id_run_hashes_are_those_of_the_texts(count: int) -> None:
    run = unique_ids().take(count, NOW_MS)
    found = run.hashes().view(np.int32)
    for row in {0, count // 2, count - 1}:
        assert int(found[row]) == string_hash(run.texts()[row].tobytes().decode())
    if count > 65_536:
        assert int(found[65_536]) == string_hash(run.texts()[65_536].tobytes().decode())
