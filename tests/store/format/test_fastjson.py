"""fastjson's JSON: parsed, refused with the position, in linear time, and written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark.store.format import fastjson
from rmq_spark.store.format.fastjson import FastjsonError, parse, write

SAMPLE = '{"a":{0:1,"x":[true,{"b":null}]},{"q":1}:-2.5e1,"s":"\\u00e4{0:\\"","$ref":"$.a"}'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{0:12,1:34\n}", {"0": 12, "1": 34}),
        ('{"0":12}', {"0": 12}),
        ("{-1:2,1.5:3}", {"-1": 2, "1.5": 3}),
        ('{{"b":"x","q":0}:{"m":5}}', {'{"b":"x","q":0}': {"m": 5}}),
        ("{{ }:1}", {"{ }": 1}),
        ('{{{1:2}:3}:4}', {"{{1:2}:3}": 4}),
        ('{"a":{"$ref":"$.b"}}', {"a": {"$ref": "$.b"}}),
        ('{"text":"{0:1} and \\" {1:2","b":"\\\\"}', {"text": '{0:1} and " {1:2', "b": "\\"}),
        ('"\\ud83d\\ude00 \\x41\\v\\0\\\'\\/"', "\U0001f600 A\v\0'/"),
        ('"\\ud83d"', "\ud83d"),
        ("[]", []),
        (" [ 1 , 2.0 , -3e2 , true,false , null ] ", [1, 2.0, -300.0, True, False, None]),
        ('{"a":1,"a":2}', {"a": 2}),
        ("9223372036854775807", 9223372036854775807),
        ('"tab\tand\nline"', "tab\tand\nline"),
    ],
)  # fmt: skip
def test_parse_reads_texts_of_fastjson(text: str, value: Any) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("text", "position", "what"),
    [
        ("", 0, "a value, the text ends"),
        ('{"a":1} x', 8, "nothing after the value, found 'x'"),
        ("{}{}", 2, "nothing after the value"),
        ('{"a":1,}', 7, "a key"),
        ("{a:1}", 1, "a key"),
        ('{"a" 1}', 5, "a colon after a key"),
        ("{{}}", 3, "a colon after a key"),
        ("{[]:1}", 1, "a key"),
        ("[1,]", 3, "a value"),
        ("[1 2]", 3, ", or ]"),
        ('{"a":1 "b":2}', 7, ", or }"),
        ('["abc', 1, "a string that ends"),
        ('["a\\qb"]', 3, "a known escape"),
        ('"\\u12"', 1, "a known escape"),
        ("tru", 0, "a value"),
        ("truex", 4, "nothing after the value"),
        ("-", 0, "a value"),
        ("1.", 1, "nothing after the value"),
        ("'a'", 0, "a value"),
        ("1" * 401, 0, "a number of at most 400 characters"),
        ("[" * 101, 100, "at most 100 levels"),
    ],
)
def test_parse_refuses_invalid_texts_with_the_position(text: str, position: int, what: str) -> None:
    with pytest.raises(FastjsonError) as caught:
        parse(text)
    assert caught.value.position == position
    assert f"expected {what}" in str(caught.value)
    assert str(caught.value).startswith(f"character {position}: ")


@pytest.mark.parametrize("size", range(len(SAMPLE)))
def test_parse_refuses_a_text_cut_anywhere(size: int) -> None:
    parse(SAMPLE)
    with pytest.raises(FastjsonError):
        parse(SAMPLE[:size])
    with pytest.raises(FastjsonError, match="nothing after the value"):
        parse(SAMPLE + SAMPLE[: size + 1])


class Looks:
    """Counts the characters that the reader's patterns could look at, to see that it never goes back far."""

    def __init__(self, pattern: Any, seen: list[int]) -> None:
        self._pattern, self._seen = pattern, seen

    def match(self, text: str, at: int) -> Any:
        match = self._pattern.match(text, at)
        self._seen[0] += (match.end() - at if match else 0) + 1
        return match

    def sub(self, *args: Any) -> Any:
        return self._pattern.sub(*args)


