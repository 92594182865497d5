"""A reader of a store in which nothing moves: cheap whatever state it was left in, and awake when something comes."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rmq_spark.store import StoreReader, open_reader
from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.checkpoint import Checkpoint, encode_checkpoint
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

QUEUE, NEW = QueueKey("T", 0), QueueKey("N", 0)
SEGMENT_BYTES = 1024
UNIT_BYTES = 20


def message(number: int, queue: QueueKey = QUEUE, body_bytes: int = 10) -> SampleMessage:
    body = b"%03d" % number + bytes(body_bytes - 3)
    return SampleMessage(queue.topic, queue.queue_id, body, tags="t", store_timestamp=number * 10_000)


class Stages:
    """A store as it is after some messages, and then after more: what a writer added is copied over piece by piece."""

    def __init__(self, folder: Path, before: list[SampleMessage], after: list[SampleMessage], *, abort: bool) -> None:
        self.path, self._later = folder / "now", folder / "later"
        for path, content in ((self.path, before), (self._later, before + after)):
            build_store(path, content, segment_bytes=SEGMENT_BYTES, abort=abort, empty_topics={"T": 1, "N": 1})
            (path / "checkpoint").write_bytes(encode_checkpoint(Checkpoint(0, 0, 0, 0, 0)))

    def bring(self, name: str) -> None:
        """Bring a file or folder of the store to the later stage."""
        path = self._later / name
        if path.is_dir():
            shutil.copytree(path, self.path / name, dirs_exist_ok=True)
        else:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(path.read_bytes())

    def records(self) -> list[int]:
        """Return where the records of the later stage begin in the first segment, and where the last one ends."""
        data = self.segment.read_bytes()
        places = [0]
        while size := int.from_bytes(data[places[-1] :][:4], "big"):
            places.append(places[-1] + size)
        return places

    @property
    def segment(self) -> Path:
        return self._later / "commitlog" / f"{0:020d}"

    def write_log(self, begin: int, end: int) -> None:
        """Bring the bytes [begin, end) of the first segment to the later stage."""
        with (self.path / "commitlog" / self.segment.name).open("r+b") as file:
            file.seek(begin)
            file.write(self.segment.read_bytes()[begin:end])


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were listed; clear it to begin anew."""
    found: list[str] = []
    list_folder = files.list_folder

    def counted(path: str) -> list[tuple[str, bool]]:
        found.append(path)
        return list_folder(path)

    monkeypatch.setattr(files, "list_folder", counted)
    return found


@contextmanager
def idle_reader(path: Path, listed: list[str]) -> Iterator[StoreReader]:
    """A reader that has looked, and lists no folder when it is asked again."""
    with open_reader(str(path)) as reader:
        assert reader.refresh()
        listed.clear()
        assert not reader.refresh()
        assert not listed
        yield reader
        assert not reader.refresh()


def test_a_message_whose_queue_has_no_folder_is_waited_for_without_a_look(tmp_path: Path, listed: list[str]) -> None:
    stages = Stages(tmp_path, [message(0)], [message(1, NEW)], abort=True)
    stages.write_log(0, SEGMENT_BYTES)
    with idle_reader(stages.path, listed) as reader:
        assert reader.bounds(NEW) == QueueBounds(0, 0)
        stages.bring("consumequeue/N/0")
        assert reader.refresh()
        assert reader.bounds(NEW) == QueueBounds(0, 1)


def test_a_unit_that_is_late_is_waited_for_without_a_look(tmp_path: Path, listed: list[str]) -> None:
    stages = Stages(tmp_path, [message(0)], [message(1)], abort=True)
    stages.write_log(0, SEGMENT_BYTES)
    with idle_reader(stages.path, listed) as reader:
        assert reader.bounds(QUEUE) == QueueBounds(0, 1)
        stages.bring("consumequeue/T/0")
        assert reader.refresh()
        assert reader.bounds(QUEUE) == QueueBounds(0, 2)


def test_a_unit_that_is_half_written_is_waited_for_without_a_look(tmp_path: Path, listed: list[str]) -> None:
    stages = Stages(tmp_path, [message(0)], [message(1)], abort=True)
    stages.bring("commitlog")
    stages.bring("consumequeue/T/0")
    path = stages.path / "consumequeue/T/0" / f"{0:020d}"
    whole = path.read_bytes()
    path.write_bytes(whole[: 2 * UNIT_BYTES - 8] + bytes(len(whole) - 2 * UNIT_BYTES + 8))  # without its tags code
    with idle_reader(stages.path, listed) as reader:
        assert reader.bounds(QUEUE) == QueueBounds(0, 1)
        path.write_bytes(whole)
        assert reader.refresh()
        assert reader.bounds(QUEUE) == QueueBounds(0, 2)


def test_a_record_that_is_half_written_is_waited_for_without_a_look(tmp_path: Path, listed: list[str]) -> None:
    stages = Stages(tmp_path, [message(0)], [message(1)], abort=True)
    begin, end = stages.records()[-2:]
    stages.write_log(begin, begin + 92)  # its head, and not all of its body
    with idle_reader(stages.path, listed) as reader:
        assert reader.bounds(QUEUE) == QueueBounds(0, 1)
        stages.write_log(begin, end)
        stages.bring("consumequeue/T/0")
        assert reader.refresh()
        assert reader.bounds(QUEUE) == QueueBounds(0, 2)


