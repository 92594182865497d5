"""Files that shrink or vanish under a reader: an error that says so or the right rows; no signal, no wrong row.

Touching a mapped page behind a file's end would end the process (SIGBUS). So the reader is a process of its own, and
its return code is looked at. It compares every body and key with what was built.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from rmq_spark.store import StoreReader, open_reader
from rmq_spark.store.errors import DamageError, StoreChangedError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_store import build_uniform_store

READ_MODES = ("mmap", "pread")
COLUMNS = ["queueOffset", "body", "keys", "tags", "properties", "msgId", "bornHost", "storeTimestamp"]
QUEUE = QueueKey("t", 0)
MESSAGES = 60_000
SEGMENT_BYTES = 12 << 20  # several batches of 16,384 rows
TRIALS = 40  # of each mode in the default run
TRIALS_TORTURE = 2_000
ANSWERS = ("right", "StoreChangedError", "DamageError")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shrinking") / "pristine"
    build_uniform_store(
        path, topic="t", queue_count=1, message_count=MESSAGES, segment_bytes=SEGMENT_BYTES, queue_file_bytes=200_000
    )
    return path


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "store"))


class Reader:
    """A reader in a process of its own; each line to it is one read of everything, each line from it an answer."""

    def __init__(self, store: Path, pristine: Path, read_mode: str, *flags: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), str(store), str(pristine), read_mode, *flags]
        self._process = subprocess.Popen(
            command,
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": ":".join(sys.path)},
        )

    def __enter__(self) -> "Reader":
        assert self.answer() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert code >= 0, f"the reader died of signal {-code}"

    def start(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("read\n")
        assert self.answer() == "go"

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def shrinkable(store: Path, random: Random) -> Path:
    """Choose a segment, sometimes a file of the queue."""
    segments, units = sorted((store / "commitlog").iterdir()), sorted((store / "consumequeue/t/0").iterdir())
    return random.choice(segments if random.random() < 0.85 else units)


def spoil(path: Path, random: Random) -> str:
    """Shrink the file in place, or delete it."""
    size = path.stat().st_size
    to = random.choice((0, 1, 4096, size - 1, size - 4096, size // 2, random.randrange(size), None))
    if to is None:
        path.unlink()
        return "deleted"
    os.truncate(path, to)
    return f"cut to {to}"


def restore(path: Path, store: Path, pristine: Path) -> None:
    """Put a whole file in the spoilt one's place: a new one, so that who has the old one open keeps that."""
    whole = path.with_name(path.name + ".new")
    shutil.copyfile(pristine / path.relative_to(store), whole)
    whole.rename(path)


def try_again_and_again(store: Path, pristine: Path, read_mode: str, seed: int, trials: int) -> dict[str, int]:
    random = Random(seed)
    answers: dict[str, int] = {}
    usual = 0.05  # seconds that a read takes, about
    with Reader(store, pristine, read_mode) as reader:
        for trial in range(trials):
            path = shrinkable(store, random)
            begun = time.monotonic()
            reader.start()
            time.sleep(random.random() * usual)  # the instant at which it happens; nothing is concluded from it
            how = spoil(path, random)
            answer = reader.answer()
            if answer == "right":
                usual = 0.8 * usual + 0.2 * (time.monotonic() - begun)
            assert answer in ANSWERS, f"seed {seed}, trial {trial}, {read_mode}, {path.name} {how}: {answer or 'died'}"
            answers[answer] = answers.get(answer, 0) + 1
            restore(path, store, pristine)
    return answers


@pytest.mark.parametrize("read_mode", READ_MODES)
def test_a_file_spoilt_at_any_instant_gives_an_error_or_the_right_rows(
    store: Path, pristine: Path, read_mode: str
) -> None:
    answers = try_again_and_again(store, pristine, read_mode, 1, TRIALS)
    assert answers.get("StoreChangedError", 0) > 0, answers  # else nothing was tried


