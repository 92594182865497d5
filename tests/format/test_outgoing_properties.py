"""The properties that a row gives and the text they become: what is kept, what is dropped, what is refused."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark.store.format import java
from rmq_spark.store.format.message_columns import RowFault, Texts, join_rows
from rmq_spark.store.format.outgoing_properties import ENGINE_OWNED, TRANSIENT_PREFIX, OutgoingProperties
from rmq_spark.store.format.properties import encode, parse

MAP = pa.map_(pa.string(), pa.string())
ROOT = Path(__file__).resolve().parent.parent.parent
SEPARATOR = "the character \\x02, which ends a property: take it out"
Pairs = Sequence[tuple[str, str | None]] | None


def maps(*rows: Pairs) -> pa.MapArray:
    return pa.array(rows, MAP)


def column(*values: str | None) -> Texts:
    return Texts.of(pa.array(values, pa.string()))


def texts_of(properties: OutgoingProperties, row_count: int) -> list[bytes]:
    """Return the rows' texts, and see that their sizes are as announced."""
    pieces = properties.pieces()
    joined = join_rows(pa.array([b""] * row_count), *pieces).to_pylist()
    sizes = properties.sizes
    assert [len(text) for text in joined] == (
        [sizes] * row_count if isinstance(sizes, int) else [int(size) for size in sizes]
    )
    return [bytes(text) for text in joined]


def test_columns_come_first_and_the_map_after_them() -> None:
    properties = OutgoingProperties(
        column("T", "U"), column("k1 k2", "k3"), column("s", "t"), maps([("a", "1"), ("b", "2")], [("中", "文")])
    )
    assert texts_of(properties, 2) == [
        encode({"TAGS": "T", "KEYS": "k1 k2", "__SHARDINGKEY": "s", "a": "1", "b": "2"}),
        encode({"TAGS": "U", "KEYS": "k3", "__SHARDINGKEY": "t", "中": "文"}),
    ]


def test_null_and_empty_values_are_left_out() -> None:
    properties = OutgoingProperties(
        column("T", None, ""), column(None, "k", None), None, maps(None, [], [("a", ""), ("b", None), ("c", "3")])
    )
    assert texts_of(properties, 3) == [encode({"TAGS": "T"}), encode({"KEYS": "k"}), encode({"c": "3"})]


def test_rows_without_any_have_empty_texts() -> None:
    for properties in (
        OutgoingProperties(),
        OutgoingProperties(column(None, ""), column("", ""), None, maps(None, [])),
    ):
        assert texts_of(properties, 2) == [b"", b""]


@pytest.mark.parametrize("name", [*sorted(ENGINE_OWNED), TRANSIENT_PREFIX + "TOPIC_SYS_FLAG"])
def test_a_name_that_the_engine_owns_is_dropped(name: str) -> None:
    rows = maps([(name, "7"), ("a", "1")], [("a", "1"), (name, "\x02")], [(name, "x")])
    assert texts_of(OutgoingProperties(properties=rows), 3) == [b"a\x011\x02", b"a\x011\x02", b""]


@pytest.mark.parametrize("name", ["WAIT", "CLUSTER", "MSG_REGION", "TRACE_ON", "delay", "DELAYS", "BUYER_ID", "TTL"])
def test_other_names_stay_even_where_rocketmq_uses_them(name: str) -> None:
    assert texts_of(OutgoingProperties(properties=maps([(name, "v")])), 1) == [encode({name: "v"})]


@pytest.mark.parametrize(("name", "argument"), [("TAGS", "tags"), ("KEYS", "keys"), ("__SHARDINGKEY", "sharding_keys")])
def test_a_column_wins_over_the_map_unless_it_is_null(name: str, argument: str) -> None:
    columns: dict[str, Any] = {argument: column("c", None, "", None, None)}
    columns["properties"] = maps([(name, "m")], [(name, "m"), ("a", "1")], [(name, "m")], [(name, None)], [("b", "2")])
    assert texts_of(OutgoingProperties(**columns), 5) == [
        encode({name: "c"}), encode({name: "m", "a": "1"}), b"", b"", encode({"b": "2"}),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["TAGS", "KEYS", "__SHARDINGKEY"])
def test_without_a_column_the_map_s_value_is_taken(name: str) -> None:
    rows = maps([("a", "1"), (name, "m")], None, [(name, "n")])
    assert texts_of(OutgoingProperties(properties=rows), 3) == [encode({name: "m", "a": "1"}), b"", encode({name: "n"})]


def test_of_equal_names_readers_find_the_later_one_that_is_not_empty() -> None:
    rows = maps([("TAGS", "1"), ("x", "1"), ("TAGS", "2"), ("x", "2"), ("x", ""), ("TAGS", None)])
    properties = OutgoingProperties(properties=rows)
    assert parse(texts_of(properties, 1)[0]) == {"TAGS": "2", "x": "2"}
    assert properties.tags is not None
    assert properties.tags.bytes(0) == b"2"


