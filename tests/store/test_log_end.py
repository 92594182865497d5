"""Where a store ends for a reader that may not repair it: stale bytes, holes, clocks, crashes."""

import shutil
from pathlib import Path

import pytest

from rmq_spark.store import open_reader
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.checkpoint import Checkpoint, encode_checkpoint
from rmq_spark.store.format.record import RECORD_HEAD
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store
from rmq_spark.store.units import QueueBounds, QueueKey

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


def test_stale_records_that_continue_the_chain_are_not_believed(tmp_path: Path) -> None:
    store = truncated_and_appended(tmp_path, 600_000)
    checkpoint(store, 600_000)
    assert bounds(store) == QueueBounds(0, 4)


def test_stale_records_are_not_believed_either_when_the_writer_was_killed(tmp_path: Path) -> None:
    store = truncated_and_appended(tmp_path, 600_000)
    checkpoint(store, 0)
    (store / "abort").touch()
    assert bounds(store) == QueueBounds(0, 4)


def test_a_clock_that_was_set_back_hides_nothing(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([900_000, 900_001, 1000, 1001]))
    checkpoint(tmp_path / "s", 1001)  # the broker's own word for the time of the last message
    assert bounds(tmp_path / "s") == QueueBounds(0, 4)


def test_a_clock_that_was_set_back_and_caught_up_hides_nothing_even_without_a_checkpoint(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([900_000, 1000, 1001, 900_002]), abort=True)
    checkpoint(tmp_path / "s", 0)
    assert bounds(tmp_path / "s") == QueueBounds(0, 4)


def test_a_small_step_back_of_a_running_clock_hides_nothing(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([900_000, 900_001, 899_990]), abort=True)
    assert bounds(tmp_path / "s") == QueueBounds(0, 3)


def test_a_unit_missing_from_a_store_closed_in_order_is_damage(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([1, 2, 3]))
    overwrite(queue_file(tmp_path / "s"), 2 * UNIT_BYTES, bytes(UNIT_BYTES))
    with pytest.raises(DamageError, match=r"position 40: the unit of queue offset 2 of T/0.*found nothing"):
        bounds(tmp_path / "s")


def test_a_unit_missing_after_a_crash_is_only_late(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([1, 2, 3]), abort=True)
    overwrite(queue_file(tmp_path / "s"), 2 * UNIT_BYTES, bytes(UNIT_BYTES))
    assert bounds(tmp_path / "s") == QueueBounds(0, 2)


def test_a_unit_with_other_bytes_is_damage_even_after_a_crash(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([1, 2, 3]), abort=True)
    overwrite(queue_file(tmp_path / "s"), 2 * UNIT_BYTES + 11, b"\x7f")
    with pytest.raises(DamageError, match="the unit of queue offset 2 of T/0"):
        bounds(tmp_path / "s")


def test_a_hole_before_newer_messages_is_damage(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([1, 2, 3, 4]))
    size = int.from_bytes(log_file(tmp_path / "s").read_bytes()[:4], "big")
    overwrite(log_file(tmp_path / "s"), size + 4, b"\0\0\0\0")
    with pytest.raises(DamageError, match="no record where the log goes on: 2 newer messages follow"):
        bounds(tmp_path / "s")


def test_a_hole_where_the_broker_itself_had_ended_its_log_is_its_end(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([1, 2, 3, 4]))
    size = int.from_bytes(log_file(tmp_path / "s").read_bytes()[:4], "big")
    overwrite(log_file(tmp_path / "s"), size + 4, b"\0\0\0\0")
    checkpoint(tmp_path / "s", 1, confirmed=size)
    assert bounds(tmp_path / "s") == QueueBounds(0, 1)


def test_a_body_torn_by_a_power_cut_ends_the_log(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([10_000, 20_000, 30_000, 40_000]), abort=True)
    checkpoint(tmp_path / "s", 20_000)
    size = int.from_bytes(log_file(tmp_path / "s").read_bytes()[:4], "big")
    overwrite(log_file(tmp_path / "s"), 2 * size + 90, b"\0\0\0")
    assert bounds(tmp_path / "s") == QueueBounds(0, 2)


def test_messages_of_a_deleted_topic_do_not_stand_in_the_way(tmp_path: Path) -> None:
    mixed = [
        message for pair in zip(messages([1, 3, 5]), messages([2, 4, 6], topic="gone"), strict=True) for message in pair
    ]
    build_store(tmp_path / "s", [*mixed, SampleMessage("T", 0, b"last", store_timestamp=7)])
    shutil.rmtree(tmp_path / "s" / "consumequeue" / "gone")
    assert bounds(tmp_path / "s") == QueueBounds(0, 4)


def test_the_chain_leads_from_segment_to_segment(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages(list(range(100))), segment_bytes=1024, preallocated=True)
    assert bounds(tmp_path / "s") == QueueBounds(0, 100)


def field_of_record(store: Path, number: int, name: str, value: bytes) -> None:
    """Overwrite a field in the head of one of the store's records, which are all of one length."""
    size = int.from_bytes(log_file(store).read_bytes()[:4], "big")
    overwrite(log_file(store), number * size + RECORD_HEAD.fields[name][1], value)


@pytest.mark.parametrize(("name", "value"), [("queue_offset", bytes(8)), ("queue_id", b"\0\0\0\1")])
def test_a_record_that_calls_itself_anothers_is_damage_where_its_unit_still_names_it(
    tmp_path: Path, name: str, value: bytes
) -> None:
    """The message is not that of another queue offset or queue, which have units of their own for other places."""
    others = [SampleMessage("T", 1, b"a body%02d" % n, tags="t", store_timestamp=n) for n in range(4)]
    build_store(tmp_path / "s", [*others, *messages([5, 6, 7])])
    field_of_record(tmp_path / "s", 6, name, value)
    with open_reader(str(tmp_path / "s")) as reader:
        with pytest.raises(DamageError, match=r"position 40: a unit of queue T/0 .*expected queue offset 2 of queue 0"):
            reader.bounds(QUEUE)
        assert reader.bounds(QueueKey("T", 1)) == QueueBounds(0, 4)


def test_a_stale_unit_for_a_record_that_has_another_is_not_believed_and_no_damage(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([1, 2, 3]))
    units = queue_file(tmp_path / "s").read_bytes()
    overwrite(queue_file(tmp_path / "s"), 3 * UNIT_BYTES, units[2 * UNIT_BYTES : 3 * UNIT_BYTES])
    assert bounds(tmp_path / "s") == QueueBounds(0, 3)


def test_a_message_from_the_future_does_not_make_those_behind_it_stale_without_a_word(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([10_000, 10_001, 99_000_000, 10_003, 10_004]))
    checkpoint(tmp_path / "s", 10_004)
    assert bounds(tmp_path / "s") == QueueBounds(0, 5)  # the checkpoint says that the last one is the last
    field_of_record(tmp_path / "s", 4, "magic", bytes(4))
    with pytest.raises(DamageError, match=r"the log ends before its last message.* expected 10004, found 99000000"):
        bounds(tmp_path / "s")


def test_a_message_from_the_future_does_not_hide_that_the_last_ones_are_behind_a_hole(tmp_path: Path) -> None:
    build_store(tmp_path / "s", messages([10_000, 99_000_000, 10_002, 10_003, 10_004]))
    checkpoint(tmp_path / "s", 10_004)
    field_of_record(tmp_path / "s", 2, "magic", bytes(4))
    with pytest.raises(DamageError, match=r"the log ends before its last message.* expected 10004, found 99000000"):
        bounds(tmp_path / "s")
