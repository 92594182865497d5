"""The task's side: rows in order, and no row of a store that is not the planned one."""

import pickle
import shutil
from dataclasses import replace

import pytest
from support.parsed_options import parse_options

from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.plan.splitting import TaskLimits
from rmq_spark.datasource.spark.partition import Piece, RmqPartition, plan_partitions
from rmq_spark.datasource.spark.partition_reader import read_partition
from rmq_spark.datasource.spark.source_view import SourceView
from rmq_spark.store.errors import DamageError, DataLossError, StoreChangedError
from rmq_spark.store.local import backend as local_backend
from rmq_spark.store.local.directory import StoreDirectory
from rmq_spark.store.model import QueueKey, QueueRange, RecordProof
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

QUEUE = QueueKey("orders", 0)
SETTINGS = ReadSettings(("queueOffset",), False, 64 << 20, True)
LENIENT = ReadSettings(("queueOffset",), False, 64 << 20, False)


def plan(path, *spans):
    """Plan the queue offsets [begin, end) of each span as one partition."""
    view = SourceView(parse_options({"path": str(path), "subscribe": "orders"}, 0))
    view.refresh()
    try:
        return plan_partitions(view, [QueueRange(QUEUE, begin, end) for begin, end in spans], TaskLimits())[0]
    finally:
        view.close()


def offsets(partition, settings=SETTINGS):
    return [offset for batch in read_partition(partition, settings) for offset in batch["queueOffset"].to_pylist()]


def build(path, count, *, size=300, first_ms=1_600_000_000_000, topic="orders"):
    messages = [SampleMessage(topic, 0, b"x" * size, store_timestamp=first_ms + n) for n in range(count)]
    build_store(path, messages, segment_bytes=4096)
    return path


def oldest_segment(path):
    return min((path / "commitlog").iterdir())


def test_a_partition_comes_back_from_pickling_and_is_small(tmp_path) -> None:
    partition = plan(build(tmp_path / "store", 5), (1, 4))
    data = pickle.dumps(partition)
    again = pickle.loads(data)
    assert (again.location, again.pieces) == (partition.location, partition.pieces)
    assert len(data) < 300 + len(partition.location.path)
    empty = RmqPartition(StoreDirectory("/x", "/y"), (Piece(QUEUE, 0, 1, None, RecordProof(1, 2)),))
    assert pickle.loads(pickle.dumps(empty)).pieces == empty.pieces


def test_a_store_of_another_id_is_another_store_whatever_lies_in_it(tmp_path) -> None:
    partition = plan(build(tmp_path / "store", 40), (3, 37))
    assert partition.identity is None
    mark = tmp_path / "store" / "rmq"
    mark.mkdir()
    (mark / "settings.json").write_text('{"v": 1, "storeId": "one"}')
    marked = plan(tmp_path / "store", (3, 37))
    assert offsets(partition) == offsets(marked) == list(range(3, 37))
    (mark / "settings.json").write_text('{"v": 1, "storeId": "two"}')
    with pytest.raises(StoreChangedError, match="its id is two, the driver planned with one"):
        offsets(marked)


def test_rows_of_a_piece_come_in_queue_order(tmp_path) -> None:
    assert offsets(plan(build(tmp_path / "store", 40), (3, 37))) == list(range(3, 37))


def test_a_task_with_many_pieces_opens_the_store_once_and_closes_it(tmp_path, monkeypatch) -> None:
    path = build(tmp_path / "store", 40)
    real, opened = local_backend.StoreReader, []

    def open_and_count(path, **given):
        opened.append(real(path, **given))
        monkeypatch.setattr(opened[-1], "close", lambda: opened.append("closed"))
        return opened[-1]

    partition = plan(path, *((n, n + 1) for n in range(0, 40, 5)))
    monkeypatch.setattr(local_backend, "StoreReader", open_and_count)
    assert offsets(partition) == list(range(0, 40, 5))
    assert opened[1:] == ["closed"]


def plan_queues(path, count, *, size):
    """Plan all messages of a store with `count` messages of `size` bytes in each of four queues."""
    messages = [
        SampleMessage("orders", n % 4, b"x" * size, store_timestamp=1_600_000_000_000) for n in range(4 * count)
    ]
    build_store(path, messages, segment_bytes=32 << 20)
    view = SourceView(parse_options({"path": str(path), "subscribe": "orders"}, 0))
    view.refresh()
    try:
        return plan_partitions(view, [QueueRange(QueueKey("orders", n), 0, count) for n in range(4)], TaskLimits())
    finally:
        view.close()


