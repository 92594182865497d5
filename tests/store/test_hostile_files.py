"""Files of a store with hostile content, or replaced by a FIFO: an error of ours or the right answer, at once."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

import rmq_spark
from rmq_spark import OptionError, RmqError
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.locks import BrokerLock, FileLock, is_locked, is_open_to_write
from rmq_spark.store.errors import StorePathError
from rmq_spark.store.format.side_file import parse_json

HANG_S = 10
CONTENTS = {"a deep list": b"[" * 200_000, "true": b"true"}


LEASE = """
import fcntl, os, signal, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
signal.signal(signal.SIGIO, lambda *_: fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK))
fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("leased", flush=True)
sys.stdin.read()
"""


class Hang(BaseException):
    pass


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    def alarm(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, alarm)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a file of nearly every kind in config/ and rmq/."""
    path = tmp_path_factory.mktemp("grown") / "s"
    golden = Path(__file__).resolve().parent.parent / "golden"
    with rmq_spark.open_store(path, segment_bytes=1 << 20, message_delay_level="1s 5s") as store:
        for number in range(9):
            store.send("orders", f"{number}", keys=f"k{number}")
        store.send("orders", "later", delay_level=1)
        store.send("orders", "much later", deliver_at_ms=wall_clock_ms() + 10_000_000)
        store.set_retention(max_bytes=1 << 40)
    with rmq_spark.open_consumer(path, "g") as consumer:
        for queue in consumer.queues("orders"):
            consumer.update_consume_offset(queue, 1)
        consumer.commit()
    for config in sorted(golden.glob("*/config/*.json")):
        if not (path / "config" / config.name).exists():
            shutil.copy(config, path / "config")
    for config in sorted((path / "config").glob("*.json")):
        shutil.copy(config, f"{config}.bak")
    for name in ("claims.json", "resets.json", "published.json", "suspended.json", "members/m.json"):
        side = path / "rmq" / "groups" / "g" / name
        side.parent.mkdir(parents=True, exist_ok=True)
        if not side.exists():
            side.write_text("{}")
    for name in ("ledger/q.json", "sentback/q.json", "intents/q.json", "holder.json", "delivery/timer.json"):
        side = path / "rmq" / name
        side.parent.mkdir(parents=True, exist_ok=True)
        if not side.exists():
            side.write_text("{}")
    return path


def names_of(path: Path) -> list[str]:
    found = [one for folder in ("config", "rmq") for one in (path / folder).rglob("*") if one.is_file()]
    return [*sorted(str(one.relative_to(path)) for one in found), "checkpoint", "lock", "abort"]


def read(path: Path) -> None:
    with rmq_spark.open_reader(path) as reader:
        for queue in reader.queues("orders"):
            held = reader.bounds(queue)
            for _ in reader.read(queue, held.min_offset, held.max_offset, ["body"]):
                pass
        list(reader.find_key("orders", "k3"))


def send(path: Path) -> None:
    with rmq_spark.open_store(path, lock_timeout_ms=0) as store:
        store.send("orders", "x")
        store.send("orders", "x", delay_level=1)


def pull(path: Path) -> None:
    with rmq_spark.open_consumer(path, "g") as consumer:
        for queue in consumer.queues("orders"):
            consumer.pull(queue, consumer.fetch_consume_offset(queue) or 0)


OPERATIONS: dict[str, Callable[[Path], object]] = {
    "read": read,
    "check": rmq_spark.check,
    "groups": rmq_spark.groups,
    "group_lag": lambda path: rmq_spark.group_lag(path, "g"),
    "pull": pull,
    "send": send,
    "close": rmq_spark.close,
}


def outcomes(path: Path, what: str) -> Iterator[str]:
    """Run each operation, and yield everything that came out of it except an answer and an error of ours."""
    for name, operate in OPERATIONS.items():
        if "rmq/groups" in what and name in ("read", "send", "close"):
            continue  # they do not look at groups
        try:
            with no_hang():
                operate(path)
        except RmqError:
            continue
        except Hang:
            yield f"{what}: {name} hangs"
        except Exception as error:
            yield f"{what}: {name} raises {type(error).__name__}: {error}"[:300]


@pytest.mark.slow
@pytest.mark.parametrize("content", CONTENTS)
def test_no_content_of_a_side_file_escapes_as_another_error(
    grown: Path, tmp_path: Path, copy_store: Callable[[Path, Path], Path], content: str
) -> None:
    path, faults = copy_store(grown, tmp_path / "s"), []
    for name in names_of(grown):
        one = path / name
        before = one.read_bytes() if one.exists() else None
        one.write_bytes(CONTENTS[content])
        faults += outcomes(path, f"{content} in {name}")
        if before is None:
            one.unlink(missing_ok=True)
        else:
            one.write_bytes(before)
    assert not faults, "\n".join(faults)


def test_no_FIFO_in_place_of_a_file_hangs_anybody(
    grown: Path, tmp_path: Path, copy_store: Callable[[Path, Path], Path]
) -> None:
    path, faults = copy_store(grown, tmp_path / "s"), []
    for name in names_of(grown):
        one = path / name
        before = one.read_bytes() if one.exists() else None
        one.unlink(missing_ok=True)
        os.mkfifo(one)
        faults += outcomes(path, f"a FIFO as {name}")
        one.unlink(missing_ok=True)
        if before is not None:
            one.write_bytes(before)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "act",
    [
        lambda path: files.read_small(path),
        lambda path: files.OpenFile(path),
        lambda path: FileLock(path).try_take(),
        lambda path: BrokerLock(path).try_take(),
        lambda path: is_locked(path),
        lambda path: is_open_to_write(path),
    ],
)
def test_opening_a_FIFO_names_it_and_says_what_it_is(tmp_path: Path, act: Callable[[str], object]) -> None:
    os.mkfifo(tmp_path / "f")
    with no_hang(), pytest.raises(StorePathError, match=r"/f .*not a regular file"):
        act(str(tmp_path / "f"))


def test_import_parquet_refuses_a_FIFO(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.parquet")
    with no_hang(), pytest.raises((StorePathError, OptionError)):
        rmq_spark.import_parquet(tmp_path / "s", tmp_path / "f.parquet")


def test_an_owner_of_a_lease_does_not_fail_a_reader(tmp_path: Path) -> None:
    """The kernel refuses an open that may not wait while another process has a lease: then the reader waits."""
    path = tmp_path / "f"
    path.write_bytes(b"content")
    with subprocess.Popen([sys.executable, "-c", LEASE, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"leased\n"
        with no_hang():
            assert files.read_small(str(path)) == b"content"
        owner.kill()


def test_parse_json_raises_ValueError_for_whatever_is_not_JSON() -> None:
    for text in (b"[" * 200_000, b"NaN", b'{"a": -Infinity}', b"\xff", b"", b"9" * 5000):
        with pytest.raises(ValueError):  # noqa: PT011
            parse_json(text)
    assert parse_json(b'{"a": [1, "x", null]}') == {"a": [1, "x", None]}
