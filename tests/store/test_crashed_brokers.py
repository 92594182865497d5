"""What a power cut left of a broker: our writer takes over where RocketMQ's recovery would end, or refuses."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.record import Record
from rmq_spark.store.testing.row_twin import walk_records
from rmq_spark.store.units import QueueKey

SEGMENT_BYTES = 65536


@pytest.fixture
def crashed(tmp_store: Callable[[str], Path]) -> Path:
    """A store that a broker left with `abort`, with nothing synced as far as its checkpoint says."""
    store = tmp_store("livekill533")
    assert (store / "abort").exists()
    (store / "checkpoint").write_bytes(bytes(4096))
    return store


@pytest.fixture
def torn(crashed: Path) -> Record:
    """The last record with a unit, as it was: its last sector did not get to the disk. No CRC covers what was there."""
    with rmq_spark.open_reader(str(crashed)) as reader:
        queues = reader.queues("orders")
        newest = max(reader.proof(queue, reader.bounds(queue).max_offset - 1).physical_offset for queue in queues)
    (last,) = [record for record in walk_records(crashed) if record.physical_offset == newest]
    with (crashed / "commitlog" / f"{newest // SEGMENT_BYTES * SEGMENT_BYTES:020d}").open("r+b") as file:
        torn_bytes = 2 + len(last.properties)  # with their length
        file.seek(newest % SEGMENT_BYTES + last.total_size - torn_bytes)
        file.write(bytes(torn_bytes))
    return last


def test_a_record_without_its_properties_is_the_end(crashed: Path, torn: Record) -> None:
    queue = QueueKey(torn.topic.decode(), torn.queue_id)
    with rmq_spark.open_reader(str(crashed)) as reader:
        assert reader.bounds(queue).max_offset == torn.queue_offset
    with rmq_spark.open_store(str(crashed)) as writer:
        assert writer.send(queue.topic, b"x", queue_id=queue.queue_id).queue_offset == torn.queue_offset
    with rmq_spark.open_reader(str(crashed)) as reader:
        assert reader.proof(queue, torn.queue_offset).physical_offset == torn.physical_offset


@pytest.mark.usefixtures("torn")
def test_a_torn_record_that_the_checkpoint_vouches_for_is_refused_and_nothing_changed(crashed: Path) -> None:
    (crashed / "checkpoint").write_bytes(struct.pack(">qq", 2**42, 2**42).ljust(4096, b"\0"))
    before = {path: path.read_bytes() for path in crashed.rglob("0*") if path.is_file()}
    with pytest.raises(DamageError, match="a record before the log's end"):
        rmq_spark.open_store(str(crashed)).send("orders", b"x")
    assert {path: path.read_bytes() for path in before} == before


def test_a_segment_missing_in_the_middle_is_no_crash(crashed: Path) -> None:
    """Messages behind it are not taken back."""
    (crashed / "commitlog" / f"{SEGMENT_BYTES:020d}").unlink()
    before = {path: path.read_bytes() for path in (crashed / "commitlog").iterdir()}
    with rmq_spark.open_reader(str(crashed)) as reader, pytest.raises(DamageError, match="no segment where the log"):
        reader.refresh()
    with pytest.raises(DamageError, match="no segment where the log"):
        rmq_spark.open_store(str(crashed)).send("orders", b"x")
    assert {path: path.read_bytes() for path in (crashed / "commitlog").iterdir()} == before
