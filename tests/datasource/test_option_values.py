"""Texts of option values: what is understood, and what is refused in which words."""

from contextlib import suppress
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.datasource import values
from rmq_spark.datasource.option_table import OPTIONS
from rmq_spark.datasource.options import parse_options
from rmq_spark.datasource.values import EARLIEST, LATEST, Times, Unacceptable
from rmq_spark.store.errors import OptionError
from rmq_spark.store.units import QueueKey

# No deadline: a busy machine is no bug. The same examples every time.
usual = settings(deadline=None, derandomize=True)

NOW_MS = 1_700_000_000_000


def refusal(parse, *arguments):
    with pytest.raises(Unacceptable) as caught:
        parse(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"), [("1", 1), (" 42 ", 42), ("1_000_000", 10**6), (str(2**63 - 1), 2**63 - 1)]
)
def test_a_count_is_a_whole_number_from_1_on(text, number) -> None:
    assert values.parse_count(text) == number


@pytest.mark.parametrize("text", ["0", "-1", "-5", "1.5", "", "ten", "1e3", str(2**63), "٣"])
def test_what_is_no_count_is_refused(text) -> None:
    assert "whole number from 1" in refusal(values.parse_count, text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64m", 64 << 20), ("1g", 1 << 30), ("512", 512), ("8 KB", 8192), ("3kib", 3072), ("2B", 2), ("1T", 1 << 40)],
)
def test_a_size_is_bytes_or_has_a_unit(text, size) -> None:
    assert values.parse_size(text) == size


@pytest.mark.parametrize("text", ["0", "-1m", "64x", "m", "", "1.5g", "99999999999t"])
def test_what_is_no_size_is_refused_with_an_example(text) -> None:
    assert "such as 64m" in refusal(values.parse_size, text)


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("15m", 900_000), ("500ms", 500), ("2 h", 7_200_000), ("10S", 10_000), ("1d", 86_400_000), ("7", 7)],
)
def test_a_duration_is_ms_or_has_a_unit(text, duration_ms) -> None:
    assert values.parse_duration(text) == duration_ms


@pytest.mark.parametrize(
    ("duration_ms", "text"), [(90_000, "90s"), (1_500, "1500ms"), (7_200_000, "7200s"), (1, "1ms")]
)
def test_a_duration_is_shown_as_it_may_be_given(duration_ms, text) -> None:
    assert values.show_duration(duration_ms) == text
    assert values.parse_duration(text) == duration_ms


@pytest.mark.parametrize("text", ["0", "-1m", "15 parsecs", "", "m"])
def test_what_is_no_duration_is_refused_with_an_example(text) -> None:
    assert "such as 15m" in refusal(values.parse_duration, text)


@pytest.mark.parametrize(
    ("text", "wait_ms"), [("0", 0), ("00", 0), ("0m", 0), ("0 s", 0), (" 0MS ", 0), ("10", 10), ("15s", 15_000)]
)
def test_a_wait_is_a_duration_or_none_at_all(text, wait_ms) -> None:
    assert values.parse_wait(text) == wait_ms


@pytest.mark.parametrize("text", ["-1s", "0 parsecs", "", "s", "00x", "99999999999999999d"])
def test_what_is_no_wait_is_refused_with_0_among_what_is_accepted(text) -> None:
    assert refusal(values.parse_wait, text).startswith("is no duration. Accepted: 0, or a number with ms")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), (" TRUE ", True)])
def test_a_flag_is_true_or_false_in_any_case(text, value) -> None:
    assert values.parse_flag(text) is value


@pytest.mark.parametrize("text", ["yes", "1", ""])
def test_another_word_than_true_or_false_is_refused(text) -> None:
    assert refusal(values.parse_flag, text) == "is none of: true, false."


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
        ("a:b", "a:b"),  # one letter is no scheme of Spark's
    ],
)
def test_a_path_may_be_a_file_uri(text, path) -> None:
    assert values.parse_path(text) == path


@pytest.mark.parametrize("text", ["s3://bucket/store", "hdfs:///store", "dbfs:/store", "s3a://b"])
def test_a_path_on_no_file_system_is_refused_with_what_to_do(text) -> None:
    message = refusal(values.parse_path, text)
    assert text.split(":")[0] in message
    assert "Mount" in message


def test_a_file_uri_with_a_host_is_refused() -> None:
    assert "three slashes" in refusal(values.parse_path, "file://data/store")


def test_an_empty_path_is_refused() -> None:
    assert refusal(values.parse_path, "  ") == "is empty."


