"""The files that a broker reads are up to date after `close`, even if the process that delivered died."""

from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store import DeliveryScheduler
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.log.delay_offsets import DelayOffsetFile
from rmq_spark.store.testing.crash_disk import ProcessDeathError


def test_close_hands_over_what_a_dead_process_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    with rmq_spark.open_store(path, segment_bytes=1 << 20, queues=1, message_delay_level="0s") as store:
        store.send("T", "a", delay_level=1)

    def die(*_: object) -> None:
        raise ProcessDeathError

    with monkeypatch.context() as patch:
        patch.setattr(DelayOffsetFile, "write", die)
        with pytest.raises(ProcessDeathError):
            DeliveryScheduler(str(path)).tick(wall_clock_ms())
    offsets = path / "config/delayOffset.json"
    assert not offsets.exists()
    rmq_spark.close(path)
    assert "".join(offsets.read_text().split()) == '{"offsetTable":{1:1}}'
    assert not (path / "abort").exists()


def test_close_creates_no_delivery_files_if_no_message_waited(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with rmq_spark.open_store(path, segment_bytes=1 << 20, queues=1) as store:
        store.send("T", "a")
    rmq_spark.close(path)
    assert not (path / "rmq/delivery").exists()
    assert not (path / "config/delayOffset.json").exists()