@pytest.mark.torture
@pytest.mark.parametrize("read_mode", READ_MODES)
def test_a_file_spoilt_at_thousands_of_instants_gives_an_error_or_the_right_rows(
    store: Path, pristine: Path, read_mode: str
) -> None:
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    print(try_again_and_again(store, pristine, read_mode, seed, TRIALS_TORTURE))


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 4096, 100_000, SEGMENT_BYTES // 2, SEGMENT_BYTES - 1])
@pytest.mark.parametrize("read_mode", READ_MODES)
def test_a_segment_cut_between_two_batches_ends_in_an_error(
    store: Path, pristine: Path, read_mode: str, size: int
) -> None:
    """The file is mapped by then: the next batch touches pages that are gone."""
    with Reader(store, pristine, read_mode, "--cut-after-first-batch", str(size)) as reader:
        reader.start()
        answer = reader.answer()
    # A cut that leaves all records (the last bytes are filler) may give all rows.
    assert answer in (("StoreChangedError",) if size < SEGMENT_BYTES - 1 else ("StoreChangedError", "right"))


@pytest.mark.parametrize("read_mode", READ_MODES)
def test_a_segment_deleted_while_it_is_read_is_read_to_its_end(store: Path, pristine: Path, read_mode: str) -> None:
    with Reader(store, pristine, read_mode, "--cut-after-first-batch", "-1") as reader:
        reader.start()
        assert reader.answer() == "right"


def read_and_compare(store: StoreReader, bodies: pa.Table, spoilt: Path | None, size: int) -> None:
    """Read everything; raise AssertionError for a row that is not as built."""
    next_offset = 0
    for number, batch in enumerate(store.read(QUEUE, 0, MESSAGES, COLUMNS)):
        count = batch.num_rows
        expected = bodies.slice(next_offset, count)
        for name in COLUMNS:
            assert expected.column(name).combine_chunks().equals(batch.column(name)), f"{name} from {next_offset} on"
        next_offset += count
        if number == 0 and spoilt is not None:
            if size < 0:
                spoilt.unlink()
            else:
                os.truncate(spoilt, size)
    assert next_offset == MESSAGES, next_offset


def answers(path: str, read_mode: str, expected: pa.Table, spoilt: Path | None, size: int) -> Iterator[str]:
    """Yield one answer for each line that comes in. Every other read goes on with the reader of the one before."""
    reader = None
    for number, _ in enumerate(sys.stdin):
        yield "go"
        try:
            if reader is None:
                reader = open_reader(path, read_mode=read_mode)
            read_and_compare(reader, expected, spoilt, size)
            answer = "right"
        except (StoreChangedError, DamageError) as error:
            answer = type(error).__name__
        except AssertionError as error:
            answer = f"wrong: {error}"
        if reader is not None and number % 2:
            reader.close()
            reader = None
        yield answer


def main() -> None:
    parser = argparse.ArgumentParser(description="The reader under which files shrink.")
    parser.add_argument("store")
    parser.add_argument("pristine")
    parser.add_argument("read_mode")
    parser.add_argument("--cut-after-first-batch", type=int, dest="cut")
    options = parser.parse_args()
    with open_reader(options.pristine) as reader:
        expected = pa.Table.from_batches(list(reader.read(QUEUE, 0, MESSAGES, COLUMNS, check_crc=True)))
    expected = expected.combine_chunks()
    first = Path(options.store) / "commitlog" / f"{0:020d}"
    print("ready", flush=True)
    for line in answers(
        options.store, options.read_mode, expected, first if options.cut is not None else None, options.cut or 0
    ):
        print(line, flush=True)


if __name__ == "__main__":
    main()


def test_a_sigbus_that_is_not_ours_goes_to_the_handler_from_before() -> None:
    code = """
import faulthandler, signal, sys
faulthandler.enable()
from rmq_spark.store.disk import mapped_window
mapped_window._install()
signal.raise_signal(signal.SIGBUS)  # none of our mappings explains it: the earlier handler is back
signal.raise_signal(signal.SIGBUS)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
        check=False,
    )
    assert ran.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in ran.stderr
