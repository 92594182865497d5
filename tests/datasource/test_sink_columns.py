"""From the types in which Spark hands rows over to the ones that the encoder takes, in pieces of bounded size."""

import pyarrow as pa
import pytest
from support.parsed_options import parse_sink_options

from rmq_spark.datasource.options.sink_schema import PIECE_BYTES, PIECE_ROWS, cut_pieces, normalise_columns

EXPECTED = {
    "topic": pa.string(),
    "body": pa.binary(),
    "tags": pa.string(),
    "keys": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "queueId": pa.int32(),
    "shardingKey": pa.string(),
    "flag": pa.int32(),
}
VALUES = {
    "topic": ["a", "b"],
    "body": ["x", ""],
    "tags": [None, "t"],
    "keys": ["k1 k2", None],
    "properties": [[("p", "q")], None],
    "queueId": [None, 3],
    "shardingKey": ["s", None],
    "flag": [7, None],
}


def rows(types=None, **values):
    types = EXPECTED | (types or {})
    return pa.RecordBatch.from_pydict({name: pa.array(column, types[name]) for name, column in values.items()})


def test_columns_that_have_their_types_come_out_as_they_are() -> None:
    batch = rows(**VALUES)
    assert normalise_columns(batch, None).equals(batch)


def test_text_bodies_and_large_types_come_out_in_the_one_type_that_the_encoder_takes() -> None:
    large = {
        "topic": pa.large_string(),
        "body": pa.large_string(),
        "tags": pa.large_string(),
        "keys": pa.large_string(),
        "properties": pa.map_(pa.large_string(), pa.field("value", pa.large_string(), nullable=False)),
        "shardingKey": pa.large_string(),
    }
    out = normalise_columns(rows(large, **VALUES), None)
    assert out.equals(rows(**VALUES))
    assert normalise_columns(rows({"body": pa.string()}, **VALUES), None).equals(out)
    binary = rows({"body": pa.large_binary()}, topic=["a"], body=[b"\xff"])
    assert normalise_columns(binary, None).column("body").to_pylist() == [b"\xff"]


@pytest.mark.parametrize("text", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_lists_of_keys_stay_lists(text, kind) -> None:
    given = rows(
        {"keys": kind(pa.field("element", text))}, topic=["a"] * 3, body=[b""] * 3, keys=[["k", None], [], None]
    )
    out = normalise_columns(given, None).column("keys")
    assert out.type == pa.list_(pa.string())
    assert out.to_pylist() == [["k", None], [], None]


def test_the_option_topic_takes_the_place_of_the_column_nulls_and_all() -> None:
    out = normalise_columns(rows(topic=["a", None], body=[b"", b""]), "orders")
    assert out.column("topic").to_pylist() == ["orders", "orders"]
    assert normalise_columns(rows(body=[b""]), "orders").column("topic").to_pylist() == ["orders"]


def test_nulls_stay_for_the_encoder_which_knows_their_rows() -> None:
    batch = rows(topic=["a", None], body=[None, b""])
    assert normalise_columns(batch.slice(1), None).equals(batch.slice(1))


def test_pieces_have_all_rows_in_order_and_copy_nothing() -> None:
    batch = rows(
        topic=["a"] * (3 * PIECE_ROWS + 1), body=[b"x"] * (3 * PIECE_ROWS + 1), queueId=range(3 * PIECE_ROWS + 1)
    )
    pieces = list(cut_pieces(batch))
    assert pa.Table.from_batches(pieces).column("queueId").to_pylist() == list(range(3 * PIECE_ROWS + 1))
    assert max(piece.num_rows for piece in pieces) <= PIECE_ROWS
    assert pieces[1].column("body").buffers()[2].address == batch.column("body").buffers()[2].address


def test_big_bodies_make_small_pieces_but_a_row_is_never_cut() -> None:
    sizes = [1, PIECE_BYTES // 2, PIECE_BYTES // 2, PIECE_BYTES * 2, 1, 1]
    batch = rows(body=[bytes(size) for size in sizes], topic=["a"] * 6)
    pieces = list(cut_pieces(batch))
    assert [len(body) for piece in pieces for body in piece.column("body").to_pylist()] == sizes
    assert all(piece.nbytes <= PIECE_BYTES or piece.num_rows == 1 for piece in pieces)


def test_big_properties_count_too() -> None:
    batch = rows(topic=["a"] * 64, body=[b""] * 64, properties=[[("p", "v" * (1 << 20))]] * 64)
    assert max(piece.nbytes for piece in cut_pieces(batch)) <= PIECE_BYTES


def test_no_rows_are_no_pieces() -> None:
    assert list(cut_pieces(rows(topic=[], body=[]))) == []


def test_brokerName_stays_only_for_a_place_with_broker_names() -> None:
    given = rows({"brokerName": pa.large_string()}, body=[b""], brokerName=["broker-a"])
    assert normalise_columns(given, None, has_brokers=True).column("brokerName").type == pa.string()
    assert normalise_columns(given, None).schema.names == ["body"]
    for place, names in (({"path": "/store"}, ["body"]), ({"nameServer": "a:1"}, ["body", "brokerName"])):
        delivery = {"delivery": "atLeastOnce"} if "nameServer" in place else {}
        assert parse_sink_options(place | delivery).normalise(given).schema.names == names
