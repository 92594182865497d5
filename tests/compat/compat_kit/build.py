"""Class path of a RocketMQ: its jars from Maven and our programs, compiled once and cached."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

VERSIONS = ("5.3.3", "4.9.7")
JAVA_MIN = 11
SOURCES = Path(__file__).resolve().parent.parent / "java"


class UnavailableError(Exception):
    """RocketMQ is not available for the tests; the text says what is missing and how to get it."""


def java_program(name: str) -> str:
    """Return the path of a program of the JDK: of JAVA_HOME if that is set, else the first on PATH."""
    home = os.environ.get("JAVA_HOME")
    path = shutil.which(str(Path(home, "bin", name))) if home else shutil.which(name)
    if path is None:
        where = f"in JAVA_HOME ({home})" if home else "on PATH"
        raise UnavailableError(f"no {name} {where}; Debian, Ubuntu: apt-get install openjdk-17-jdk-headless")
    return path


def class_path(version: str) -> str:
    """Return the class path of a version with our programs on it, built on first use.

    Raises UnavailableError where Java or Maven is missing or Maven cannot get the jars.
    """
    assert version in VERSIONS, version
    jars = _jars(version)
    classes = _once(_cache("classes", version, *sorted(SOURCES.rglob("*.java"))), lambda path: _compile(jars, path))
    return os.pathsep.join((str(classes), str(SOURCES / "resources"), f"{jars}/*"))


def _jars(version: str) -> Path:
    profile = ["-Pproxy"] if version.startswith("5.") else []
    options = [*profile, f"-Drocketmq.version={version}"]
    return maven_jars(version, SOURCES / "pom.xml", options, f"the jars of RocketMQ {version}")


def maven_jars(name: str, pom: Path, options: Sequence[str], what: str) -> Path:
    """Return a folder with the jars that a pom asks for, fetched on first use. `name` is part of the folder's name.

    Raises UnavailableError where Maven is missing or cannot get the jars, which are called `what`.
    """

    def fetch(folder: Path) -> None:
        maven = shutil.which("mvn")
        if maven is None:
            raise UnavailableError("no mvn on PATH; Debian, Ubuntu: apt-get install maven")
        settings = (f"-DoutputDirectory={folder}", "-DincludeScope=runtime")
        _run([maven, "-B", "-q", "-f", str(pom), "dependency:copy-dependencies", *options, *settings], what)

    return _once(_cache("jars", name, pom), fetch)


def _compile(jars: Path, folder: Path) -> None:
    sources = [str(path) for path in sorted(SOURCES.rglob("*.java"))]
    options = ["--release", str(JAVA_MIN), "-nowarn", "-encoding", "UTF-8", "-cp", f"{jars}/*", "-d", str(folder)]
    _run([java_program("javac"), *options, *sources], "the programs in tests/compat/java")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"cannot build {what}: {(done.stdout + done.stderr).strip()[-1500:]}")


def _cache(kind: str, version: str, *inputs: Path) -> Path:
    """Return the folder for the output of these files; its name changes with their contents."""
    digest = hashlib.sha256()
    for path in inputs:
        digest.update(path.name.encode() + path.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "rmq-spark-compat" / f"{kind}-{version}-{digest.hexdigest()[:12]}"


def _once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder, made in one piece: two runs at a time do not see each other's halves."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as room:
            made = Path(room) / "made"
            made.mkdir()
            make(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another run was first
                    raise
    return folder
