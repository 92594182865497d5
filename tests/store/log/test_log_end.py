"""LogEnd: the ends of the log and of queues after stale bytes, holes, clock changes and crashes."""

import shutil
from pathlib import Path

import pytest

from rmq_spark.store import open_reader, open_store
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.checkpoint import Checkpoint, encode_checkpoint
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

QUEUE = QueueKey("T", 0)
UNIT_BYTES = 20


def messages(times: list[int], body: bytes = b"a body", topic: str = "T") -> list[SampleMessage]:
    return [SampleMessage(topic, 0, body + b"%02d" % n, tags="t", store_timestamp=t) for n, t in enumerate(times)]


def log_file(store: Path) -> Path:
    return min((store / "commitlog").iterdir())


def queue_file(store: Path, topic: str = "T") -> Path:
    return min((store / "consumequeue" / topic / "0").iterdir())


def overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def checkpoint(store: Path, last_ms: int, confirmed: int = 0) -> None:
    page = encode_checkpoint(Checkpoint(last_ms, last_ms, 0, 0, confirmed))
    (store / "checkpoint").write_bytes(page)


def bounds(store: Path, queue: QueueKey = QUEUE) -> QueueBounds:
    with open_reader(str(store)) as reader:
        return reader.bounds(queue)


def truncated_and_appended(tmp_path: Path, appended_ms: int) -> Path:
    """A broker truncated six equal records after the third and appended one of the same length."""
    build_store(tmp_path / "old", messages([1000, 1001, 1002, 1003, 1004, 1005]))
    build_store(tmp_path / "new", messages([1000, 1001, 1002, appended_ms]))
    old, new = log_file(tmp_path / "old"), log_file(tmp_path / "new")
    size = int.from_bytes(old.read_bytes()[:4], "big")
    overwrite(old, 3 * size, new.read_bytes()[3 * size : 4 * size])
    return tmp_path / "old"


def test_log_end_excludes_stale_records_that_continue_the_chain(tmp_path: Path) -> None:
    store = truncated_and_appended(tmp_path, 600_000)
    checkpoint(store, 600_000)
    assert bounds(store) == QueueBounds(0, 4)


def test_log_end_excludes_stale_records_after_a_crash(tmp_path: Path) -> None:
    store = truncated_and_appended(tmp_path, 600_000)
    checkpoint(store, 0)
    (store / "abort").touch()
    assert bounds(store) == QueueBounds(0, 4)


def test_log_end_after_a_clock_was_set_back(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([900_000, 900_001, 1000, 1001]))
    checkpoint(tmp_path / "s", 1001)  # the broker's time of the last message
    assert bounds(tmp_path / "s") == QueueBounds(0, 4)


def test_log_end_without_a_checkpoint_after_a_clock_was_set_back(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([900_000, 1000, 1001, 900_002]), abort=True)
    checkpoint(tmp_path / "s", 0)
    assert bounds(tmp_path / "s") == QueueBounds(0, 4)


def test_log_end_after_a_small_step_back_of_a_clock(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([900_000, 900_001, 899_990]), abort=True)
    assert bounds(tmp_path / "s") == QueueBounds(0, 3)


def test_log_end_reports_a_missing_entry_after_a_clean_shutdown(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([1, 2, 3]))
    overwrite(queue_file(tmp_path / "s"), 2 * UNIT_BYTES, bytes(UNIT_BYTES))
    with pytest.raises(DamageError, match=r"position 40: the entry of queue offset 2 of T/0.*found nothing"):
        bounds(tmp_path / "s")


def test_log_end_waits_for_a_missing_entry_after_a_crash(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([1, 2, 3]), abort=True)
    overwrite(queue_file(tmp_path / "s"), 2 * UNIT_BYTES, bytes(UNIT_BYTES))
    assert bounds(tmp_path / "s") == QueueBounds(0, 2)


def test_log_end_reports_a_wrong_entry_after_a_crash(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([1, 2, 3]), abort=True)
    overwrite(queue_file(tmp_path / "s"), 2 * UNIT_BYTES + 11, b"\x7f")
    with pytest.raises(DamageError, match="the entry of queue offset 2 of T/0"):
        bounds(tmp_path / "s")


def test_log_end_reports_a_hole_before_newer_messages(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([1, 2, 3, 4]))
    size = int.from_bytes(log_file(tmp_path / "s").read_bytes()[:4], "big")
    overwrite(log_file(tmp_path / "s"), size + 4, b"\0\0\0\0")
    with pytest.raises(DamageError, match="no record at the end of the chain: 2 newer messages follow"):
        bounds(tmp_path / "s")


def test_log_end_is_at_a_hole_where_the_broker_had_its_end(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([1, 2, 3, 4]))
    size = int.from_bytes(log_file(tmp_path / "s").read_bytes()[:4], "big")
    overwrite(log_file(tmp_path / "s"), size + 4, b"\0\0\0\0")
    checkpoint(tmp_path / "s", 1, confirmed=size)
    assert bounds(tmp_path / "s") == QueueBounds(0, 1)


