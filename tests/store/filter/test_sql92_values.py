"""Numbers of texts as Java parses them, one text at a time and by column."""

import math
import struct

import numpy as np
import pyarrow as pa
import pytest
from support.sql92_rows import matches_row
from support.sql92_samples import ODD_TEXTS, Sql92Samples

from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter import sql92_values
from rmq_spark.store.filter.sql92_filter import compile_sql92
from rmq_spark.store.filter.sql92_lexer import read_boolean, read_double, read_integer
from rmq_spark.store.filter.sql92_values import read_doubles, read_integers

INTEGERS = {
    "0": 0,
    "-0": 0,
    "+7": 7,
    "007": 7,
    "0" * 5000 + "1": 1,
    "2147483647": 2**31 - 1,
    "-2147483648": -(2**31),
    "\uff14": 4,  # a full-width 4
    "-\u0661\u0662": -12,  # Arabic-Indic digits
    "1\u0967": 11,  # digits of two scripts
}
LONGS = {"2147483648": 2**31, "9223372036854775807": 2**63 - 1, "-9223372036854775808": -(2**63)}
BEYOND_LONG = ("9223372036854775808", "-9223372036854775809", "18446744073709551617", "1" + "0" * 25)
NO_INTEGERS = (
    "",
    "+",
    "-",
    "--1",
    "+-1",
    " 1",
    "1 ",
    "1_0",
    "0x10",
    "1.0",
    "1e3",
    "1L",
    "\U0001d7cf",
    "\u00b2",
    "x1",
    "1:1",
    "1/1",
    "1x",
)
DOUBLES = {
    "3": 3.0,
    "-0": -0.0,
    "+.5e1": 5.0,
    "5.": 5.0,
    " \t\n\x00\x1f4d\x0b ": 4.0,
    "1e23": 1e23,
    "0.1f": 0.1,  # the suffix changes nothing
    "NaN": math.nan,
    "-NaN": math.nan,
    "+Infinity": math.inf,
    "-Infinity": -math.inf,
    "1e400": math.inf,
    "-1e-400": -0.0,
    "1e99999999999999999999": math.inf,
    "4.9e-324": 5e-324,
    "2.4703282292062327e-324": 0.0,
    "2.4703282292062328e-324": 5e-324,
    "1.7976931348623158e308": 1.7976931348623157e308,
    "1.7976931348623159e308": math.inf,
    "9007199254740993": 9007199254740992.0,
    "9007199254740993.0000000000000000000000000001": 9007199254740994.0,
    "18446744073709551615": 18446744073709551616.0,
    "35184372088832.0000000000000000001": 35184372088832.0,  # its digits as one number are 1 modulo 2^64
    "+0.12345678901234567": 0.12345678901234567,
    "0x10p0": 16.0,
    "-0X.8P1d": -1.0,
    "0x1.fffffffffffff8p1023": math.inf,
    "0x1p-1075": 0.0,
    "0x1.8p-1075": 5e-324,
    "0x1p99999999999": math.inf,
    "-0x1p99999999999": -math.inf,
    "0x0p99999999999": 0.0,
}
NO_DOUBLES = (
    *("", " ", ".", "-", "+", "e5", "1e", "1e+", "1_0", "1.2.3", "0x10", "0x.p1", "0x1p", "nan", "inf", "NaNd"),
    *(
        "Infinityf",
        "1dd",
        "1l",
        "- 1",
        "\u00a01",
        "\u30001",
        "\uff14",
        "\u0661.5",
        "1,5",
        "--1.5",
        "1.5e1.5",
        "1 2",
        "1:1",
        "1.:5",
        "1/.5",
    ),
)


def column(read: object, texts: list[str], *arguments: int) -> list[int | float | None]:
    values, is_number = read(pa.array(texts, pa.string()), *arguments)  # type: ignore[operator]
    assert not values[~is_number].any()
    return [value if is_one else None for value, is_one in zip(values.tolist(), is_number.tolist(), strict=True)]


def bits_of(value: int | float | None) -> bytes | None:
    """Distinguish -0.0 from 0.0, and make NaN equal to itself."""
    return None if value is None else struct.pack("d", math.nan if value != value else value)


def test_read_integers_and_read_integer_accept_the_range_of_their_type() -> None:
    for bits, numbers in ((32, INTEGERS), (64, INTEGERS | LONGS)):
        assert [read_integer(text, bits) for text in numbers] == list(numbers.values())
        assert column(read_integers, list(numbers), bits) == list(numbers.values())
    for bits, others in ((32, (*NO_INTEGERS, *LONGS, *BEYOND_LONG)), (64, (*NO_INTEGERS, *BEYOND_LONG))):
        for text in others:
            assert read_integer(text, bits) is None, text
        assert column(read_integers, list(others), bits) == [None] * len(others)