def test_a_task_reads_several_queues_one_after_the_other(tmp_path) -> None:
    (partition,) = plan_queues(tmp_path / "store", 5, size=10)
    assert [piece.queue.queue_id for piece in partition.pieces] == [0, 1, 2, 3]
    (batch,) = read_partition(partition, ReadSettings(("queueId", "queueOffset"), False, 64 << 20, True))
    assert batch.to_pydict() == {"queueId": [n for n in range(4) for _ in range(5)], "queueOffset": [*range(5)] * 4}
    assert [batch.num_rows for batch in read_partition(partition, ReadSettings((), False, 64 << 20, True))] == [20]


def test_a_task_of_several_queues_finds_another_store_in_the_last_one(tmp_path) -> None:
    (partition,) = plan_queues(tmp_path / "store", 2, size=10)
    pieces = partition.pieces
    moved = replace(pieces[3], last=RecordProof(pieces[3].last.physical_offset, 1))
    other = RmqPartition(partition.location, (*pieces[:3], moved), partition.identity)
    with pytest.raises(StoreChangedError, match=r"in queue orders/3: the message at queue offset 1 .* planned with"):
        list(read_partition(other, SETTINGS))
    assert len(list(read_partition(partition, SETTINGS))) == 1


def test_a_task_of_several_queues_reports_damage_with_its_place(tmp_path) -> None:
    (partition,) = plan_queues(tmp_path / "store", 2, size=10)
    segment = oldest_segment(tmp_path / "store")
    with open(segment, "r+b") as file:
        file.seek(partition.pieces[2].last.physical_offset + 20)
        file.write(b"\xff" * 8)
    with pytest.raises(DamageError, match=r"queue offset, message 1 of queue orders/2") as caught:
        list(read_partition(partition, SETTINGS))
    assert str(segment) in str(caught.value)


def test_a_task_of_several_topics_reads_each_topic_alone(tmp_path) -> None:
    path = tmp_path / "store"
    build_store(path, [SampleMessage(topic, n, topic.encode()) for topic in ("a", "b", "b") for n in range(2)])
    view = SourceView(parse_options({"path": str(path), "subscribe": "a,b"}, 0))
    view.refresh()
    ranges = [QueueRange(queue, 0, bounds.max_offset) for queue, bounds in view.bounds.items()]
    (partition,) = plan_partitions(view, ranges, TaskLimits())
    view.close()
    columns = ("topic", "queueId", "queueOffset", "body")
    (batch,) = read_partition(partition, ReadSettings(columns, False, 64 << 20, True))
    expected = [("a", 0, 0), ("a", 1, 0), ("b", 0, 0), ("b", 0, 1), ("b", 1, 0), ("b", 1, 1)]
    assert [tuple(row.values()) for row in batch.to_pylist()] == [(*row, row[0].encode()) for row in expected]


def test_queues_with_large_records_do_not_share_a_task(tmp_path) -> None:
    partitions = plan_queues(tmp_path / "store", 4, size=3 << 20)
    assert [[piece.queue.queue_id for piece in partition.pieces] for partition in partitions] == [[0, 1], [2, 3]]
    whole = ReadSettings(("body",), False, 64 << 20, True)
    assert [sum(batch.num_rows for batch in read_partition(one, whole)) for one in partitions] == [8, 8]


@pytest.mark.parametrize("settings", [SETTINGS, LENIENT])
def test_another_store_at_the_path_gives_no_row(tmp_path, settings) -> None:
    partition = plan(build(tmp_path / "store", 10), (0, 10))
    shutil.rmtree(tmp_path / "store")
    for other in ({"first_ms": 1_600_000_000_001}, {"size": 301}):
        build(tmp_path / "store", 10, **other)
        with pytest.raises(StoreChangedError, match="is not the one that the driver planned with") as caught:
            offsets(partition, settings)
        assert "storage that the driver and all executors share" in str(caught.value)
        assert "queue offset 9" in str(caught.value)
        shutil.rmtree(tmp_path / "store")


@pytest.mark.parametrize("settings", [SETTINGS, LENIENT])
def test_a_store_that_differs_only_in_the_last_message_gives_no_row(tmp_path, settings) -> None:
    partition = plan(build(tmp_path / "store", 10), (0, 10))
    shutil.rmtree(tmp_path / "store")
    messages = [SampleMessage("orders", 0, b"x" * 300, store_timestamp=1_600_000_000_000 + n) for n in range(9)]
    messages.append(SampleMessage("orders", 0, b"x" * 300, store_timestamp=1_600_000_000_500))
    build_store(tmp_path / "store", messages, segment_bytes=4096)
    with pytest.raises(StoreChangedError):
        next(read_partition(partition, settings))


