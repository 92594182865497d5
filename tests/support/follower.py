"""A reader that follows a store beside its writer and notes everything that it reads, for a judge.

    python -m support.follower STORE --notes FILE --stop FILE [--style pieces] [--read-mode pread]

It loops over refresh, bounds and read until the stop file exists, then runs one more round. One note per line:

    r  topic  queue  offset  digest    a row (`appender_log.digest_row`), rows of a queue in the order read
    l  topic  queue  from  to          offsets that were deleted before it read them
    b  topic  queue  from  to          the queue's end stepped back
    e  error                           an error that a reader beside a writer must not meet
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TextIO

import pyarrow as pa
from support.appender_log import History, digest_row

from rmq_spark.store import StoreReader, open_reader
from rmq_spark.store.errors import OffsetRangeError, RmqError, StoreChangedError, StorePathError
from rmq_spark.store.model import QueueKey

STYLES = ("whole", "pieces")
_COLUMNS = ("topic", "queueId", "queueOffset", "commitLogOffset", "tags", "keys", "body", "storeTimestamp")
_PIECE_MESSAGES = 40  # at most, with style "pieces"


class Follower:
    """Follows all queues of a store, each from offset 0. `style` "pieces" reads in small ranges of random length."""

    def __init__(self, path: str, notes: TextIO, style: str, read_mode: str, random: Random) -> None:
        assert style in STYLES, style
        self._path, self._notes, self._style, self._read_mode = path, notes, style, read_mode
        self._random = random
        self._next: dict[QueueKey, int] = {}
        self._reader: StoreReader | None = None

    def go_round(self) -> None:
        """Refresh the store and read the new messages of every queue."""
        try:
            if self._reader is None:
                self._reader = open_reader(self._path, read_mode=self._read_mode)
            self._reader.refresh()
            queues = [queue for topic in self._reader.topics() for queue in self._reader.queues(topic)]
        except StorePathError:
            return  # the writer has not made it yet
        except StoreChangedError:
            return  # the writer deleted a file in between: refresh again
        except RmqError as error:
            self._note("e", f"{type(error).__name__} {error}")
            return
        for queue in queues:
            try:
                self._follow(self._reader, queue)
            except (StoreChangedError, OffsetRangeError):
                continue  # the oldest segment went; the next round shows whether this one begins later now
            except RmqError as error:
                self._note("e", f"{queue} {type(error).__name__} {error}")

    def close(self) -> None:
        """Close the reader."""
        if self._reader is not None:
            self._reader.close()

    def _follow(self, reader: StoreReader, queue: QueueKey) -> None:
        bounds = reader.bounds(queue)
        at = self._next.setdefault(queue, 0)
        if bounds.min_offset > at:
            self._note("l", queue.topic, queue.queue_id, at, bounds.min_offset)
            at = self._next[queue] = bounds.min_offset
        if bounds.max_offset < at:
            self._note("b", queue.topic, queue.queue_id, at, bounds.max_offset)
        for begin, end in self._ranges(at, bounds.max_offset):
            for batch in reader.read(queue, begin, end, _COLUMNS):
                self._note_rows(queue, batch)
            if self._next[queue] != end:
                self._note("e", f"{queue}: read [{begin}, {end}) came to {self._next[queue]}")

    def _ranges(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        while begin < end:
            step = end - begin if self._style == "whole" else self._random.randint(1, _PIECE_MESSAGES)
            yield begin, min(begin + step, end)
            begin += step

    def _note_rows(self, queue: QueueKey, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            expected = queue.topic, queue.queue_id, self._next[queue]
            found = row["topic"], row["queueId"], row["queueOffset"]
            if found != expected:
                self._note("e", f"row {found} where {expected} comes next")
            self._next[queue] = row["queueOffset"] + 1
            store_ms = round(row["storeTimestamp"].timestamp() * 1000)
            digest = digest_row(row["body"], row["tags"], row["keys"], row["commitLogOffset"], store_ms)
            self._note("r", queue.topic, queue.queue_id, row["queueOffset"], digest)

    def _note(self, *fields: Any) -> None:
        self._notes.write("\t".join(str(field) for field in fields).replace("\n", " ") + "\n")


@dataclass(slots=True)
class Verdict:
    """Verdict of a judge on a follower's notes: how much was read, and all faults."""

    rows: int = 0
    lost: int = 0
    faults: list[str] = field(default_factory=list)


def judge(notes: Path, history: History) -> Verdict:
    """Compare a follower's notes with the appender's history.

    Faults are: a row that was not written there, a row twice or out of order, a skipped offset that had not expired,
    an end that stepped back, an acknowledged message that was never read, and every error.
    """
    verdict = Verdict()
    reached: dict[QueueKey, int] = {}
    for line in notes.read_text().splitlines():
        kind, *fields = line.split("\t")
        if kind == "e":
            verdict.faults.append(fields[0])
            continue
        queue, numbers = QueueKey(fields[0], int(fields[1])), fields[2:]
        if kind == "r":
            offset, digest = int(numbers[0]), numbers[1]
            verdict.rows += 1
            if offset != reached.get(queue, 0):
                verdict.faults.append(f"{queue}: offset {offset} after {reached.get(queue, 0) - 1}")
            reached[queue] = offset + 1
            fault = history.fault(queue, offset, digest)
            verdict.faults += [fault] if fault else []
        elif kind == "l":
            begin, end = int(numbers[0]), int(numbers[1])
            verdict.lost += end - begin
            reached[queue] = end
            verdict.faults += _missed(history, queue, begin, end)
        else:
            verdict.faults.append(f"{queue}: its end stepped back from {numbers[0]} to {numbers[1]}")
    for queue, end in history.ends().items():
        verdict.faults += _missed(history, queue, reached.get(queue, 0), end)
    return verdict


def _missed(history: History, queue: QueueKey, begin: int, end: int) -> Iterator[str]:
    for offset in range(begin, end):
        message = history.acknowledged.get((queue, offset))
        if message is not None and message.physical_offset >= history.log_begin:
            yield f"{queue} offset {offset} at {message.physical_offset}: acknowledged, never read"


def run_follower(follower: Follower, stopped: Callable[[], bool]) -> None:
    """Loop until `stopped`, then run one more round."""
    going = True
    while going:
        going = not stopped()
        follower.go_round()
    follower.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Follow from the command line."""
    parser = argparse.ArgumentParser(prog="follower", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", help="the store")
    parser.add_argument("--notes", type=Path, required=True, help="file for what was read")
    parser.add_argument("--stop", type=Path, required=True, help="run until this file exists")
    parser.add_argument("--style", choices=STYLES, default="whole")
    parser.add_argument("--read-mode", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with options.notes.open("w") as notes:
        follower = Follower(options.path, notes, options.style, options.read_mode, Random(options.seed))
        run_follower(follower, options.stop.exists)
    sys.stdout.write(f"seed {options.seed}: {options.style} {options.read_mode} done\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