def test_read_doubles_and_read_double_return_the_nearest_double() -> None:
    expected = list(map(bits_of, DOUBLES.values()))
    assert [bits_of(read_double(text)) for text in DOUBLES] == expected
    assert [bits_of(value) for value in column(read_doubles, list(DOUBLES))] == expected
    for text in NO_DOUBLES:
        assert read_double(text) is None, text
    assert column(read_doubles, list(NO_DOUBLES)) == [None] * len(NO_DOUBLES)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("tRuE", True), (" true", False), ("1", False), ("", False), ("trüe", False)]
)
def test_read_boolean_accepts_only_the_word_true(text: str, value: bool) -> None:
    assert read_boolean(text) is value


@pytest.mark.parametrize("block_rows", [1, 7, 16384])
@pytest.mark.parametrize("arrow_type", [pa.string(), pa.large_string()])
def test_read_doubles_and_integers_agree_with_one_text_at_a_time(
    block_rows: int, arrow_type: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql92_values, "_BLOCK_ROWS", block_rows)
    samples = Sql92Samples(f"numbers {block_rows}")
    rows = [None, *ODD_TEXTS, None, *(samples.text() for _ in range(1500 if block_rows > 1 else 100))]
    # A slice begins in the middle of the column's bytes, and other rows follow it.
    texts = pa.array(["12", *rows, "34"], arrow_type).slice(1, len(rows))
    for bits in (32, 64):
        expected = [None if text is None else read_integer(text, bits) for text in rows]
        values, is_number = read_integers(texts, bits)
        assert [value if found else None for value, found in zip(values.tolist(), is_number, strict=True)] == expected
    doubles = [None if text is None else read_double(text) for text in rows]
    values, is_number = read_doubles(texts)
    found = [value if is_one else None for value, is_one in zip(values.tolist(), is_number, strict=True)]
    assert list(map(bits_of, found)) == list(map(bits_of, doubles))


def test_read_doubles_accepts_any_number_of_digits_around_the_point() -> None:
    digits = "1234567890123456789012"
    texts = [digits[:whole] + "." + digits[:part] for whole in range(23) for part in range(23) if whole or part]
    assert column(read_doubles, texts) == list(map(float, texts))
    texts = [digits[:count] for count in range(1, 20)]
    assert column(read_integers, texts, 64) == [None if int(text) >= 2**63 else int(text) for text in texts]


def test_read_doubles_and_integers_read_what_python_writes() -> None:
    rng = np.random.default_rng(3)
    doubles = rng.integers(-(2**63), 2**63, 3000).view(np.float64)
    doubles = doubles[np.isfinite(doubles)].tolist() + rng.random(2000).tolist() + (rng.random(2000) * 1e6).tolist()
    assert column(read_doubles, list(map(repr, doubles))) == doubles
    longs = (rng.integers(-(2**63), 2**63, 3000) >> rng.integers(0, 63, 3000)).tolist()
    assert column(read_integers, list(map(str, longs)), 64) == longs


def test_read_doubles_and_integers_of_columns_without_texts() -> None:
    for texts in (pa.array([], pa.string()), pa.array([None, None], pa.string()), pa.array(["", None, ""])):
        assert not read_doubles(texts)[1].any()
        assert not read_integers(texts, 32)[1].any()


def test_read_doubles_and_integers_ignore_the_bytes_of_a_null() -> None:
    offsets, none_is_valid = np.array([0, 4, 6], np.int32), b"\x00"
    texts = pa.StringArray.from_buffers(2, pa.py_buffer(offsets), pa.py_buffer(b"1234.5"), pa.py_buffer(none_is_valid))
    for values, is_number in (read_doubles(texts), read_integers(texts, 64)):
        assert not values.any()
        assert not is_number.any()


@pytest.mark.parametrize(
    ("text", "message", "is_match"),
    [
        ("a > 2147483647", "2147483648", False),  # an Integer, so a greater text is invalid
        ("a >= 2147483647", "2147483647", True),
        ("a >= 2147483648", "2147483648", True),  # a Long
        ("a > 7L", "2147483648", False),  # an Integer in spite of its L, because it is small
        ("a > 7.", "2147483648", True),  # a Double
    ],
)
def test_matches_parses_a_text_as_the_class_of_the_literal(text: str, message: str, is_match: bool) -> None:
    assert matches_row(compile_sql92(text), {"a": message}) is is_match
    assert compile_sql92(text).matches({"a": pa.array([message])}, 1).tolist() == [is_match]


def test_between_compares_a_long_beside_a_double_as_doubles() -> None:
    compile_sql92("a BETWEEN 9007199254740993 AND 9007199254740992.0")  # equal as doubles
    with pytest.raises(OptionError):
        compile_sql92("a BETWEEN 9007199254740993 AND 9007199254740992")
