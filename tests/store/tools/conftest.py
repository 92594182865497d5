"""Fixtures of the crash tests."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rmq_spark.store.testing.crash_disk import CrashDisk


@pytest.fixture
def crash_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[CrashDisk, Iterable[int], int, Callable[[Path], None]], None]:
    """A function that writes the crash images at some points and calls `go_on` with the store in each of them."""

    def crash(disk: CrashDisk, points: Iterable[int], seed: int, go_on: Callable[[Path], None]) -> None:
        folder = tmp_path / "image"
        for point in points:
            for image in disk.images(point, seed, subset_count=1):
                shutil.rmtree(folder, ignore_errors=True)
                image.write_to(folder)
                with monkeypatch.context() as patch:
                    if "power cut" in str(image):
                        patch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "after the power cut")
                    try:
                        go_on(folder / "s")
                    except (AssertionError, Exception) as error:
                        raise AssertionError(f"{image}: {error!r}") from error

    return crash
