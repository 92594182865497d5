"""option_parsers: which texts each parser accepts, and with which error it refuses others."""

from contextlib import suppress
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.parsed_options import parse_options

from rmq_spark.datasource.options import option_parsers as parsers
from rmq_spark.datasource.options.option_parsers import EARLIEST, LATEST, InvalidValueError, Times
from rmq_spark.datasource.options.option_table import OPTIONS
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey

# No deadline, as the machine may be busy. The same examples every time.
usual = settings(deadline=None, derandomize=True)

NOW_MS = 1_700_000_000_000


def refusal(parse, *arguments):
    with pytest.raises(InvalidValueError) as caught:
        parse(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"), [("1", 1), (" 42 ", 42), ("1_000_000", 10**6), (str(2**63 - 1), 2**63 - 1)]
)
def test_parse_count_accepts_an_integer_from_1(text, number) -> None:
    assert parsers.parse_count(text) == number


@pytest.mark.parametrize("text", ["0", "-1", "-5", "1.5", "", "ten", "1e3", str(2**63), "٣"])
def test_parse_count_refuses_other_texts(text) -> None:
    assert refusal(parsers.parse_count, text) == "expected an integer ≥ 1."


@pytest.mark.parametrize(
    ("text", "size"),
    [("64m", 64 << 20), ("1g", 1 << 30), ("512", 512), ("8 KB", 8192), ("3kib", 3072), ("2B", 2), ("1T", 1 << 40)],
)
def test_parse_size_accepts_bytes_or_a_unit(text, size) -> None:
    assert parsers.parse_size(text) == size


@pytest.mark.parametrize("text", ["0", "-1m", "64x", "m", "", "1.5g", "99999999999t"])
def test_parse_size_refuses_other_texts_with_an_example(text) -> None:
    assert "such as 64m" in refusal(parsers.parse_size, text)


def test_parse_size_accepts_0_only_if_the_minimum_is_0() -> None:
    assert parsers.parse_size("0", minimum=0) == 0
    assert "a size ≥ 0:" in refusal(parsers.parse_size, "-1", 0)
    assert "a size ≥ 1 byte:" in refusal(parsers.parse_size, "0")


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("15m", 900_000), ("500ms", 500), ("2 h", 7_200_000), ("10S", 10_000), ("1d", 86_400_000), ("7", 7)],
)
def test_parse_duration_accepts_ms_or_a_unit(text, duration_ms) -> None:
    assert parsers.parse_duration(text) == duration_ms


@pytest.mark.parametrize(
    ("duration_ms", "text"), [(90_000, "90s"), (1_500, "1500ms"), (7_200_000, "7200s"), (1, "1ms")]
)
def test_show_duration_returns_what_parse_duration_accepts(duration_ms, text) -> None:
    assert parsers.show_duration(duration_ms) == text
    assert parsers.parse_duration(text) == duration_ms


@pytest.mark.parametrize("text", ["0", "-1m", "15 parsecs", "", "m"])
def test_parse_duration_refuses_other_texts_with_an_example(text) -> None:
    assert "such as 15m" in refusal(parsers.parse_duration, text)


@pytest.mark.parametrize(
    ("text", "wait_ms"), [("0", 0), ("00", 0), ("0m", 0), ("0 s", 0), (" 0MS ", 0), ("10", 10), ("15s", 15_000)]
)
def test_parse_duration_accepts_0_if_that_is_the_minimum(text, wait_ms) -> None:
    assert parsers.parse_duration(text, 0) == wait_ms


@pytest.mark.parametrize("text", ["-1s", "0 parsecs", "", "s", "00x", "99999999999999999d"])
def test_parse_duration_names_its_minimum(text) -> None:
    assert refusal(parsers.parse_duration, text, 0).startswith("expected a duration ≥ 0: a number with ms")
    assert refusal(parsers.parse_duration, text, 1000).startswith("expected a duration ≥ 1s: a number with ms")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), (" TRUE ", True)])
def test_parse_flag_accepts_true_or_false_in_any_case(text, value) -> None:
    assert parsers.parse_flag(text) is value


