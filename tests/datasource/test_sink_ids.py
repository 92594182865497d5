"""task_writer: the keys of tasks and commits, and commits whose tasks differ."""

import pytest

from rmq_spark.datasource.spark.task_writer import key_of_commit, key_of_task
from rmq_spark.store import CommitKey
from rmq_spark.store.errors import BatchConflictError

QUERY = "5522af66-1bf5-4b7b-9e5c-781c630b3a2b"
KEY = CommitKey(QUERY, 7)


def test_key_of_task_is_made_of_the_local_properties() -> None:
    assert key_of_task(QUERY, "7") == KEY
    assert key_of_task(QUERY, "0") == CommitKey(QUERY, 0)


@pytest.mark.parametrize(
    ("query_id", "batch_id"), [(None, "7"), ("", "7"), (QUERY, None), (QUERY, ""), (QUERY, "-1"), (QUERY, "seven")]
)
def test_key_of_task_refuses_missing_ids(query_id, batch_id) -> None:
    with pytest.raises(BatchConflictError) as caught:
        key_of_task(query_id, batch_id)
    message = str(caught.value)
    assert f"sql.streaming.queryId={query_id!r} and streaming.sql.batchId={batch_id!r}" in message
    assert "txnAppId and txnVersion" in message


def test_key_of_commit_is_the_key_of_all_tasks() -> None:
    assert key_of_commit([KEY, KEY], 2, 7) == KEY
    write = CommitKey("a-uuid")
    assert key_of_commit([write], 1, None) == write


@pytest.mark.parametrize(("keys", "task_count"), [([KEY], 2), ([], 1), ([], 0)])
def test_key_of_commit_refuses_a_missing_task(keys, task_count) -> None:
    with pytest.raises(
        BatchConflictError,
        match=f"batch 7 cannot be committed: found staged rows of {len(keys)} tasks; expected {task_count}",
    ):
        key_of_commit(keys, task_count, 7)
    with pytest.raises(BatchConflictError, match="the write cannot be committed"):
        key_of_commit(keys, task_count, None)


@pytest.mark.parametrize("other", [CommitKey(QUERY, 8), CommitKey("another-query", 7)])
def test_key_of_commit_refuses_different_keys(other) -> None:
    with pytest.raises(BatchConflictError) as caught:
        key_of_commit([KEY, other, KEY], 3, 7)
    assert str(KEY) in str(caught.value)
    assert str(other) in str(caught.value)


def test_key_of_commit_refuses_another_batch_than_the_committed_one() -> None:
    with pytest.raises(BatchConflictError, match="batch 8 cannot be committed"):
        key_of_commit([KEY, KEY], 2, 8)
