"""Stores that we write: messages of all sorts, in files so small that a few hundred fill several of each kind."""

from collections.abc import Container, Iterable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from rmq_spark.store import MESSAGE_COLUMNS, Producer
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.transaction.sink import RecordBuilderSettings

SMALL = FileSizes(256 << 10, 100 * 20, 10 * 46, IndexShape(100, 400))
TOPICS = {"orders": 4, "p": 1, "many-queues_%x|y": 8, "t" * 127: 2, "plain": 3}
_ODD_NAME = "naïve 中文 \U0001f680 '\"\\{}=;,#|&"  # without control characters, which we refuse in a name
_ODD = "naïve 中文 \U0001f680 \t\n\r \x00\x03\x7f '\"\\{}=;,#|&"


def index_conf(sizes: FileSizes) -> dict[str, object]:
    """Return the configuration of a broker for a store with such index files."""
    return {"maxHashSlotNum": sizes.index.slot_count, "maxIndexNum": sizes.index.unit_count}


def broker_conf(sizes: FileSizes = SMALL) -> dict[str, object]:
    """Return the configuration of a broker for a store with such files; without the timer wheel's 38 MB."""
    return index_conf(sizes) | {
        "mappedFileSizeCommitLog": sizes.segment_bytes,
        "mappedFileSizeConsumeQueue": sizes.queue_file_bytes,
        "mapperFileSizeBatchConsumeQueue": sizes.batch_queue_file_bytes,
        "timerWheelEnable": False,
    }


def open_small(
    path: Path, *, flush: str = "async", sizes: FileSizes = SMALL, lock_timeout_ms: int = 60_000, **outbox: Any
) -> Producer:
    """Open a store to append, as `rmq_spark.open_store` does, with files of these sizes if it makes any."""
    settings = WriterSettings("compat tests", lock_timeout_ms, sizes=sizes)
    return Producer(str(path), settings, RecordBuilderSettings(sizes=sizes, **outbox), flush)


def message(number: int, random: Random) -> dict[str, Any]:
    """Return a message of any sort; its body begins with its number, unless it is empty."""
    topic = random.choice(list(TOPICS))
    size = random.choice((0, 1, 20, 200, 200, 200, 3000, 5000)) if number % 50 else 100_000
    text = random.choice(("abc ", "xyz " * 50, "")) * size
    return {
        "topic": topic,
        "body": (b"%d " % number + text.encode() + random.randbytes(size))[:size],
        "tags": random.choice((None, "a", "paid || created", "标签", "T" * 300)),
        "keys": random.choice((None, f"k{number}", f"k{number} all 键{number % 7}", f"only-{number % 5}")),
        "properties": random.choice(
            (
                None,
                [],
                [("region", "eu")],
                [("a", _ODD), (_ODD_NAME, "b"), ("empty", ""), ("long", "v" * 9000)],
                [(f"p{n}", str(n)) for n in range(40)],
            )
        ),
        "shardingKey": random.choice((None, None, f"s{number % 11}")),
        "queueId": random.choice((None, None, random.randrange(TOPICS[topic]))),
        "flag": random.choice((0, 0, 7, -1)),
    }


def table(messages: Iterable[dict[str, Any]]) -> pa.Table:
    """Return messages as `send_many` takes them, none of which waits for a time."""
    types = {
        "topic": pa.string(),
        "body": pa.binary(),
        "tags": pa.string(),
        "keys": pa.string(),
        "properties": pa.map_(pa.string(), pa.string()),
        "shardingKey": pa.string(),
        "queueId": pa.int32(),
        "flag": pa.int32(),
    }
    assert set(types) <= set(MESSAGE_COLUMNS)  # other tests cover waiting messages
    return pa.Table.from_pylist(list(messages), schema=pa.schema(list(types.items())))


def fill(
    path: Path,
    *,
    count: int = 900,
    seed: int = 1,
    flush: str = "async",
    close: bool = True,
    with_bodies: Container[str] = (),
) -> int:
    """Append messages of all sorts in calls of different sizes, with every compression; return how many.

    `with_bodies`: topics in which no body is empty.
    """
    random, number = Random(seed), 0
    while number < count:
        compression = random.choice((None, "zlib", "lz4", "zstd"))
        with_store = open_small(path, flush=flush, compression=compression, compress_over=2000)
        for topic, queues in TOPICS.items():
            with_store.create_topic(topic, queues)
        for _ in range(4):
            size = min(random.choice((1, 2, 30, 120)), count - number)
            if size:
                made = [message(number + n, random) for n in range(size)]
                bodies = (b"-" if one["topic"] in with_bodies and not one["body"] else one["body"] for one in made)
                with_store.send_many(table({**one, "body": body} for one, body in zip(made, bodies, strict=True)))
                number += size
        if close:
            with_store.close()
    return number
