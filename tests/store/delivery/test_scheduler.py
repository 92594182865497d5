"""Delivery rounds: what is due, once and in order; with brokers, other processes and corrupt offset files."""

import json
import logging
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.timer_rig import waiting

from rmq_spark.store.delivery.scheduler import DeliveryRound, DeliveryScheduler
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, LockTimeoutError
from rmq_spark.store.format.consume_queue_entry import encode_blank_fill
from rmq_spark.store.format.java import Host
from rmq_spark.store.log.delay_offsets import DelayOffsetFile
from rmq_spark.store.names import SCHEDULE_TOPIC
from rmq_spark.store.testing.crash_disk import ProcessDeathError
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.transaction.roll_forward import BatchRollForward

if TYPE_CHECKING:
    from tests.store.delivery.conftest import Kit

Wait = Callable[..., SampleMessage]
GOLDEN = Path(__file__).parents[2] / "golden"
DELAYS_MS = [1000, 5000, 10_000, 30_000, *range(60_000, 600_001, 60_000), 1_200_000, 1_800_000, 3_600_000, 7_200_000]


@pytest.mark.parametrize("level", range(1, 19))
def test_tick_delivers_when_the_delay_is_over_and_not_a_ms_earlier(kit: "Kit", wait: Wait, level: int) -> None:
    kit.put(wait(level, "m"))
    due_ms = kit.now_ms + DELAYS_MS[level - 1]
    ticker = kit.ticker()
    assert kit.tick(ticker) == DeliveryRound(0, due_ms)
    kit.now_ms = due_ms - 1
    assert kit.tick(ticker) == DeliveryRound(0, due_ms)
    assert kit.messages() == {}
    kit.now_ms = due_ms
    assert kit.tick(ticker) == DeliveryRound(1, None)
    assert kit.messages() == {0: ["m"]}
    assert kit.offsets() == {level: 1}
    assert kit.tick(ticker) == DeliveryRound(0, None)


def test_tick_keeps_everything_but_topic_queue_and_times(kit: "Kit", wait: Wait) -> None:
    stays = ("body", "properties", "tags", "msgId", "bornTimestamp", "bornHost", "storeHost", "flag", "reconsumeTimes")
    fields = {"flag": 7, "reconsume_times": 3, "born_host": Host("2001:db8::1", 5), "store_host": Host("10.0.0.1", 6)}
    kit.put(wait(1, "m", "%RETRY%g", 3, **fields))
    kit.now_ms += 5000
    assert kit.tick().delivered == 1
    (before,) = kit.messages(SCHEDULE_TOPIC, ["physicalTopic", *stays])[0]
    (after,) = kit.messages("%RETRY%g", ["physicalTopic", "storeTimestamp", "queueOffset", *stays])[3]
    assert {name: after[name] for name in stays} == {name: before[name] for name in stays}
    assert (after["physicalTopic"], after["queueOffset"]) == ("%RETRY%g", 0)
    assert round(after["storeTimestamp"].timestamp() * 1000) == kit.now_ms
    assert dict(after["properties"])["DELAY"] == "1"


def test_tick_drops_the_crc_of_the_waiting_record(kit: "Kit", wait: Wait) -> None:
    messages = [wait(1, name) for name in ("a", "b")]
    messages[0].properties["__CRC32#"] = "1234567890"
    kit.put(*messages)
    kit.now_ms += 1000
    assert kit.tick().delivered == 2
    for row, name in zip(kit.messages(columns=("body", "properties"))[0], ("a", "b"), strict=True):
        expected = {**wait(1, name).properties, "REAL_TOPIC": "T", "REAL_QID": "0"}
        assert dict(row["properties"]) == expected
    data = Path(kit.root, "commitlog", "0" * 20).read_bytes()
    assert data.count(b"__CRC32#") == 1


def test_tick_keeps_the_order_of_each_level(kit: "Kit", wait: Wait) -> None:
    for number in range(5):
        kit.put(wait(3, f"slow{number}", queue_id=0), wait(1, f"fast{number}", queue_id=1))
        kit.now_ms += 400
    kit.now_ms += 200
    assert kit.tick() == DeliveryRound(4, 1_700_000_000_000 + 2600)
    assert kit.messages() == {1: [f"fast{number}" for number in range(4)]}
    kit.now_ms += 60_000
    assert kit.tick() == DeliveryRound(6, None)
    assert kit.messages() == {0: [f"slow{number}" for number in range(5)], 1: [f"fast{number}" for number in range(5)]}
    assert kit.offsets() == {1: 5, 3: 5}