@pytest.mark.parametrize("text", ["yes", "1", ""])
def test_parse_flag_refuses_other_words(text) -> None:
    assert refusal(parsers.parse_flag, text) == "expected one of: true, false."


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("relative/store", "relative/store"),
        ("/data/store", "/data/store"),
        ("file:/data/store", "/data/store"),
        ("file:///data/my%20store", "/data/my store"),
        ("file://localhost/data", "/data"),
        ("file:///data/a?b#c", "/data/a?b#c"),
        ("file:/data#1", "/data#1"),
        ("a:b", "a:b"),  # Spark does not take one letter for a scheme
    ],
)
def test_parse_path_accepts_a_file_uri(text, path) -> None:
    assert parsers.parse_path(text) == path


@pytest.mark.parametrize("text", ["s3://bucket/store", "hdfs:///store", "dbfs:/store", "s3a://b"])
def test_parse_path_refuses_other_schemes_with_a_next_step(text) -> None:
    message = refusal(parsers.parse_path, text)
    assert text.split(":")[0] in message
    assert "Mount" in message


def test_parse_path_refuses_a_file_uri_with_a_host() -> None:
    assert "three slashes" in refusal(parsers.parse_path, "file://data/store")


def test_parse_path_refuses_an_empty_text() -> None:
    assert refusal(parsers.parse_path, "  ") == "expected a text that is not empty."


@pytest.mark.parametrize("text", ["/a\0b", "file:///a%00b", "file:/a\0b"])
def test_parse_path_refuses_the_character_0(text) -> None:
    assert "found the character 0" in refusal(parsers.parse_path, text)
    assert "found the character 0" in refusal(parsers.parse_paths, f"/x,{text}")


def test_parse_path_refuses_a_file_uri_without_a_path() -> None:
    assert refusal(parsers.parse_path, "file:") == "found no folder; expected a path, or file:///path."
    assert parsers.parse_path("file:///a%20") == "/a ", "a blank at the end is part of the name"


def test_parse_topics_splits_at_commas() -> None:
    assert parsers.parse_topics(" orders ,%RETRY%billing,a-b_c|d") == ("orders", "%RETRY%billing", "a-b_c|d")


@pytest.mark.parametrize("text", ["../etc/passwd", "a/b", "orders .", "a,b/../c", "ärger", "a" * 256, "@"])
def test_parse_topics_names_an_illegal_topic(text) -> None:
    assert "found the topic name" in refusal(parsers.parse_topics, text)


def test_parse_topics_refuses_an_empty_or_repeated_topic() -> None:
    assert "empty name" in refusal(parsers.parse_topics, "a,,b")
    assert 'found "a" twice' in refusal(parsers.parse_topics, "a,b,a")


def test_parse_pattern_refuses_an_invalid_expression() -> None:
    assert "expected a regular expression of Python: missing )" in refusal(parsers.parse_pattern, "orders-(")
    assert parsers.parse_pattern("orders-.*") == "orders-.*"


def test_parse_search_words_splits_at_blanks_because_keys_may_have_commas() -> None:
    assert parsers.parse_search_words(" a,b  c a,b ") == ("a,b", "c")


def test_parse_assignment_returns_sorted_queues() -> None:
    assert parsers.parse_assignment('{"b": [1, 0], "a": [2, 2]}') == (
        QueueKey("a", 2),
        QueueKey("b", 0),
        QueueKey("b", 1),
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"a": [0', "found invalid JSON"),
        ("[0]", "found JSON that is not an object"),
        ('{"a": 0}', "found 0 for topic a; expected queue ids"),
        ('{"a": []}', "found [] for topic a; expected queue ids"),
        ("{}", "found no queue"),
        ('{"a": [-1]}', "queue id -1"),
        ('{"a": [true]}', "queue id true"),
        ('{"a": ["x"]}', 'queue id "x"'),
        ('{"../a": [0]}', "found the topic name"),
    ],
)
def test_parse_assignment_refuses_other_texts_with_the_finding(text, part) -> None:
    message = refusal(parsers.parse_assignment, text)
    assert part in message


@pytest.mark.parametrize(("text", "default"), [("earliest", EARLIEST), (" Latest ", LATEST)])
def test_parse_positions_accepts_a_word(text, default) -> None:
    assert parsers.parse_positions(text).default == default


