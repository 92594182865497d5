"""Tests of DirtyFiles: which files a sync covers, and that the disk starts to write all of them before it waits."""

from pathlib import Path

from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.log.commit_log_writer import DirtyFiles


class Noting(SystemCalls):
    """Notes the syncs, by the name of the file, instead of performing them."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []
        self._names: dict[int, str] = {}

    def open(self, path: str) -> int:
        descriptor = super().open(path)
        self._names[descriptor] = Path(path).name
        return descriptor

    def begin_sync(self, descriptor: int) -> None:
        self.notes.append(("begin", self._names[descriptor]))

    def sync(self, descriptor: int) -> None:
        self.notes.append(("sync", self._names[descriptor]))

    def sync_folder(self, path: str) -> None:
        self.notes.append(("folder", Path(path).name))


def test_sync_starts_the_writing_of_all_files_before_it_waits_for_the_first(tmp_path: Path) -> None:
    calls = Noting()
    changes = DirtyFiles(Disk(calls), (str(tmp_path),))
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"x")
        changes.note_file(str(tmp_path / name))
    changes.note_file(str(tmp_path / "expired"))
    changes.note_folder(str(tmp_path))
    changes.sync()
    assert calls.notes == [
        *(("begin", name) for name in "bc"),  # the sync of the first one starts at once
        *(("sync", name) for name in "abc"),
        ("folder", tmp_path.name),
    ]
    calls.notes.clear()
    changes.sync()
    assert not calls.notes
