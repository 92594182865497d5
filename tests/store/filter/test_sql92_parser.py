"""Errors of SQL92 expressions: position, expected and found tokens, advice; limits of the parser."""

import pickle
import subprocess
import sys

import pytest
from support.sql92_rows import matches_row

from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.sql92_filter import compile_sql92
from rmq_spark.store.filter.sql92_parser import MAX_NESTED


def fault_of(text: str, *, strict_end: bool = True) -> str:
    with pytest.raises(OptionError) as caught:
        compile_sql92(text, strict_end=strict_end)
    return str(caught.value)


# The text with ^ before the position, the expected token, the found one, a word of the advice.
WRONG = [
    ("a > ^'5'", "a number or a property", "`'5'`", "without quotes"),
    ("^TRUE between 1 and 2", "a number or a property", "`TRUE`", "IS NULL"),
    ("a > 1 and b >= ^(c = 1)", "a number or a property", "a condition", "Only numbers"),
    ("^a > 1 > 2", "a number or a property", "a condition", "Only numbers"),
    ("a not between 1 and ^NULL", "a number or a property", "`NULL`", "IS NULL"),
    ("b = 1 or a <> ^NULL", "a value", "`NULL`", "IS NOT NULL"),
    ("TRUE = ^'x'", "TRUE or FALSE", "`'x'`", "compared with conditions"),
    ("a between 10 and ^9.5", "a number not below 10", "`9.5`", "smaller number first"),
    ("^not a in ('x')", "a property on the left of IN", "a condition", "NOT IN"),
    ("^-a in ('x')", "a property on the left of IN", "the negation of an operand", "NOT IN"),
    ("a in ('x', ^5)", "a text in single quotes", "`5`", "not 5"),
    ("a in ('x' ^'y')", ")", "`'y'`", "separated by commas"),
    ("a in ^'x'", "(", "`'x'`", "IN ('x', 'y')"),
    ("a startswith ^b", "a text in single quotes", "`b`", "STARTSWITH takes texts"),
    ("a is ^5", "NULL or NOT NULL", "`5`", "IS NOT NULL"),
    ("a is not ^5", "NULL", "`5`", "IS NOT NULL"),
    ("a not ^= 5", "BETWEEN, IN, CONTAINS, STARTSWITH or ENDSWITH", "`=`", "NOT (...)"),
    ("a between 1 ^or 2", "AND", "`OR`", "BETWEEN 1 AND 10"),
    ("(a = 1 ^b", "), AND, OR or a comparison", "`b`", "not closed"),
    ("a =^= 1", "a property, a number, a text", "`=`", "single ="),
    ("a = 1 and ^", "a property, a number, a text", "the end of the expression", "complete it"),
    ("^", "a property, a number, a text", "the end of the expression", "leave the option out"),
    ("^iN = 1", "a property, a number, a text", "`IN`", "reserved"),
    ("a = 1 and ^)", "a property, a number, a text", "`)`", "remove the token"),
    ("a = 1 or ^5.5", "a condition or a property", "`5.5`", "compare it"),
    ("^'x'", "a condition or a property", "`'x'`", "compare it"),
    ("not ^5", "a condition or a property", "`5`", "compare it"),
    ("^-a and b", "a condition or a property", "`-`", "compare it"),
    ("a > ^9223372036854775808", "fits a Long", "`9223372036854775808`", "9223372036854775807"),
    ("a > ^" + "9" * 5000, "fits a Long", "9999`", "9223372036854775807"),
    ("a > ^1e" + "9" * 5000, "fits a Double", "`1e9999", "1.7976931348623157E308"),
    ("a > ^0.0", "fits a Double", "`0.0`", "zero is written 0"),
    ("a > ^1e400", "fits a Double", "`1e400`", "1.7976931348623157E308"),
    ("a = ^'x", "an operator", "a text without a closing quote", "written twice"),
    ("a = 'it'^s'", "AND, OR, a comparison or the end", "`s`", "written twice"),
    ('a = ^"x"', "an operator", '`"`', "single quotes"),
    ("a ^!= 1", "an operator", "`!`", "<>"),
    ("a = 1 ^&& b = 1", "an operator", "`&`", "AND"),
    ("a = 1^;", "an operator", "`;`", "Remove the semicolon"),
    ("a ^/* b", "an operator", "a comment without an end", "*/"),
    ("a^.b = 1", "an operator", "`.`", "cannot be filtered on"),
    ("a^\u00a0= 1", "an operator", "the character U+00A0", "ASCII"),
    ("a = 1 ^\v", "an operator", "the character U+000B", "ASCII"),
    ("a = '\U0001f600^\ud800'", "characters", "the character U+D800", "ASCII"),
    # RocketMQ reports no error for these, and filters by the text before the position.
    ("a = 'x' ^b", "AND, OR, a comparison or the end", "`b`", "RocketMQ itself ignores"),
    ("a ^Like 'x%'", "AND, OR, a comparison or the end", "`Like`", "CONTAINS"),
    ("a = 1^)", "AND, OR, a comparison or the end", "`)`", "none is open"),
    ("a > 0^0", "AND, OR, a comparison or the end", "`0`", "leading zeros"),
    ("a > 1 ^- 1 > 0", "AND, OR, a comparison or the end", "`-`", "Arithmetic"),
    ("a > 1 ^-- more", "AND, OR, a comparison or the end", "`-`", "line end"),
]


