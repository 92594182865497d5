"""Queues with files of wrong names or lengths: only they fail, until the files are fixed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rmq_spark.store import StoreReader, open_reader
from rmq_spark.store.errors import DamageError, StorePathError
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

WRONG, RIGHT, OTHER = QueueKey("T", 0), QueueKey("T", 1), QueueKey("other", 0)
FILE_BYTES = 5 * 20


def store_of(path: Path, *, abort: bool = False, preallocated: bool = False) -> Path:
    """A store of three queues with two files each. Their messages alternate."""
    turns = [SampleMessage(key.topic, key.queue_id, b"%d" % n) for n in range(8) for key in (WRONG, RIGHT, OTHER)]
    build_store(path, turns, queue_file_bytes=FILE_BYTES, segment_bytes=4096, abort=abort, preallocated=preallocated)
    return path


def files_of(store: Path, queue: QueueKey) -> list[Path]:
    return sorted((store / "consumequeue" / queue.topic / str(queue.queue_id)).iterdir())


def cut_to(size: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        with max(folder.iterdir()).open("r+b") as file:
            file.truncate(size)

    return cut


def cut_all_to(size: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        max(folder.iterdir()).unlink()
        cut_to(size)(folder)

    return cut


def add_note(folder: Path) -> None:
    (folder / "notes.txt").touch()


def offsets(reader: StoreReader, queue: QueueKey) -> list[int]:
    bounds = reader.bounds(queue)
    batches = reader.read(queue, bounds.min_offset, bounds.max_offset, ["queueOffset"])
    return [offset for batch in batches for offset in batch.column(0).to_pylist()]


@pytest.mark.parametrize("abort", [False, True], ids=["closed in order", "crashed"])
@pytest.mark.parametrize(
    ("spoil", "error", "what"),
    [
        (cut_to(60), DamageError, "segments of one folder have one size: expected 100, found 60"),
        (cut_all_to(50), DamageError, "length of a consume-queue file"),
        (add_note, StorePathError, "notes.txt does not belong there"),
    ],
    ids=["one shorter", "half a unit", "a foreign file"],
)
def test_bounds_raises_only_for_the_queue_with_wrong_files(
    tmp_path: Path, spoil: Callable[[Path], None], error: type[Exception], what: str, abort: bool
) -> None:
    store = store_of(tmp_path / "s", abort=abort)
    spoil(store / "consumequeue" / "T" / "0")
    with open_reader(str(store)) as reader:
        assert reader.topics() == ["T", "other"]
        assert [queue.queue_id for queue in reader.queues("T")] == [0, 1]
        for ask in (reader.bounds, lambda queue: reader.offset_at_time(queue, 0)):
            with pytest.raises(error, match=what):
                ask(WRONG)
        assert offsets(reader, RIGHT) == offsets(reader, OTHER) == list(range(8))


def test_refresh_reads_a_queue_again_after_its_files_were_fixed(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s")
    path = files_of(store, WRONG)[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:60])
    with open_reader(str(store)) as reader:
        with pytest.raises(DamageError):
            reader.bounds(WRONG)
        assert not reader.refresh()
        path.write_bytes(whole)
        assert reader.refresh()
        assert [offsets(reader, queue) for queue in (WRONG, RIGHT)] == [list(range(8))] * 2
        assert not reader.refresh()


def test_refresh_reports_a_queue_whose_files_became_wrong(tmp_path: Path) -> None:
    """An append to another queue does not fix it."""
    build_store(tmp_path / "later", [SampleMessage(key.topic, key.queue_id, b"x") for key in (WRONG, OTHER)] * 2)
    build_store(tmp_path / "s", [SampleMessage(key.topic, key.queue_id, b"x") for key in (WRONG, OTHER)])
    with open_reader(str(tmp_path / "s")) as reader:
        assert reader.bounds(WRONG) == QueueBounds(0, 1)
        files_of(tmp_path / "s", WRONG)[0].write_bytes(bytes(50))
        for name in ("commitlog", "consumequeue/other/0"):
            path = tmp_path / "s" / name / f"{0:020d}"
            path.write_bytes((tmp_path / "later" / name / path.name).read_bytes())
        assert reader.refresh()
        for _ in range(2):
            with pytest.raises(DamageError, match="length of a consume-queue file"):
                reader.bounds(WRONG)
            assert reader.bounds(OTHER) == QueueBounds(0, 2)
            reader.refresh()


def test_bounds_refuses_a_batch_queue_with_a_wrong_first_offset(golden: Path, tmp_path: Path) -> None:
    """A first entry with a larger base would hide the earlier messages."""
    store = Path(shutil.copytree(golden / "batchcq-cqext", tmp_path / "s"))
    units = store / "batchconsumequeue" / "TopicIB" / "0" / f"{0:020d}"
    data = bytearray(units.read_bytes())
    data[35] ^= 8
    units.write_bytes(data)
    with open_reader(str(store)) as reader, pytest.raises(DamageError, match="base offset of the first entry"):
        reader.bounds(QueueKey("TopicIB", 0))
