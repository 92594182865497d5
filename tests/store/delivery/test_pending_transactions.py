"""Pending transactions: half messages without a decision. Committed ones are rows of their topic."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from rmq_spark.store import open_reader
from rmq_spark.store.delivery.dead_letters import HALF_QUEUE, OP_QUEUE, PENDING, pending_transactions
from rmq_spark.store.errors import DamageError, StorePathError
from rmq_spark.store.format.config_json import ConsumerOffsets, encode_consumer_offsets
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

GROUP_TOPICS = (f"{HALF_QUEUE.topic}@CID_RMQ_SYS_TRANS", f"{OP_QUEUE.topic}@CID_RMQ_SYS_TRANS")


def half(name: str, **more: str) -> SampleMessage:
    """A half message of the transaction `name`, for payments/1."""
    named = {
        "UNIQ_KEY": name,
        "PGROUP": "checkout",
        "TRAN_MSG": "true",
        "REAL_TOPIC": "payments",
        "REAL_QID": "1",
    }
    return SampleMessage(HALF_QUEUE.topic, 0, f"pay {name}".encode(), "card", "P-1", {**named, **more})


def op(text: str, tags: str = "d") -> SampleMessage:
    return SampleMessage(OP_QUEUE.topic, 0, text.encode(), tags, properties={"WAIT": "true"})


def pending(folder: Path, messages: Iterable[SampleMessage], progress: tuple[int, int] | None = None) -> list[str]:
    """Return the transactions that are pending in a store of these messages, and a broker's progress."""
    build_store(folder / "store", list(messages))
    if progress is not None:
        offsets = {name: {0: offset} for name, offset in zip(GROUP_TOPICS, progress, strict=True)}
        file = folder / "store" / "config" / "consumerOffset.json"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(encode_consumer_offsets(ConsumerOffsets(offsets)))
    found: list[str] = pending_transactions(folder / "store")["transactionId"].to_pylist()
    return found


def test_pending_transactions_describe_the_message_to_commit(tmp_path: Path) -> None:
    build_store(tmp_path / "store", [half("a", TRANSACTION_CHECK_TIMES="2"), half("b"), op("1")])
    table = pending_transactions(tmp_path / "store")
    assert table.schema == PENDING
    [row] = table.to_pylist()
    assert (row["topic"], row["queueId"], row["transactionId"], row["producerGroup"]) == (
        "payments",
        1,
        "a",
        "checkout",
    )
    assert (row["tags"], row["keys"], row["body"]) == ("card", "P-1", b"pay a")
    assert (row["checks"], row["halfQueueOffset"], row["commitLogOffset"]) == (2, 0, 0)
    assert row["storeTimestamp"] >= row["bornTimestamp"]


@pytest.mark.parametrize("ops", [["0", "2"], ["0,2,"], ["2,", "0,"], ["0,,2,"]])
def test_pending_transactions_with_ops_of_one_or_many_offsets(tmp_path: Path, ops: list[str]) -> None:
    halves = [half(name) for name in "abc"]
    assert pending(tmp_path, [*halves, *map(op, ops)]) == ["b"]


def test_pending_transactions_ignore_ops_with_another_tag(tmp_path: Path) -> None:
    assert pending(tmp_path, [half("a"), op("not a number", tags="x")]) == ["a"]


def test_pending_transactions_report_an_op_without_offset_as_damage(tmp_path: Path) -> None:
    with pytest.raises(DamageError, match=r"RMQ_SYS_TRANS_OP_HALF_TOPIC/0.*body of an op.*found b'zero'"):
        pending(tmp_path, [half("a"), op("zero")])


def test_pending_transactions_show_the_newest_copy(tmp_path: Path) -> None:
    messages = [half("a"), half("b"), half("a", TRANSACTION_CHECK_TIMES="1")]
    assert pending(tmp_path, messages) == ["b", "a"]


@pytest.mark.parametrize("decided", ["0", "2"])
def test_pending_transactions_decided_by_an_op_of_any_copy(tmp_path: Path, decided: str) -> None:
    messages = [half("a"), half("b"), half("a", TRANSACTION_CHECK_TIMES="1"), op(decided)]
    assert pending(tmp_path, messages) == ["b"]


def test_pending_transactions_before_a_brokers_progress_are_decided(tmp_path: Path) -> None:
    assert pending(tmp_path, [half("a"), half("b"), half("c"), op("1")], progress=(1, 0)) == ["c"]


def test_pending_transactions_skip_ops_before_a_brokers_progress(tmp_path: Path) -> None:
    assert pending(tmp_path, [half("a"), op("x"), half("b"), op("1")], progress=(1, 1)) == []


def test_pending_transactions_of_a_store_without_any(golden: Path, tmp_path: Path) -> None:
    assert pending_transactions(golden / "broker497").num_rows == 0
    assert pending(tmp_path, [SampleMessage("orders")]) == []
    with pytest.raises(StorePathError):
        pending_transactions(tmp_path / "nothing")


def test_pending_transactions_without_a_queue(tmp_path: Path) -> None:
    build_store(tmp_path / "store", [half("a", REAL_QID="one")])
    assert pending_transactions(tmp_path / "store")["queueId"].to_pylist() == [None]


def test_pending_transactions_of_a_broker_are_not_rows_of_their_topic(golden: Path, tmp_path: Path) -> None:
    assert pending_transactions(golden / "demo").num_rows == 0, "the broker decided all"
    with open_reader(golden / "demo") as store:
        bodies = {
            queue: [body for batch in store.read(queue, 0, 3, ["body"]) for body in batch["body"].to_pylist()]
            for queue in store.queues(HALF_QUEUE.topic)
        }[HALF_QUEUE]
        ends = {queue: store.bounds(queue).max_offset for queue in store.queues("payments")}
        rows = [
            row
            for queue, end in ends.items()
            for batch in store.read(queue, 0, end, ["queueId", "body", "sysFlag", "properties"])
            for row in batch.to_pylist()
        ]
    sent = [row for row in rows if row["body"] in bodies]
    assert [(row["body"][14:20], row["sysFlag"] & 0xC) for row in sent] == [(b"P-5400", 8), (b"P-5402", 8)]
    assert all(dict(row["properties"])["TRAN_MSG"] == "true" for row in sent)