def test_parse_positions_accepts_json_with_sentinels_and_skips_the_metadata() -> None:
    found = parsers.parse_positions('{"a": {"0": 5, "11": -1}, "b": {"0": -2}, "@": {"v": 1, "start": {}}}')
    assert found.default is None
    assert found.queues == {QueueKey("a", 0): 5, QueueKey("a", 11): LATEST, QueueKey("b", 0): EARLIEST}


def test_parse_positions_names_what_it_expects() -> None:
    assert refusal(parsers.parse_positions, "earlyest") == 'expected earliest, latest or {"TopicA": {"0": 42}}.'


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("group", "expected earliest, latest or {"),
        ('{"a": {"0": 5}', "found invalid JSON"),
        ('{"a": 5}', "found 5 for topic a; expected offsets by queue id"),
        ('{"a": {"0": -3}}', "found the offset -3 for queue a/0"),
        ('{"a": {"0": 1.5}}', "found the offset 1.5 for queue a/0"),
        ('{"a": {"0": "5"}}', 'found the offset "5" for queue a/0'),
        ('{"a": {"0": true}}', "found the offset true for queue a/0"),
        ('{"a": {"00": 5}}', 'queue id "00"'),
        ('{"a": {"x": 5}}', 'queue id "x"'),
        ('{"a/b": {"0": 5}}', "found the topic name"),
        (f'{{"a": {{"0": {2**63}}}}}', "expected an integer ≥ 0, -1 (latest) or -2 (earliest)"),
    ],
)
def test_parse_positions_refuses_other_texts_with_the_finding(text, part) -> None:
    assert part in refusal(parsers.parse_positions, text)


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("0", 0),
        ("1700000000123", 1_700_000_000_123),
        ("2026-01-31T12:00:00Z", 1_769_860_800_000),
        ("2026-01-31T13:00:00.5+01:00", 1_769_860_800_500),
        ("-10m", NOW_MS - 600_000),
        ("-500ms", NOW_MS - 500),
        ("-2H", NOW_MS - 7_200_000),
        ("-0s", NOW_MS),
        ("-9999999d", 0),
    ],
)
def test_parse_time_accepts_ms_or_iso_or_a_duration_before_now(text, time_ms) -> None:
    assert parsers.parse_time(text, NOW_MS) == time_ms


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("yesterday", "expected ms since 1970"),
        ("2026-01-31T12:00:00", "found a time without a time zone; expected ms since 1970"),
        ("2026-01-31", "found a time without a time zone; expected ms since 1970"),
        ("-10", 'found "-10" without the unit'),
        ("-10y", 'found "-10y" without the unit'),
        ("10m", "expected ms since 1970"),
        ("", "expected ms since 1970"),
        (str(2**63), "expected ms since 1970"),
    ],
)
def test_parse_time_refuses_other_texts_with_examples(text, part) -> None:
    message = refusal(parsers.parse_time, text, NOW_MS)
    assert part in message
    assert "-10m" in message


