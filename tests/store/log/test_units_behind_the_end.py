"""Units that outlived their records in a power cut: a broker recovers such a store, and closes it in order."""

import shutil
from pathlib import Path

import pytest
from support.encoded_samples import encode_samples

from rmq_spark.store import open_reader
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage

SETTINGS = WriterSettings(sizes=FileSizes(4096, 400, 10 * 46, IndexShape(10, 100)))
KEEPS = 6  # messages that the power cut left, in two queues


def append(root: Path, first: int, last: int, time_ms: int) -> None:
    messages = [
        SampleMessage("T", number % 2, b"%d" % number, tags="t", keys=f"k{number}") for number in range(first, last)
    ]
    store = StoreWriter(str(root), Disk(), SETTINGS, lambda: time_ms, lambda seconds: None)
    with store.section() as section:
        section.ensure_topic("T", 2)
        section.append(encode_samples(messages))
    store.close()


@pytest.fixture
def truncated(tmp_path: Path) -> Path:
    """A store whose log, index and checkpoint know six messages, and whose queues still have the units of ten."""
    store, later = tmp_path / "store", tmp_path / "later"
    append(store, 0, KEEPS, 1_700_000_000_000)
    shutil.copytree(store, later)
    append(later, KEEPS, 10, 1_700_000_005_000)
    shutil.rmtree(store / "rmq")  # of a broker, which has none
    shutil.rmtree(store / "consumequeue")
    shutil.copytree(later / "consumequeue", store / "consumequeue")
    page = decode_checkpoint((store / "checkpoint").read_bytes())
    (store / "checkpoint").write_bytes(encode_checkpoint(Checkpoint(logics_msg_timestamp=page.logics_msg_timestamp)))
    return store


