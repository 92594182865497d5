"""Frames: golden ones, cut ones, wrong ones, and where the bytes of bodies are."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.remoting_frames import RecordedFrame, frame_of, read_frames

from rmq_spark.store.cluster.frame import (
    _PULL_ANSWER,
    MAX_FRAME_BYTES,
    Command,
    FrameError,
    FrameReader,
    encode_command,
)
from rmq_spark.store.errors import OptionError

FRAMES = read_frames()
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
int32s = st.integers(-(1 << 31), (1 << 31) - 1)
commands = st.builds(
    Command,
    code=int32s,
    opaque=int32s,
    fields=st.dictionaries(texts, texts, max_size=5),
    body=st.binary(max_size=20),
    flag=st.integers(0, 3),
    remark=st.none() | texts,
    language=st.sampled_from(["PYTHON", "JAVA", "OTHER", "Klingon"]),
    version=st.integers(0, 600),
)


def test_golden_frames_decode_to_their_recorded_fields() -> None:
    assert len(FRAMES) == 726
    assert {frame.is_json for frame in FRAMES} == {True, False}
    for frame in FRAMES:
        command, line = frame.command(), frame.line
        assert (command.code, command.opaque, command.flag) == (line["code"], line["opaque"], line["flag"]), frame
        assert (command.language, command.version) == (line["language"], line["version"]), frame
        assert (command.remark, command.fields) == (line.get("remark"), line.get("ext") or {}), frame
        assert bytes(command.body) == frame.data[8 + frame.header_size :], frame
        assert command.is_response == (line["kind"] == "response"), frame
        assert command.is_one_way == (line["kind"] == "oneway"), frame


def check_cut(data: bytes, cut: int, reader: FrameReader) -> None:
    assert reader.feed(data[:cut]) == []
    with pytest.raises(FrameError, match=f"closed after {cut} bytes; expected"):
        reader.at_end()


@pytest.mark.parametrize("kind", [True, False])
def test_a_frame_cut_anywhere_gives_no_command_until_it_is_complete(kind: bool) -> None:
    chosen = random.Random(3).sample([frame for frame in FRAMES if frame.is_json == kind], 8)
    for frame in chosen:
        check_every_cut(frame)


@pytest.mark.slow
def test_every_golden_frame_cut_at_every_byte_gives_no_command_until_it_is_complete() -> None:
    for frame in FRAMES:
        check_every_cut(frame)


def check_every_cut(frame: RecordedFrame) -> None:
    whole, piecemeal = frame.command(), FrameReader()
    for cut in range(1, len(frame.data)):
        check_cut(frame.data, cut, FrameReader())
        assert piecemeal.feed(frame.data[cut - 1 : cut]) == []
    assert piecemeal.feed(frame.data[-1:]) == [whole]
    piecemeal.at_end()


def test_frames_arrive_in_order_whatever_the_pieces() -> None:
    chance = random.Random(5)
    expected = [frame.command() for frame in FRAMES]
    stream = b"".join(frame.data for frame in FRAMES)
    for largest in (1, 100, 5000, 1 << 20):
        reader, found, at = FrameReader(), list[Command](), 0
        while at < len(stream):
            size = chance.randint(1, largest) if largest > 1 else 977
            found += reader.feed(stream[at : at + size])
            at += size
        reader.at_end()
        assert found == expected


@settings(deadline=None)
@given(commands)
def test_encode_command_and_feed_return_the_same_command(command: Command) -> None:
    assert FrameReader().feed(encode_command(command)) == [command]


@settings(deadline=None)
@given(commands)
def test_the_fast_way_through_a_header_gives_what_a_json_parser_gives(command: Command) -> None:
    check_both_ways(encode_command(command)[8 : len(encode_command(command)) - len(command.body)])


@pytest.mark.parametrize("name", ["PULL_MESSAGE", "GET_MIN_OFFSET"])
def test_both_ways_through_a_header_refuse_the_same_changes_of_it(name: str) -> None:
    frames = [frame for frame in FRAMES if frame.is_json and frame.line["name"] == name]
    header = next(frame.header for frame in frames if frame.line["kind"] == "response")
    pieces = [
        b'"',
        b"\\",
        b",",
        b":",
        b"{",
        b"}",
        b"0",
        b"-",
        b".",
        b"e1",
        b"\n",
        b" ",
        b"\x7f",
        b"\xc3",
        b"9" * 10,
        b"",
    ]
    for at in range(1, len(header)):
        for piece in pieces:
            check_both_ways(header[:at] + piece + header[at:])
            check_both_ways(header[:at] + piece + header[at + 1 :])


PULL_ANSWERS = [
    frame
    for frame in FRAMES
    if frame.is_json and frame.line["kind"] == "response" and "nextBeginOffset" in (frame.line.get("ext") or {})
]


def test_golden_answers_to_pulls_have_the_form_that_is_read_at_once() -> None:
    assert len(PULL_ANSWERS) > 50
    for frame in PULL_ANSWERS:
        assert _PULL_ANSWER.fullmatch(frame.header.decode()), frame
        check_both_ways(frame.header)


@settings(deadline=None, max_examples=1000)
@given(st.randoms(use_true_random=False), st.sampled_from(PULL_ANSWERS))
def test_both_ways_read_the_same_from_changed_answers_to_pulls(chance: random.Random, frame: RecordedFrame) -> None:
    tokens = re.findall(rb'"[^"]*"|[0-9]+|.', frame.header)
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(1, len(tokens))
        tokens[at] = chance.choice((b"", b'"1"', b"0", b"01", b"9" * 10, b",", b'"-1"', b'"A"', *tokens))
    check_both_ways(b"".join(tokens))


def check_both_ways(header: bytes) -> None:
    """Compare with the same header after a space, which does not match the pattern of the fast way."""
    assert header[:1] == b"{"
    assert outcome(header) == outcome(b"{ " + header[1:])


def outcome(header: bytes) -> list[Command] | None:
    try:
        return FrameReader().feed(frame_of(header, b"body"))
    except FrameError:
        return None


def test_headers_of_brokers_are_like_those_of_encode_command() -> None:
    """So the test above compares two ways, not the general one with itself."""
    header = encode_command(Command(0, 7, {"a": "1"}, b"", 1, "FOUND", "JAVA", 479))[8:]
    assert header == (
        b'{"code":0,"extFields":{"a":"1"},"flag":1,"language":"JAVA","opaque":7,"remark":"FOUND",'
        b'"serializeTypeCurrentRPC":"JSON","version":479}'
    )


def json_header(**changes: object) -> bytes:
    values: dict[str, object] = {"code": 0, "flag": 1, "language": "JAVA", "opaque": 1, "version": 479}
    values |= changes
    return json.dumps({name: value for name, value in values.items() if value != "missing"}).encode()


WRONG_HEADERS = {
    "no object": (b"[]", "not a JSON object"),
    "empty": (b"", "not JSON"),
    "cut": (b'{"code":0', "not JSON"),
    "deep": (b"[" * 200_000, "not JSON"),
    "deep in a field": (b'{"code":0,"x":' + b'{"a":' * 100_000, "not JSON"),
    "long number": (b'{"code":' + b"1" * 10_000 + b"}", "not JSON"),
    "not UTF-8": (b'{"remark":"\xff"}', "not UTF-8"),
    "no code": (json_header(code="missing"), "as 'code' in a header; expected a whole number"),
    "no opaque": (json_header(opaque=None), "nothing as 'opaque'"),
    "no flag": (json_header(flag="missing"), "nothing as 'flag'"),
    "text as code": (json_header(code="0"), "'0' as 'code'"),
    "truth as code": (json_header(code=True), "True as 'code'"),
    "fraction as flag": (json_header(flag=1.5), "1.5 as 'flag'"),
    "large opaque": (json_header(opaque=1 << 31), "2147483648 as 'opaque'"),
    "list as version": (json_header(version=[1]), "a list as 'version'"),
    "number as language": (json_header(language=3), "3 as 'language' in a header; expected a text"),
    "number as remark": (json_header(remark=3), "3 as 'remark' in a header; expected a text"),
    "list of fields": (json_header(extFields=[]), "as 'extFields' in a header; expected an object"),
    "number as field": (json_header(extFields={"a": 1}), "1 as 'a' in a header; expected a text"),
    "null as field": (json_header(extFields={"a": None}), "nothing as 'a' in a header"),
    "single surrogate": (json_header(remark="\ud800"), "without single surrogates"),
    "single surrogate as name": (json_header(extFields={"\ud800": ""}), "without single surrogates"),
}


@pytest.mark.parametrize(("header", "message"), WRONG_HEADERS.values(), ids=WRONG_HEADERS)
def test_a_wrong_json_header_is_a_frame_error_with_clear_text(header: bytes, message: str) -> None:
    with pytest.raises(FrameError) as caught:
        FrameReader().feed(frame_of(header))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"HTTP/1.1 400 Bad", r"found the frame size 1213486164 \(first bytes b'HTTP/1.1 400 Bad'\)"),
        ((1 << 24).to_bytes(4, "big"), "found the frame size 16777220"),
        ((-5).to_bytes(4, "big", signed=True), "found the frame size -1 "),
        ((3).to_bytes(4, "big"), "expected 8 to 16777216 bytes"),
        (
            (20).to_bytes(4, "big") + b"\0\0\0\x11",
            "found a header of 17 bytes in a frame of 24; expected at most 16 bytes",
        ),
        ((16 << 19).to_bytes(4, "big") + b"\0\x7f\xff\xff", "expected at most 2097152 bytes"),
        ((20).to_bytes(4, "big") + b"\2\0\0\x10", r"the header kind 2; expected 0 \(JSON\) or 1 \(binary\)"),
    ],
)
def test_a_wrong_size_is_a_frame_error_as_soon_as_it_arrives(data: bytes, message: str) -> None:
    reader = FrameReader()
    with pytest.raises(FrameError, match=message):
        reader.feed(data)
    for call in (reader.get_buffer, reader.at_end, lambda: reader.received(0), lambda: reader.feed(b"1")):
        with pytest.raises(FrameError, match=message):
            call()


def test_the_limit_of_a_reader_counts() -> None:
    data = encode_command(Command(0, 1, {}, bytes(1000)))
    assert FrameReader(len(data)).feed(data)
    with pytest.raises(FrameError, match=f"the frame size {len(data)} "):
        FrameReader(len(data) - 1).feed(data)


def binary_frame(remark: bytes = b"", fields: bytes = b"", language: int = 3, rest: bytes = b"") -> bytes:
    header = (17).to_bytes(2, "big") + bytes([language]) + (407).to_bytes(2, "big")
    header += (9).to_bytes(4, "big") + (1).to_bytes(4, "big")
    for part in (remark, fields):
        header += len(part).to_bytes(4, "big") + part
    return frame_of(header + rest, b"", 1)


def test_a_binary_header_has_language_remark_and_fields() -> None:
    fields = b"\0\1a\0\0\0\2\xc3\xbc" + b"\0\0\0\0\0\0"
    (command,) = FrameReader().feed(binary_frame(b"why", fields))
    assert command == Command(17, 9, {"a": "ü", "": ""}, b"", 1, "why", "PYTHON", 407)
    (command,) = FrameReader().feed(binary_frame(language=77))
    assert (command.remark, command.language) == (None, "OTHER")


def test_a_binary_header_cut_anywhere_is_a_frame_error() -> None:
    for frame in [frame for frame in FRAMES if not frame.is_json]:
        for cut in range(frame.header_size):
            with pytest.raises(FrameError, match="binary header"):
                FrameReader().feed(frame_of(frame.header[:cut], b"body", 1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (binary_frame(rest=b"x"), "found 1 bytes after the fields"),
        (binary_frame(b"\xff"), "not UTF-8"),
        (binary_frame(fields=b"\0\1a\xff\xff\xff\xff"), "does not fit"),
        (binary_frame(fields=b"\xff\xff"), "does not fit"),
        (binary_frame(fields=b"\0\1a\0\0\0\5abcd"), "at byte 3 of 11 does not fit"),
    ],
)
def test_a_wrong_binary_header_is_a_frame_error(data: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        FrameReader().feed(data)


def test_encode_command_refuses_what_cannot_be_sent() -> None:
    largest = MAX_FRAME_BYTES - len(encode_command(Command(10, 1)))
    assert len(encode_command(Command(10, 1, {}, bytes(largest)))) == MAX_FRAME_BYTES
    with pytest.raises(OptionError, match="its frame has 16777217 bytes; expected at most 16777216"):
        encode_command(Command(10, 1, {}, bytes(largest + 1)))
    with pytest.raises(OptionError, match=r"a text in it contains '\\ud800'"):
        encode_command(Command(11, 1, {"subscription": "a\ud800"}))


def receive(reader: FrameReader, data: bytes, at_once: int) -> list[Command]:
    """Receive as from a socket, into the reader's own buffer."""
    found: list[Command] = []
    while data:
        buffer = reader.get_buffer()
        assert len(buffer) > 0
        size = min(at_once, len(buffer), len(data))
        buffer[:size] = data[:size]
        found += reader.received(size)
        data = data[size:]
    return found


