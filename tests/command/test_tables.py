"""Tables: full width in a pipe, the width of the terminal otherwise."""

import io
import re
import sys

import pytest

from rmq_spark.command.output import bytes_text, cell
from rmq_spark.command.tables import print_table

ROWS = [
    {"topic": "a-topic-with-a-rather-long-name", "queueId": 3, "bytes": 2048, "what": "word " * 12, "free": None},
    {"topic": "b", "queueId": 12, "bytes": 0, "what": "short", "free": None},
]
COLUMNS = ("topic", "queueId", "bytes", "what")


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_screen(monkeypatch: pytest.MonkeyPatch, columns: int, spared: tuple[str, ...] = ()) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    screen = _Screen()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        print_table(ROWS, COLUMNS, spared)
    return re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()


def test_in_a_pipe_a_row_is_a_line_whatever_its_width(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(ROWS, COLUMNS, ("what",))
    head, first, second = capsys.readouterr().out.splitlines()
    assert head == "topic                            queueId  bytes  what"
    assert first == f"a-topic-with-a-rather-long-name        3  2 KiB  {('word ' * 12).rstrip()}"
    assert second == "b                                     12    0 B  short"


def test_where_there_is_room_a_row_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(on_screen(monkeypatch, 120)) == 4


def test_what_can_be_spared_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = on_screen(monkeypatch, 60, ("what", "bytes"))
    assert len(lines) == 4
    assert lines[0].split() == ["topic", "queueId", "bytes"]
    assert capsys.readouterr().err == "Columns that do not fit: what. --json prints all.\n"


def test_long_texts_are_folded_and_numbers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = on_screen(monkeypatch, 60)
    assert max(map(len, lines)) <= 60
    assert any("2 KiB" in line for line in lines)
    assert "".join(line[:20].split()[0] for line in lines[2:4] if line[:20].strip()).startswith("a-topic")


def test_on_a_very_narrow_terminal_a_value_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = on_screen(monkeypatch, 36)
    assert max(map(len, lines)) <= 36
    assert "queueId  3" in [line.rstrip() for line in lines]
    assert "" in [line.strip() for line in lines], "between two rows"


def test_cells_are_on_one_line() -> None:
    assert cell("what", "a\nb\t\x1b[1m") == r"a\nb\t\x1b[1m"
    assert cell("names", ["a", "b"]) == "a, b"
    assert cell("properties", {"a": "1"}) == "a=1"
    assert (cell("isX", True), cell("isX", False), cell("x", None)) == ("yes", "no", "")
    assert [bytes_text(size) for size in (0, 1023, 1024, 1 << 20, 1 << 60)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1 MiB",
        "1.02e+03 PiB",
    ]