@pytest.mark.parametrize("begin", range(4))
def test_a_part_of_a_column_of_maps_is_its_rows(begin: int) -> None:
    rows: list[Pairs] = [[("a", "1"), ("b", "2")], None, [("TAGS", "t")], [("c", "3")]]
    expected = [b"a\x011\x02b\x012\x02", b"", b"TAGS\x01t\x02", b"c\x013\x02"]
    assert texts_of(OutgoingProperties(properties=maps(*rows)[begin:]), 4 - begin) == expected[begin:]


def test_pairs_behind_a_null_map_are_not_seen() -> None:
    names, values = pa.array(["a", "b"]), pa.array(["1", "2"])
    hidden = pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), names, values, mask=pa.array([True, False]))
    assert hidden.to_pylist() == [None, [("b", "2")]]
    assert texts_of(OutgoingProperties(properties=hidden), 2) == [b"", b"b\x012\x02"]


@pytest.mark.parametrize(
    "odd",
    [
        [("b", "1"), ("a", "2")], [("a", "1"), ("c", "2")], [("a", "1")], [("a", "1"), ("b", "2"), ("c", "3")],
        [("ab", "1")], [("a", "1"), ("DELAY", "2")], [("TAGS", "1"), ("b", "2")], [],
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 1, 4])
def test_one_row_with_other_names_among_equal_ones_changes_only_itself(odd: list[tuple[str, str]], place: int) -> None:
    rows: list[Pairs] = [[("a", "x"), ("b", "y")]] * 5
    rows[place] = odd
    expected = [b"a\x01x\x02b\x01y\x02"] * 5
    expected[place] = encode({name: value for name, value in odd if name != "DELAY"})
    assert texts_of(OutgoingProperties(properties=maps(*rows)), 5) == expected


def test_names_whose_letters_agree_but_not_their_ends_are_told_apart() -> None:
    rows = maps([("ab", "1"), ("c", "2")], [("a", "1"), ("bc", "2")])
    assert texts_of(OutgoingProperties(properties=rows), 2) == [b"ab\x011\x02c\x012\x02", b"a\x011\x02bc\x012\x02"]


@pytest.mark.parametrize("name", ["", "a\x01", "\x02", "\x01"])
@pytest.mark.parametrize("value", ["v", "", None])
def test_a_name_that_readers_would_lose_or_split_is_refused(name: str, value: str | None) -> None:
    with pytest.raises(RowFault, match="is no name of a property: accepted are") as error:
        OutgoingProperties(properties=maps([("a", "1")], None, [("b", "1"), (name, value)], [(name, "x")]))
    assert error.value.row == 2
    assert repr(name) in error.value.what


@pytest.mark.parametrize("name", ["a", "TAGS", "KEYS", "__SHARDINGKEY"])
def test_a_value_that_ends_a_property_too_early_is_refused(name: str) -> None:
    with pytest.raises(RowFault) as error:
        OutgoingProperties(properties=maps([("b", "\x01")], [("DELAY", "\x02"), ("b", "x")], [(name, "x\x02y")]))
    assert error.value.row == 2
    assert error.value.what == f"the property '{name}' holds {SEPARATOR}"


@pytest.mark.parametrize(("place", "name"), [(0, "tags"), (1, "keys"), (2, "shardingKey")])
def test_so_is_one_in_a_column(place: int, name: str) -> None:
    columns: list[Any] = [None, None, None]
    columns[place] = column("a", "\x01", "\x02", "\x02")
    with pytest.raises(RowFault) as error:
        OutgoingProperties(*columns)
    assert error.value.row == 2
    assert error.value.what == f"{name} holds {SEPARATOR}"


def test_a_long_name_is_shown_by_its_beginning() -> None:
    with pytest.raises(RowFault, match="n'… of 5001 characters is no name"):
        OutgoingProperties(properties=maps([("n" * 5000 + "\x02", "v")]))


def test_sharding_keys_are_hashed_where_they_were_given() -> None:
    hashes = OutgoingProperties(
        None, None, column("a", None, "", None), maps(None, [("__SHARDINGKEY", "b")], None, None)
    ).sharding_hashes()
    assert hashes is not None
    assert hashes.mask.tolist() == [True, True, True, False]
    assert [int(value) for value in hashes.values[:3]] == [java.string_hash(key) for key in ("a", "b", "")]


def test_a_sharding_key_that_is_null_or_empty_in_all_maps_was_not_given() -> None:
    for value in (None, ""):
        found = OutgoingProperties(properties=maps([("__SHARDINGKEY", value)], [("a", "1")]))
        assert found.sharding_hashes() is None


def test_digests_do_not_depend_on_where_a_property_comes_from_or_on_the_order() -> None:
    def one(*arguments: Any) -> list[int]:
        return [int(value) for value in OutgoingProperties(*arguments).digests()]  # type: ignore[union-attr]

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


def test_the_options_say_what_is_dropped() -> None:
    section = (ROOT / "docs" / "OPTIONS.md").read_text().split("## What the sink drops")[1].split("\n## ")[0]
    listed = {name for line in section.splitlines() if line.startswith("| ") for name in re.findall(r"`([^`]+)`", line)}
    assert listed == {*ENGINE_OWNED, TRANSIENT_PREFIX + "…"}