HOUR_MS = 3_600_000


@pytest.mark.parametrize("behind_ms", [1, 2000, HOUR_MS])
def test_tick_with_a_slow_clock_delivers_nothing_early(kit: "Kit", wait: Wait, behind_ms: int) -> None:
    """The clock was set back, or is another machine's: messages get the store time of the last one."""
    kit.put(wait(3, "a"))
    due_ms = kit.now_ms + 10_000
    kit.now_ms -= behind_ms
    kit.put(wait(3, "b"), wait(18, "two hours"))
    ticker = kit.ticker()
    for one in (ticker, ticker, kit.ticker()):
        assert kit.tick(one) == DeliveryRound(0, due_ms)
    kit.now_ms = due_ms
    assert kit.tick(ticker) == DeliveryRound(2, due_ms + 7_190_000)
    assert kit.messages() == {0: ["a", "b"]}


def test_tick_ignores_a_store_time_that_is_hours_ahead(
    kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    kit.put(wait(3, "a"))
    kit.now_ms -= HOUR_MS + 1
    assert kit.tick() == DeliveryRound(1, None)
    assert kit.messages() == {0: ["a"]}
    assert "delay level 3: 1 messages are delivered now, up to 3610 s before the time in their entries" in caplog.text
    assert "last message is 3600 s ahead" in caplog.text


def test_tick_leaves_messages_that_are_stored_during_it(
    kit: "Kit", wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.put(wait(1, "due"))
    kit.now_ms += 2000
    ticker, now_ms = kit.ticker(), kit.now_ms
    create_lock_file = ticker._create_lock_file

    def store_more() -> None:
        kit.now_ms += 3
        kit.put(wait(18, "two hours"), wait(1, "a second"))
        create_lock_file()

    with monkeypatch.context() as patch:
        patch.setattr(ticker, "_create_lock_file", store_more)
        assert ticker.tick(now_ms) == DeliveryRound(1, now_ms + 1003)
    assert kit.messages() == {0: ["due"]}
    kit.now_ms += 1000
    assert kit.tick(ticker) == DeliveryRound(1, kit.now_ms + 7_199_000)


def test_tick_after_a_change_of_the_delays(kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    kit.put(wait(2, "shortened"), wait(18, "taken away"))
    settings = Path(kit.root, "rmq/settings.json")
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "messageDelayLevel": "1s 1s 1s"}))
    ticker = kit.ticker()
    assert kit.tick(ticker) == DeliveryRound(1, kit.now_ms + 7_200_000)
    assert kit.messages() == {0: ["shortened"]}
    assert "delay level 2: 1 messages are delivered now" in caplog.text
    kit.now_ms += 7_199_999
    assert kit.tick(ticker).delivered == 0
    kit.now_ms += 1
    assert kit.tick(ticker) == DeliveryRound(1, None)


def test_tick_does_not_deliver_a_time_exactly_one_delay_ahead(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(3, "a"))
    assert kit.tick() == DeliveryRound(0, kit.now_ms + 10_000)


def test_tick_changes_no_file_if_nothing_waits(kit: "Kit") -> None:
    with kit.writer() as writer, writer.section() as section:
        section.ensure_topic("T", 1)
    before = _files(kit)
    assert kit.tick() == DeliveryRound(0, None)
    assert _files(kit) == before


def test_tick_changes_no_file_if_nothing_is_due(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(3, "a"))
    before = _files(kit)
    ticker = kit.ticker()
    for _ in range(3):
        assert kit.tick(ticker).delivered == 0
    assert _files(kit) == before


