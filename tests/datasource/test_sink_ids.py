"""Which batch a commit is of: what tasks say, and what happens when they do not say the same."""

import pytest

from rmq_spark.datasource.batch_ids import key_of_commit, key_of_task
from rmq_spark.store import CommitKey
from rmq_spark.store.errors import BatchConflictError

QUERY = "5522af66-1bf5-4b7b-9e5c-781c630b3a2b"
KEY = CommitKey(QUERY, 7)


def test_the_local_properties_of_a_task_name_its_batch() -> None:
    assert key_of_task(QUERY, "7") == KEY
    assert key_of_task(QUERY, "0") == CommitKey(QUERY, 0)


@pytest.mark.parametrize(
    ("query_id", "batch_id"), [(None, "7"), ("", "7"), (QUERY, None), (QUERY, ""), (QUERY, "-1"), (QUERY, "seven")]
)
def test_a_task_without_ids_is_refused_with_what_it_had(query_id, batch_id) -> None:
    with pytest.raises(BatchConflictError) as caught:
        key_of_task(query_id, batch_id)
    message = str(caught.value)
    assert f"sql.streaming.queryId={query_id!r}, streaming.sql.batchId={batch_id!r}" in message
    assert "txnAppId and txnVersion" in message


def test_tasks_that_say_the_same_make_a_commit() -> None:
    assert key_of_commit([KEY, KEY], 2, 7) == KEY
    write = CommitKey("a-uuid")
    assert key_of_commit([write], 1, None) == write


@pytest.mark.parametrize(("keys", "task_count"), [([KEY], 2), ([], 1), ([], 0)])
def test_a_commit_that_lacks_a_task_is_refused(keys, task_count) -> None:
    with pytest.raises(BatchConflictError, match=f"batch 7 cannot be committed: {len(keys)} of {task_count} tasks"):
        key_of_commit(keys, task_count, 7)
    with pytest.raises(BatchConflictError, match="the write cannot be committed"):
        key_of_commit(keys, task_count, None)


@pytest.mark.parametrize("other", [CommitKey(QUERY, 8), CommitKey("another-query", 7)])
def test_tasks_that_differ_are_refused_with_what_they_said(other) -> None:
    with pytest.raises(BatchConflictError) as caught:
        key_of_commit([KEY, other, KEY], 3, 7)
    assert str(KEY) in str(caught.value)
    assert str(other) in str(caught.value)


def test_tasks_of_another_batch_than_the_one_that_spark_commits_are_refused() -> None:
    with pytest.raises(BatchConflictError, match="batch 8 cannot be committed"):
        key_of_commit([KEY, KEY], 2, 8)