@pytest.mark.parametrize("text", ["/a\0b", "file:///a%00b", "file:/a\0b"])
def test_no_path_has_the_character_0(text) -> None:
    assert "has the character 0 in it" in refusal(values.parse_path, text)
    assert "has the character 0 in it" in refusal(values.parse_paths, f"/x,{text}")


def test_a_file_uri_without_a_path_is_no_folder() -> None:
    assert refusal(values.parse_path, "file:") == "names no folder."
    assert values.parse_path("file:///a%20") == "/a ", "a blank at the end belongs to the name"


def test_topics_are_separated_by_commas() -> None:
    assert values.parse_topics(" orders ,%RETRY%billing,a-b_c|d") == ("orders", "%RETRY%billing", "a-b_c|d")


@pytest.mark.parametrize("text", ["../etc/passwd", "a/b", "orders .", "a,b/../c", "ärger", "a" * 256, "@"])
def test_what_can_be_no_topic_is_refused_by_name(text) -> None:
    assert "which no topic can be called" in refusal(values.parse_topics, text)


def test_an_empty_or_repeated_topic_is_refused() -> None:
    assert "empty name" in refusal(values.parse_topics, "a,,b")
    assert 'names "a" twice' in refusal(values.parse_topics, "a,b,a")


def test_a_pattern_that_does_not_compile_is_refused() -> None:
    assert "is no regular expression" in refusal(values.parse_pattern, "orders-(")
    assert values.parse_pattern("orders-.*") == "orders-.*"


def test_search_words_are_separated_by_blanks_because_keys_may_have_commas() -> None:
    assert values.parse_search_words(" a,b  c a,b ") == ("a,b", "c")


def test_an_assignment_names_queues() -> None:
    assert values.parse_assignment('{"b": [1, 0], "a": [2, 2]}') == (
        QueueKey("a", 2),
        QueueKey("b", 0),
        QueueKey("b", 1),
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"a": [0', "is no JSON"),
        ("[0]", "no JSON object"),
        ('{"a": 0}', "gives a no list"),
        ('{"a": []}', "gives a no list"),
        ("{}", "names no queue"),
        ('{"a": [-1]}', "queue id -1"),
        ('{"a": [true]}', "queue id true"),
        ('{"a": ["x"]}', 'queue id "x"'),
        ('{"../a": [0]}', "which no topic can be called"),
    ],
)
def test_a_bad_assignment_is_refused_with_an_example(text, part) -> None:
    message = refusal(values.parse_assignment, text)
    assert part in message


@pytest.mark.parametrize(("text", "default"), [("earliest", EARLIEST), (" Latest ", LATEST)])
def test_positions_may_be_a_word(text, default) -> None:
    assert values.parse_positions(text).default == default


def test_positions_may_be_json_with_sentinels_and_a_mark_that_is_passed_over() -> None:
    found = values.parse_positions('{"a": {"0": 5, "11": -1}, "b": {"0": -2}, "@": {"v": 1, "start": {}}}')
    assert found.default is None
    assert found.queues == {QueueKey("a", 0): 5, QueueKey("a", 11): LATEST, QueueKey("b", 0): EARLIEST}


def test_a_misspelt_word_is_answered_with_what_is_accepted() -> None:
    assert refusal(values.parse_positions, "earlyest") == 'is none of: earliest, latest, {"TopicA": {"0": 42}}.'


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("group", "is none of"),
        ('{"a": {"0": 5}', "is no JSON"),
        ('{"a": 5}', "gives a no offsets by queue id"),
        ('{"a": {"0": -3}}', "gives a/0 the offset -3"),
        ('{"a": {"0": 1.5}}', "gives a/0 the offset 1.5"),
        ('{"a": {"0": "5"}}', 'gives a/0 the offset "5"'),
        ('{"a": {"0": true}}', "gives a/0 the offset true"),
        ('{"a": {"00": 5}}', 'queue id "00"'),
        ('{"a": {"x": 5}}', 'queue id "x"'),
        ('{"a/b": {"0": 5}}', "which no topic can be called"),
        (f'{{"a": {{"0": {2**63}}}}}', "Accepted: 0 and up"),
    ],
)
def test_bad_positions_are_refused_by_name(text, part) -> None:
    assert part in refusal(values.parse_positions, text)


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
def test_a_time_is_ms_or_iso_or_relative_to_the_clock_that_is_given(text, time_ms) -> None:
    assert values.parse_time(text, NOW_MS) == time_ms


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("yesterday", "is no time"),
        ("2026-01-31T12:00:00", "names no time zone"),
        ("2026-01-31", "names no time zone"),
        ("-10", "has no unit"),
        ("-10y", "has no unit"),
        ("10m", "is no time"),
        ("", "is no time"),
        (str(2**63), "is no time"),
    ],
)
def test_a_bad_time_is_refused_with_examples(text, part) -> None:
    message = refusal(values.parse_time, text, NOW_MS)
    assert part in message
    assert "-10m" in message


