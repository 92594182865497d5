"""A call to the kernel fails, each one of a read and of a check: an error that names the file, never fewer rows."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmq_spark.store import check, open_reader, open_store, plan_repair
from rmq_spark.store.errors import RmqError, StoreError, StorePathError
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queue_registry import find_lost_queues, newest_unit, read_registry
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

ERRORS = [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE, errno.ENOMEM, errno.ELOOP, errno.EINTR]
ROWS = 40
EachFailure = Callable[..., Iterator[tuple[str, object]]]


def assert_is_told(root: Path, hit: str, error: RmqError) -> None:
    assert isinstance(error, StoreError), (hit, error)
    assert str(root) in str(error), (hit, error)


@pytest.fixture(params=[False, True], ids=["closed", "crashed"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    messages = [SampleMessage("orders", number % 2, b"body %d" % number) for number in range(ROWS)]
    return build_store(tmp_path / "store", messages, queue_file_bytes=200, abort=request.param).path


def read_all(store: Path, read_mode: str) -> list[bytes]:
    rows = []
    with open_reader(store, read_mode=read_mode) as reader:
        reader.refresh()
        for topic in reader.topics():
            for queue in reader.queues(topic):
                held = reader.bounds(queue)
                for batch in reader.read(queue, held.min_offset, held.max_offset, ["body"]):
                    rows += batch.column("body").to_pylist()
    return sorted(rows)


@pytest.mark.slow
@pytest.mark.parametrize("read_mode", ["mmap", "pread"])
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_a_read_gives_every_row_or_an_error_that_names_the_file(
    store: Path, each_failure: EachFailure, error: int, read_mode: str
) -> None:
    whole = read_all(store, read_mode)
    assert len(whole) == ROWS
    for hit, outcome in each_failure(str(store), error, lambda: read_all(store, read_mode)):
        if isinstance(outcome, RmqError):
            assert_is_told(store, hit, outcome)
        else:
            assert outcome == whole, hit


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.EMFILE], ids=errno.errorcode.get)
def test_a_check_of_a_damaged_store_never_calls_it_healthy(store: Path, each_failure: EachFailure, error: int) -> None:
    (unit,) = (store / "consumequeue/orders/0").glob("0" * 20)
    data = bytearray(unit.read_bytes())
    data[41] ^= 1
    unit.write_bytes(data)
    assert not check(store).is_healthy
    for hit, outcome in each_failure(str(store), error, lambda: check(store, sleep=lambda _: None)):
        if isinstance(outcome, RmqError):
            assert_is_told(store, hit, outcome)
        else:
            assert not outcome.is_healthy, hit  # type: ignore[attr-defined]


def test_a_queue_whose_folder_cannot_be_listed_hides_no_other_and_is_never_rebuilt(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = store / "consumequeue/orders/0", os.scandir

    def refuse(path: str) -> object:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with open_reader(store) as reader:
        reader.refresh()
        with pytest.raises(StorePathError, match=f"{folder} cannot be listed: Permission denied; expected"):
            reader.bounds(QueueKey("orders", 0))
        assert reader.bounds(QueueKey("orders", 1)) == QueueBounds(0, ROWS // 2)
    findings = [one for one in check(store).findings if one.path == str(folder)]
    assert [(one.severity, one.action) for one in findings] == [("damage", "leave")]
    assert "Permission denied" in findings[0].what
    with pytest.raises(StorePathError, match=f"{folder} cannot be listed"):
        plan_repair(store)


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, pytest.MonkeyPatch]:
    """A store that our writer closed, a queue's folder in it that cannot be listed from now on, and who undoes that."""
    root = tmp_path / "ours"
    with open_store(root, queues=2) as messages:
        for number in range(4):
            messages.send("orders", b"body", queue_id=number % 2)
    folder, real = root / "consumequeue/orders/1", os.scandir

    def refuse(path: str) -> object:
        if Path(path) == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    return root, folder, monkeypatch


def test_a_queue_that_cannot_be_listed_is_not_registered(ours: tuple[Path, Path, pytest.MonkeyPatch]) -> None:
    root, folder, patch = ours
    registry = root / "rmq/queues"
    registry.unlink()  # an older release left the store
    with pytest.raises(StoreError, match=f"{folder} cannot be listed"), open_store(root) as messages:
        messages.send("orders", b"body", queue_id=0)
    assert not registry.exists()
    patch.undo()
    with open_store(root) as messages:
        messages.send("orders", b"body", queue_id=0)
    found = read_registry(str(root))
    assert found is not None
    assert [found.queues[QueueKey("orders", queue)] >= 0 for queue in range(2)] == [True, True]


def test_a_queue_that_cannot_be_listed_neither_has_files_nor_has_none(
    ours: tuple[Path, Path, pytest.MonkeyPatch],
) -> None:
    root, folder, _ = ours
    queues = TopicTable(str(root)).queues
    registered, log = read_registry(str(root)), CommitLog((str(root / "commitlog"),), mapped=False)
    found = find_lost_queues(str(root), log, registered, lambda key: newest_unit(queues[key]), TopicTable(str(root)))
    assert list(found) == [QueueKey("orders", 1)]
    assert f"{folder} cannot be listed" in str(found[QueueKey("orders", 1)])
