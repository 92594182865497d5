"""Look-ups by key and by time, asked of our reader as RocketMQ's store classes were asked."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import rmq_spark
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.units import QueueKey

_MOST_HITS = 64  # that a store gives for one key, the newest ones: maxMsgsNumBatch


def key_differences(store: Path, answers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return for which keys our reader finds other messages than the store classes did, a line each."""
    lines = []
    with rmq_spark.open_reader(str(store)) as reader:
        reader.refresh()
        for answer in answers:
            ours, theirs = _places(reader, answer["topic"], answer["key"]), set(answer["places"])
            if ours != theirs if len(ours) < _MOST_HITS else not theirs or not theirs <= ours:
                lines.append(f"{answer['topic']}#{answer['key']}: {sorted(ours)}, theirs {sorted(theirs)}")
    return lines


def time_differences(store: Path, answers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return for which times our reader finds another queue offset than the store classes did, a line each.

    5.x is asked for LOWER and UPPER, 4.9 for the nearest in the file of the queue that it chooses by its mtime.
    """
    lines = []
    with rmq_spark.open_reader(str(store)) as reader:
        reader.refresh()
        for of_queue in answers:
            queue = QueueKey(of_queue["topic"], of_queue["queueId"])
            for answer in of_queue["answers"]:
                rules = {"lower": "lower", "upper": "upper"} if "lower" in answer else {"nearest": "offset"}
                for rule, name in rules.items():
                    ours, theirs = reader.offset_at_time(queue, answer["timestamp"], rule), answer[name]
                    if ours != theirs:
                        lines.append(f"{queue} at {answer['timestamp']} ms, {rule}: {ours}, theirs {theirs}")
    return lines


def _places(reader: StoreReader, topic: str, key: str) -> set[int]:
    places = set()
    for queue, offset in reader.find_key(topic, key):
        for batch in reader.read(queue, offset, offset + 1, ("commitLogOffset",)):
            places.update(batch.column(0).to_pylist())
    return places