def _files(kit: "Kit") -> dict[str, tuple[bytes, int]]:
    paths = [path for path in sorted(Path(kit.root).rglob("*")) if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_tick_without_a_store_returns_a_problem(kit: "Kit") -> None:
    found = kit.tick()
    assert found.delivered == 0
    assert "does not exist" in str(found.problem)
    assert not Path(kit.root).exists()


def test_tick_notices_a_later_message_that_is_due_earlier(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(5, "slow"))
    ticker = kit.ticker()
    assert kit.tick(ticker).next_due_ms == kit.now_ms + 60_000
    kit.put(wait(1, "fast"))
    assert kit.tick(ticker).next_due_ms == kit.now_ms + 1000
    kit.now_ms += 1000
    assert kit.tick(ticker) == DeliveryRound(1, kit.now_ms + 59_000)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"topic": None}, "it has no property REAL_TOPIC"),
        ({"topic": "../../etc"}, "is not a valid topic"),
        ({"topic": SCHEDULE_TOPIC}, "where it would wait for ever"),
        ({"topic": "rmq_sys_wheel_timer"}, "where it would wait for ever"),
        ({"topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, "which is discarded"),
        ({"queue_id": None}, "REAL_QID is missing"),
        ({"queue_id": "x"}, "REAL_QID is missing or not a queue id"),
        ({"queue_id": "-1"}, "REAL_QID is missing or not a queue id"),
        ({"queue_id": str(2**31)}, "REAL_QID is missing or not a queue id"),
    ],
)
def test_tick_skips_and_logs_what_cannot_be_delivered(
    kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture, message: dict[str, object], why: str
) -> None:
    kit.put(wait(2, "a"), wait(2, "bad", **message), wait(2, "b"))
    kit.now_ms += 5000
    assert kit.tick() == DeliveryRound(2, None)
    assert kit.messages() == {0: ["a", "b"]}
    assert kit.offsets() == {2: 3}
    lines = [line for line in caplog.messages if "skipped" in line]
    assert len(lines) == 1
    assert "delay level 2: skipped the message at queue offset 1" in lines[0]
    assert why in lines[0]


def test_tick_skips_a_single_undeliverable_message_for_ever(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(1, "bad", topic=None))
    kit.now_ms += 1000
    assert kit.tick() == DeliveryRound(0, None)
    assert kit.offsets() == {1: 1}
    row = kit.ledger()
    assert row is not None
    assert (row.batch_id, row.rows, row.note) == (0, 0, {"level.1": 1})