@pytest.mark.parametrize("size", [10, 1000, 100_000, 262_144, 1_000_000])
def test_later_bytes_never_overwrite_a_body(size: int) -> None:
    reader, chance, kept = FrameReader(), random.Random(size), []
    for number in range(40):
        body = chance.randbytes(chance.randint(1, size))
        (command,) = receive(reader, encode_command(Command(0, number, {}, body)), 60_000)
        kept.append((command.body, body))
        receive(reader, encode_command(Command(0, number)), 7)
    assert all(isinstance(body, memoryview) and body.readonly for body, _ in kept)
    assert all(body == expected for body, expected in kept)


def test_a_large_body_stays_where_it_was_received() -> None:
    data = encode_command(Command(0, 1, {}, bytes(5_000_000)))
    reader = FrameReader()
    first = reader.get_buffer()
    first[:100] = data[:100]
    assert reader.received(100) == []
    rest = reader.get_buffer()
    assert len(rest) == len(data) - 100, "room for this frame, and no more"
    rest[:] = data[100:]
    (command,) = reader.received(len(rest))
    rest[-1] = 7
    assert command.body[-1] == 7, "the body is the memory that was received into"


def test_the_buffer_is_used_again_while_no_body_is_in_it() -> None:
    reader, data = FrameReader(), encode_command(Command(0, 1))
    first = reader.get_buffer()
    for _ in range(10_000):
        assert len(receive(reader, data, 1 << 20)) == 1
    again = reader.get_buffer()
    first[0] = 77
    assert again[0] == 77
    assert len(again) == len(first)


def test_a_declared_size_takes_no_memory_before_it_was_checked() -> None:
    reader = FrameReader()
    reader.feed((MAX_FRAME_BYTES - 4).to_bytes(4, "big"))
    assert len(reader.get_buffer()) < 1 << 20, "the header's size is not known yet"
    reader.feed(b"\0\0\0\2")
    assert len(reader.get_buffer()) == MAX_FRAME_BYTES - 8
