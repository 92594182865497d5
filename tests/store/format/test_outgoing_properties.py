"""Property encoder: the properties that are kept, dropped or refused."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark.store.format import java
from rmq_spark.store.format.message_columns import RowFault, Texts, join_rows
from rmq_spark.store.format.properties import encode, parse
from rmq_spark.store.format.property_encoder import ENGINE_OWNED, TRANSIENT_PREFIX, EncodedProperties

MAP = pa.map_(pa.string(), pa.string())
ROOT = Path(__file__).resolve().parents[3]
SEPARATOR = "the character \\x02, which ends a property: take it out"
Pairs = Sequence[tuple[str, str | None]] | None


def maps(*rows: Pairs) -> pa.MapArray:
    return pa.array(rows, MAP)


def column(*values: str | None) -> Texts:
    return Texts.of(pa.array(values, pa.string()))


def texts_of(properties: EncodedProperties, row_count: int) -> list[bytes]:
    """Return the properties strings of the rows, and check `sizes`."""
    pieces = properties.pieces()
    joined = join_rows(pa.array([b""] * row_count), *pieces).to_pylist()
    sizes = properties.sizes
    assert [len(text) for text in joined] == (
        [sizes] * row_count if isinstance(sizes, int) else [int(size) for size in sizes]
    )
    return [bytes(text) for text in joined]


def test_encoded_properties_have_columns_before_the_map() -> None:
    properties = EncodedProperties(
        column("T", "U"), column("k1 k2", "k3"), column("s", "t"), maps([("a", "1"), ("b", "2")], [("中", "文")])
    )
    assert texts_of(properties, 2) == [
        encode({"TAGS": "T", "KEYS": "k1 k2", "__SHARDINGKEY": "s", "a": "1", "b": "2"}),
        encode({"TAGS": "U", "KEYS": "k3", "__SHARDINGKEY": "t", "中": "文"}),
    ]


def test_encoded_properties_omit_null_and_empty_values() -> None:
    properties = EncodedProperties(
        column("T", None, ""), column(None, "k", None), None, maps(None, [], [("a", ""), ("b", None), ("c", "3")])
    )
    assert texts_of(properties, 3) == [encode({"TAGS": "T"}), encode({"KEYS": "k"}), encode({"c": "3"})]


def test_encoded_properties_of_rows_without_any_are_empty() -> None:
    for properties in (
        EncodedProperties(),
        EncodedProperties(column(None, ""), column("", ""), None, maps(None, [])),
    ):
        assert texts_of(properties, 2) == [b"", b""]


@pytest.mark.parametrize("name", [*sorted(ENGINE_OWNED), TRANSIENT_PREFIX + "TOPIC_SYS_FLAG"])
def test_encoded_properties_drop_engine_owned_names(name: str) -> None:
    rows = maps([(name, "7"), ("a", "1")], [("a", "1"), (name, "\x02")], [(name, "x")])
    assert texts_of(EncodedProperties(properties=rows), 3) == [b"a\x011\x02", b"a\x011\x02", b""]


@pytest.mark.parametrize("name", ["WAIT", "CLUSTER", "MSG_REGION", "TRACE_ON", "delay", "DELAYS", "BUYER_ID", "TTL"])
def test_encoded_properties_keep_other_names_of_rocketmq(name: str) -> None:
    assert texts_of(EncodedProperties(properties=maps([(name, "v")])), 1) == [encode({name: "v"})]


@pytest.mark.parametrize(("name", "argument"), [("TAGS", "tags"), ("KEYS", "keys"), ("__SHARDINGKEY", "sharding_keys")])
def test_encoded_properties_prefer_a_column_to_the_map(name: str, argument: str) -> None:
    columns: dict[str, Any] = {argument: column("c", None, "", None, None)}
    columns["properties"] = maps([(name, "m")], [(name, "m"), ("a", "1")], [(name, "m")], [(name, None)], [("b", "2")])
    assert texts_of(EncodedProperties(**columns), 5) == [
        encode({name: "c"}), encode({name: "m", "a": "1"}), b"", b"", encode({"b": "2"}),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["TAGS", "KEYS", "__SHARDINGKEY"])
def test_encoded_properties_use_the_map_without_a_column(name: str) -> None:
    rows = maps([("a", "1"), (name, "m")], None, [(name, "n")])
    assert texts_of(EncodedProperties(properties=rows), 3) == [encode({name: "m", "a": "1"}), b"", encode({name: "n"})]


def test_encoded_properties_of_equal_names_are_read_as_the_last() -> None:
    rows = maps([("TAGS", "1"), ("x", "1"), ("TAGS", "2"), ("x", "2"), ("x", ""), ("TAGS", None)])
    properties = EncodedProperties(properties=rows)
    assert parse(texts_of(properties, 1)[0]) == {"TAGS": "2", "x": "2"}
    assert properties.tags is not None
    assert properties.tags.bytes(0) == b"2"


@pytest.mark.parametrize("begin", range(4))
def test_encoded_properties_of_a_slice_are_its_rows(begin: int) -> None:
    rows: list[Pairs] = [[("a", "1"), ("b", "2")], None, [("TAGS", "t")], [("c", "3")]]
    expected = [b"a\x011\x02b\x012\x02", b"", b"TAGS\x01t\x02", b"c\x013\x02"]
    assert texts_of(EncodedProperties(properties=maps(*rows)[begin:]), 4 - begin) == expected[begin:]


def test_encoded_properties_ignore_the_pairs_of_a_null_map() -> None:
    names, values = pa.array(["a", "b"]), pa.array(["1", "2"])
    hidden = pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), names, values, mask=pa.array([True, False]))
    assert hidden.to_pylist() == [None, [("b", "2")]]
    assert texts_of(EncodedProperties(properties=hidden), 2) == [b"", b"b\x012\x02"]


@pytest.mark.parametrize(
    "odd",
    [
        [("b", "1"), ("a", "2")], [("a", "1"), ("c", "2")], [("a", "1")], [("a", "1"), ("b", "2"), ("c", "3")],
        [("ab", "1")], [("a", "1"), ("DELAY", "2")], [("TAGS", "1"), ("b", "2")], [],
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 1, 4])
def test_encoded_properties_of_one_different_row_change_only_that_row(odd: list[tuple[str, str]], place: int) -> None:
    rows: list[Pairs] = [[("a", "x"), ("b", "y")]] * 5
    rows[place] = odd
    expected = [b"a\x01x\x02b\x01y\x02"] * 5
    expected[place] = encode({name: value for name, value in odd if name != "DELAY"})
    assert texts_of(EncodedProperties(properties=maps(*rows)), 5) == expected


def test_encoded_properties_separate_names_with_equal_bytes() -> None:
    rows = maps([("ab", "1"), ("c", "2")], [("a", "1"), ("bc", "2")])
    assert texts_of(EncodedProperties(properties=rows), 2) == [b"ab\x011\x02c\x012\x02", b"a\x011\x02bc\x012\x02"]


@pytest.mark.parametrize("name", ["", "a\x01", "\x02", "\x01"])
@pytest.mark.parametrize("value", ["v", "", None])
def test_encoded_properties_refuse_an_invalid_name(name: str, value: str | None) -> None:
    with pytest.raises(RowFault, match="is not a property name; expected") as error:
        EncodedProperties(properties=maps([("a", "1")], None, [("b", "1"), (name, value)], [(name, "x")]))
    assert error.value.row == 2
    assert repr(name) in error.value.what


@pytest.mark.parametrize("name", ["a", "TAGS", "KEYS", "__SHARDINGKEY"])
def test_encoded_properties_refuse_a_separator_in_a_value(name: str) -> None:
    with pytest.raises(RowFault) as error:
        EncodedProperties(properties=maps([("b", "\x01")], [("DELAY", "\x02"), ("b", "x")], [(name, "x\x02y")]))
    assert error.value.row == 2
    assert error.value.what == f"the property '{name}' holds {SEPARATOR}"


@pytest.mark.parametrize(("place", "name"), [(0, "tags"), (1, "keys"), (2, "shardingKey")])
def test_encoded_properties_refuse_a_separator_in_a_column(place: int, name: str) -> None:
    columns: list[Any] = [None, None, None]
    columns[place] = column("a", "\x01", "\x02", "\x02")
    with pytest.raises(RowFault) as error:
        EncodedProperties(*columns)
    assert error.value.row == 2
    assert error.value.what == f"{name} holds {SEPARATOR}"


def test_encoded_properties_shorten_a_long_name_in_errors() -> None:
    with pytest.raises(RowFault, match="n'… of 5001 characters is not a property name"):
        EncodedProperties(properties=maps([("n" * 5000 + "\x02", "v")]))


def test_sharding_hashes_are_of_the_given_keys() -> None:
    hashes = EncodedProperties(
        None, None, column("a", None, "", None), maps(None, [("__SHARDINGKEY", "b")], None, None)
    ).sharding_hashes()
    assert hashes is not None
    assert hashes.mask.tolist() == [True, True, True, False]
    assert [int(value) for value in hashes.values[:3]] == [java.string_hash(key) for key in ("a", "b", "")]


def test_sharding_hashes_ignore_null_and_empty_keys_of_maps() -> None:
    for value in (None, ""):
        found = EncodedProperties(properties=maps([("__SHARDINGKEY", value)], [("a", "1")]))
        assert found.sharding_hashes() is None


def test_digests_ignore_the_order_and_origin_of_properties() -> None:
    def one(*arguments: Any) -> list[int]:
        return [int(value) for value in EncodedProperties(*arguments).digests()]  # type: ignore[union-attr]

    base = one(column("T"), None, None, maps([("a", "1"), ("b", "2")]))
    assert one(None, None, None, maps([("b", "2"), ("TAGS", "T"), ("a", "1")])) == base
    assert one(column("T"), column(None), None, maps([("b", "2"), ("a", "1"), ("c", ""), ("DELAY", "9")])) == base
    others = [
        one(column("U"), None, None, maps([("a", "1"), ("b", "2")])),
        one(None, column("T"), None, maps([("a", "1"), ("b", "2")])),
        one(None, None, column("T"), maps([("a", "1"), ("b", "2")])),
        one(column("T"), None, None, maps([("a", "2"), ("b", "1")])),
        one(column("T"), None, None, maps([("a", "1")])),
        one(column("T"), None, None, maps([("a", "12")])),
        one(column("T"), None, None, None),
    ]
    assert len({tuple(digest) for digest in [base, *others]}) == 8


def test_engine_owned_names_are_documented() -> None:
    section = (ROOT / "docs" / "OPTIONS.md").read_text().split("## Dropped properties")[1].split("\n## ")[0]
    listed = {name for line in section.splitlines() if line.startswith("| ") for name in re.findall(r"`([^`]+)`", line)}
    assert listed == {*ENGINE_OWNED, TRANSIENT_PREFIX + "…"}
