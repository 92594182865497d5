"""Fixtures that every test may use. One Spark for the whole run: starting it takes seconds."""

import builtins
import contextlib
import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import settings

from rmq_spark.store.disk import files
from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.errors import RmqError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rmq_spark.store.testing.brokers import RunningCluster

for name in ("fixtures", "reading", "groups", "sinks"):  # an assert shows its values only in modules named here
    pytest.register_assert_rewrite(f"rmq_spark.store.testing.backend_{name}")

GOLDEN = Path(__file__).resolve().parent / "golden"

# No deadline: the machine may be busy. The same examples every time: only a change of code makes a test fail.
settings.register_profile("usual", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))


_TORTURE_MINUTES = 2  # of a long run that does not name its minutes
_SHORT_MINUTES = 1.5
_LONG_TEST_S = 1
_LONG_TESTS_SHOWN = 40
_ends_at = pytest.StashKey[float]()
_in_any_case = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of long random runs."""
    group = parser.getgroup("torture", "long random runs")
    group.addoption("--torture-seed", type=int, help="of the order of tests, and of `run_seed`; default: random")
    group.addoption("--torture-seconds", type=float, help="begin only tests that end in time")
    group.addoption("--torture-least", type=int, default=0, help="number of short tests to begin even without time")
    parser.addoption("--part", metavar="K/N", type=_parse_part, help="run part K of N of the tests; K is from 1 to N")


def _parse_part(text: str) -> tuple[int, int]:
    """Return the number of a part, from 0, and how many parts there are."""
    number, _, count = text.partition("/")
    if not 1 <= int(number) <= int(count):
        raise ValueError(text)
    return int(number) - 1, int(count)


def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed of this run, unless it is given; note when its time is over."""
    if config.getoption("--torture-seed") is None:
        config.option.torture_seed = Random().randrange(2**32)
    if (seconds := config.getoption("--torture-seconds")) is not None:
        config.stash[_ends_at] = time.monotonic() + seconds


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a long run that would exceed the time. Print the begin of each, for the process that may have to end it."""
    if _ends_at in item.config.stash and item.get_closest_marker("torture"):
        minutes, now_s = _minutes_of(item), time.monotonic()
        if _in_any_case not in item.stash and now_s + minutes * 60 > item.config.stash[_ends_at]:
            pytest.skip("the time is over")
        print(f"\nbegun at {now_s:.0f} s: {item.nodeid}, {minutes:g} minutes", flush=True)


def _minutes_of(item: pytest.Item) -> float:
    mark = item.get_closest_marker("torture")
    return float(mark.kwargs.get("minutes", _TORTURE_MINUTES)) if mark else 0.0


def _put_least_first(items: list[pytest.Item], count: int) -> None:
    """Put `count` short tests of different functions first; they begin even without time."""
    first: dict[str, pytest.Item] = {}
    for item in sorted(items, key=lambda item: max(_minutes_of(item), _SHORT_MINUTES)):
        first.setdefault(item.nodeid.partition("[")[0], item)
    chosen = list(first.values())[:count]
    for item in chosen:
        item.stash[_in_any_case] = True
    items.sort(key=lambda item: item not in chosen)


@pytest.fixture
def run_seed(request: pytest.FixtureRequest) -> int:
    """The seed of a long random run, another one in each run; a failure prints it."""
    seed = int(request.config.getoption("--torture-seed"))
    print("seed", seed)
    return seed


@pytest.hookimpl(trylast=True)  # after deselected tests are removed
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In parallel runs put files with Spark first: otherwise one worker may begin a long file when all others are done.

    Where time is limited the seed shuffles the tests: each run tries others. A part of the tests is chosen by their
    names, and whole files of compat, because their tests share servers.
    """
    if (part := config.getoption("--part")) is not None:
        number, count = part
        parts: list[list[pytest.Item]] = [[] for _ in range(count)]
        for item in items:
            name = item.path.name if item.get_closest_marker("compat") else item.nodeid
            parts[int(hashlib.sha1(name.encode()).hexdigest(), 16) % count].append(item)
        items[:] = parts.pop(number)
        config.hook.pytest_deselected(items=list(itertools.chain(*parts)))
    if _ends_at in config.stash:
        Random(config.getoption("--torture-seed")).shuffle(items)
        _put_least_first(items, config.getoption("--torture-least"))
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("spark")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the default tests that took more than a second, so that somebody makes them faster or marks them `slow`."""
    long = [
        (report.duration, report.nodeid)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
        and report.when == "call"
        and report.duration > _LONG_TEST_S
        and not {"slow", "spark", "torture", "compat", "notebooks"} & set(report.keywords)
    ]
    if long:
        terminalreporter.section(f"{len(long)} tests took more than {_LONG_TEST_S} s and are not marked slow")
        for seconds, name in sorted(long, reverse=True)[:_LONG_TESTS_SHOWN]:
            terminalreporter.write_line(f"{seconds:6.1f} s  {name}")


def _sync_file(calls: SystemCalls, descriptor: int) -> None:
    os.fstat(descriptor)  # still an error unless it is an open file


def _sync_folder(calls: SystemCalls, path: str) -> None:
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


@pytest.fixture(scope="session")
def is_long_run(request: pytest.FixtureRequest) -> bool:
    """Whether it is one of the runs that take their time."""
    return any(item.get_closest_marker(name) for item in request.session.items for name in ("torture", "compat"))


@pytest.fixture(scope="module", autouse=True)
def _quick_syncs(request: pytest.FixtureRequest, is_long_run: bool) -> Iterator[None]:
    """Make syncs in this process return at once: only a power cut needs them, and the crash disk simulates those.

    Syncs are real in the tests of the disk, in the long runs, and in every process that a test starts.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not is_long_run and request.path.parent.name != "disk":
            patch.setattr(SystemCalls, "sync", _sync_file)
            patch.setattr(SystemCalls, "_sync_new", _sync_file)
            patch.setattr(SystemCalls, "sync_folder", _sync_folder)
        yield


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of stores that a real RocketMQ wrote. Read them where they are; copy to change."""
    return GOLDEN


@pytest.fixture
def tmp_store(tmp_path: Path) -> Callable[[str], Path]:
    """A function that copies the golden store of that name and returns the copy's path."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy


