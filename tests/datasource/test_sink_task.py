"""Staging in tasks and committing in the driver, without Spark."""

import logging
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from support.parsed_options import parse_sink_options

from rmq_spark.datasource.options.sink_schema import PIECE_ROWS
from rmq_spark.datasource.spark.task_writer import SinkTask, StagedRows, receipts_of, stage_rows, staged_keys
from rmq_spark.datasource.spark.writer import RmqBatchWriter, write_key
from rmq_spark.store import CommitKey, open_reader
from rmq_spark.store.errors import NotFoundError, OptionError, StoreChangedError, StorePathError
from rmq_spark.store.model import QueueKey

KEY = CommitKey("a-query", 0)
TASK = SinkTask(3, 17, 0xABC)


def options(path, **given):
    return parse_sink_options({"path": str(path), "topic": "orders"} | given)


def batch(*bodies, **columns):
    return pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.string())} | columns)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    options(tmp_path / "store").sink().prepare()
    return tmp_path / "store"


def files_of(store: Path) -> set[str]:
    return {str(file.relative_to(store)) for file in store.rglob("*") if file.is_file()}


def bodies(store: Path) -> list[bytes]:
    """Return the bodies in queue 0."""
    with open_reader(str(store)) as reader:
        queue = QueueKey("orders", 0)
        bounds = reader.bounds(queue)
        read = reader.read(queue, bounds.min_offset, bounds.max_offset, ["body"])
        return [body for part in read for body in part.column("body").to_pylist()]


def test_a_task_touches_nothing_but_the_staging_folder(store) -> None:
    before = files_of(store)
    staged = stage_rows([batch("a", "b"), batch(), batch("c")], options(store), None, KEY, TASK)
    assert staged.rows == 3
    new = files_of(store) - before
    assert {name for name in new if not name.startswith("rmq/")} == set()
    assert [name for name in new if name.endswith(".arrow")] == [f"rmq/staging/{staged.name}"]
    assert staged.name.endswith("/00003-17-00000abc.arrow")


def test_what_tasks_staged_comes_out_in_the_order_of_the_tasks_once(store) -> None:
    given = options(store, queues="1")
    staged = [
        stage_rows([batch(f"{task}-0", f"{task}-1")], given, None, KEY, SinkTask(task, 9 - task, 0))
        for task in range(3)
    ]
    for _ in range(2):  # the same batch again
        given.sink().commit(KEY, staged)
    assert bodies(store) == [f"{task}-{row}".encode() for task in range(3) for row in range(2)]
    assert not [name for name in files_of(store) if name.endswith(".arrow")]