def test_tick_skips_a_damaged_record(kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    kit.put(wait(2, "first"), wait(2, "damaged"), wait(2, "last"))
    kit.settle()
    segment = Path(kit.root, "commitlog", "0" * 20)
    data = bytearray(segment.read_bytes())
    place = data.index(b"UNIQ_KEY\x01id-damaged")
    data[place - 1] += 1  # the length of its properties
    segment.write_bytes(data)
    kit.now_ms += 5000
    assert kit.tick() == DeliveryRound(2, None)
    assert kit.messages() == {0: ["first", "last"]}
    assert "delay level 2: skipped the message at queue offset 1" in caplog.text


def test_tick_delivers_to_queues_that_topics_json_lacks(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(1, "a", "T", 9), wait(1, "b", "gone", 1))
    kit.now_ms += 1000
    assert kit.tick() == DeliveryRound(2, None)
    assert kit.messages() == {9: ["a"]}
    assert kit.messages("gone") == {1: ["b"]}
    topics = json.loads(Path(kit.root, "config/topics.json").read_text())["topicConfigTable"]
    assert topics["T"]["writeQueueNums"] == 2
    assert "gone" not in topics


def test_tick_commits_in_batches_of_commit_bytes(kit: "Kit", wait: Wait) -> None:
    names = [f"{number:03d}" for number in range(60)]
    kit.put(*(wait(1, name) for name in names))
    kit.now_ms += 1000
    ticker = kit.ticker()
    ticker.commit_bytes, ticker.tick_bytes = 2000, 5000
    delivered = 0
    while (tick := kit.tick(ticker)).delivered:
        delivered += tick.delivered
        assert tick.next_due_ms == (kit.now_ms if delivered < 60 else None)
        assert kit.offsets() == {1: delivered}
        assert 10 < tick.delivered < 40
    assert delivered == 60
    assert kit.messages() == {0: names}
    assert kit.ledger().batch_id > 3


def test_tick_commits_in_batches_of_commit_messages(kit: "Kit", wait: Wait) -> None:
    kit.put(*(wait(1 + number % 3, f"{number:03d}", queue_id=number % 3) for number in range(30)))
    kit.now_ms += 10_000
    ticker = kit.ticker()
    ticker.commit_messages = 4
    assert kit.tick(ticker) == DeliveryRound(30, None)
    assert kit.ledger().batch_id == 7
    assert kit.messages() == {queue: [f"{number:03d}" for number in range(queue, 30, 3)] for queue in range(3)}


def test_tick_delivers_the_most_overdue_level_first(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(2, "older"))
    kit.now_ms += 4500
    kit.put(wait(1, "newer"))
    kit.now_ms += 5000
    ticker = kit.ticker()
    ticker.commit_messages, ticker.tick_bytes = 1, 1
    assert kit.tick(ticker).delivered == 1
    assert kit.messages() == {0: ["older"]}


def test_tick_ends_while_another_process_holds_the_lock(kit: "Kit", wait: Wait) -> None:
    kit.put(*(wait(1, f"{number}") for number in range(5)))
    kit.now_ms += 1000
    first, second = kit.ticker(), kit.ticker()
    turn = FileLock(str(Path(kit.root, "rmq/delivery/turn")))
    Path(turn.path).parent.mkdir()
    Path(turn.path).touch()
    assert turn.try_take()
    assert kit.tick(first) == DeliveryRound(0, None), "somebody else delivers"
    assert kit.messages() == {}
    turn.release()
    assert kit.tick(second).delivered == 5
    assert kit.tick(first) == DeliveryRound(0, None)
    assert kit.messages() == {0: [str(number) for number in range(5)]}


def test_tick_with_an_old_plan_does_not_deliver_again(kit: "Kit", wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock prevents this. Without locks (on some file systems) the commit number still does."""
    kit.put(wait(1, "a"), wait(1, "b"))
    kit.now_ms += 1000
    first, second = kit.ticker(), kit.ticker()
    real = first._take

    def take(now_ms: int, room_bytes: int) -> object:
        due = real(now_ms, room_bytes)
        if not second_ran:
            second_ran.append(1)
            first._lock.release()
            assert kit.tick(second).delivered == 2
        return due

    second_ran: list[int] = []
    monkeypatch.setattr(first, "_take", take)
    assert kit.tick(first) == DeliveryRound(0, None)
    assert kit.messages() == {0: ["a", "b"]}


def test_tick_does_nothing_while_a_broker_holds_the_store(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(1, "a"))
    ticker = kit.ticker()
    assert kit.tick(ticker).next_due_ms == kit.now_ms + 1000
    kit.now_ms += 1000
    broker = FileLock(str(Path(kit.root, "lock")))
    assert broker.try_take()
    before = _files(kit)
    for _ in range(2):
        assert kit.tick(ticker) == DeliveryRound(0, None)
    assert _files(kit) == before
    broker.release()
    assert kit.tick(ticker) == DeliveryRound(1, None)


def test_tick_does_not_take_our_writer_for_a_broker(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(3, "a"))
    with kit.writer() as writer, writer.section():
        assert kit.tick() == DeliveryRound(0, kit.now_ms + 10_000)


def test_tick_resumes_at_a_brokers_higher_offset(kit: "Kit", wait: Wait) -> None:
    kit.put(*(wait(1, f"{number}") for number in range(4)))
    kit.now_ms += 1000
    _write_offsets(kit, b'{"offsetTable":{1:3},"dataVersion":{"counter":7,"stateVersion":0,"timestamp":5}}')
    assert kit.tick() == DeliveryRound(1, None)
    assert kit.messages() == {0: ["3"]}
    text = Path(kit.root, "config/delayOffset.json").read_text()
    assert '"counter":8' in "".join(text.split())
    assert kit.offsets() == {1: 4}


def test_tick_resumes_at_the_metadata_if_the_file_lags(kit: "Kit", wait: Wait) -> None:
    kit.put(*(wait(1, f"{number}") for number in range(4)))
    kit.now_ms += 1000
    kit.tick()
    _write_offsets(kit, b'{"offsetTable":{1:1,2:0}}')
    assert kit.tick() == DeliveryRound(0, None)
    assert kit.offsets() == {1: 4, 2: 0}, "a broker that came now would not deliver again"
    assert len(kit.messages()[0]) == 4


def _write_offsets(kit: "Kit", data: bytes, name: str = "delayOffset.json") -> None:
    Path(kit.root, "config", name).write_bytes(data)


@pytest.mark.parametrize("held", [9, 2**62])
def test_tick_corrects_an_offset_beyond_the_queue(
    kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture, held: int
) -> None:
    kit.put(*(wait(1, f"{number}") for number in range(4)))
    kit.now_ms += 1000
    _write_offsets(kit, b'{"offsetTable":{1:%d}}' % held)
    assert kit.tick() == DeliveryRound(0, None)
    assert kit.offsets() == {1: 4}
    assert f"delay level 1: delivery was at queue offset {held}" in caplog.text
    kit.put(wait(1, "new"))
    kit.now_ms += 1000
    assert kit.tick() == DeliveryRound(1, None)
    assert kit.messages() == {0: ["new"]}


def test_tick_delivers_messages_stored_below_a_wrong_offset(
    kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut took the end of the log, and a program writes before the next round."""
    kit.put(wait(1, "old"), wait(2, "old"))
    _write_offsets(kit, b'{"offsetTable":{1:9,2:1,3:7}}')
    kit.put(wait(1, "new"), wait(2, "new"))
    assert kit.offsets() == {1: 1, 2: 1, 3: 7}
    assert "delay level 1 was 9, beyond its queue's end, and was lowered to the end, 1" in caplog.text
    kit.now_ms += 5000
    assert kit.tick().delivered == 2
    assert kit.messages() == {0: ["new", "new"]}


def test_tick_after_writes_with_a_corrupt_delay_offset_file(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(1, "one"))
    _write_offsets(kit, b"{")
    kit.put(wait(1, "two"))
    _write_offsets(kit, b'{"offsetTable":{1:0}}')
    kit.now_ms += 1000
    assert kit.tick().delivered == 2


@pytest.mark.parametrize("is_told", [True, False], ids=["with delayOffset.json", "without"])
def test_tick_ignores_metadata_of_a_longer_log(kit: "Kit", wait: Wait, is_told: bool) -> None:
    """`rmq/`, and maybe delayOffset.json, are newer than what was restored."""
    kit.put(wait(1, "old"))
    kit.now_ms += 1000
    kit.tick()
    path = Path(kit.root, "rmq/ledger/rmq%3Adelivery.json")
    path.write_text(path.read_text().replace('"level.1": 1', '"level.1": 9'))
    if is_told:
        _write_offsets(kit, b'{"offsetTable":{1:9}}')
    kit.put(wait(1, "new"), wait(1, "newer"))
    kit.now_ms += 1000
    assert kit.tick() == DeliveryRound(2, None)
    assert kit.messages() == {0: ["old", "new", "newer"]}
    assert kit.offsets() == {1: 3}
    assert (row := kit.ledger()) is not None
    assert row.note["level.1"] == 3


def test_tick_corrects_metadata_beyond_the_queue(kit: "Kit", wait: Wait) -> None:
    kit.put(*(wait(1, f"{number}") for number in range(4)))
    kit.now_ms += 1000
    kit.tick()
    path = Path(kit.root, "rmq/ledger/rmq%3Adelivery.json")
    path.write_text(path.read_text().replace('"level.1": 4', '"level.1": 8'))
    kit.tick()
    kit.put(*(wait(1, f"new{number}") for number in range(3)))
    kit.now_ms += 1000
    assert kit.tick().delivered == 3
    assert kit.messages()[0][4:] == ["new0", "new1", "new2"]


def test_tick_corrects_an_offset_below_the_first_message(
    kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(80):
        kit.put(wait(1, f"{number}" + "b" * 300))
    kit.now_ms += 2 * 86_400_000
    with kit.writer() as writer, writer.section() as section:
        section.expire(max_bytes=16_000)
    first = next(iter(kit.messages(SCHEDULE_TOPIC, ["queueOffset"])[0]))["queueOffset"]
    assert first > 10
    assert kit.tick().delivered == 80 - first
    assert kit.messages()[0][0].startswith(str(first))
    assert kit.offsets() == {1: 80}
    assert "skipped" not in caplog.text
    assert f"delay level 1: {first} messages of" in caplog.text


@pytest.mark.parametrize("main", [None, b"", b'{"offsetTable":{1:', b"garbage"])
def test_tick_reads_delay_offsets_from_bak(kit: "Kit", wait: Wait, main: bytes | None) -> None:
    kit.put(*(wait(1, f"{number}") for number in range(4)))
    kit.now_ms += 1000
    if main is not None:
        _write_offsets(kit, main)
    _write_offsets(kit, b'{"offsetTable":{1:2}}', "delayOffset.json.bak")
    assert kit.tick() == DeliveryRound(2, None)
    assert kit.messages() == {0: ["2", "3"]}
    assert kit.offsets() == {1: 4}


@pytest.mark.parametrize("bak", [None, b"more garbage"])
def test_tick_delivers_nothing_without_readable_delay_offsets(
    kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture, bak: bytes | None
) -> None:
    kit.put(wait(1, "a"))
    kit.now_ms += 1000
    _write_offsets(kit, b"garbage")
    if bak is not None:
        _write_offsets(kit, bak, "delayOffset.json.bak")
    ticker = kit.ticker()
    for _ in range(3):
        found = kit.tick(ticker)
        assert isinstance(found.problem, DamageError)
        assert "delayOffset.json" in str(found.problem)
        assert found.delivered == 0
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1, "told once"
    assert kit.messages() == {}
    _write_offsets(kit, b"{}")
    assert kit.tick(ticker).delivered == 1


def test_delay_offset_file_keeps_other_fields_and_a_bak(kit: "Kit") -> None:
    Path(kit.root, "config").mkdir(parents=True)
    old = b'{"more":[1],"offsetTable":{1:5,7:9}}'
    _write_offsets(kit, old)
    file = DelayOffsetFile(kit.root, Disk(), kit.clock, lambda _: None)
    assert dict(file.read()) == {1: 5, 7: 9}
    file.write({1: 6})
    assert dict(file.read()) == {1: 6, 7: 9}
    path = Path(kit.root, "config/delayOffset.json")
    assert b'"more"' in path.read_bytes()
    assert Path(f"{path}.bak").read_bytes() == old
    written = path.stat().st_mtime_ns
    file.write({7: 9})
    assert path.stat().st_mtime_ns == written


def test_tick_uses_the_stores_table_of_levels(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(1, "before"))
    settings = Path(kit.root, "rmq/settings.json")
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "messageDelayLevel": "100s"}))
    kit.put(wait(1, "later"))
    assert kit.tick() == DeliveryRound(0, kit.now_ms + 1000)
    kit.now_ms += 1000
    assert kit.tick() == DeliveryRound(1, kit.now_ms + 99_000)
    kit.now_ms += 99_000
    assert kit.tick() == DeliveryRound(1, None)
    assert kit.messages() == {0: ["before", "later"]}


