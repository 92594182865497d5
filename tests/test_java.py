"""Without a suitable Java, an error before Spark starts names the remedy."""

from pathlib import Path

import pytest

from rmq_spark import OptionError
from rmq_spark.java import check_java


def make_java(home: Path, answer: str) -> Path:
    """Make a Java home whose `java -version` answers on stderr, like the real one."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho '{answer}' >&2\n")
    java.chmod(0o755)
    return home


@pytest.mark.parametrize("answer", ['openjdk version "17.0.15" 2025-04-15', 'java version "21" 2023-09-19', '"'])
def test_java_17_and_newer_pass_and_anything_else_is_refused(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path, answer)))
    if "version" in answer:
        check_java()
    else:
        with pytest.raises(OptionError, match="-version printed"):
            check_java()


@pytest.mark.parametrize(
    ("answer", "number"),
    [('java version "1.8.0_392"', "8"), ('openjdk version "11.0.21" 2023-10-17', "11")],
)
def test_an_older_java_is_named_with_its_version_and_where_it_came_from(
    answer: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path, answer)))
    with pytest.raises(OptionError, match=rf"from JAVA_HOME\) is Java {number}\. Install Java 17"):
        check_java()


def test_java_home_wins_over_path_as_in_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = make_java(tmp_path / "new", 'openjdk version "17.0.1"')
    monkeypatch.setenv("PATH", f"{new}/bin:/usr/bin:/bin")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(OptionError, match=r"nowhere.* does not run"):
        check_java()
    monkeypatch.delenv("JAVA_HOME")
    check_java()


def test_no_java_at_all_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OptionError, match=r"no `java` on PATH.*apt-get install"):
        check_java()
