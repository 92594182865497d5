"""What a power cut left of a broker: our writer takes over where RocketMQ's recovery would end, or refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.errors import DamageError
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


def test_a_record_without_its_properties_is_the_end(crashed: Path) -> None:
    """Its last sector did not get to the disk, and its unit did. No CRC covers topic and properties."""
    with rmq_spark.open_reader(str(crashed)) as reader:
        queues = reader.queues("orders")
        newest = max(reader.proof(queue, reader.bounds(queue).max_offset - 1).physical_offset for queue in queues)
    (last,) = [record for record in walk_records(crashed) if record.physical_offset == newest]
    with (crashed / "commitlog" / f"{last.physical_offset // SEGMENT_BYTES * SEGMENT_BYTES:020d}").open("r+b") as file:
        torn_bytes = 2 + len(last.properties)  # with their length
        file.seek(last.physical_offset % SEGMENT_BYTES + last.total_size - torn_bytes)
        file.write(bytes(torn_bytes))
    queue = QueueKey(last.topic.decode(), last.queue_id)
    with rmq_spark.open_reader(str(crashed)) as reader:
        assert reader.bounds(queue).max_offset == last.queue_offset
    with rmq_spark.open_store(str(crashed)) as writer:
        assert writer.send(queue.topic, b"x", queue_id=queue.queue_id).queue_offset == last.queue_offset
    with rmq_spark.open_reader(str(crashed)) as reader:
        assert reader.proof(queue, last.queue_offset).physical_offset == last.physical_offset


def test_a_segment_missing_in_the_middle_is_no_crash(crashed: Path) -> None:
    """Messages behind it are not taken back."""
    (crashed / "commitlog" / f"{SEGMENT_BYTES:020d}").unlink()
    before = {path: path.read_bytes() for path in (crashed / "commitlog").iterdir()}
    with rmq_spark.open_reader(str(crashed)) as reader, pytest.raises(DamageError, match="no segment where the log"):
        reader.refresh()
    with pytest.raises(DamageError, match="no segment where the log"):
        rmq_spark.open_store(str(crashed)).send("orders", b"x")
    assert {path: path.read_bytes() for path in (crashed / "commitlog").iterdir()} == before
