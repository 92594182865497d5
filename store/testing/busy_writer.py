"""A process that appends numbered messages to a store, and records which calls were acknowledged.

    python -m rmq_spark.store.testing.busy_writer STORE --name a --count 1000 --each 50 --notes FILE

It uses the public interface. The message with number n of the writer with name `a` has the body `a n`. Messages are
sent to the queues in turn. After each call that returned, a line is appended to the file `--notes`. It contains the
number of the call's first message, and the number of its last message plus 1.
"""

import argparse
import os
import sys

import pyarrow as pa

from rmq_spark.store import open_store

TOPIC = "busy"


def main(arguments: list[str] | None = None) -> int:
    """Append `--count` messages, `--each` of them in each call. After each call, append a line to `--notes`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--name", required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--each", type=int, default=100)
    parser.add_argument("--queues", type=int, default=4)
    parser.add_argument("--flush", default="async")
    parser.add_argument("--notes", required=True)
    options = parser.parse_args(arguments)
    notes = os.open(options.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    store = open_store(options.store, flush=options.flush, queues=options.queues, segment_bytes=1 << 22)
    for first in range(options.first, options.first + options.count, options.each):
        last = min(first + options.each, options.first + options.count)
        numbers = range(first, last)
        store.send_many(
            pa.table(
                {
                    "body": [f"{options.name} {number}".encode() for number in numbers],
                    "keys": [f"{options.name}{number}" for number in numbers],
                    "queueId": pa.array([number % options.queues for number in numbers], pa.int32()),
                }
            ),
            topic=TOPIC,
        )
        os.write(notes, f"{first} {last}\n".encode())
    store.settle()
    return 0


if __name__ == "__main__":
    sys.exit(main())
