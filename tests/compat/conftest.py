"""A real RocketMQ for the tests marked `compat`: built, started in a network that it takes, or skipped with the reason.

With RMQ_COMPAT=required in the environment a skipped test is a failed one: continuous integration may not do without.
A file of tests runs with one of the releases, half of the files with each, unless RMQ_COMPAT_RELEASES=all. A test may
be marked with the release that it runs with.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def _load_kit() -> None:
    """Make the kit importable: test folders are not packages, and sys.path does not change."""
    place = HERE / "compat_kit"
    spec = importlib.util.spec_from_file_location(
        "compat_kit", place / "__init__.py", submodule_search_locations=[str(place)]
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["compat_kit"] = module
    spec.loader.exec_module(module)


_load_kit()

from compat_kit.build import VERSIONS, UnavailableError, class_path, java_program  # noqa: E402
from compat_kit.coverage_table import add_counts, encode_counts, table_lines  # noqa: E402
from compat_kit.network import Network  # noqa: E402
from compat_kit.rocketmq import Java, Verifier  # noqa: E402

IS_REQUIRED = os.environ.get("RMQ_COMPAT") == "required"
RUNS_ALL = os.environ.get("RMQ_COMPAT_RELEASES") == "all"
_known: dict[str, Java | str] = {}  # by version: how it is run, or why it is not


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests out at other releases than the one that they run with."""
    left = [] if RUNS_ALL else [item for item in items if _is_for_other_release(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def _is_for_other_release(item: pytest.Item) -> bool:
    found = item.callspec.params.get("java") if hasattr(item, "callspec") else None
    if found is None:
        return False
    marker = item.get_closest_marker("release")
    # By its name, so that another file does not change it.
    release = marker.args[0] if marker else VERSIONS[zlib.crc32(item.path.name.encode()) % len(VERSIONS)]
    return bool(found != release)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if IS_REQUIRED and report.skipped and not hasattr(report, "wasxfail") and HERE in item.path.parents:
        report.outcome = "failed"
        report.longrepr = f"RMQ_COMPAT=required, and it was skipped: {report.longrepr}"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what a worker process counted to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["compared"] = encode_counts()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """Add what a worker process counted."""
    add_counts(getattr(node, "workeroutput", {}).get("compared", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in table_lines():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def run_java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Java]]:
    """A function that returns how a version is run, or skips the test with the reason why it is not."""
    home = tmp_path_factory.mktemp("rocketmq")
    networks: list[Network] = []

    def find(version: str) -> Java:
        java_program("java")
        class_path(version)
        if not networks:
            networks.append(Network(version, home))
        return Java(version, networks[0], home)

    def get(version: str) -> Java:
        if version not in _known:
            try:
                _known[version] = find(version)
            except UnavailableError as error:
                _known[version] = str(error)
        found = _known[version]
        if isinstance(found, str):
            pytest.skip(found)
        return found

    yield get
    for network in networks:
        network.close()


@pytest.fixture(scope="session", params=VERSIONS)
def java(request: pytest.FixtureRequest, run_java: Callable[[str], Java]) -> Java:
    """One version after the other."""
    return run_java(request.param)


@pytest.fixture(scope="session")
def verifiers(run_java: Callable[[str], Java]) -> Iterator[Callable[[str], Verifier]]:
    """A function that returns the store classes of a version: one process for the whole run."""
    held: dict[str, Verifier] = {}

    def get(version: str) -> Verifier:
        return held.setdefault(version, Verifier(run_java(version)))

    yield get
    for verifier in held.values():
        verifier.close()


@pytest.fixture
def verifier(java: Java, verifiers: Callable[[str], Verifier]) -> Verifier:
    """The store classes of the version that the test is at."""
    return verifiers(java.version)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """A function that copies a store, with holes and modification times, for tests that change it."""
    made = 0

    def copy(store: Path) -> Path:
        nonlocal made
        made += 1
        target = tmp_path / "copies" / str(made)
        target.parent.mkdir(exist_ok=True)
        if shutil.which("cp") and sys.platform == "linux":
            subprocess.run(["cp", "-a", "--sparse=always", str(store), str(target)], check=True)
        else:
            shutil.copytree(store, target, copy_function=shutil.copy2)
        return target

    return copy
