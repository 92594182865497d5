"""Speed of appending columns as messages, over the speed of copying bytes; and a profile of the time.

Ready columns (bodies of 200 bytes, a tag, a key) are encoded with CRC and ids, appended, dispatched to four queues and
added to the key index, 64 MiB of log at a time, without a sync. Wall time of one process; log bytes are record bytes.
"""

import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
from figures import Figure, ratio_figure, take_turns
from sample_stores import BODY_BYTES, TOPIC, SampleStores

from rmq_spark.store import CommitKey, SinkSettings, TaskStage, commit_sink, open_store

COPY_BYTES = 256 << 20
BATCH_ROWS = 65_536
WAITERS = 4
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


def ready_columns(messages: int) -> pa.Table:
    """Return a table of messages: body, tags, keys; the same again for the same number."""
    random = np.random.default_rng(messages)
    bodies = _HEX[np.frombuffer(random.bytes(messages * BODY_BYTES), np.uint8) & 15]
    body = pa.FixedSizeBinaryArray.from_buffers(pa.binary(BODY_BYTES), messages, [None, pa.py_buffer(bodies)])
    numbers = pa.array(np.arange(messages)).cast(pa.string())
    tags = pa.array([f"Tag{letter}" for letter in "ABCDEFGH"]).take(pa.array(np.arange(messages) % 8))
    keys = pa.compute.binary_join_element_wise("key", numbers, "-")
    return pa.table({"body": body.cast(pa.binary()), "tags": tags, "keys": keys})


def measure_appending(stores: SampleStores, messages: int, repeats: int) -> Iterable[Figure]:
    """Yield the figure of appends, and the longest wait of others during a large commit."""
    columns = ready_columns(min(messages, 1_000_000))
    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)

    def copy_rate() -> float:
        begin = time.perf_counter()
        np.copyto(target, source)
        return COPY_BYTES / (time.perf_counter() - begin)

    def append_rate() -> float:
        folder = stores.scratch("append") / "store"
        store = open_store(str(folder))
        store.create_topic(TOPIC)
        begin = time.perf_counter()
        store.send_many(columns, topic=TOPIC)
        seconds = time.perf_counter() - begin
        shutil.rmtree(folder)
        return _record_bytes() * len(columns) / seconds

    copy_rate()
    append_rate()
    rates, copies = take_turns(repeats, append_rate, copy_rate)
    yield ratio_figure(
        "append, flush=async, log bytes over memcpy",
        rates,
        copies,
        required=0.06,
        note=f"{median(rates) / _record_bytes() / 1e6:.2f} million messages a second",
        detail={"log_bytes_per_second": median(rates), "copied_bytes_per_second": median(copies)},
    )
    yield _measure_waits(stores, messages)


def _record_bytes() -> int:
    """Return the length of one record of those columns, with the id that is added."""
    return 91 + BODY_BYTES + len(TOPIC) + len("TAGS\1TagA\2KEYS\1key-123456\2UNIQ_KEY\1\2") + 32


def _measure_waits(stores: SampleStores, messages: int) -> Figure:
    """Have four writers send one message after the other while a commit of many is on."""
    folder = str(stores.scratch("waits") / "store")
    settings = SinkSettings(folder)
    key = CommitKey("benchmark", 0)
    with open_store(folder) as store:
        store.create_topic(TOPIC)
    stage = TaskStage(settings, key, "all")
    part = ready_columns(500_000).append_column("topic", pa.repeat(TOPIC, 500_000))
    for _ in range(max(messages * 3 // len(part), 1)):  # 4 GB at 4 million messages
        for batch in part.to_batches(max_chunksize=BATCH_ROWS):
            stage.write(batch)
    staged = stage.finish()
    done = threading.Event()
    waits: list[float] = []

    def send_on() -> None:
        with open_store(folder) as store:
            while not done.is_set():
                begin = time.perf_counter()
                store.send(TOPIC, "one")
                waits.append(time.perf_counter() - begin)

    threads = [threading.Thread(target=send_on) for _ in range(WAITERS)]
    for thread in threads:
        thread.start()
    begin = time.perf_counter()
    commit_sink(settings, key, [staged])
    seconds = time.perf_counter() - begin
    done.set()
    for thread in threads:
        thread.join()
    shutil.rmtree(Path(folder))
    return Figure(
        f"longest wait of {WAITERS} writers during a commit of {staged.bytes / 1e9:.1f} GB, over that commit",
        max(waits) / seconds,
        median(waits) / seconds,
        max(waits) / seconds,
        note=f"{max(waits):.2f} s, {len(waits)} sends, the commit {seconds:.1f} s",
    )