@pytest.mark.parametrize("settings", [SETTINGS, LENIENT])
def test_no_store_a_shorter_one_or_one_without_the_queue_is_another_store(tmp_path, settings) -> None:
    path = build(tmp_path / "store", 10)
    partition = plan(path, (0, 10))
    shutil.rmtree(path)
    with pytest.raises(StoreChangedError, match="does not exist"):
        offsets(partition, settings)
    build(path, 5)
    with pytest.raises(StoreChangedError, match=r"holds the queue offsets \[0, 5\)"):
        offsets(partition, settings)
    shutil.rmtree(path)
    build(path, 5, topic="payments")
    with pytest.raises(StoreChangedError, match='no topic "orders"'):
        offsets(partition, settings)


def test_what_expired_before_the_read_is_data_loss_or_is_skipped(tmp_path, caplog) -> None:
    partition = plan(build(tmp_path / "store", 40), (0, 40))
    oldest_segment(tmp_path / "store").unlink()
    with pytest.raises(DataLossError) as caught:
        offsets(partition)
    lost = caught.value
    assert (lost.begin, lost.topic, lost.queue_id) == (0, "orders", 0)
    assert offsets(partition, LENIENT) == list(range(lost.end, 40))
    assert f"{lost.end} messages of queue orders/0, queue offsets [0, {lost.end})" in caplog.text


def test_a_piece_of_which_nothing_is_left_is_skipped_whole(tmp_path) -> None:
    partition = plan(build(tmp_path / "store", 40), (0, 3))
    oldest_segment(tmp_path / "store").unlink()
    assert offsets(partition, LENIENT) == []
    with pytest.raises(DataLossError) as caught:
        offsets(partition)
    assert (caught.value.begin, caught.value.end) == (0, 3)


class Interrupted:
    """A store whose read fails after some batches, like after the deletion of a file."""

    def __init__(self, store, after, then):
        self._store, self._after, self._then = store, after, then

        self.small_ranges = store.small_ranges

    def close(self):
        self._store.close()

    def store_id(self):
        return self._store.store_id()

    def proof(self, queue, offset):
        return self._store.proof(queue, offset)

    def read_with_progress(self, queue, begin, end, columns, limits, wanted):
        yield from self._store.read_with_progress(queue, begin, min(end, begin + self._after), columns, limits, wanted)
        self._then()
        raise StoreChangedError("a file vanished")


def test_a_segment_that_goes_away_in_the_middle_is_looked_into_and_no_row_comes_twice(tmp_path, monkeypatch) -> None:
    partition = plan(build(tmp_path / "store", 40), (0, 40))
    real, opened = local_backend.StoreReader, []

    def open_once_interrupted(path, **given):
        store = real(path, **given)
        opened.append(store)
        if len(opened) > 1:
            return store
        return Interrupted(store, 2, oldest_segment(tmp_path / "store").unlink)

    monkeypatch.setattr(local_backend, "StoreReader", open_once_interrupted)
    rows = offsets(partition, LENIENT)
    assert rows[:2] == [0, 1]
    assert rows[2:] == list(range(rows[2], 40))
    assert rows[2] > 2


def test_after_a_failure_that_was_none_the_read_goes_on_where_it_was(tmp_path, monkeypatch) -> None:
    partition = plan(build(tmp_path / "store", 40), (0, 40))
    real, opened = local_backend.StoreReader, []

    def open_interrupted_twice(path, **given):
        opened.append(1)
        store = real(path, **given)
        return Interrupted(store, 3, lambda: None) if len(opened) < 3 else store

    monkeypatch.setattr(local_backend, "StoreReader", open_interrupted_twice)
    assert offsets(partition) == list(range(40))


def test_a_file_that_keeps_failing_without_progress_is_an_error_and_no_hang(tmp_path, monkeypatch) -> None:
    partition = plan(build(tmp_path / "store", 40), (0, 40))
    real, opened = local_backend.StoreReader, []

    def open_interrupted(path, **given):
        opened.append(1)
        return Interrupted(real(path, **given), 0, lambda: None)

    monkeypatch.setattr(local_backend, "StoreReader", open_interrupted)
    with pytest.raises(StoreChangedError, match="a file vanished"):
        offsets(partition, LENIENT)
    assert len(opened) == 2


def test_damage_is_an_error_with_its_place_whatever_fail_on_data_loss_says(tmp_path) -> None:
    path = build(tmp_path / "store", 10)
    partition = plan(path, (0, 10))
    segment = oldest_segment(path)
    with open(segment, "r+b") as file:
        file.seek(partition.pieces[0].first.physical_offset + 2 * 400)
        file.write(b"\xff" * 500)
    for settings in (SETTINGS, LENIENT):
        with pytest.raises(DamageError) as caught:
            offsets(partition, settings)
        assert str(segment) in str(caught.value)
