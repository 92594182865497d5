"""Tests of what a power cut leaves of a broker: our writer continues where RocketMQ's recovery ends, or refuses."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from support.row_twin import walk_records

import rmq_spark
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.record import Record
from rmq_spark.store.model import QueueKey

SEGMENT_BYTES = 65536


@pytest.fixture
def crashed(tmp_store: Callable[[str], Path]) -> Path:
    """A store that a broker left with `abort`, with nothing synced according to its checkpoint."""
    store = tmp_store("livekill533")
    assert (store / "abort").exists()
    (store / "checkpoint").write_bytes(bytes(4096))
    return store


@pytest.fixture
def torn(crashed: Path) -> Record:
    """Break the last record with an entry: its last sector was not written. No CRC covers this part."""
    with rmq_spark.open_reader(str(crashed)) as reader:
        queues = reader.queues("orders")
        newest = max(reader.proof(queue, reader.bounds(queue).max_offset - 1).physical_offset for queue in queues)
    (last,) = [record for record in walk_records(crashed) if record.physical_offset == newest]
    with (crashed / "commitlog" / f"{newest // SEGMENT_BYTES * SEGMENT_BYTES:020d}").open("r+b") as file:
        torn_bytes = 2 + len(last.properties)  # with their length
        file.seek(newest % SEGMENT_BYTES + last.total_size - torn_bytes)
        file.write(bytes(torn_bytes))
    return last


def test_prepare_ends_the_log_at_a_record_without_properties(crashed: Path, torn: Record) -> None:
    queue = QueueKey(torn.topic.decode(), torn.queue_id)
    with rmq_spark.open_reader(str(crashed)) as reader:
        assert reader.bounds(queue).max_offset == torn.queue_offset
    with rmq_spark.open_store(str(crashed)) as writer:
        assert writer.send(queue.topic, b"x", queue_id=queue.queue_id).queue_offset == torn.queue_offset
    with rmq_spark.open_reader(str(crashed)) as reader:
        assert reader.proof(queue, torn.queue_offset).physical_offset == torn.physical_offset


@pytest.mark.usefixtures("torn")
def test_prepare_refuses_a_torn_record_that_the_checkpoint_guarantees(crashed: Path) -> None:
    (crashed / "checkpoint").write_bytes(struct.pack(">qq", 2**42, 2**42).ljust(4096, b"\0"))
    before = {path: path.read_bytes() for path in crashed.rglob("0*") if path.is_file()}
    with pytest.raises(DamageError, match="a record before the log's end"):
        rmq_spark.open_store(str(crashed)).send("orders", b"x")
    assert {path: path.read_bytes() for path in before} == before


def test_prepare_refuses_a_missing_segment_in_the_middle(crashed: Path) -> None:
    """The messages after it are not truncated."""
    (crashed / "commitlog" / f"{SEGMENT_BYTES:020d}").unlink()
    before = {path: path.read_bytes() for path in (crashed / "commitlog").iterdir()}
    with rmq_spark.open_reader(str(crashed)) as reader, pytest.raises(DamageError, match="missing segment after"):
        reader.refresh()
    with pytest.raises(DamageError, match="missing segment after"):
        rmq_spark.open_store(str(crashed)).send("orders", b"x")
    assert {path: path.read_bytes() for path in (crashed / "commitlog").iterdir()} == before