@pytest.mark.parametrize(
    "piece", ["[", '{"a":', '"\\', "{{}:", '["\\u0041",', " ", '"a', "1", "[" * 50 + "]" * 50 + ","]
)
def test_parse_reads_a_hostile_text_once(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [0]
    for name in ("_SPACE", "_STRING", "_NUMBER", "_WORD"):
        monkeypatch.setattr(fastjson, name, Looks(getattr(fastjson, name), seen))
    text = "[" + piece * 2000
    with pytest.raises(FastjsonError):
        parse(text)
    assert seen[0] <= 8 * len(text)


def samples(golden: Path) -> dict[str, str]:
    parts = (golden / "json/wire-and-config-samples.txt").read_text().split("### ")
    return {name.split("\n")[0]: name.partition("\n")[2] for name in parts if name}


def test_parse_reads_golden_samples(golden: Path) -> None:
    texts = samples(golden)
    table = parse(texts["topicstats"])["offsetTable"]
    assert table == {
        '{"brokerName":"broker-a","queueId":0,"topic":"TopicA"}': {
            "lastUpdateTimestamp": 0, "maxOffset": 5, "minOffset": 0,
        }
    }  # fmt: skip
    assert parse(texts["route old"]) == parse(texts["route std"])
    assert parse(texts["consumerOffset.json(mimic)"])["dv"] == {"$ref": "$.dataVersion"}
    for name in ("heartbeat", "lock", "lockresp", "route std", "topiclist", "topics.json", "subscriptionGroup.json"):
        assert parse(texts[name]) == json.loads(texts[name]), name


@pytest.mark.parametrize("store", ["demo", "broker497", "livekill533"])
def test_write_restores_every_config_file_of_a_broker(golden: Path, store: str) -> None:
    names = [*(golden / store / "config").glob("*.json"), *(golden / store / "config").glob("*Metrics")]
    assert names
    for path in names:
        value = parse(path.read_text())
        assert parse(write(value)) == value, path
        assert json.loads(write(value)) is not None, path


def test_write_restores_golden_files_byte_for_byte(golden: Path) -> None:
    text = (golden / "json/consumerOffset.json").read_text()
    value = parse(text)
    table = {key: {int(queue): n for queue, n in numbers.items()} for key, numbers in value["offsetTable"].items()}
    assert write({**value, "offsetTable": table}, bare_numbers=True) == text
    assert json.loads(write({**value, "offsetTable": table})) == value


def test_write_sorts_keys_and_omits_none() -> None:
    assert write({"b": {10: 1, 9: 2}, "a": None}) == '{\n\t"b":{"9":2,"10":1\n\t}\n}'
    assert write({"b": {10: 1, 9: 2}}, bare_numbers=True) == '{\n\t"b":{9:2,10:1\n\t}\n}'
    assert write({"a": {}, "l": [1, "x", {}]}) == '{\n\t"a":{},\n\t"l":[1,"x",{}]\n}'


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner.filter(lambda v: v is not None), max_size=4)
    ),
    max_leaves=20,
)


@given(TREES)
def test_write_returns_json_that_parse_restores(value: Any) -> None:
    text = write(value)
    assert parse(text) == value
    assert json.loads(text) == value
    assert parse(json.dumps(value)) == value


@given(st.text(alphabet='{}[]:,"\\0a -.', max_size=40))
def test_parse_raises_only_fastjson_error(text: str) -> None:
    problem = None
    try:
        value = parse(text)
    except FastjsonError as error:
        problem = error
    if problem is None:
        assert parse(write(value)) == value
    else:
        assert 0 <= problem.position <= len(text)


@given(st.text(alphabet='{}[]:,"\\0a -.1', max_size=40))
def test_parse_equals_a_strict_parser_for_strict_json(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        return
    assert parse(text) == value


def test_write_keeps_a_single_surrogate() -> None:
    assert write("\ud83d").encode() == b'"\\ud83d"'


@pytest.mark.parametrize(
    "text",
    [
        "[" * fastjson.MAX_DEPTH + "]" * fastjson.MAX_DEPTH,
        "[" * (fastjson.MAX_DEPTH + 1) + "]" * (fastjson.MAX_DEPTH + 1),
        '{"a":[' * 60 + "1" + "]}" * 60,
        "[" * 100_000,
        "9" * 400,
        "9" * 401,
        "[NaN]",
        '{"a":1,"a":2}',
        '"\\ud83d"',
        "-0",
        "1.5E+3",
    ],
)
def test_parse_equals_the_tolerant_reader(text: str) -> None:
    def answer(read: Callable[[str], Any]) -> tuple[str, object]:
        try:
            return "value", read(text)
        except FastjsonError as error:
            return "error", str(error)

    assert answer(parse) == answer(lambda given: fastjson._Reader(given).read())
