"""The consumer of a store directory: how it waits, whose offsets it keeps, and what it refuses.

What it has in common with the consumer of a live cluster is in `test_pull_consumers.py`.
"""

import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rmq_spark
from rmq_spark.store.client.producer import Producer
from rmq_spark.store.client.pull_consumer import PullConsumer
from rmq_spark.store.errors import LockTimeoutError, NotFoundError, OptionError, StoreError, StorePathError
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.group.pull_limits import PullLimits
from rmq_spark.store.model import QueueKey
from rmq_spark.store.pull_result import Accept, GetMessageStatus, PullStatus
from rmq_spark.store.testing.busy_writer import TOPIC as BUSY_TOPIC
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

QUEUE, OTHER = QueueKey("T", 0), QueueKey("T", 1)
FIRST_MS = 1_700_000_000_000
WANTED: Accept = lambda codes: codes == string_hash("wanted")  # noqa: E731


def ten_messages() -> list[SampleMessage]:
    return [SampleMessage("T", 0, b"%d" % n, tags="t", store_timestamp=FIRST_MS + 1000 * n) for n in range(10)]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Ten messages in queue 0 of T, a second apart; queue 1 is empty."""
    return str(build_store(tmp_path / "store", ten_messages(), segment_bytes=1 << 16, empty_topics={"T": 2}).path)


@pytest.fixture
def consumer(store: str) -> Iterator[PullConsumer]:
    with PullConsumer(store, "G") as opened:
        yield opened


def stored_offsets(store: str) -> dict[str, dict[str, int]]:
    path = Path(store, "config", "consumerOffset.json")
    return json.loads(path.read_text().replace("{0:", '{"0":').replace(",1:", ',"1":').replace("{1:", '{"1":'))[
        "offsetTable"
    ]


# -- looking and pulling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "rule", "offset"),
    [
        (FIRST_MS + 2_400, "lower", 3),
        (FIRST_MS + 2_400, "upper", 2),
        (FIRST_MS + 2_400, "nearest", 2),
        (FIRST_MS + 2_600, "nearest", 3),
        (FIRST_MS + 99_000, "lower", 10),
        (datetime.fromtimestamp(FIRST_MS / 1000 + 4, UTC), "lower", 4),
    ],
)
def test_an_offset_is_found_by_time(consumer: PullConsumer, at: int | datetime, rule: str, offset: int) -> None:
    assert consumer.search_offset(QUEUE, at, rule) == offset


def test_what_was_sent_is_pulled_at_once(consumer: PullConsumer) -> None:
    assert consumer.pull(OTHER, 0).status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
    sent = consumer.send("T", "hello", queue_id=1, tags="wanted")
    found = consumer.pull(OTHER, sent.queue_offset, accept=WANTED)
    assert found.messages.column("body").to_pylist() == [b"hello"]
    assert consumer.send("new", b"x").topic in consumer.topics()


def test_limits_and_columns_are_those_of_the_consumer(store: str) -> None:
    with PullConsumer(store, columns=["body"], limits=PullLimits(max_count_in_memory=2)) as consumer:
        assert consumer.pull(QUEUE, 4).messages.to_pydict() == {"body": [b"4", b"5"]}


# -- waiting ----------------------------------------------------------------------------------------------------------


class TimeLine:
    """A clock that advances only while sleeping, and appends to queue 1 meanwhile: (ms, tags)."""

    def __init__(self, store: str, appends: list[tuple[float, str]]) -> None:
        self._store, self._appends, self.ms = store, appends, 0.0

    def now_ms(self) -> float:
        return self.ms

    def sleep(self, seconds: float) -> None:
        self.ms += seconds * 1000
        while self._appends and self._appends[0][0] <= self.ms:
            with PullConsumer(self._store) as producer:
                producer.send("T", "late", queue_id=1, tags=self._appends.pop(0)[1])

    def wait(
        self, offset: int = 0, timeout_ms: int = 15_000, accept: Accept | None = None, *, long_polling: bool = True
    ) -> tuple[str, str, int, float]:
        """Pull from queue 1 and wait; return both statuses, the next offset, and the time by then."""
        with PullConsumer(self._store, long_polling=long_polling, now_ms=self.now_ms, sleep=self.sleep) as consumer:
            found = consumer.pull_block_if_not_found(OTHER, offset, timeout_ms=timeout_ms, accept=accept)
        return found.status, found.pull_status, found.next_begin_offset, round(self.ms, 3)


def test_a_wanted_message_is_answered_when_it_comes(store: str) -> None:
    *said, at_ms = TimeLine(store, [(2_000, "wanted")]).wait(accept=WANTED)
    assert said == ["FOUND", "FOUND", 1]
    assert 2_000 <= at_ms <= 2_021


def test_an_unwanted_message_is_answered_at_the_next_check(store: str) -> None:
    *said, at_ms = TimeLine(store, [(2_000, "other")]).wait(accept=WANTED)
    assert said == ["NO_MATCHED_MESSAGE", "NO_MATCHED_MSG", 1]
    assert 5_000 <= at_ms <= 5_021


def test_a_wanted_message_after_an_unwanted_one_is_answered_when_it_comes(store: str) -> None:
    *said, at_ms = TimeLine(store, [(1_000, "other"), (2_000, "wanted")]).wait(accept=WANTED)
    assert said == ["FOUND", "FOUND", 2]
    assert 2_000 <= at_ms <= 2_021


def test_without_a_message_the_answer_comes_when_the_time_is_over(store: str) -> None:
    *said, at_ms = TimeLine(store, []).wait()
    assert said == ["NO_MESSAGE_IN_QUEUE", "NO_NEW_MSG", 0]
    assert 15_000 <= at_ms <= 20_000


def test_without_long_polling_a_second_is_waited_and_nobody_tells(store: str) -> None:
    *said, at_ms = TimeLine(store, []).wait(long_polling=False)
    assert said == ["NO_MESSAGE_IN_QUEUE", "NO_NEW_MSG", 0]
    assert 1_000 <= at_ms <= 2_000
    *said, at_ms = TimeLine(store, [(200, "wanted")]).wait(long_polling=False)
    assert said == ["FOUND", "FOUND", 1]
    assert 1_000 <= at_ms <= 1_021


def test_a_pull_that_does_not_wait_is_answered_at_once(store: str) -> None:
    line = TimeLine(store, [])
    with PullConsumer(store, now_ms=line.now_ms, sleep=line.sleep) as consumer:
        assert consumer.pull(QUEUE, 10).pull_status is PullStatus.NO_NEW_MSG
        assert consumer.pull_block_if_not_found(QUEUE, 10, timeout_ms=0).pull_status is PullStatus.NO_NEW_MSG
    assert line.ms == 0


@pytest.mark.parametrize("offset", [7, 1])
def test_an_illegal_offset_is_answered_at_once(store: str, offset: int) -> None:
    line = TimeLine(store, [])
    assert line.wait(offset) == (GetMessageStatus.NO_MESSAGE_IN_QUEUE, PullStatus.OFFSET_ILLEGAL, 0, 0.0)


def test_messages_of_other_queues_do_not_wake(store: str) -> None:
    line = TimeLine(store, [])
    appended = []

    def sleep(seconds: float) -> None:
        line.sleep(seconds)
        if not appended:
            with PullConsumer(store) as producer:
                appended.append(producer.send("T", "elsewhere", queue_id=0))

    with PullConsumer(store, now_ms=line.now_ms, sleep=sleep) as consumer:
        found = consumer.pull_block_if_not_found(OTHER, 0, timeout_ms=3_000)
    assert (found.pull_status, len(appended)) == (PullStatus.NO_NEW_MSG, 1)
    assert line.ms == pytest.approx(3_000)


def test_a_wait_can_be_interrupted(store: str) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with PullConsumer(store, sleep=interrupt) as consumer:
        with pytest.raises(KeyboardInterrupt):
            consumer.pull_block_if_not_found(QUEUE, 10)
        assert consumer.pull(QUEUE, 9).messages.num_rows == 1


def test_an_append_of_another_process_wakes(tmp_path: Path, store: str) -> None:
    notes = tmp_path / "notes"
    writer = [sys.executable, "-m", "rmq_spark.store.testing.busy_writer", store, "--name", "a", "--count", "40"]
    with PullConsumer(store) as consumer:
        consumer.send(BUSY_TOPIC, "first", queue_id=0)
        with subprocess.Popen([*writer, "--each", "10", "--notes", str(notes)]) as process:
            pulled, offset = [], 1
            while len(pulled) < 10:
                found = consumer.pull_block_if_not_found(QueueKey(BUSY_TOPIC, 0), offset, timeout_ms=120_000)
                assert found.status is GetMessageStatus.FOUND, "two minutes went by"
                pulled += found.messages.column("body").to_pylist()
                offset = found.next_begin_offset
            assert process.wait() == 0
    assert pulled == [b"a %d" % number for number in range(0, 40, 4)]


# -- a group's offsets ------------------------------------------------------------------------------------------------


def test_a_smaller_offset_overwrites_a_larger_one_in_the_store(consumer: PullConsumer, store: str) -> None:
    consumer.update_consume_offset(QUEUE, 10)
    consumer.commit()
    consumer.update_consume_offset(QUEUE, 9)
    consumer.commit()
    assert stored_offsets(store) == {"T@G": {"0": 9}}
    consumer.update_consume_offset(QUEUE, 2, increase_only=True)
    assert consumer.commit() == {}


def test_only_the_queues_named_are_committed_and_the_rest_when_the_consumer_is_closed(store: str) -> None:
    with PullConsumer(store, "G") as consumer:
        consumer.update_consume_offset(QUEUE, 5)
        consumer.update_consume_offset(OTHER, 0)
        assert consumer.commit([OTHER]) == {OTHER: 0}
        assert stored_offsets(store) == {"T@G": {"1": 0}}
    assert stored_offsets(store) == {"T@G": {"0": 5, "1": 0}}


def test_offsets_of_other_groups_stay(store: str) -> None:
    for group, offset in (("G", 3), ("H", 8)):
        with PullConsumer(store, group) as consumer:
            consumer.update_consume_offset(QUEUE, offset)
    assert stored_offsets(store) == {"T@G": {"0": 3}, "T@H": {"0": 8}}


def test_beside_a_broker_offsets_are_read_and_a_commit_is_refused(store: str) -> None:
    with PullConsumer(store, "G") as consumer:
        consumer.update_consume_offset(QUEUE, 3)
        consumer.commit()
        before = Path(store, "config", "consumerOffset.json").read_bytes()
        with Path(store, "lock").open("r+b") as lock:
            fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
            assert consumer.fetch_consume_offset(QUEUE, from_store=True) == 3
            assert consumer.pull(QUEUE, 3).messages.num_rows == 7
            consumer.update_consume_offset(QUEUE, 10)
            with pytest.raises(LockTimeoutError, match=r'consumer group "G".*a broker holds the store'):
                consumer.commit()
        assert Path(store, "config", "consumerOffset.json").read_bytes() == before
        assert consumer.commit() == {QUEUE: 10}, "the next commit tries again"


def test_a_consumer_that_only_reads_changes_nothing_on_disk(store: str) -> None:
    def files() -> dict[str, tuple[int, int]]:
        return {str(one): (one.stat().st_mtime_ns, one.stat().st_size) for one in Path(store).rglob("*")}

    before = files()
    with PullConsumer(store, "G") as consumer:
        consumer.pull(QUEUE, 0)
        consumer.fetch_consume_offset(QUEUE)
        consumer.pull_block_if_not_found(QUEUE, 10, timeout_ms=1)
    assert files() == before


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda one: one.pull(QUEUE, -1), OptionError, "pull: offset=-1 is not a queue offset"),
        (lambda one: one.pull(QUEUE, "0"), OptionError, "pull: offset='0' is not a queue offset"),
        (lambda one: one.pull_block_if_not_found(QUEUE, 1.0), OptionError, "pull_block_if_not_found: offset=1.0 is"),
        (lambda one: one.pull(QUEUE, 0, 0), OptionError, "max_messages=0 must be an integer ≥ 1"),
        (lambda one: one.pull(QUEUE, 0, "1"), OptionError, "max_messages='1' must be an integer"),
        (
            lambda one: one.pull_block_if_not_found(QUEUE, 0, timeout_ms=-1),
            OptionError,
            "timeout_ms=-1 must be an integer",
        ),
        (lambda one: one.search_offset(QUEUE, 1_700_000_000), OptionError, "the unit is milliseconds"),
        (lambda one: one.search_offset(QUEUE, "noon"), OptionError, "search_offset: at='noon' must be an integer"),
        (lambda one: one.pull(QueueKey("T", 2), 0), NotFoundError, "has no queue 2. Its queues are: 0, 1"),
        (lambda one: one.queues("Tt"), NotFoundError, "Did you mean T"),
        (lambda one: one.max_offset(QueueKey("U", 0)), NotFoundError, 'no topic "U"'),
        (lambda one: one.search_offset(QUEUE, 0, "closest"), OptionError, 'rule="closest" is none of'),
        (lambda one: one.update_consume_offset(QUEUE, -1), OptionError, "update_consume_offset: offset=-1 is no"),
        (lambda one: one.update_consume_offset(QueueKey("T", 2), 1), NotFoundError, "has no queue 2"),
        (lambda one: one.fetch_consume_offset(QueueKey("T", 2)), NotFoundError, "has no queue 2"),
    ],
)
def test_a_call_that_cannot_mean_anything_is_named(
    consumer: PullConsumer, ask: Callable[[PullConsumer], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask(consumer)


@pytest.mark.parametrize("offset", [1.0, True, np.True_, 1 << 63, 10**30, "2", None, np.float64(2)])
def test_what_is_no_queue_offset_reaches_no_other_groups_offsets(store: str, offset: object) -> None:
    with PullConsumer(store, "other") as other:
        other.update_consume_offset(QUEUE, 4)
    before = Path(store, "config", "consumerOffset.json").read_bytes()
    with PullConsumer(store, "G") as consumer:
        with pytest.raises(OptionError, match=r"update_consume_offset: offset=.* from 0 to 2\*\*63 - 1"):
            consumer.update_consume_offset(QUEUE, offset)
        assert consumer.commit() == {}
    assert Path(store, "config", "consumerOffset.json").read_bytes() == before


@pytest.mark.parametrize("offset", [np.int64(3), np.uint8(3), (1 << 63) - 1])
def test_every_whole_number_is_written_as_one(consumer: PullConsumer, store: str, offset: int) -> None:
    consumer.update_consume_offset(QUEUE, offset)
    assert consumer.commit() == {QUEUE: int(offset)}
    assert stored_offsets(store)["T@G"]["0"] == int(offset)


def test_an_error_at_the_close_does_not_hide_that_of_the_body(store: str) -> None:
    class Sender(Producer):
        def close(self) -> None:
            raise LockTimeoutError("a broker came")

    def fail() -> None:
        with PullConsumer(store, "G", open_producer=lambda: Sender.__new__(Sender)) as consumer:
            consumer._opened_producer()
            raise RuntimeError("the user's")

    with pytest.raises(RuntimeError, match="the user's") as caught:
        fail()
    assert "a broker came" in caught.value.__notes__[0]


def test_a_program_opens_a_consumer_with_a_brokers_settings(store: str) -> None:
    with rmq_spark.open_consumer(store, "G", max_transfer_count_on_message_in_memory=3) as consumer:
        assert consumer.pull(QUEUE, 0).messages.num_rows == 3
    with rmq_spark.open_consumer(store, access_message_in_memory_max_ratio=1) as consumer:
        assert consumer._limits.memory_ratio_percent == 1
    one_unit = rmq_spark.open_consumer(store, max_filter_message_count=20)
    assert one_unit.pull(QUEUE, 0, 1, accept=WANTED).next_begin_offset == 1
    with one_unit, rmq_spark.open_consumer(store) as usual:
        assert usual._limits == replace(PullLimits(), memory_bytes=usual._limits.memory_bytes)
    consumer = rmq_spark.open_consumer(
        store, long_polling=False, max_decompressed_bytes=7, lock_timeout_ms=5, allow_network_store=True
    )
    assert (consumer._long_polling, consumer._max_decompressed_bytes) == (False, 7)
    assert (consumer._settings.lock_timeout_ms, consumer._settings.allow_network_store) == (5, True)
    consumer.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_filter_message_count": 0}, "max_filter_message_count=0 must be an integer ≥ 1"),
        (
            {"max_transfer_bytes_on_message_in_disk": "1k"},
            "max_transfer_bytes_on_message_in_disk='1k' must be",
        ),
        ({"lock_timeout_ms": -1}, "lock_timeout_ms=-1 must be an integer"),
        ({"long_polling": 1}, "long_polling=1 must be True or False"),
        ({"columns": "body"}, r"columns='body'; expected a list of names\. Give one, as columns=\[\"body\"\]"),
        ({"columns": 5}, "columns=5; expected a list"),
        ({"columns": ["body", 5]}, "no such column: 5"),
        ({"group": 5}, "a consumer group's name is a text, found 5"),
    ],
)
def test_a_consumer_is_not_opened_with_what_means_nothing(store: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        rmq_spark.open_consumer(store, **given)


def test_a_consumer_opens_only_with_what_it_can_use(store: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is not a group's name"):
        PullConsumer(store, "a group")
    with pytest.raises(OptionError, match="no such column: bdy"):
        PullConsumer(store, columns=["bdy"])
    with pytest.raises(StorePathError):
        PullConsumer(str(tmp_path / "nowhere"))


def test_a_closed_consumer_says_so(store: str) -> None:
    consumer = PullConsumer(store, "G")
    consumer.close()
    consumer.close()
    for ask in (
        lambda: consumer.pull(QUEUE, 0),
        lambda: consumer.send("T", "x"),
        lambda: consumer.queues("T"),
        consumer.commit,
        consumer.__enter__,
    ):
        with pytest.raises(StoreError, match=r"was closed\. Open it again"):
            ask()


def test_files_are_closed_even_if_the_offsets_cannot_be_written(store: str) -> None:
    closed: list[str] = []

    class Sender(Producer):
        def close(self) -> None:
            closed.append("sender")

    consumer = PullConsumer(store, "G", open_producer=lambda: Sender.__new__(Sender))
    with pytest.raises(AttributeError):
        consumer.send("T", "x")
    consumer.update_consume_offset(QUEUE, 1)
    with Path(store, "lock").open("r+b") as lock:
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        with pytest.raises(LockTimeoutError):
            consumer.close()
    assert closed == ["sender"]


def test_search_offset_refuses_a_datetime_without_a_zone_and_rounds_others(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "s") as store:
        store.send("orders", "x", queue_id=0)
    queue = QueueKey("orders", 0)
    with rmq_spark.open_consumer(tmp_path / "s") as consumer:
        with pytest.raises(OptionError, match="has no time zone"):
            consumer.search_offset(queue, datetime(2026, 1, 31, 12))
        table = consumer.pull(queue, 0).messages
        stored_ms = table.column("storeTimestamp").cast("int64")[0].as_py() // 1000
        moment = datetime.fromtimestamp(stored_ms / 1000, UTC)
        assert consumer.search_offset(queue, moment) == 0
        assert consumer.search_offset(queue, moment + timedelta(microseconds=400)) == 0
        assert consumer.search_offset(queue, moment + timedelta(microseconds=600)) == 1
