"""Notes of commits that deliver delayed messages: copied to the ledger; topics do not block delivery."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.crash_disk import ProcessDeathError
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.transaction.encoded_slices import slice_records
from rmq_spark.store.transaction.intents import Intents
from rmq_spark.store.transaction.roll_forward import BatchRollForward, _is_same

if TYPE_CHECKING:
    from tests.store.transaction.conftest import Kit

KEY = CommitKey("d", 0)
NAMES = [f"row{number}" for number in range(12)]
NOTE = {"level.1": 5, "timer.read": 1_700_000_000_000}
Spread = Callable[..., dict[int, list[str]]]
Encode = Callable[..., EncodedRecords]


def die_before_appending(kit: "Kit", **options: object) -> None:
    files = kit.stage(KEY, NAMES)

    def die(*_: object) -> None:
        raise ProcessDeathError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchRollForward, "append", die)
        with pytest.raises(ProcessDeathError):
            kit.commit(KEY, files, **options)


def test_note_of_a_commit_is_in_the_ledger(kit: "Kit") -> None:
    kit.commit(KEY, kit.stage(KEY, NAMES), note=NOTE)
    row = kit.ledger("d")
    assert row is not None
    assert (row.batch_id, row.note) == (0, NOTE)
    kit.commit(CommitKey("d", 1), kit.stage(CommitKey("d", 1), NAMES))
    assert kit.ledger("d").note == {}, "of another batch, which has none"


def test_note_of_a_commit_without_rows_is_in_the_ledger(kit: "Kit") -> None:
    kit.commit(KEY, [], note=NOTE)
    assert kit.ledger("d").note == NOTE


def test_note_is_written_by_the_process_that_finishes_the_commit(kit: "Kit", spread: Spread) -> None:
    die_before_appending(kit, note=NOTE)
    assert kit.ledger("d") is None
    kit.settle()
    assert kit.ledger("d").note == NOTE
    assert kit.rows() == spread(NAMES)


def lose_queues(kit: "Kit") -> None:
    """Leave the topic with one queue to write to."""
    path = Path(kit.root, "config/topics.json")
    topics = json.loads(path.read_text())
    topics["topicConfigTable"]["T"]["writeQueueNums"] = 1
    path.write_text(json.dumps(topics))


@pytest.mark.parametrize("checks_topics", [True, False])
def test_checks_topics_false_accepts_a_topic_with_fewer_queues(kit: "Kit", spread: Spread, checks_topics: bool) -> None:
    kit.commit(CommitKey("w"), kit.stage(CommitKey("w"), ["first", "second"], tasks=1))
    lose_queues(kit)
    files = kit.stage(KEY, NAMES)
    if checks_topics:
        with pytest.raises(StoreChangedError, match='topic "T" has 1 write queues'):
            kit.commit(KEY, files)
        return
    kit.commit(KEY, files, checks_topics=False)
    assert kit.rows() == {
        queue: before + after
        for (queue, after), before in zip(spread(NAMES).items(), [["first"], ["second"]], strict=True)
    }


def test_checks_topics_false_applies_to_the_process_that_finishes(kit: "Kit", spread: Spread) -> None:
    kit.commit(CommitKey("w"), kit.stage(CommitKey("w"), ["first", "second"], tasks=1))
    die_before_appending(kit, checks_topics=False, note=NOTE)
    lose_queues(kit)
    kit.settle()
    assert len(kit.all_rows()) == 14
    assert kit.own_files() == []


@pytest.mark.parametrize("note", [{}, NOTE])
def test_note_allows_rows_that_a_broker_delivered_in_another_order(
    kit: "Kit", encode: Encode, note: dict[str, int]
) -> None:
    kit.settle()
    names = ["a", "b", "c"]
    files = kit.stage(KEY, names, tasks=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchRollForward, "append", lambda *_: (_ for _ in ()).throw(ProcessDeathError()))
        with pytest.raises(ProcessDeathError):
            kit.commit(KEY, files, note=note)
    held = Intents(kit.root, Disk()).lock("d")
    assert held.try_take(), "as if a broker had the store: nobody of ours finishes"
    with kit.writer().section() as section:
        for number in (1, 0):  # the records that were staged, the second one first
            section.append(slice_records(encode(names, ids="0-0"), number, number + 1))
    held.release()
    kit.settle()
    if note:
        assert sorted(kit.all_rows()) == ["a", "b", "b", "c"], "nothing lost, and what was not met in order is doubled"
        assert kit.own_files() == []
    else:
        assert sorted(kit.all_rows()) == ["a", "b"], "for others a row without the one before it is damage"
        assert kit.own_files() != []


def test_count_applied_rows_compares_reconsume_times() -> None:
    one = SampleMessage("T", 0, b"body").as_record(0, 0, 1)
    assert _is_same(one, replace(one, queue_offset=5, physical_offset=17, store_timestamp=2))
    assert not _is_same(one, replace(one, reconsume_times=1))