def test_a_stale_record_behind_the_end_costs_no_look(tmp_path: Path, listed: list[str]) -> None:
    stages = Stages(tmp_path, [message(2), message(0)], [], abort=False)
    page = encode_checkpoint(Checkpoint(20_000, 20_000, 0, 0, 0))
    (stages.path / "checkpoint").write_bytes(page)
    build_store(tmp_path / "over", [message(2), message(3)], segment_bytes=SEGMENT_BYTES)
    with idle_reader(stages.path, listed) as reader:
        assert reader.bounds(QUEUE) == QueueBounds(0, 1)
        log = f"commitlog/{0:020d}"
        (stages.path / log).write_bytes((tmp_path / "over" / log).read_bytes())
        (stages.path / "checkpoint").write_bytes(encode_checkpoint(Checkpoint(30_000, 30_000, 0, 0, 0)))
        assert reader.refresh()
        assert reader.bounds(QUEUE) == QueueBounds(0, 2)


def test_a_filler_at_the_end_is_followed_when_the_next_segment_is_made(tmp_path: Path, listed: list[str]) -> None:
    large = [message(number, body_bytes=700) for number in range(2)]
    stages = Stages(tmp_path, large[:1], large[1:], abort=True)
    stages.write_log(0, SEGMENT_BYTES)
    with idle_reader(stages.path, listed) as reader:
        assert reader.bounds(QUEUE) == QueueBounds(0, 1)
        (stages.path / "commitlog" / f"{SEGMENT_BYTES:020d}").touch()  # just being made
        assert not reader.refresh()
        stages.bring(f"commitlog/{SEGMENT_BYTES:020d}")
        stages.bring("consumequeue/T/0")
        assert reader.refresh()
        assert reader.bounds(QUEUE) == QueueBounds(0, 2)


def test_a_store_without_a_segment_costs_no_look_at_its_queues(tmp_path: Path, listed: list[str]) -> None:
    stages = Stages(tmp_path, [message(0)], [], abort=False)
    shutil.rmtree(stages.path / "commitlog")
    shutil.rmtree(stages.path / "consumequeue")
    (stages.path / "commitlog").mkdir()
    with open_reader(str(stages.path)) as reader:
        assert reader.refresh()
        listed.clear()
        assert not reader.refresh()
        assert listed == [str(stages.path / "commitlog")]
        stages.bring("consumequeue")
        stages.bring("commitlog")
        assert reader.refresh()
        assert reader.bounds(QUEUE) == QueueBounds(0, 1)


def test_a_store_closed_in_order_without_the_unit_that_was_late_is_damaged(tmp_path: Path, listed: list[str]) -> None:
    stages = Stages(tmp_path, [message(0)], [message(1)], abort=True)
    stages.write_log(0, SEGMENT_BYTES)
    with idle_reader(stages.path, listed) as reader:
        (stages.path / "abort").unlink()
        assert reader.refresh()
        with pytest.raises(DamageError, match="the entry of queue offset 1 of T/0"):
            reader.bounds(QUEUE)
        assert not reader.refresh()
        stages.bring("consumequeue/T/0")
        (stages.path / "checkpoint").touch()  # as who repairs a store leaves it
        assert reader.refresh()
        assert reader.bounds(QUEUE) == QueueBounds(0, 2)


def test_messages_to_others_are_found_without_listing_queues_for_one_that_has_no_folder(
    tmp_path: Path, listed: list[str]
) -> None:
    stages = Stages(tmp_path, [message(0)], [message(1, NEW), message(2)], abort=True)
    places = stages.records()
    stages.write_log(0, places[2])
    with idle_reader(stages.path, listed) as reader:
        stages.write_log(places[2], places[3])
        stages.bring("consumequeue/T/0")
        listed.clear()
        assert reader.refresh()
        assert listed == [str(stages.path / "commitlog")]
        assert reader.bounds(QUEUE) == QueueBounds(0, 2)


def test_a_topic_deleted_since_the_last_look_is_not_waited_for_and_no_damage(tmp_path: Path, listed: list[str]) -> None:
    stages = Stages(tmp_path, [message(0)], [message(1, NEW), message(2)], abort=True)
    places = stages.records()
    stages.write_log(0, places[2])
    with idle_reader(stages.path, listed) as reader:
        topics = stages.path / "config" / "topics.json"
        topics.write_text(topics.read_text().replace('"N"', '"O"'))
        stages.write_log(places[2], places[3])
        stages.bring("consumequeue/T/0")
        (stages.path / "abort").unlink()
        (stages.path / "checkpoint").write_bytes(encode_checkpoint(Checkpoint(20_000, 20_000, 0, 0, 0)))
        assert reader.refresh()
        assert reader.topics() == ["O", "T"]
        assert reader.bounds(QUEUE) == QueueBounds(0, 2)