@pytest.fixture
def holed(truncated: Path, tmp_path: Path) -> Path:
    """The same with the later records in the log but for the first of them, which the power cut took."""
    for segment in (truncated / "commitlog").iterdir():
        shutil.copy(tmp_path / "later" / "commitlog" / segment.name, segment)
    with open_reader(str(tmp_path / "later")) as reader:
        reader.refresh()
        lost = reader.proof(QueueKey("T", 0), KEEPS // 2).physical_offset
    with (truncated / "commitlog" / "00000000000000000000").open("r+b") as file:
        file.seek(lost)
        file.write(bytes(100))
    return truncated


@pytest.fixture
def torn(holed: Path, tmp_path: Path) -> Path:
    """The same, but the power cut left the first later record's head and took the second one."""
    with open_reader(str(tmp_path / "later")) as reader:
        reader.refresh()
        first, second = (reader.proof(QueueKey("T", queue), KEEPS // 2).physical_offset for queue in range(2))
    whole = (tmp_path / "later" / "commitlog" / "00000000000000000000").read_bytes()
    with (holed / "commitlog" / "00000000000000000000").open("r+b") as file:
        file.seek(first)
        file.write(whole[first : first + 92].ljust(second - first + 100, b"\0"))
    return holed


@pytest.fixture
def beheaded(torn: Path, tmp_path: Path) -> Path:
    """The same, but the head of the first later record is all that the power cut left of them."""
    with open_reader(str(tmp_path / "later")) as reader:
        reader.refresh()
        first = reader.proof(QueueKey("T", 0), KEEPS // 2).physical_offset
    with (torn / "commitlog" / "00000000000000000000").open("r+b") as file:
        file.seek(first + 92)
        file.write(bytes(4096 - file.tell()))
    return torn


def bounds(store: Path) -> list[QueueBounds]:
    with open_reader(str(store)) as reader:
        reader.refresh()
        return [reader.bounds(QueueKey("T", queue)) for queue in range(2)]


def test_units_of_lost_records_are_no_messages(truncated: Path) -> None:
    assert bounds(truncated) == [QueueBounds(0, 3), QueueBounds(0, 3)]


def test_a_writer_goes_on_where_the_records_end(truncated: Path) -> None:
    append(truncated, KEEPS, 8, 1_700_000_009_000)
    assert bounds(truncated) == [QueueBounds(0, 4), QueueBounds(0, 4)]
    with open_reader(str(truncated)) as reader:
        bodies = [
            batch.column(0).to_pylist() for batch in reader.read(QueueKey("T", 0), 0, 4, ("body",), check_crc=True)
        ]
    assert bodies == [[b"0", b"2", b"4", b"6"]]


def test_a_writer_does_not_go_by_its_note_of_an_earlier_boot(
    truncated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that took back all that the power cut had left of our last section leaves a checkpoint equal to ours."""
    before = tmp_path / "before"
    append(before, 0, KEEPS, 1_700_000_000_000)
    shutil.rmtree(before / "consumequeue")
    shutil.copytree(truncated / "consumequeue", before / "consumequeue")
    monkeypatch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "after the power cut")
    append(before, KEEPS, 8, 1_700_000_009_000)
    assert bounds(before) == [QueueBounds(0, 4), QueueBounds(0, 4)]


def test_without_an_index_the_place_where_a_broker_of_5_started_is_the_witness(truncated: Path) -> None:
    with open_reader(str(truncated)) as reader:
        reader.refresh()
        last = reader.proof(QueueKey("T", 1), 2).physical_offset
    shutil.rmtree(truncated / "index")
    with pytest.raises(DamageError, match="beyond the end of the log"):
        bounds(truncated)
    page = decode_checkpoint((truncated / "checkpoint").read_bytes())
    (truncated / "checkpoint").write_bytes(
        encode_checkpoint(Checkpoint(logics_msg_timestamp=page.logics_msg_timestamp, confirm_phy_offset=last))
    )
    assert bounds(truncated) == [QueueBounds(0, 3), QueueBounds(0, 3)]


def test_newer_records_behind_a_hole_are_none_if_nobody_knew_of_them(holed: Path) -> None:
    assert bounds(holed) == [QueueBounds(0, 3), QueueBounds(0, 3)]


def test_newer_records_behind_a_hole_are_damage_if_the_index_knows_of_them(holed: Path, tmp_path: Path) -> None:
    shutil.rmtree(holed / "index")
    shutil.copytree(tmp_path / "later" / "index", holed / "index")
    with pytest.raises(DamageError, match="3 newer messages follow"):
        bounds(holed)


def test_an_index_that_knows_more_says_that_it_is_damage(truncated: Path, tmp_path: Path) -> None:
    shutil.rmtree(truncated / "index")
    shutil.copytree(tmp_path / "later" / "index", truncated / "index")
    with pytest.raises(DamageError, match="beyond the end of the log"):
        bounds(truncated)


def test_a_checkpoint_that_knows_more_says_that_it_is_damage(truncated: Path, tmp_path: Path) -> None:
    shutil.copy(tmp_path / "later" / "checkpoint", truncated / "checkpoint")
    with pytest.raises(DamageError, match="which the checkpoint contains"):
        bounds(truncated)


def test_newer_records_behind_a_head_and_a_hole_are_none_if_nobody_knew_of_them(torn: Path) -> None:
    assert bounds(torn) == [QueueBounds(0, 3), QueueBounds(0, 3)]
    append(torn, KEEPS, 8, 1_700_000_009_000)
    assert bounds(torn) == [QueueBounds(0, 4), QueueBounds(0, 4)]


def test_newer_records_behind_a_head_and_a_hole_are_damage_if_the_index_knows_of_them(
    torn: Path, tmp_path: Path
) -> None:
    shutil.rmtree(torn / "index")
    shutil.copytree(tmp_path / "later" / "index", torn / "index")
    with pytest.raises(DamageError, match="newer messages follow"):
        bounds(torn)


def test_units_behind_a_head_alone_are_no_messages(beheaded: Path) -> None:
    assert bounds(beheaded) == [QueueBounds(0, 3), QueueBounds(0, 3)]
    append(beheaded, KEEPS, 8, 1_700_000_009_000)
    assert bounds(beheaded) == [QueueBounds(0, 4), QueueBounds(0, 4)]


def test_units_behind_a_head_alone_are_damage_if_the_index_knows_of_them(beheaded: Path, tmp_path: Path) -> None:
    shutil.rmtree(beheaded / "index")
    shutil.copytree(tmp_path / "later" / "index", beheaded / "index")
    with pytest.raises(DamageError, match="expected one for a complete record"):
        bounds(beheaded)
