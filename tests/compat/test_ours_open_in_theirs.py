"""RocketMQ's store classes open our stores: no recovery, every message, every column, every look-up."""

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from compat_kit import our_stores
from compat_kit.lookups import key_differences, range_differences, time_differences
from compat_kit.rocketmq import Line, Request, Verifier
from compat_kit.rows import bound_differences, count, differences, our_bounds, our_rows, their_rows

import rmq_spark
from rmq_spark.store import CommitKey, CommitOptions, RecordBuilderSettings, SinkSettings, TaskStage, commit_sink
from rmq_spark.store.model import QueueKey

pytestmark = pytest.mark.compat

SMALL = our_stores.index_conf(our_stores.SMALL)
DEFAULTS = {"maxHashSlotNum": 5_000_000, "maxIndexNum": 20_000_000}


def closed(store: Path) -> dict[str, object]:
    """Appends without a sync, then close."""
    our_stores.fill(store)
    assert len(list((store / "commitlog").iterdir())) > 5
    assert len(list((store / "index").iterdir())) > 2
    return SMALL


def synced(store: Path) -> dict[str, object]:
    """flush=sync, and the writer never closes the store."""
    our_stores.fill(store, seed=2, count=300, flush="sync", close=False)
    return SMALL


def of_default_sizes(store: Path) -> dict[str, object]:
    """A store of `rmq_spark.open_store` with default sizes: sparse segments and index files; single sends."""
    with rmq_spark.open_store(str(store), queues=2) as writer:
        for number in range(20):
            writer.send("plain", f"hello {number}", tags="t", keys=f"k{number} all", properties={"p": "v"})
        writer.send("plain", b"", queue_id=1)
    return DEFAULTS


def expired(store: Path) -> dict[str, object]:
    """A store whose oldest segments, queue files and index files expired."""
    our_stores.fill(store, seed=3)
    with our_stores.open_small(store) as writer:
        gone = writer.expire(max_bytes=600_000)
    assert gone.segments
    assert gone.queue_files
    assert gone.index_files
    return SMALL


def in_turns(store: Path) -> dict[str, object]:
    """Two writers alternate, message by message."""
    random = Random(4)
    with our_stores.open_small(store) as one, our_stores.open_small(store, compression="zstd") as other:
        for topic, queues in our_stores.TOPICS.items():
            one.create_topic(topic, queues)
        for number in range(60):
            (one, other)[number % 2].send_many(our_stores.table([our_stores.message(number, random)]))
    return SMALL


def committed(store: Path) -> dict[str, object]:
    """Batches of a sink, an uncommitted staged file, and a ledger."""
    outbox = RecordBuilderSettings(sizes=our_stores.SMALL)
    settings = SinkSettings(str(store), outbox, CommitOptions(chunk_bytes=100_000))
    random = Random(5)
    for batch_id in range(3):
        key = CommitKey("a-query", batch_id)
        staged = []
        for task in range(2):
            stage = TaskStage(settings, key, f"task{task}")
            rows = [our_stores.message(number, random) for number in range(batch_id * 100 + 1, batch_id * 100 + 50)]
            stage.write(our_stores.table({**row, "queueId": None} for row in rows).combine_chunks().to_batches()[0])
            staged.append(stage.finish())
        commit_sink(settings, key, staged)
    TaskStage(settings, CommitKey("a-query", 3), "lost").finish()
    return SMALL


def light_and_empty(store: Path) -> dict[str, object]:
    """Topics without a message, and an empty queue."""
    with our_stores.open_small(store) as writer:
        writer.create_topic("nothing", 3)
        writer.create_topic("little", 8)
        writer.send("little", b"x", queue_id=5)
    return SMALL


KINDS = (closed, synced, of_default_sizes, expired, in_turns, committed, light_and_empty)


