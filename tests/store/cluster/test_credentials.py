"""The keys of an account: from the address, and from a file that changes."""

import os
from pathlib import Path

import pytest

from rmq_spark.store.cluster.address import Credentials
from rmq_spark.store.cluster.credentials import CHECK_PERIOD_S, CredentialsReader
from rmq_spark.store.errors import OptionError


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("accessKey: a\nsecretKey: b\n")
    return path


def reader_of(file: Path, clock: Clock) -> CredentialsReader:
    return CredentialsReader(Credentials(file=str(file)), clock)


def test_reader_returns_the_keys_of_the_address(clock: Clock) -> None:
    assert CredentialsReader(Credentials("a", "b"), clock).current() == Credentials("a", "b")
    assert CredentialsReader(None, clock).current() is None


def test_reader_refuses_keys_that_were_withheld(clock: Clock) -> None:
    with pytest.raises(OptionError, match="with_secrets_of"):
        CredentialsReader(Credentials(is_withheld=True), clock).current()


def test_reader_reads_all_forms_of_lines(file: Path, clock: Clock) -> None:
    file.write_text("\ufeff# an account\n\n accessKey : 'a: b'\nsecretKey: \"#c\"\r\nsecurityToken: d=\n", newline="")
    assert reader_of(file, clock).current() == Credentials("a: b", "#c", "d=")


def test_reader_reads_a_changed_file_after_the_period(file: Path, clock: Clock) -> None:
    reader = reader_of(file, clock)
    reader.current()
    file.write_text("accessKey: a\nsecretKey: changed\n")
    assert reader.current() == Credentials("a", "b")
    clock.now_s += CHECK_PERIOD_S
    assert reader.current() == Credentials("a", "changed")


def test_reader_notices_a_replaced_file_of_the_same_size_and_time(file: Path, clock: Clock, tmp_path: Path) -> None:
    reader = reader_of(file, clock)
    reader.current()
    other = tmp_path / "other"
    other.write_text("accessKey: a\nsecretKey: c\n")
    status = file.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)
    clock.now_s += CHECK_PERIOD_S
    assert reader.current() == Credentials("a", "c")


@pytest.mark.parametrize("content", [None, "accessKey: a\n"])
def test_reader_keeps_the_last_keys_while_the_file_is_replaced(file: Path, clock: Clock, content: str | None) -> None:
    reader = reader_of(file, clock)
    reader.current()
    file.unlink()
    if content is not None:
        file.write_text(content)
    clock.now_s += CHECK_PERIOD_S
    assert reader.current() == Credentials("a", "b")
    file.write_text("accessKey: a\nsecretKey: new\n")
    clock.now_s += CHECK_PERIOD_S
    assert reader.current() == Credentials("a", "new")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"planted-secret", "line 1"),
        (b"accessKey: a\nplanted-secret: b\n", "line 2"),
        (b"accessKey: planted-secret\n", "no secretKey"),
        (b"", "no accessKey and no secretKey"),
        (b"accessKey: \xff planted-secret", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_reader_refuses_a_wrong_file_without_showing_its_text(
    file: Path, clock: Clock, content: bytes | None, found: str
) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(OptionError, match=found) as error:
        reader_of(file, clock).current()
    assert "planted" not in str(error.value)
    assert str(file) in str(error.value)