def _data_from(descriptor: int, at: int) -> int:
    """Return where the next data of a file begin, -1 where from `at` on all is hole."""
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return -1


def _copy_data(source: str, target: str) -> str:
    with open(source, "rb") as old, open(target, "wb") as new:
        new.truncate(os.fstat(old.fileno()).st_size)
        at = 0
        while (at := _data_from(old.fileno(), at)) >= 0:
            end = os.lseek(old.fileno(), at, os.SEEK_HOLE)
            os.pwrite(new.fileno(), os.pread(old.fileno(), end - at, at), at)
            at = end
    return target


@pytest.fixture(scope="session")
def copy_store() -> Callable[[Path, Path], Path]:
    """A function that copies a store and leaves its holes: an index file alone has 400 MB of them."""

    def copy(store: Path, target: Path) -> Path:
        return Path(shutil.copytree(store, target, copy_function=_copy_data, dirs_exist_ok=True))

    return copy


@pytest.fixture
def run_cluster(tmp_path: Path) -> Iterator[Callable[..., "RunningCluster"]]:
    """A function that starts name servers and brokers in this process: see `brokers.RunningCluster`."""
    from rmq_spark.store.testing.brokers import RunningCluster

    with contextlib.ExitStack() as stack:
        numbers = itertools.count()
        yield lambda **terms: stack.enter_context(RunningCluster(tmp_path / f"cluster-{next(numbers)}", **terms))


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """Spark with the source registered, for tests marked `spark`. Do not stop it."""
    import rmq_spark

    session = rmq_spark.session(
        "rmq-spark tests",
        master="local[2]",
        conf={
            "spark.sql.shuffle.partitions": "2",
            "spark.default.parallelism": "2",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            "spark.sql.session.timeZone": "UTC",
            # A run ends before it is worth to compile twice, and its rows are few.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        },
    )
    yield session
    session.stop()


_OF_PATHS = ((os, "open"), (os, "stat"), (os, "scandir"), (os, "statvfs"))
_OF_DESCRIPTORS = (
    (os, "fstat"),
    (os, "pread"),
    (os, "preadv"),
    (os, "lseek"),
    (os, "close"),
    (fcntl, "fcntl"),
    (mmap, "mmap"),
)

_FEW_CALLS = 10  # who makes no more of them asks something else than this module knows


class _FailingKernel:
    """Calls that look up, open, read, map, lock and close files below `root`; one of them fails.

    That is number `fail_at`, counted from 0 since `failing` was entered; it raises OSError with the errno `error`. It
    fails the engine's own calls in this process, for one thread. `hit` is the call and the path that failed.
    """

    def __init__(self, root: str, fail_at: int, error: int) -> None:
        self._root, self._fail_at, self._error = os.path.realpath(root), fail_at, error
        self.count, self.hit = 0, ""

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Let the call fail within the block."""
        with contextlib.ExitStack() as stack:
            for module, name in _OF_PATHS:
                stack.enter_context(mock.patch.object(module, name, self._of_path(name, getattr(module, name))))
            for module, name in _OF_DESCRIPTORS:
                stack.enter_context(mock.patch.object(module, name, self._of_descriptor(name, getattr(module, name))))
            opening = self._of_path("open", builtins.open)
            stack.enter_context(mock.patch.object(files, "open", opening, create=True))
            yield

    def _of_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(path, str):
                self._meet(name, path)
            return real(path, *rest, **more)

        return call

    def _of_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        readlink = os.readlink

        def call(descriptor: Any, *rest: Any, **more: Any) -> Any:
            path = readlink(f"/proc/self/fd/{descriptor}") if isinstance(descriptor, int) and descriptor >= 0 else ""
            if name == "close":
                real(descriptor)  # the kernel closes it even if it reports an error
                self._meet(name, path)
                return None
            self._meet(name, path)
            return real(descriptor, *rest, **more)

        return call

    def _meet(self, name: str, path: str) -> None:
        if path != self._root and not path.startswith(self._root + "/"):
            return
        number, self.count = self.count, self.count + 1
        if number == self._fail_at:
            self.hit = f"{name}({path})"
            raise OSError(self._error, os.strerror(self._error), path)


def _each_failure(root: str, error: int, act: Callable[[], object]) -> Iterator[tuple[str, object]]:
    """Call `act` once for each of its system calls, which fails; yield that call and the outcome of `act`.

    The outcome is its result, or the RmqError that it raised; another error is raised. `act` must change nothing.
    """
    number = 0
    while True:
        kernel = _FailingKernel(root, number, error)
        outcome: object
        try:
            with kernel.failing():
                outcome = act()
        except RmqError as raised:
            outcome = raised
        if not kernel.hit:
            assert number > _FEW_CALLS, number
            return
        yield kernel.hit, outcome
        number += 1


@pytest.fixture(scope="session")
def each_failure() -> Callable[[str, int, Callable[[], object]], Iterator[tuple[str, object]]]:
    """A function that calls another once for each of its calls to the kernel, which fails: see `_each_failure`."""
    return _each_failure