@usual
@given(st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(9998, 1, 1)))
def test_an_iso_time_is_the_moment_it_names(moment) -> None:
    moment = moment.replace(microsecond=moment.microsecond // 1000 * 1000, tzinfo=UTC)
    expected = round((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000)
    assert values.parse_time(moment.isoformat(), NOW_MS) == expected


def test_times_are_for_all_for_a_topic_or_for_a_queue_and_the_nearest_goes_first() -> None:
    found = values.parse_times('{"a": "-1s", "b": {"0": 1600000000005, "1": "-2s"}}', NOW_MS)
    assert found.of(QueueKey("a", 7)) == NOW_MS - 1000
    assert found.of(QueueKey("b", 0)) == 1_600_000_000_005
    assert found.of(QueueKey("b", 1)) == NOW_MS - 2000
    assert found.of(QueueKey("b", 2)) is None
    assert values.parse_times("-1s", NOW_MS) == Times(NOW_MS - 1000)
    assert Times(1, {"a": 2}, {QueueKey("a", 0): 3}).of(QueueKey("a", 0)) == 3


@pytest.mark.parametrize("text", ["{}", '{"@": {"v": 1}}', '{"a": {"0": "soon"}}', '{"a": true}', '{"a": null}'])
def test_bad_times_by_topic_are_refused(text) -> None:
    assert refusal(values.parse_times, text, NOW_MS)


@pytest.mark.parametrize("digits", ["9" * 5000, "0" * 5000, "0" * 5000 + "7"])
def test_more_digits_than_python_reads_are_a_number_like_any_other(digits) -> None:
    if digits.endswith("7"):
        assert values.parse_count(digits) == values.parse_size(digits) == values.parse_duration(digits) == 7
        assert "the unit is milliseconds" in refusal(values.parse_time, digits, NOW_MS)
    else:
        assert "whole number from 1" in refusal(values.parse_count, digits)
        assert "such as 64m" in refusal(values.parse_size, digits)
        assert "such as 15m" in refusal(values.parse_duration, digits)
    assert values.parse_time(f"-{digits}d", NOW_MS) in (0, NOW_MS, NOW_MS - 7 * 86_400_000)
    assert "is no JSON" in refusal(values.parse_positions, '{"a": {"0": %s}}' % ("9" * 5000))


@pytest.mark.parametrize("parse", [values.parse_positions, values.parse_assignment])
@pytest.mark.parametrize("depth", [900, 960, 975, 980, 985, 990, 100_000])
def test_json_that_is_nested_too_deeply_is_refused(parse, depth) -> None:
    assert refusal(parse, '{"a": {"0": %s}}' % ("[" * depth + "]" * depth))
    assert refusal(values.parse_times, '{"a": {"0": %s}}' % ("[" * depth + "]" * depth), NOW_MS)


def test_a_long_value_in_json_is_shown_in_part() -> None:
    long = "[" + "1, " * 5000 + "1]"
    assert len(refusal(values.parse_positions, f'{{"a": {{"0": {long}}}}}')) < 300
    assert len(refusal(values.parse_assignment, f'{{"a": [{long}]}}')) < 300


@pytest.mark.parametrize("text", ["(" * 5000 + ")" * 5000, "a{99999999999}"])
def test_a_pattern_that_python_cannot_read_is_refused(text) -> None:
    assert "is no regular expression" in refusal(values.parse_pattern, text)


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


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("option", [option.name for option in OPTIONS] + ["paths"])
@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_no_option_fails_in_another_way_than_by_an_option_error(option, text) -> None:
    with suppress(OptionError):
        parse_options({option: text}, NOW_MS)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Python's, for sets in a pattern that are odd
@usual
@given(st.text(max_size=30))
def test_no_text_makes_a_parser_fail_in_another_way(text) -> None:
    timeless = (
        values.parse_count,
        values.parse_size,
        values.parse_duration,
        values.parse_path,
        values.parse_topics,
        values.parse_pattern,
        values.parse_assignment,
        values.parse_positions,
    )
    for parse in timeless:
        with suppress(Unacceptable):
            parse(text)
    for parse in (values.parse_times, values.parse_time):
        with suppress(Unacceptable):
            parse(text, NOW_MS)