@pytest.mark.parametrize(("marked", "expected", "found", "advice"), WRONG, ids=lambda value: repr(value)[:40])
def test_parse_sql92_marks_the_position_of_an_error(marked: str, expected: str, found: str, advice: str) -> None:
    position, text = marked.index("^"), marked.replace("^", "", 1)
    head, _, _, text_of_advice = fault_of(text).split("\n")
    assert head.startswith(f"sql92, character {position + 1}: expected ")
    assert expected in head
    assert head.endswith(f"found {found}.") or found in head.split(", found ")[1]
    assert advice in text_of_advice


def test_fault_has_the_caret_below_the_position() -> None:
    assert fault_of("a > 5 AND b LIKE 'x'").split("\n")[1:3] == [
        "    a > 5 AND b LIKE 'x'",
        "                ^",
    ]


def test_fault_shows_the_line_of_the_position() -> None:
    lines = fault_of("a = 1 AND -- one\r\n\tb = 2 AND\n c == 3\n OR d = 4").split("\n")
    assert lines[0].startswith("sql92, line 3, character 5: ")
    assert lines[1:3] == ["     c == 3", "        ^"]
    assert fault_of("a = 1\n\t!").split("\n")[:3] == [
        "sql92, line 2, character 2: expected a property, a literal or an operator, found `!`.",
        "    \t!",
        "    \t^",
    ]


def test_fault_moves_the_caret_by_two_for_a_wide_character() -> None:
    assert fault_of("a = '中e\u0301' b").split("\n")[1:3] == ["    a = '中e\u0301' b", "              ^"]


@pytest.mark.parametrize("position", [0, 1, 60, 500, 990])
def test_fault_shows_the_part_of_a_long_line_around_the_position(position: int) -> None:
    text = " " * position + "!" + "x" * (1000 - position)
    _, shown, caret, _ = fault_of(text).split("\n")
    assert len(shown) <= 4 + 102
    assert shown[caret.index("^")] == "!"


def test_fault_prints_half_a_surrogate_pair() -> None:
    fault_of("a = '\ud800'").encode()
    fault_of("\ud800 = 5").encode()


@pytest.mark.parametrize("opened", ["(", "not ", "-", "+", "-("])
def test_parse_sql92_refuses_deep_nesting_without_a_crash(opened: str) -> None:
    closed = ")" * opened.count("(")
    deep = MAX_NESTED // len(opened.strip().replace("not", "n"))
    inner = "1" if opened[0] in "-+" else "b"
    text = "a = {}" if opened[0] in "-+" else "{}"
    matches_row(compile_sql92(text.format(opened * deep + inner + closed * deep)), {"b": "x"})
    for count in (deep + 1, 20_000):
        assert "at most 50 levels" in fault_of(text.format(opened * count + inner + closed * count))


def test_parse_sql92_accepts_a_long_flat_chain() -> None:
    many = compile_sql92(" OR ".join(f"(a = '{number}' AND b IS NULL)" for number in range(3000)))
    assert matches_row(many, {"a": "2999"})
    assert not matches_row(many, {"a": "3000"})
    assert "at most 50 levels" in fault_of("a" + " is null" * 1000)
    assert matches_row(compile_sql92("a" + " is null" * 100), {}) is False


def test_strict_end_false_reads_only_one_token_after_the_expression() -> None:
    ignoring = compile_sql92("a = '1' b \" 'c d", strict_end=False)
    assert ignoring.property_names == ("a",)
    assert matches_row(ignoring, {"a": "1"})
    assert 'found `"`' in fault_of("a = '1' \"", strict_end=False)
    assert "the end of the expression" in fault_of("a = '1' or", strict_end=False)


def test_fault_keeps_its_text_when_pickled() -> None:
    with pytest.raises(OptionError) as caught:
        compile_sql92("a like 'x'")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


MILLIONS = 3_000_000
HUGE = {
    "a text": "a = '" + "x" * MILLIONS + "'",
    "quotes in a text": "a = '" + "''" * MILLIONS + "'",
    "blanks": " " * MILLIONS + "a = 1",
    "comments": "/**/" * MILLIONS + "a = 1",
    "a name": "a" * MILLIONS + " = 1",
}


@pytest.mark.parametrize("kind", HUGE)
def test_lexer_needs_memory_for_a_few_copies_of_a_huge_literal(kind: str) -> None:
    """A regular expression that can backtrack keeps a hundred bytes per character."""
    code = (
        "import resource, sys\n"
        "from rmq_spark.store.filter.sql92_parser import parse_sql92\n"
        "text = sys.stdin.read()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "parse_sql92(text, strict_end=True)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], input=HUGE[kind], text=True, stdout=-1, env=environment, check=True
    )
    assert int(done.stdout) * 1024 < 16 * len(HUGE[kind])


def test_fault_shows_only_the_ends_of_a_huge_literal() -> None:
    for literal in ("9" * MILLIONS, "1e" + "9" * MILLIONS, "'" + "x" * MILLIONS + "'"):
        assert len(fault_of(f"a > {literal}")) < 600


def test_lexer_refuses_an_unclosed_text_at_its_beginning() -> None:
    for text in ("'", "'x", "'x''", "'x''y", "'''''x"):
        assert "character 5: " in fault_of(f"a = {text}")
        assert "without a closing quote" in fault_of(f"a = {text}", strict_end=False)
