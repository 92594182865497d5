"""Tables: full width in a pipe, the width of the terminal otherwise."""

import io
import re
import sys
from typing import Any

import pytest
from rich.cells import cell_len

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


def on_screen(
    monkeypatch: pytest.MonkeyPatch, columns: int, spared: tuple[str, ...] = (), late: tuple[str, ...] = ()
) -> list[str]:
    return print_on_screen(monkeypatch, columns, ROWS, COLUMNS, spared, late)


def print_on_screen(
    monkeypatch: pytest.MonkeyPatch, width: int, rows: list[dict[str, Any]], *words: tuple[str | tuple[str, ...], ...]
) -> list[str]:
    """Return the lines that a terminal of this width shows."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    screen = _Screen()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        print_table(rows, *words)
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


def test_columns_of_a_pair_are_left_out_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ("topic", "group", "inRate", "outRate", "inDay", "outDay", "lagMessages")
    row = {"topic": "orders", "group": "a-group-of-billing", "inRate": 3.0, "outRate": 1.0, "inDay": 100, "outDay": 40}
    rows = [{**row, "lagMessages": 6}]
    lines = print_on_screen(monkeypatch, 60, rows, columns, (("inDay", "outDay"),))
    assert lines[0].split() == ["topic", "group", "inRate", "outRate", "lagMessages"]
    assert capsys.readouterr().err == "Columns that do not fit: inDay, outDay. --json prints all.\n"
    assert "inDay  outDay" in print_on_screen(monkeypatch, 80, rows, columns, (("inDay", "outDay"),))[0]


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


def test_durations_are_in_readable_units() -> None:
    assert [cell("secondsBehind", seconds) for seconds in (0, 0.25, 97_200, 657_717.1)] == [
        "0 s",
        "0.25 s",
        "1 d 3 h",
        "7 d 14 h",
    ]
    assert cell("age", 61) == "1 min 1 s"


def test_spared_columns_are_left_out_before_a_value_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = on_screen(monkeypatch, 36, spared=(), late=("what",))
    assert lines[0].split() == ["topic", "queueId", "bytes"]
    assert max(map(len, lines)) <= 36


def test_a_colour_has_a_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"state": "expired", "lagMessages": 5, "groupOffset": 0},
        {"state": "ok", "lagMessages": 0, "groupOffset": 1},
    ]

    def raw(**variables: str) -> str:
        screen = _Screen()
        with monkeypatch.context() as patch:
            patch.delenv("NO_COLOR", raising=False)
            for name, value in {"TERM": "xterm", "COLUMNS": "60", **variables}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdout", screen)
            print_table(rows, ("state", "lagMessages", "groupOffset"))
        return screen.getvalue()

    found = raw()
    for code, text in (("1;31", "expired"), ("33", "5"), ("32", "ok"), ("2", "0")):
        assert re.search(rf"\x1b\[{code}m *{text}", found), repr(found)
    assert len(re.findall(r"\x1b\[2m", found)) == 1, "an offset of 0 is not nothing"
    assert "\x1b" not in raw(NO_COLOR="1")
    assert "\x1b" not in raw(TERM="dumb")


def test_a_name_is_folded_between_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"topic": "RMQ_SYS_TRANS_OP_HALF_TOPIC", "queueId": 1}, {"topic": "x" * 30, "queueId": 2}]
    shown = print_on_screen(monkeypatch, 24, rows, ("topic", "queueId"))
    assert [line.rstrip() for line in shown[2:]] == [
        f"{'RMQ_SYS_TRANS_':<15}        1",
        " OP_HALF_TOPIC",
        f"{'x' * 15}        2",
        f" {'x' * 14}",
        " x",
    ]


def test_a_list_is_folded_before_a_column_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"group": "g", "topics": ["RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"], "lagBytes": 5}]
    shown = print_on_screen(monkeypatch, 50, rows, ("group", "topics", "lagBytes"), ("lagBytes",))
    assert [line.split() for line in shown[2:]] == [
        ["g", "RMQ_SYS_TRANS_HALF_TOPIC,", "5", "B"],
        ["RMQ_SYS_TRANS_OP_HALF_TOPIC"],
    ]


def test_an_empty_column_is_left_out_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"topic": "orders", "member": None}]
    assert print_on_screen(monkeypatch, 10, rows, ("topic", "member"), ("member",))[0].split() == ["topic"]
    assert capsys.readouterr().err == ""


def test_a_value_on_each_line_leaves_nothing_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = on_screen(monkeypatch, 20, spared=("what",))
    assert any(line.startswith("what") for line in lines)
    assert capsys.readouterr().err == ""


def test_a_wide_character_takes_two_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = [{"topic": "orders", "tag": "日本語", "messages": 12}, {"topic": "orders", "tag": "paid", "messages": 3}]
    columns = ("topic", "tag", "messages")
    print_table(wide, columns)
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert (first, second) == ("orders  日本語        12", "orders  paid           3")
    assert any("日本語" in line for line in print_on_screen(monkeypatch, 60, wide, columns))
    names = [{"topic": "日本語" * 12, "messages": 1}]
    lines = print_on_screen(monkeypatch, 40, names, ("topic", "messages"))
    assert max(map(cell_len, lines)) <= 40
    assert "".join(lines).count("日") == 12


def test_a_very_narrow_terminal_shows_all_for_which_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    row = [{"topic": "日本語 orders", "storeTimestamp": "2026-11-21"}]
    for width in range(14, 21):  # the longer name has 14 columns
        text = "".join(print_on_screen(monkeypatch, width, row, ("topic", "storeTimestamp")))
        assert [one for one in text if one in "日本語"] == (list("日本語") if width >= 18 else [])
