"""The spool of a sender: items in order and with their bytes, from memory and from a file, and a full disk."""

import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sent_rows import batch_of, encode, id_array, id_text

from rmq_spark.store.cluster.message_spool import ItemRun, MessageSpool
from rmq_spark.store.errors import DiskFullError, StoreError
from rmq_spark.store.format.batch_items import NOT_SOLO, EncodedItems, encode_item, split_item
from rmq_spark.store.model import QueueKey

ORDERS = QueueKey("orders", 0, "broker-a")


def row(number: int, queue: int | None = None, **changes: Any) -> dict[str, Any]:
    place = {} if queue is None else {"queueId": queue % 2, "brokerName": ("broker-a", "broker-b")[queue // 2]}
    return {"topic": "orders", "body": b"%04d" % number * (1 + number % 3), **place, **changes}


def items_of(*rows: dict[str, Any], first: int = 0) -> EncodedItems:
    """Return the items of rows, whose ids begin at the number `first`."""
    return encode(batch_of(rows), ids=lambda count, _: id_array(first + count)[first:])


def bodies_of(spool: MessageSpool, runs: list[ItemRun]) -> list[tuple[int, bytes]]:
    """Return number and body of each item of some runs. Checks sizes and ids."""
    found = []
    for run in runs:
        data = bytes(spool.read(run))
        assert len(data) == run.sizes.sum()
        ids = spool.ids(run.rows)
        for number, size, message_id in zip(run.rows.tolist(), run.sizes.tolist(), ids, strict=True):
            item, data = data[:size], data[size:]
            _, body, properties = split_item(item)
            assert len(item) == len(encode_item(0, body, properties.encode()))
            assert properties.startswith(f"UNIQ_KEY\x01{message_id}\x02")
            found.append((number, body))
    return found


@pytest.mark.parametrize("memory_bytes", [1 << 20, 150, 0], ids=["memory", "both", "file"])
@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=5))
def test_add_keeps_the_order_of_each_queue(memory_bytes: int, pieces: list[list[int]]) -> None:
    queues = [queue for piece in pieces for queue in piece]
    rows = [row(number, queue) for number, queue in enumerate(queues)]
    with MessageSpool(keeps_ids=True, memory_bytes=memory_bytes) as spool:
        for piece in pieces:
            first = spool.count
            spool.add(items_of(*rows[first : first + len(piece)], first=first))
        assert spool.count == len(rows)
        assert spool.bytes == sum(int(run.sizes.sum()) for runs in spool.runs.values() for run in runs)
        for number in set(queues):
            queue = QueueKey("orders", number % 2, ("broker-a", "broker-b")[number // 2])
            expected = [(at, rows[at]["body"]) for at, one in enumerate(queues) if one == number]
            assert bodies_of(spool, list(spool.runs[queue])) == expected
        assert len(spool.runs) == len(set(queues))
        assert spool.id_column().to_pylist() == [id_text(at) for at in range(len(rows))]
        is_in_file = [run.data is None for runs in spool.runs.values() for run in runs]
        assert any(is_in_file) == (spool.bytes > memory_bytes)


@pytest.mark.parametrize("memory_bytes", [1 << 20, 0], ids=["memory", "file"])
def test_cut_divides_a_run(memory_bytes: int) -> None:
    rows = [row(number, 0, delayLevel=1 if number in (2, 3) else None) for number in range(5)]
    with MessageSpool(keeps_ids=True, memory_bytes=memory_bytes) as spool:
        spool.add(items_of(row(0, 3), *rows, first=0))  # so that the run does not begin at 0
        (run,) = spool.runs[ORDERS]
        whole = bodies_of(spool, [run])
        assert run.cut(5) == (run, None)
        assert run.solo is not None
        for count in range(1, 5):
            first, rest = run.cut(count)
            assert rest is not None
            assert bodies_of(spool, [first]) == whole[:count]
            assert bodies_of(spool, [rest]) == whole[count:]
            assert (first.solo.tolist(), rest.solo.tolist()) == (run.solo[:count].tolist(), run.solo[count:].tolist())  # type: ignore[union-attr]
            assert first.is_free is rest.is_free is run.is_free
            again, last = rest.cut(1)
            assert bodies_of(spool, [again] if last is None else [again, last]) == whole[count:]


def test_add_notes_what_is_solo_and_free() -> None:
    with MessageSpool() as spool:
        spool.add(items_of(row(0, 0, delayLevel=1), row(1, 0), row(2, 1)))
        spool.add(items_of(row(0), row(1)))
        spool.add(items_of(row(0, shardingKey="a"), row(1)))
        solo = {str(queue): [None if run.solo is None else run.solo.tolist() for run in runs]
                for queue, runs in spool.runs.items()}  # fmt: skip
        free = [run.is_free for runs in spool.runs.values() for run in runs]
    assert solo["orders/broker-a:0"][0] == [0, NOT_SOLO]
    assert solo["orders/broker-a:1"][0] is None
    assert sorted(free) == [False, False, False, True, True, True]


def test_a_run_with_one_row_that_is_bound_is_not_free() -> None:
    keys = [f"key-{number}" for number in range(20)]
    with MessageSpool() as spool:
        spool.add(items_of(*(row(number, shardingKey=key if number % 2 else None) for number, key in enumerate(keys))))
        for runs in spool.runs.values():
            for run in runs:
                assert run.is_free == all(number % 2 == 0 for number in run.rows.tolist())


def test_add_one_adds_an_item() -> None:
    item = encode_item(7, b"body", f"UNIQ_KEY\x01{id_text(5)}\x02".encode())
    with MessageSpool(keeps_ids=True) as spool:
        spool.add_one(ORDERS, item, id_text(5), is_free=True)
        (run,) = spool.runs[ORDERS]
        assert bytes(spool.read(run)) == item
        assert (run.rows.tolist(), run.sizes.tolist(), run.is_free, run.solo) == ([0], [len(item)], True, None)
        assert spool.ids(np.array([0])) == (id_text(5),)
        spool.add(items_of(row(1, 0), first=6))
        assert spool.ids(np.array([1, 0])) == (id_text(6), id_text(5))
        assert spool.id_column().to_pylist() == [id_text(5), id_text(6)]
        assert [run.rows.tolist() for run in spool.runs[ORDERS]] == [[0], [1]]


def test_a_spool_without_ids_returns_none() -> None:
    with MessageSpool() as spool:
        spool.add(items_of(row(0, 0)))
        assert spool.ids(np.array([0])) == ()
    with MessageSpool(keeps_ids=True) as spool:
        assert spool.id_column().to_pylist() == []


def open_files() -> list[str]:
    """Return the open files of this process that are temporary files of a spool, and deleted."""
    found = []
    for one in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(one.readlink()))
        except OSError:
            continue
    return [name for name in found if name.startswith(tempfile.gettempdir()) and "deleted" in name]


def test_close_removes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spool = MessageSpool(memory_bytes=0)
    spool.add(items_of(row(0, 0)))
    assert len(open_files()) == 1
    assert list(tmp_path.iterdir()) == [], "nobody else finds it, and it goes with the process"
    spool.close()
    spool.close()
    assert open_files() == []


def test_leaving_with_removes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with MessageSpool(memory_bytes=0) as spool:
        spool.add(items_of(row(0, 0)))
    assert open_files() == []


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let writes beyond `size` bytes of a file fail (EFBIG), as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(size: int, *pieces: EncodedItems) -> None:
    """Add items to a spool whose file can have this many bytes."""
    with files_up_to(size), MessageSpool(memory_bytes=0) as spool:
        for items in pieces:
            spool.add(items)


@pytest.mark.parametrize("count", [20, 20_000], ids=["in the buffer", "beyond the buffer"])
def test_a_full_disk_is_an_error_that_names_the_folder(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    items = items_of(*(row(number, 0) for number in range(count)))
    with pytest.raises(DiskFullError, match=f"{tmp_path}: File too large; expected room for about") as caught:
        fill(400, items_of(row(0, 0)), items)
    assert "Nothing was sent" in str(caught.value)
    assert open_files() == []


def test_a_temporary_folder_that_is_full_from_the_begin_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then Python finds no folder in which it can write."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(DiskFullError, match="temporary folder: No usable temporary directory found"):
        fill(0, items_of(row(0, 0)))


def test_items_in_memory_need_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", None)
    items = items_of(row(0, 0), row(1, 1))
    with MessageSpool(memory_bytes=int(items.sizes.sum())) as spool:
        spool.add(items)
        assert [body for runs in spool.runs.values() for _, body in bodies(spool, list(runs))] == [b"0000", b"00010001"]


def bodies(spool: MessageSpool, runs: list[ItemRun]) -> list[tuple[int, bytes]]:
    """Return number and body of each item, for a spool without ids and runs of one item."""
    return [(int(run.rows[0]), split_item(bytes(spool.read(run)))[1]) for run in runs]


def test_read_of_a_temporary_file_that_fails_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with MessageSpool(memory_bytes=0) as spool:
        spool.add(items_of(row(0), row(1)))
        (run,) = next(iter(spool.runs.values()))

        class Failing:
            def seek(self, position: int) -> None:
                raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(spool, "_file", Failing())
            with pytest.raises(StoreError, match="cannot be read from the temporary file: Input/output error"):
                spool.read(run)
