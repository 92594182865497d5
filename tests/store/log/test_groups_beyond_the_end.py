"""A group's offset is on disk before the messages that it passes: what recovery makes of it when they are lost."""

import json
import logging
import shutil
import time
from itertools import count
from pathlib import Path

import pytest
from support.encoded_samples import encode_samples

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.group.offset_file import OffsetFile, read_group_offsets
from rmq_spark.store.log import recovery
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage

SIZES = FileSizes(4096, 1000, 50 * 46, IndexShape(20, 60))
OLD, NEW, MORE = QueueKey("T", 0), QueueKey("T", 1), QueueKey("U", 0)
AT = {OLD: 30, NEW: 10, MORE: 5}


class DeathError(Exception):
    """The recovering writer dies here."""


def writer(root: Path) -> StoreWriter:
    ticks = count(1_700_000_000_000)
    return StoreWriter(str(root), Disk(), WriterSettings(sizes=SIZES), lambda: next(ticks), time.sleep)


def append(root: Path, key: QueueKey, number: int, *, settle: bool = False) -> list[int]:
    """Append so many messages to a queue; return their queue offsets."""
    with writer(root) as store, store.section() as section:
        section.ensure_topic(key.topic, 2)
        messages = [SampleMessage(key.topic, key.queue_id, b"b" * 30, tags="t", keys="k") for _ in range(number)]
        offsets = section.append(encode_samples(messages)).queue_offsets.tolist()
        if settle:
            section.settle()
    return offsets


def commit(root: Path, group: str, offsets: dict[QueueKey, int]) -> None:
    clock = count(1_700_000_000_000)
    file = OffsetFile(str(root), Disk(), WriterSettings(), lambda: next(clock), time.sleep)
    file.commit(group, offsets)


def offsets_of(root: Path, group: str) -> dict[QueueKey, int]:
    return read_group_offsets(str(root), group, time.sleep)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Return a store after a power cut: what was settled, and what is synced by itself.

    Two groups passed 30 messages of an old queue, 10 of a new one and 5 of another topic; 20 of the first and 5 of the
    last were settled. The group "ahead" has come to the very end, the group "behind" to what was settled or less.
    """
    root, settled = tmp_path / "s", tmp_path / "settled"
    append(root, MORE, 5)
    append(root, OLD, 20, settle=True)
    shutil.copytree(root, settled)
    append(root, OLD, 10)
    append(root, NEW, 10)
    commit(root, "behind", {OLD: 20, MORE: 2})
    commit(root, "ahead", AT)
    for name in ("config/consumerOffset.json", "config/topics.json", "rmq/queues", "abort"):
        shutil.copyfile(root / name, settled / name)
    return settled


def cut_power(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "another boot")


@pytest.mark.parametrize("how", ["power cut", "lost memory", "no watermark"])
def test_a_group_beyond_what_is_left_goes_on_where_its_queues_end(
    how: str, image: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "power cut":
        cut_power(monkeypatch)
    if how == "no watermark":
        (image / "rmq/watermark").unlink()
    before = (image / "config/consumerOffset.json").read_bytes()
    with caplog.at_level(logging.WARNING):
        assert append(image, OLD, 10) == list(range(20, 30))
    assert offsets_of(image, "ahead") == {OLD: 20, NEW: 0, MORE: 5}
    assert offsets_of(image, "behind") == {OLD: 20, MORE: 2}
    assert append(image, NEW, 1) == [0]
    told = [one.getMessage() for one in caplog.records if "group ahead" in one.getMessage()]
    assert any("group ahead in queue T/0 from 30 to 20" in line for line in told)
    assert any("group ahead in queue T/1 from 10 to 0" in line for line in told)
    assert len(told) == 2
    assert [one.read_bytes() for one in (image / "rmq/before-repair").iterdir()] == [before]


def test_a_group_stays_where_it_is_when_its_messages_outlive_the_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "s"
    append(root, MORE, 5)
    append(root, OLD, 30)
    append(root, NEW, 10)
    commit(root, "ahead", AT)
    before = (root / "config/consumerOffset.json").read_bytes()
    cut_power(monkeypatch)
    assert append(root, OLD, 1) == [30]
    assert (root / "config/consumerOffset.json").read_bytes() == before


@pytest.mark.parametrize("step", ["set_groups_back", "_close_session"])
def test_a_recovery_that_dies_around_it_is_done_again_before_anything_is_stored(
    step: str, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_power(monkeypatch)

    def die(*_: object) -> None:
        raise DeathError

    with monkeypatch.context() as patch:
        patch.setattr(recovery, step, die)
        with pytest.raises(DeathError):
            append(image, OLD, 1)
    assert offsets_of(image, "ahead")[OLD] == (30 if step == "set_groups_back" else 20)
    assert append(image, OLD, 10) == list(range(20, 30))
    assert offsets_of(image, "ahead") == {OLD: 20, NEW: 0, MORE: 5}


def test_an_offset_of_a_queue_that_lost_its_files_waits_for_the_repair(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(image / "consumequeue/U")
    cut_power(monkeypatch)
    append(image, OLD, 1)
    assert offsets_of(image, "ahead") == {OLD: 20, NEW: 0, MORE: 5}


def test_the_backup_is_set_back_too_where_the_file_cannot_be_read(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = image / "config/consumerOffset.json"
    backup = path.with_name(path.name + ".bak")
    backup.write_bytes(path.read_bytes())
    path.write_bytes(b"{")
    cut_power(monkeypatch)
    append(image, OLD, 1)
    assert path.read_bytes() == b"{"
    assert json.loads(backup.read_text().replace("{0:", '{"0":').replace(",1:", ',"1":'))["offsetTable"]["T@ahead"] == {
        "0": 20,
        "1": 0,
    }
    assert offsets_of(image, "ahead") == {OLD: 20, NEW: 0, MORE: 5}