@usual
@given(st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(9998, 1, 1)))
def test_parse_time_returns_the_moment_of_an_iso_time(moment) -> None:
    moment = moment.replace(microsecond=moment.microsecond // 1000 * 1000, tzinfo=UTC)
    expected = round((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000)
    assert parsers.parse_time(moment.isoformat(), NOW_MS) == expected


def test_parse_times_prefers_a_queue_to_its_topic_and_a_topic_to_the_default() -> None:
    found = parsers.parse_times('{"a": "-1s", "b": {"0": 1600000000005, "1": "-2s"}}', NOW_MS)
    assert found.of(QueueKey("a", 7)) == NOW_MS - 1000
    assert found.of(QueueKey("b", 0)) == 1_600_000_000_005
    assert found.of(QueueKey("b", 1)) == NOW_MS - 2000
    assert found.of(QueueKey("b", 2)) is None
    assert parsers.parse_times("-1s", NOW_MS) == Times(NOW_MS - 1000)
    assert Times(1, {"a": 2}, {QueueKey("a", 0): 3}).of(QueueKey("a", 0)) == 3


@pytest.mark.parametrize("text", ["{}", '{"@": {"v": 1}}', '{"a": {"0": "soon"}}', '{"a": true}', '{"a": null}'])
def test_parse_times_refuses_other_json(text) -> None:
    assert refusal(parsers.parse_times, text, NOW_MS)


@pytest.mark.parametrize("digits", ["9" * 5000, "0" * 5000, "0" * 5000 + "7"])
def test_parsers_accept_more_digits_than_python_converts(digits) -> None:
    if digits.endswith("7"):
        assert parsers.parse_count(digits) == parsers.parse_size(digits) == parsers.parse_duration(digits) == 7
        assert "the unit is milliseconds" in refusal(parsers.parse_time, digits, NOW_MS)
    else:
        assert "expected an integer ≥ 1" in refusal(parsers.parse_count, digits)
        assert "such as 64m" in refusal(parsers.parse_size, digits)
        assert "such as 15m" in refusal(parsers.parse_duration, digits)
    assert parsers.parse_time(f"-{digits}d", NOW_MS) in (0, NOW_MS, NOW_MS - 7 * 86_400_000)
    assert "found invalid JSON" in refusal(parsers.parse_positions, '{"a": {"0": %s}}' % ("9" * 5000))


@pytest.mark.parametrize("parse", [parsers.parse_positions, parsers.parse_assignment])
@pytest.mark.parametrize("depth", [900, 960, 975, 980, 985, 990, 100_000])
def test_parse_object_refuses_json_nested_too_deeply(parse, depth) -> None:
    assert refusal(parse, '{"a": {"0": %s}}' % ("[" * depth + "]" * depth))
    assert refusal(parsers.parse_times, '{"a": {"0": %s}}' % ("[" * depth + "]" * depth), NOW_MS)


def test_parse_object_cuts_long_values_in_errors() -> None:
    long = "[" + "1, " * 5000 + "1]"
    assert len(refusal(parsers.parse_positions, f'{{"a": {{"0": {long}}}}}')) < 300
    assert len(refusal(parsers.parse_assignment, f'{{"a": [{long}]}}')) < 300


@pytest.mark.parametrize("text", ["(" * 5000 + ")" * 5000, "a{99999999999}"])
def test_parse_pattern_refuses_an_expression_that_python_cannot_compile(text) -> None:
    assert "regular expression" in refusal(parsers.parse_pattern, text)


NASTY = [
    "",
    " ",
    "\0",
    "a\0b",
    "file://[",
    "file://[::1/x",
    "9" * 5000,
    "-" + "9" * 5000 + "d",
    "9" * 5000 + "m",
    "[" * 100_000,
    '{"a":' * 100_000,
    '{"a": {"0": 1e999}}',
    '{"a": {"0": NaN}}',
    '{"a": {"%s": 1}}' % ("9" * 5000),
    '{"a": %s}' % ("9" * 5000),
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59",
    "(" * 5000,
    ",",
    "*",
    "\ud800",
]


def test_parse_positions_accepts_queues_with_the_names_of_their_brokers() -> None:
    wanted = {QueueKey("orders", 0, "broker-a"): 42, QueueKey("orders", 1, "dc-b"): -1}
    assert parsers.parse_positions('{"orders": {"broker-a:0": 42, "dc-b:1": -1}}').queues == wanted
    assert parsers.parse_assignment('{"orders": ["broker-a:0", "dc-b:1"]}') == tuple(wanted)
    for text in (":0", "a:b:0", " a:0", "a/b:0", "a:"):
        with pytest.raises(InvalidValueError, match="the queue id"):
            parsers.parse_positions(f'{{"orders": {{"{text}": 42}}}}')


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("option", [option.name for option in OPTIONS] + ["paths"])
@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_parse_options_fails_by_no_other_error_than_option_error(option, text) -> None:
    with suppress(OptionError):
        parse_options({option: text}, NOW_MS)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # from Python, for odd sets in a pattern
@usual
@given(st.text(max_size=30))
def test_parsers_fail_by_no_other_error_than_invalid_value_error(text) -> None:
    timeless = (
        parsers.parse_count,
        parsers.parse_size,
        parsers.parse_duration,
        parsers.parse_path,
        parsers.parse_topics,
        parsers.parse_pattern,
        parsers.parse_assignment,
        parsers.parse_positions,
    )
    for parse in timeless:
        with suppress(InvalidValueError):
            parse(text)
    for parse in (parsers.parse_times, parsers.parse_time):
        with suppress(InvalidValueError):
            parse(text, NOW_MS)