def test_tick_rolls_a_dead_process_commit_forward_once(kit: "Kit", wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.put(wait(1, "a"), wait(1, "b"))
    kit.now_ms += 1000

    def die(*_: object) -> None:
        raise ProcessDeathError

    with monkeypatch.context() as patch:
        patch.setattr(BatchRollForward, "append", die)
        ticker = kit.ticker()
        with pytest.raises(ProcessDeathError):
            kit.tick(ticker)
    assert kit.messages() == {}
    assert kit.tick() == DeliveryRound(0, None), "the dead process's commit was rolled forward, and nothing else is due"
    assert kit.messages() == {0: ["a", "b"]}
    assert kit.offsets() == {1: 2}


def test_tick_metadata_is_cumulative(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(1, "a"), wait(2, "b"))
    for delivered in ({"level.1": 1}, {"level.1": 1, "level.2": 1}):
        kit.now_ms += 2500
        kit.tick()
        assert kit.ledger().note == delivered
        kit.now_ms += 2500


def test_tick_next_due_ms_is_the_minimum_of_all_levels(kit: "Kit", wait: Wait) -> None:
    dues = []
    for level in (18, 9, 5, 2):
        kit.put(wait(level, f"l{level}"))
        dues.append(kit.now_ms + DELAYS_MS[level - 1])
        assert kit.tick().next_due_ms == min(dues)
    for before, after in pairwise(sorted(dues)):
        kit.now_ms = before
        assert kit.tick() == DeliveryRound(1, after)


def test_hand_over_writes_what_a_dead_process_delivered(
    kit: "Kit", wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.put(wait(1, "a"), wait(1, "b"), wait(2, "c"))
    kit.now_ms += 1000

    def die(*_: object) -> None:
        raise ProcessDeathError

    with monkeypatch.context() as patch:
        patch.setattr(DelayOffsetFile, "write", die)
        with pytest.raises(ProcessDeathError):
            kit.tick()
    assert kit.messages() == {0: ["a", "b"]}
    assert kit.offsets() == {}, "a broker that came now would deliver again"
    kit.now_ms += 10_000
    kit.ticker().hand_over()
    assert kit.offsets() == {1: 2}
    assert kit.messages() == {0: ["a", "b"]}, "what is due meanwhile is the broker's to deliver"


def test_hand_over_changes_nothing_before_the_first_delivery(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(1, "a"))
    before = _files(kit)
    kit.ticker().hand_over()
    assert _files(kit) == before


def test_tick_takes_the_due_time_of_an_extended_entry_from_its_record(kit: "Kit", wait: Wait) -> None:
    """consumequeue_ext: the tags code is a negative address, and the time is in a file that may be missing."""
    kit.put(wait(3, "a"), wait(3, "b"))
    path = Path(kit.root, "consumequeue", SCHEDULE_TOPIC, "2", "0" * 20)
    units = bytearray(path.read_bytes())
    for place in (12, 32):
        units[place : place + 8] = (-(2**60)).to_bytes(8, "big", signed=True)
    path.write_bytes(units)
    ticker = kit.ticker()
    assert kit.tick(ticker) == DeliveryRound(0, kit.now_ms + 10_000)
    kit.now_ms += 9_999
    assert kit.tick(ticker).delivered == 0
    kit.now_ms += 1
    assert kit.tick(ticker).delivered == 2


def test_tick_skips_blank_fill_at_the_start_of_a_queue(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(1, "a"), wait(1, "b"))
    path = Path(kit.root, "consumequeue", SCHEDULE_TOPIC, "0", "0" * 20)
    units = bytearray(path.read_bytes())
    units[:20] = encode_blank_fill(1)
    path.write_bytes(units)
    kit.now_ms += 1000
    assert kit.tick() == DeliveryRound(1, None)
    assert kit.messages() == {0: ["b"]}
    assert kit.offsets() == {1: 2}


@pytest.mark.parametrize("gone", [range(1), range(3), range(2, 4)])
def test_tick_skips_zeroed_entries_before_others(
    kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture, gone: range
) -> None:
    kit.put(*(wait(1, f"{number}") for number in range(6)))
    kit.now_ms += 500
    kit.put(wait(1, "later"))
    path = Path(kit.root, "consumequeue", SCHEDULE_TOPIC, "0", "0" * 20)
    units = bytearray(path.read_bytes())
    units[gone.start * 20 : gone.stop * 20] = bytes(20 * len(gone))
    path.write_bytes(units)
    ticker = kit.ticker()
    kit.now_ms += 500
    for delivered in (6 - len(gone), 0, 0):
        assert kit.tick(ticker) == DeliveryRound(delivered, kit.now_ms + 500)
    assert kit.messages() == {0: [f"{number}" for number in range(6) if number not in gone]}
    assert f"skipped the message at queue offset {gone[-1]} of {SCHEDULE_TOPIC}/0" in caplog.text
    kit.now_ms += 500
    assert kit.tick(ticker) == DeliveryRound(1, None)


def test_tick_resumes_after_a_damaged_entry(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(1, "damaged"))
    kit.now_ms += 500
    kit.put(wait(1, "later"))
    path = Path(kit.root, "consumequeue", SCHEDULE_TOPIC, "0", "0" * 20)
    units = bytearray(path.read_bytes())
    units[:20] = bytes(20)
    path.write_bytes(units)
    for _ in range(2):
        assert kit.tick() == DeliveryRound(0, kit.now_ms + 1000)
    kit.now_ms += 1000
    assert kit.tick() == DeliveryRound(1, None)


def test_tick_skips_an_entry_of_another_message(kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    kit.put(*(wait(level, f"{level}{number}") for number in range(2) for level in (1, 2)))
    first, other = (Path(kit.root, "consumequeue", SCHEDULE_TOPIC, queue, "0" * 20) for queue in "01")
    units, others = bytearray(first.read_bytes()), other.read_bytes()
    units[40:80] = units[20:40] + others[:20]  # after the last: its message again, and one of another level
    first.write_bytes(units)
    kit.now_ms += 5000
    assert kit.tick() == DeliveryRound(4, None)
    assert kit.messages() == {0: ["10", "11", "20", "21"]}
    assert caplog.text.count("its entry refers to the record of another message") == 2


def test_tick_logs_the_number_of_lost_messages(kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(80):
        kit.put(wait(1, f"{number}" + "b" * 300))
    segments = sorted(Path(kit.root, "commitlog").iterdir())
    for path in segments[:3]:
        path.unlink()
    kit.now_ms += 1000
    delivered = kit.tick().delivered
    assert 10 < delivered < 70
    text = f"delay level 1: {80 - delivered} messages of {SCHEDULE_TOPIC}/0 that were not delivered are no longer in"
    assert caplog.text.count(text) == 1


@pytest.mark.parametrize("name", ["basic", "demo", "crashed", "propcrc"])
def test_tick_delivers_what_a_broker_stored_once(make_kit: "type[Kit]", tmp_path: Path, name: str) -> None:
    root = tmp_path / "store"
    shutil.copytree(GOLDEN / name, root)
    kit = make_kit(str(root), now_ms=4_000_000_000_000)
    waiting = kit.messages(SCHEDULE_TOPIC, ["body", "properties"])
    levels = {queue + 1: len(rows) for queue, rows in waiting.items()}
    held = kit.offsets()
    expected = [row for queue, rows in sorted(waiting.items()) for row in rows[held.get(queue + 1, 0) :]]
    for row in expected:  # the CRC was of the record that waited
        row["properties"] = [(name, value) for name, value in row["properties"] if name != "__CRC32#"]
    topics = {dict(row["properties"])["REAL_TOPIC"] for row in expected}
    before = {topic: kit.messages(topic, ["body", "properties"]) for topic in topics}
    assert kit.tick() == DeliveryRound(len(expected), None)
    for topic in topics:
        for queue, rows in kit.messages(topic, ["body", "properties"]).items():
            known = before[topic].get(queue, [])
            assert rows[: len(known)] == known
            came = [row for row in expected if _real_queue(row) == (topic, queue)]
            assert sorted(map(str, rows[len(known) :])) == sorted(map(str, came))
    assert {level: kit.offsets().get(level, 0) for level in levels} == levels
    assert kit.tick() == DeliveryRound(0, None)


def timed(kit: "Kit", name: str, seconds: int) -> SampleMessage:
    """Return a message that waits in the timer, for queue 1."""
    return waiting(0, kit.now_ms + seconds * 1000, queue_id=1, body=name.encode())


def test_tick_isolates_damage_of_levels_and_timer(kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    kit.put(wait(1, "level"), timed(kit, "timer", 1))
    wheel = Path(kit.root, "timerwheel")
    wheel.write_bytes(bytes(320))
    kit.now_ms += 5000
    ticker = kit.ticker()
    for delivered in (1, 0, 0):
        found = kit.tick(ticker)
        assert (found.delivered, found.next_due_ms) == (delivered, None)
        assert "the timer wheel has another length" in str(found.problem)
    assert kit.messages() == {0: ["level"]}
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1, "told once"
    wheel.unlink()
    _write_offsets(kit, b"garbage")
    Path(kit.root, "config/delayOffset.json.bak").unlink(missing_ok=True)
    found = kit.tick(ticker)
    assert (found.delivered, kit.messages()) == (1, {0: ["level"], 1: ["timer"]})
    assert "delayOffset.json" in str(found.problem)
    with pytest.raises(DamageError, match="delayOffset"):
        ticker.hand_over()
    _write_offsets(kit, b'{"offsetTable":{1:1}}')
    assert kit.tick(ticker) == DeliveryRound(0, None)


def test_tick_alternates_between_sources(kit: "Kit", wait: Wait) -> None:
    kit.put(*(wait(1, f"{number}") for number in range(20)), timed(kit, "timer", 1))
    kit.now_ms += 5000
    ticker = kit.ticker()
    ticker.commit_messages, ticker.tick_bytes = 4, 1
    for _ in range(2):
        assert kit.tick(ticker).next_due_ms == kit.now_ms
    assert kit.messages()[1] == ["timer"]


def test_tick_waits_briefly_for_a_stuck_holder_of_the_lock(kit: "Kit", wait: Wait) -> None:
    kit.put(wait(1, "a"))
    kit.now_ms += 1000
    ticker = DeliveryScheduler(kit.root, clock_ms=kit.clock, sleep=kit._sleep)
    with kit.writer() as writer, writer.section():
        began_ms = kit.now_ms
        assert isinstance(kit.tick(ticker).problem, LockTimeoutError)
        assert kit.now_ms - began_ms < 1000
        for _ in range(3):
            before_ms = kit.now_ms
            assert kit.tick(ticker) == DeliveryRound(0, began_ms + 2000)
            assert kit.now_ms == before_ms
    kit.now_ms = began_ms + 2000
    assert kit.tick(ticker) == DeliveryRound(1, None)


def test_tick_logs_its_commits_at_debug_level(kit: "Kit", wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "rmq_spark")
    kit.put(wait(1, "a"))
    kit.now_ms += 1000
    assert kit.tick().delivered == 1
    (told,) = [one for one in caplog.records if "1 rows" in one.getMessage()]
    assert told.levelno == logging.DEBUG


def _real_queue(row: dict[str, object]) -> tuple[str, int]:
    properties = dict(row["properties"])  # type: ignore[call-overload]
    return properties["REAL_TOPIC"], int(properties["REAL_QID"])