def test_log_end_is_before_a_body_torn_by_a_power_cut(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([10_000, 20_000, 30_000, 40_000]), abort=True)
    checkpoint(tmp_path / "s", 20_000)
    size = int.from_bytes(log_file(tmp_path / "s").read_bytes()[:4], "big")
    overwrite(log_file(tmp_path / "s"), 2 * size + 90, b"\0\0\0")
    assert bounds(tmp_path / "s") == QueueBounds(0, 2)


def test_log_end_skips_messages_of_a_deleted_topic(tmp_path: Path) -> None:
    mixed = [
        message for pair in zip(messages([1, 3, 5]), messages([2, 4, 6], topic="gone"), strict=True) for message in pair
    ]
    build_store(tmp_path / "s", [*mixed, SampleMessage("T", 0, b"last", store_timestamp=7)])
    shutil.rmtree(tmp_path / "s" / "consumequeue" / "gone")
    assert bounds(tmp_path / "s") == QueueBounds(0, 4)


def test_log_end_follows_the_chain_across_segments(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages(list(range(100))), segment_bytes=1024, preallocated=True)
    assert bounds(tmp_path / "s") == QueueBounds(0, 100)


def field_of_record(store: Path, number: int, name: str, value: bytes) -> None:
    """Overwrite a field in the header of a record. All records of the store have the same size."""
    size = int.from_bytes(log_file(store).read_bytes()[:4], "big")
    overwrite(log_file(store), number * size + RECORD_HEAD.fields[name][1], value)


@pytest.mark.parametrize(("name", "value"), [("queue_offset", bytes(8)), ("queue_id", b"\0\0\0\1")])
def test_log_end_reports_a_record_that_disagrees_with_its_entry(tmp_path: Path, name: str, value: bytes) -> None:
    """Other queue offsets and queues have entries of their own, with other physical offsets."""
    others = [SampleMessage("T", 1, b"a body%02d" % n, tags="t", store_timestamp=n) for n in range(4)]
    build_store(tmp_path / "s", [*others, *messages([5, 6, 7])])
    field_of_record(tmp_path / "s", 6, name, value)
    with open_reader(str(tmp_path / "s")) as reader:
        with pytest.raises(
            DamageError, match=r"position 40: an entry of queue T/0 .*expected queue offset 2 of queue 0"
        ):
            reader.bounds(QUEUE)
        assert reader.bounds(QueueKey("T", 1)) == QueueBounds(0, 4)


def test_log_end_ignores_a_stale_entry_for_a_record_with_another_one(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([1, 2, 3]))
    units = queue_file(tmp_path / "s").read_bytes()
    overwrite(queue_file(tmp_path / "s"), 3 * UNIT_BYTES, units[2 * UNIT_BYTES : 3 * UNIT_BYTES])
    assert bounds(tmp_path / "s") == QueueBounds(0, 3)


def test_log_end_reports_messages_after_one_from_the_future(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([10_000, 10_001, 99_000_000, 10_003, 10_004]))
    checkpoint(tmp_path / "s", 10_004)
    assert bounds(tmp_path / "s") == QueueBounds(0, 5)  # the checkpoint has the time of the last message
    field_of_record(tmp_path / "s", 4, "magic", bytes(4))
    with pytest.raises(DamageError, match=r"the log ends before its last message.* expected 10004, found 99000000"):
        bounds(tmp_path / "s")


def test_log_end_reports_a_hole_after_a_message_from_the_future(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([10_000, 99_000_000, 10_002, 10_003, 10_004]))
    checkpoint(tmp_path / "s", 10_004)
    field_of_record(tmp_path / "s", 2, "magic", bytes(4))
    with pytest.raises(DamageError, match=r"the log ends before its last message.* expected 10004, found 99000000"):
        bounds(tmp_path / "s")


def test_log_end_stays_the_same_if_a_refresh_fails(tmp_path: Path) -> None:
    """The whole refresh fails because the log was overwritten. It would start in the last segment."""
    early = SampleMessage("U", 0, b"first segment", store_timestamp=1)
    build_store(tmp_path / "s", [early, *messages(list(range(2, 30)))], segment_bytes=1024, preallocated=True)
    checkpoint(tmp_path / "s", 29)
    with open_reader(str(tmp_path / "s")) as reader:
        reader.refresh()
        end = reader.log_end
        last_segment = tmp_path / "s" / "commitlog" / f"{end // 1024 * 1024:020d}"
        before = last_segment.read_bytes()
        last_segment.write_bytes(bytes(len(before)))
        with pytest.raises(DamageError, match="the log ends before its last message"):
            reader.refresh()
        last_segment.write_bytes(before)
        assert reader.refresh()
        assert (reader.log_end, reader.bounds(QUEUE)) == (end, QueueBounds(0, 28))
        assert reader.bounds(QueueKey("U", 0)) == QueueBounds(0, 1)


def test_log_end_follows_a_log_whose_first_segments_expired_since_it_was_empty(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with open_store(store, segment_bytes=1 << 16) as producer:
        producer.create_topic("T", 1)
        with open_reader(store) as reader:
            assert reader.bounds(QUEUE) == QueueBounds(0, 0)
            for _ in range(3):
                producer.send("T", bytes(40_000))
            assert producer.expire(max_bytes=1 << 16).segments == 2
            assert reader.refresh()
            assert reader.bounds(QUEUE) == QueueBounds(2, 3)
            assert not reader.refresh()
