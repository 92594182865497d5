"""Checkpoints in tests/golden: their queries continue where they stopped, and write offsets of the same form."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rmq_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

WITHIN_S = 120
RESET = 1795423144425  # the number of the reset in the group's checkpoint

Batch = tuple[dict[str, range], str]  # the queue offsets of its rows by queue, and the text of its end offset

# What each query does after its restart, by batch. A text of "" is that of the checkpoint: the batch was planned there.
CONTINUED: dict[str, dict[int, Batch]] = {
    "plain": {
        2: (
            {"clicks/1": range(1, 2), "invoices/0": range(1, 2)},
            '{"clicks": {"0": 2, "1": 2}, "invoices": {"0": 2}, "@": {"v": 1, "turn": "invoices/0"}}',
        ),
        3: (
            {"clicks/0": range(2, 3), "clicks/1": range(2, 3)},
            '{"clicks": {"0": 3, "1": 3}, "invoices": {"0": 2}, "@": {"v": 1, "turn": "clicks/1"}}',
        ),
        4: (
            {"clicks/0": range(3, 4), "invoices/0": range(2, 3)},
            '{"clicks": {"0": 4, "1": 3}, "invoices": {"0": 3}, "@": {"v": 1, "turn": "clicks/0"}}',
        ),
        5: (
            {"clicks/1": range(3, 4), "invoices/0": range(3, 4)},
            '{"clicks": {"0": 4, "1": 4}, "invoices": {"0": 4}, "@": {"v": 1, "turn": "invoices/0"}}',
        ),
        6: (
            {"clicks/0": range(4, 5), "clicks/1": range(4, 5)},
            '{"clicks": {"0": 5, "1": 5}, "invoices": {"0": 4}, "@": {"v": 1, "turn": "clicks/1"}}',
        ),
        7: (
            {"clicks/0": range(5, 6), "invoices/0": range(4, 5)},
            '{"clicks": {"0": 6, "1": 5}, "invoices": {"0": 5}, "@": {"v": 1, "turn": "clicks/0"}}',
        ),
        8: (
            {"clicks/1": range(5, 6), "invoices/0": range(5, 6)},
            '{"clicks": {"0": 6, "1": 6}, "invoices": {"0": 6}, "@": {"v": 1, "turn": "invoices/0"}}',
        ),
        9: (
            {"clicks/0": range(6, 7), "clicks/1": range(6, 7)},
            '{"clicks": {"0": 7, "1": 7}, "invoices": {"0": 6}, "@": {"v": 1, "turn": "clicks/1"}}',
        ),
        10: (
            {"clicks/0": range(7, 8), "invoices/0": range(6, 7)},
            '{"clicks": {"0": 8, "1": 7}, "invoices": {"0": 7}, "@": {"v": 1}}',
        ),
        11: (
            {"clicks/0": range(8, 9), "invoices/0": range(7, 8)},
            '{"clicks": {"0": 9, "1": 7}, "invoices": {"0": 8}, "@": {"v": 1}}',
        ),
    },
    "group": {
        1: ({"orders/0": range(1, 7), "orders/1": range(7, 13)}, ""),
        2: (
            {"orders/0": range(7, 14), "orders/1": range(13, 18)},
            f'{{"orders": {{"0": 14, "1": 18}}, "@": {{"v": 1, "group": "billing", "reset": {RESET}}}}}',
        ),
        3: (
            {"orders/0": range(14, 18), "orders/1": range(18, 22)},
            f'{{"orders": {{"0": 18, "1": 22}}, "@": {{"v": 1, "group": "billing", "reset": {RESET}}}}}',
        ),
    },
    "losses": {
        0: ({"TopicR/0": range(17, 27)}, ""),
        1: (
            {"TopicR/0": range(27, 37)},
            '{"TopicR": {"0": 37}, "@": {"v": 1, "ending": true, "lost": {"TopicR": {"0": 12}}}}',
        ),
        2: (
            {"TopicR/0": range(37, 47)},
            '{"TopicR": {"0": 47}, "@": {"v": 1, "ending": true, "lost": {"TopicR": {"0": 12}}}}',
        ),
        3: (
            {"TopicR/0": range(47, 50)},
            '{"TopicR": {"0": 50}, "@": {"v": 1, "ending": true, "ended": true, "lost": {"TopicR": {"0": 12}}}}',
        ),
    },
    "finished": {},
}


class Restart:
    """A copy of a golden checkpoint and of its store, and the batches of the query that continues there."""

    def __init__(self, spark: "SparkSession", golden: Path, folder: Path, name: str) -> None:
        query = json.loads((golden / "checkpoints" / "queries.json").read_text())[name]
        self._spark, self._options = spark, query["options"]
        self.store = Path(shutil.copytree(golden / query["store"], folder / "store"))
        written = golden / "checkpoints" / f"{name}-files"  # what the query wrote into the store
        if written.exists():
            shutil.copytree(written, self.store, dirs_exist_ok=True)
        self._checkpoint = Path(shutil.copytree(golden / "checkpoints" / name, folder / "checkpoint"))
        self.batches: dict[int, list[tuple[str, int]]] = {}

    def run(self) -> None:
        """Continue the query until it has read all messages that exist."""
        stream = self._spark.readStream.format("rmq").options(**self._options).load(str(self.store))
        writer = stream.writeStream.foreachBatch(self._keep).option("checkpointLocation", str(self._checkpoint))
        assert writer.trigger(availableNow=True).start().awaitTermination(WITHIN_S), "does not come to an end"

    def _keep(self, frame: "DataFrame", batch_id: int) -> None:
        assert batch_id not in self.batches, "a batch arrives twice"
        self.batches[batch_id] = sorted(
            (f"{row['topic']}/{row['queueId']}", row["queueOffset"]) for row in frame.collect()
        )

    def offsets(self) -> dict[int, str]:
        """Return the text of the offset of each planned batch."""
        files = (self._checkpoint / "offsets").glob("[0-9]*")
        return {int(file.name): file.read_text().splitlines()[-1] for file in files}


@pytest.fixture
def restart(spark: "SparkSession", golden: Path, tmp_path: Path) -> Callable[[str], Restart]:
    """A function that copies the golden checkpoint with the given name."""
    return lambda name: Restart(spark, golden, tmp_path, name)


@pytest.mark.parametrize("name", CONTINUED)
def test_a_golden_checkpoint_continues_with_exactly_the_messages_after_it_and_then_rests(
    restart: Any, name: str
) -> None:
    query = restart(name)
    planned = query.offsets()
    batches = {
        batch_id: [(queue, offset) for queue, offsets in rows.items() for offset in offsets]
        for batch_id, (rows, _) in CONTINUED[name].items()
    }
    texts = {batch_id: text for batch_id, (_, text) in CONTINUED[name].items() if text}
    assert not planned.keys() & texts.keys()
    for _ in range(2):  # the second time nothing is new, so the text of the last offset must come back
        query.run()
        assert query.batches == batches
        assert query.offsets() == planned | texts


def test_the_golden_checkpoint_of_a_group_leaves_the_group_at_the_end(restart: Any) -> None:
    query = restart("group")
    assert rmq_spark.group_offsets(query.store, "billing")["orders"] == {0: 1, 1: 7}
    query.run()
    assert rmq_spark.group_offsets(query.store, "billing")["orders"] == {0: 18, 1: 22}
