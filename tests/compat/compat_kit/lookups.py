"""Look-ups by key, id and time: our reader against RocketMQ's store classes or a broker."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import rmq_spark
from compat_kit.rocketmq import Client, Java
from compat_kit.rows import Row, Rows, differences, our_bounds, their_rows
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueKey

_MOST_HITS = 64  # that a store gives for one key, the newest ones: maxMsgsNumBatch


def key_differences(store: Path, answers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each key for which our reader and the store classes find different messages.

    The store classes use only their index, which may lack keys after a crash or have expired ones. So our reader must
    find all messages that they find, and if it finds more, these must be all messages of a scan of the topic.
    """
    lines = []
    with rmq_spark.open_reader(str(store)) as reader:
        reader.refresh()
        for answer in answers:
            ours, theirs = _places(reader, answer["topic"], answer["key"]), set(answer["places"])
            if _are_other(ours, theirs) and (theirs - ours or ours != _seen(reader, answer["topic"], answer["key"])):
                lines.append(f"{answer['topic']}#{answer['key']}: {sorted(ours)}, theirs {sorted(theirs)}")
    return lines


def _seen(reader: StoreReader, topic: str, key: str) -> set[int]:
    """Return the physical offsets of the topic's messages with the key or the id, by a scan of the topic."""
    places = set()
    for queue in reader.queues(topic):
        bounds = reader.bounds(queue)
        for batch in reader.read(queue, bounds.min_offset, bounds.max_offset, ("commitLogOffset", "keys", "msgId")):
            places |= {
                row["commitLogOffset"]
                for row in batch.to_pylist()
                if key == row["msgId"] or key in (row["keys"] or "").split(" ")
            }
    return places


