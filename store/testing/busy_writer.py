"""A process that appends numbered messages to a store through the public door, and says what was acknowledged.

    python -m rmq_spark.store.testing.busy_writer STORE --name a --count 1000 --each 50 --notes FILE

Message n of writer `a` has the body `a n`; queues are taken in turn. Every acknowledged call is a line of the notes.
"""

import argparse
import os
import sys

import pyarrow as pa

from rmq_spark.store import open_store

TOPIC = "busy"


def main(arguments: list[str] | None = None) -> int:
    """Append until `--count` messages are there, `--each` a call; notes are `first last` of each call."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--name", required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--each", type=int, default=100)
    parser.add_argument("--queues", type=int, default=4)
    parser.add_argument("--flush", default="async")
    parser.add_argument("--notes", required=True)
    asked = parser.parse_args(arguments)
    notes = os.open(asked.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    store = open_store(asked.store, flush=asked.flush, queues=asked.queues, segment_bytes=1 << 22)
    for first in range(asked.first, asked.first + asked.count, asked.each):
        last = min(first + asked.each, asked.first + asked.count)
        numbers = range(first, last)
        store.send_many(
            pa.table(
                {
                    "body": [f"{asked.name} {number}".encode() for number in numbers],
                    "keys": [f"{asked.name}{number}" for number in numbers],
                    "queueId": pa.array([number % asked.queues for number in numbers], pa.int32()),
                }
            ),
            topic=TOPIC,
        )
        os.write(notes, f"{first} {last}\n".encode())
    store.settle()
    return 0


if __name__ == "__main__":
    sys.exit(main())
