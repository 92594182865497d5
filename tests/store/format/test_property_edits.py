"""`edit_properties`: the result equals editing one map after the other."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from support.retry_twin import edit_one

from rmq_spark.store.format.properties import edit_properties, parse
from rmq_spark.store.testing.strategies import property_texts

NAMES = ("TAGS", "KEYS", "UNIQ_KEY", "DELAY", "REAL_TOPIC", "a", "a longer name than a word")
ROW = st.tuples(property_texts(), st.none() | st.sampled_from(["v", "x\x01y", "ü" * 9]), st.booleans())


@given(st.lists(ROW, min_size=1, max_size=8), st.sets(st.sampled_from(NAMES)), st.sampled_from(NAMES))
def test_edit_properties_equals_editing_maps(
    rows: list[tuple[bytes, str | None, bool]], dropped: set[str], masked: str
) -> None:
    texts, values, mask = (list(column) for column in zip(*rows, strict=True))
    put = {"RETRY_TOPIC": pa.array(values, pa.string()).cast(pa.binary()), "WAIT": b"false"}
    made = edit_properties(pa.array(texts, pa.binary()), tuple(dropped), put, {masked: np.array(mask)})
    for text, value, is_masked, new in zip(texts, values, mask, made.to_pylist(), strict=True):
        wanted = {"WAIT": "false"} | ({"RETRY_TOPIC": value} if value is not None else {})
        assert parse(new) == edit_one(text, dropped | ({masked} if is_masked else set()), wanted)
        assert new.count(b"WAIT\x01") >= 1
        assert new.endswith(b"\x02")


def test_edit_properties_removes_repeated_names() -> None:
    text = b"DELAY\x011\x02a\x01b\x02DELAY\x012\x02"
    assert edit_properties(pa.array([text], pa.binary()), (), {"DELAY": b"3"})[0].as_py() == b"a\x01b\x02DELAY\x013\x02"


def test_edit_properties_drops_names_from_some_rows() -> None:
    texts, none = pa.array([b"a\x01b\x02c\x01d\x02"] * 2, pa.binary()), np.array([False, False])
    assert edit_properties(texts, ("a",), {}, {"a": none}).to_pylist() == [b"c\x01d\x02"] * 2
    given = pa.array([b"e", None], pa.binary())
    made = edit_properties(texts, (), {"a": given}, {"a": np.array([False, True])})
    assert made.to_pylist() == [b"c\x01d\x02a\x01e\x02", b"c\x01d\x02"]


def test_edit_properties_adds_a_missing_last_separator() -> None:
    texts = pa.array([b"a\x01b", b"", b"c\x01d\x02"], pa.binary())
    assert edit_properties(texts, (), {"x": b"y"}).to_pylist() == [
        b"a\x01b\x02x\x01y\x02",
        b"x\x01y\x02",
        b"c\x01d\x02x\x01y\x02",
    ]


def test_edit_properties_accepts_no_edits_and_no_rows() -> None:
    texts = pa.array([b"a\x01b\x02"], pa.binary())
    assert edit_properties(texts, (), {}).to_pylist() == texts.to_pylist()
    assert edit_properties(texts.slice(0, 0), ("a",), {"x": b"y"}).to_pylist() == []