def range_differences(store: Path, answers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each key and time range for which our reader and the store classes find different messages.

    RocketMQ compares whole seconds since the begin of an index file, and uses another begin for the first key of a
    file (IndexFile#selectPhyOffset). So our reader must find each message that RocketMQ finds and that was stored in
    the range. RocketMQ must find each message that our reader finds, except those of the range's first second, and
    one message in each index file.
    """
    lines, index_files = [], len(list((store / "index").iterdir()))
    with rmq_spark.open_reader(str(store)) as reader:
        reader.refresh()
        for answer in answers:
            topic, key, missed = answer["topic"], answer["key"], 0
            stored = _times(reader, topic, key)
            for one in answer["ranges"]:
                begin, end, theirs = one["begin"], one["end"], set(one["places"])
                ours = _places(reader, topic, key, begin, end)
                late = _places(reader, topic, key, begin + 1000, end)
                missed = max(missed, len(late - theirs))
                times = {place: stored[place] for place in theirs & stored.keys()}
                if {
                    place for place, time_ms in times.items() if begin <= time_ms <= end
                } - ours or theirs - stored.keys():
                    lines.append(f"{topic}#{key} in [{begin}, {end}]: {sorted(ours)}, theirs {sorted(theirs)}")
            if missed > index_files:
                lines.append(f"{topic}#{key}: {missed} that are in a range were not found by the store classes")
    return lines


def time_differences(store: Path, answers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each time for which our reader and the store classes find different queue offsets.

    5.x is asked for LOWER and UPPER, 4.9 for the nearest in the file of the queue that it chooses by its mtime.
    """
    lines = []
    with rmq_spark.open_reader(str(store)) as reader:
        reader.refresh()
        for of_queue in answers:
            queue = QueueKey(of_queue["topic"], of_queue["queueId"])
            is_batch = (store / "batchconsumequeue" / queue.topic).is_dir()
            for answer in of_queue["answers"]:
                rules = {"lower": "lower", "upper": "upper"} if "lower" in answer else {"nearest": "offset"}
                for rule, name in rules.items():
                    ours, theirs = reader.offset_at_time(queue, answer["timestamp"], rule), answer[name]
                    if ours != theirs and not (is_batch and _is_odd(reader, queue, answer["timestamp"], rule)):
                        lines.append(f"{queue} at {answer['timestamp']} ms, {rule}: {ours}, theirs {theirs}")
    return lines


def _is_odd(reader: StoreReader, queue: QueueKey, time_ms: int, rule: str) -> bool:
    """Say whether 5.3.3 answers oddly for a batch queue: after its last entry, and UPPER between two times."""
    first_at, end = reader.offset_at_time(queue, time_ms), reader.bounds(queue).max_offset
    if rule == "lower":
        return first_at == end
    return first_at == reader.offset_at_time(queue, time_ms + 1)


def broker_differences(store: Path, client: Client, rows: Rows, java: Java) -> list[str]:
    """Return a line for each different answer of a running broker and our reader: bounds, and look-ups of messages.

    Of every queue some messages are looked up, by key, by UNIQ_KEY, by offset id and by time. The broker may append
    internal messages between two requests, so different answers are requested again.
    """
    lines = []
    # It copies half messages of which it hears nothing, over and over.
    rows = {queue: held for queue, held in rows.items() if not queue.topic.startswith("RMQ_SYS_TRANS")}
    for topic in sorted({queue.topic for queue, held in rows.items() if held}):
        lines += _settled(lambda topic=topic: _broker_bound_differences(store, client, topic))
    with rmq_spark.open_reader(str(store)) as reader:
        for queue, held in rows.items():
            for row in held[:: max(len(held) // 3, 1)]:
                lines += _settled(lambda queue=queue, row=row: _broker_differences_of(reader, client, queue, row, java))
    return lines


def _settled(compare: Callable[[], list[str]]) -> list[str]:
    """Return the differences that remain after four attempts."""
    for _ in range(3):
        if not compare():
            return []
        time.sleep(0.5)
    return compare()


def _broker_bound_differences(store: Path, client: Client, topic: str) -> list[str]:
    lines, bounds = [], our_bounds(store)
    for line in client("offsets", topic=topic):
        queue, told = QueueKey(topic, line["queueId"]), (line["min"], line["max"])
        if bounds.get(queue, (0, 0)) != told:
            lines.append(f"{queue}: {bounds.get(queue)}, theirs {told}")
    return lines


def _broker_differences_of(reader: StoreReader, client: Client, queue: QueueKey, row: Row, java: Java) -> list[str]:
    place, here = row["commitLogOffset"], f"{queue} at {row['queueOffset']}"
    lines = []
    reader.refresh()
    (by_place,) = client("find", topic=queue.topic, physicalOffset=place)
    # No index has the ids and keys of messages of an inner batch: we read their queues, a broker finds none.
    is_part = "INNER_NUM" in by_place["properties"]
    if not is_part:  # otherwise it is a complete batch
        lines += differences({queue: [row]}, their_rows([by_place]))
    if (queue, row["queueOffset"]) not in reader.find_message_id(row["offsetMsgId"], [queue.topic]):
        lines.append(f"{here}: not found by {row['offsetMsgId']}")
    if "UNIQ_KEY" in row["properties"]:
        by_id = {line["commitLogOffset"] for line in client("find", topic=queue.topic, msgId=row["msgId"])}
        ours = _places(reader, queue.topic, row["msgId"])  # the broker gives one of them; none for a part of a batch
        if not by_id <= ours or (bool(by_id) != bool(ours) and not is_part):
            lines.append(f"{here}, {row['msgId']}: {sorted(ours)}, theirs {sorted(by_id)}")
    for key in set((row["keys"] or "").split()):
        ours = _places(reader, queue.topic, key)
        theirs = {line["commitLogOffset"] for line in client("find", topic=queue.topic, key=key)}
        if _are_other(ours, theirs) and not (is_part and theirs <= ours):
            lines.append(f"{here}, key {key}: {sorted(ours)}, theirs {sorted(theirs)}")
    rule, stored = "lower" if java.is_5 else "nearest", row["storeTimestamp"]
    (by_time,) = client("find", topic=queue.topic, queueId=queue.queue_id, timestamp=stored)
    if reader.offset_at_time(queue, stored, rule) != by_time["offset"]:
        lines.append(f"{here}, by time: {reader.offset_at_time(queue, stored, rule)}, theirs {by_time['offset']}")
    return lines


def _are_other(ours: set[int], theirs: set[int]) -> bool:
    return ours != theirs if len(ours) < _MOST_HITS else not theirs or not theirs <= ours


def _places(reader: StoreReader, topic: str, key: str, begin_ms: int = 0, end_ms: int = 2**63 - 1) -> set[int]:
    places = set()
    for queue, offset in reader.find_key(topic, key, begin_ms, end_ms):
        for batch in reader.read(queue, offset, offset + 1, ("commitLogOffset",)):
            places.update(batch.column(0).to_pylist())
    return places


def _times(reader: StoreReader, topic: str, key: str) -> dict[int, int]:
    """Return place and store time (ms) of each message with the key."""
    found = {}
    for queue, offset in reader.find_key(topic, key):
        proof = reader.proof(queue, offset)
        found[proof.physical_offset] = proof.store_time_ms
    return found