def test_an_older_transaction_is_dropped_with_a_warning_and_a_repeated_one_in_silence(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for version, body, said in (("7", "x", []), ("7", "x", []), ("3", "y", ["3"])):
        caplog.clear()
        given = options(store, queues="1", txnAppId="copy", txnVersion=version)
        key = write_key(given)
        given.sink().commit(key, [stage_rows([batch(body)], given, None, key, TASK)])
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(said)
        for number in said:
            assert f"batch {number} of query txn:copy with 1 rows is skipped: a later version" in caplog.text
            assert "give every one its own txnAppId" in caplog.text
    assert bodies(store) == [b"x"]


def test_many_rows_at_once_are_staged_in_pieces(store) -> None:
    staged = stage_rows([batch(*["x"] * (2 * PIECE_ROWS))], options(store), None, KEY, TASK)
    file = pa.ipc.open_file(store / "rmq" / "staging" / staged.name)
    rows = [file.get_batch(number).num_rows for number in range(file.num_record_batches)]
    assert (sum(rows), max(rows)) == (2 * PIECE_ROWS, PIECE_ROWS)


def test_a_task_without_rows_has_no_file_and_counts_all_the_same(store) -> None:
    before = files_of(store)
    staged = stage_rows([batch()], options(store), None, KEY, TASK)
    assert (staged.rows, files_of(store)) == (0, before)
    options(store).sink().commit(KEY, [staged])
    with open_reader(str(store)) as reader:
        assert reader.topics() == []


def test_a_bad_row_is_named_by_its_partition_and_place_and_the_file_goes(store) -> None:
    many = batch(*["x"] * (PIECE_ROWS + 5))
    with pytest.raises(
        OptionError, match=rf"^partition 3, row {2 * PIECE_ROWS + 11}, topic 'orders': its body is null"
    ):
        stage_rows([many, many, batch("y", None)], options(store), None, KEY, TASK)
    assert not [name for name in files_of(store) if name.endswith(".arrow")]


def test_an_error_that_comes_from_spark_goes_through_and_the_file_goes(store) -> None:
    def rows():
        yield batch("x")
        raise RuntimeError("the row before this one cannot be computed")

    with pytest.raises(RuntimeError, match="cannot be computed"):
        stage_rows(rows(), options(store), None, KEY, TASK)
    assert not [name for name in files_of(store) if name.endswith(".arrow")]


def test_a_topic_that_must_not_be_made_is_missed_by_the_task(store) -> None:
    with pytest.raises(NotFoundError, match='topic "orders" is not in the store'):
        stage_rows([batch("x")], options(store, createTopic="false"), None, KEY, TASK)


def test_a_machine_that_does_not_see_the_store_says_so_and_makes_none(tmp_path) -> None:
    with pytest.raises(StoreChangedError) as caught:
        stage_rows([batch("x")], options(tmp_path / "elsewhere"), None, KEY, TASK)
    assert "does not see the store to which the driver writes" in str(caught.value)
    assert "storage that the driver and all executors share" in str(caught.value)
    assert not (tmp_path / "elsewhere").exists()


def test_a_machine_that_sees_another_store_says_so(tmp_path) -> None:
    ids = []
    for name in ("one", "two"):
        given = options(tmp_path / name)
        assert given.sink().prepare() is None, "it has no id before its first message"
        given.sink().commit(KEY, [stage_rows([batch("x")], given, None, KEY, TASK)])
        ids.append(given.sink().prepare())
    assert None not in ids
    with pytest.raises(StoreChangedError, match=f"is {ids[1]}, the driver's has {ids[0]}"):
        stage_rows([batch("x")], options(tmp_path / "two"), ids[0], KEY, TASK)
    assert stage_rows([batch("x")], options(tmp_path / "two"), ids[1], KEY, TASK).rows == 1


def test_attempts_of_one_task_never_meet(store) -> None:
    given = options(store, queues="1")
    one = stage_rows([batch("x")], given, None, KEY, SinkTask(3, 17, 1))
    two = stage_rows([batch("x")], given, None, KEY, SinkTask(3, 17, 2))
    assert one.name != two.name
    assert one.digest == two.digest
    given.sink().commit(KEY, [two])
    assert bodies(store) == [b"x"]


def test_what_is_discarded_is_gone_and_the_rest_stays(store) -> None:
    one = stage_rows([batch("x")], options(store), None, KEY, SinkTask(0, 0, 1))
    two = stage_rows([batch("y")], options(store), None, KEY, SinkTask(1, 1, 1))
    options(store).sink().abort(KEY, [one])
    assert [name for name in files_of(store) if name.endswith(".arrow")] == [f"rmq/staging/{two.name}"]


def test_a_store_is_made_where_nothing_is_and_other_things_are_refused(tmp_path) -> None:
    options(tmp_path / "a" / "b" / "store").sink().prepare()
    with open_reader(str(tmp_path / "a" / "b" / "store")) as reader:
        assert reader.topics() == []
    (tmp_path / "notes.txt").touch()
    with pytest.raises(StorePathError, match="is not a RocketMQ store"):
        options(tmp_path).sink().prepare()
    with pytest.raises(StorePathError):
        options(tmp_path / "notes.txt").sink().prepare()
    with pytest.raises(StorePathError):
        options(tmp_path / "notes.txt" / "store").sink().prepare()


def test_every_write_has_a_key_of_its_own_unless_it_is_a_transaction(tmp_path) -> None:
    assert write_key(options(tmp_path)) != write_key(options(tmp_path))
    assert write_key(options(tmp_path)).batch_id is None
    assert write_key(options(tmp_path, txnAppId="a", txnVersion="7")) == CommitKey("txn:a", 7)


def test_a_writer_and_its_messages_survive_the_way_to_the_tasks_and_back(store) -> None:
    writer = RmqBatchWriter(options(store), None)
    travelled = pickle.loads(cloudpickle.dumps(writer))
    staged = stage_rows([batch("x")], options(store), None, write_key(options(store)), TASK)
    message = StagedRows(CommitKey("a", 1), staged)
    assert pickle.loads(cloudpickle.dumps(message)) == message
    assert len(cloudpickle.dumps(message)) < 2000, "it goes through the driver"
    assert vars(travelled) == vars(writer)


def test_a_task_that_failed_has_no_message() -> None:
    assert staged_keys([None]) == []
    assert receipts_of([None]) == []