def problems_of(store: Path, report: Line) -> list[str]:
    """Return faults of the store, and differences between the store classes and our reader."""
    found = report["recovered"]
    lines = []
    if found["abortFile"] or found["truncated"] or found["maxPhyOffset"] != found["endOnDisk"]:
        lines.append(f"needed recovery: {found}")
    if found["filesBefore"] != found["filesAfter"]:
        lines.append(f"files were {found['filesBefore']}, and then {found['filesAfter']}")
    lines += differences(our_rows(store), their_rows(report["messages"]))
    lines += bound_differences(our_bounds(store), report["queues"])
    return lines + key_differences(store, report["keys"]) + time_differences(store, report["times"])


def test_every_store_that_we_leave_in_order_is_whole(
    tmp_path: Path, verifier: Verifier, copied: Callable[[Path], Path]
) -> None:
    stores = {kind.__name__: tmp_path / kind.__name__ for kind in KINDS}
    confs = {kind.__name__: kind(stores[kind.__name__]) for kind in KINDS}
    reports = verifier.verify(Request(copied(store), confs[name], times=8, keys=400) for name, store in stores.items())
    problems, message_count = {}, 0
    for (name, store), report in zip(stores.items(), reports, strict=True):
        found = problems_of(store, report)
        if found:
            problems[name] = [*found[:5], f"{len(found)} in all"]
        assert report["keys"] or name == "light_and_empty", "look-ups have something to compare"
        message_count += count(our_rows(store))
    assert not problems, "\n".join(f"{name}: {line}" for name, lines in problems.items() for line in lines)
    print(f"{verifier.java.version}: {message_count} messages in {len(stores)} stores")


def test_keys_are_found_within_times_in_index_files_that_roll_over(
    tmp_path: Path, verifier: Verifier, copied: Callable[[Path], Path]
) -> None:
    store, random = tmp_path / "store", Random(6)
    for part in range(6):
        with our_stores.open_small(store) as writer:
            for topic, queues in our_stores.TOPICS.items():
                writer.create_topic(topic, queues)
            numbers = range(part * 80 + 1, part * 80 + 80)
            writer.send_many(our_stores.table(our_stores.message(number, random) for number in numbers))
        time.sleep(0.8)  # the index counts seconds
    assert len(list((store / "index").iterdir())) > 1
    times = sorted(row["storeTimestamp"] for rows in our_rows(store).values() for row in rows)
    ends = [times[0] - 5000, *times[:: len(times) // 5], times[-1], times[-1] + 5000]
    ranges = [(begin, end) for begin in ends for end in ends if begin <= end]
    (report,) = verifier.verify([Request(copied(store), SMALL, keys=60, ranges=ranges)])
    assert key_differences(store, report["keys"]) == []
    assert range_differences(store, report["keys"]) == []
    assert sum(len(one["places"]) for answer in report["keys"] for one in answer["ranges"]) > 100


def test_a_long_topic_is_read_by_5(
    tmp_path: Path, verifiers: Callable[[str], Verifier], copied: Callable[[Path], Path]
) -> None:
    """Its records have version 2, which 4.9 does not support."""
    store, topic = tmp_path / "store", "%RETRY%" + "g" * 193
    with our_stores.open_small(store) as writer:
        writer.send(topic, b"x", tags="t", keys="k", queue_id=0)
        writer.send("orders", b"y")
    (report,) = verifiers("5.3.3").verify([Request(copied(store), SMALL, times=2, keys=9)])
    assert problems_of(store, report) == []
    assert count(our_rows(store)) == 2


def test_the_comparison_finds_what_differs(tmp_path: Path, verifier: Verifier, copied: Callable[[Path], Path]) -> None:
    """A message more, one less, another column."""
    store = tmp_path / "store"
    with our_stores.open_small(store) as writer:
        for number in range(3):
            writer.send("plain", f"{number}", tags="t", queue_id=0)
    (report,) = verifier.verify([Request(copied(store), SMALL)])
    ours, theirs = our_rows(store), their_rows(report["messages"])
    assert differences(ours, theirs) == []
    key = QueueKey("plain", 0)
    assert differences({key: ours[key][:2]}, theirs)
    assert differences(ours, {key: theirs[key][1:]})
    assert differences(ours, {key: [{**row, "flag": 1} for row in theirs[key]]})
