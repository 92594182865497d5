"""Decoding of Avro bodies with fastavro: the Spark type of a schema, and the function that Spark's tasks run.

A body is one value in Avro's binary encoding. It has neither the header of an Avro file nor that of a schema registry.
"""

import io
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_type

from rmq_spark.store.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import Column

_PRIMITIVES: dict[str, T.DataType] = {
    "boolean": T.BooleanType(),
    "int": T.IntegerType(),
    "long": T.LongType(),
    "float": T.FloatType(),
    "double": T.DoubleType(),
    "bytes": T.BinaryType(),
    "string": T.StringType(),
    "enum": T.StringType(),
    "fixed": T.BinaryType(),
}
# The logical types that Spark has. A value of any other logical type is read as its underlying type.
_LOGICAL: dict[tuple[str, str], T.DataType] = {
    ("int", "date"): T.DateType(),
    ("long", "timestamp-millis"): T.TimestampType(),
    ("long", "timestamp-micros"): T.TimestampType(),
    ("long", "local-timestamp-millis"): T.TimestampNTZType(),
    ("long", "local-timestamp-micros"): T.TimestampNTZType(),
}
_MAX_PRECISION = 38


def avro_decoder(schema: "str | Mapping[str, Any]") -> "Callable[[Column], Column]":
    """Return a function that decodes a binary column into a struct column with the fields `value` and `error`.

    In each row one of these fields is null. Raises OptionError if fastavro is not installed, if the schema is
    invalid, or if Spark has no type for it.
    """
    try:
        import fastavro
    except ImportError:
        raise OptionError(
            'parse: avro needs the package fastavro, here and on every machine: pip install "rmq-spark[avro]".'
        ) from None
    try:
        given = json.loads(schema) if isinstance(schema, str) else dict(schema)
        parsed = fastavro.parse_schema(given, _write_hint=False)
    except Exception as error:  # fastavro raises many types
        raise OptionError(f"parse: schema is not an Avro schema as JSON: {error!r}") from None
    plain, spark_type = _Types().read(parsed, "schema")
    if not isinstance(spark_type, T.StructType):
        raise OptionError(f"parse: the Avro schema is a {spark_type.simpleString()}, expected a record.")
    answer = T.StructType([T.StructField("value", spark_type), T.StructField("error", T.StringType())])
    text, arrow_type = json.dumps(plain), to_arrow_type(spark_type, timezone="UTC")

    def decode(bodies: pa.Array) -> pa.Array:
        return decode_bodies(bodies, text, arrow_type)

    decode.__annotations__ = {"bodies": pa.Array, "return": pa.Array}
    untyped: Any = arrow_udf  # its overloads do not include functions of arrays
    decoder: Callable[[Column], Column] = untyped(decode, answer)
    return decoder


def decode_bodies(bodies: pa.Array, schema: str, value_type: pa.DataType) -> pa.StructArray:
    """Return, for each body, a struct of `value` and `error`.

    If a body cannot be decoded, `value` is null and `error` says why. Otherwise `error` is null. `value_type` is the
    Arrow type of the values.
    """
    import fastavro

    parsed = fastavro.parse_schema(json.loads(schema), _write_hint=False)
    values: list[Any] = []
    errors: list[str | None] = []
    for body in bodies.to_pylist():
        value, error = _decode_one(body, parsed, fastavro)
        values.append(value)
        errors.append(error)
    try:
        column = pa.array(values, value_type)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):  # such as an int of more than 32 bits
        for row, value in enumerate(values):
            try:
                pa.array([value], value_type)
            except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
                values[row], errors[row] = None, f"the body is not Avro of the schema: {error}"
        column = pa.array(values, value_type)
    return pa.StructArray.from_arrays([column, pa.array(errors, pa.string())], ["value", "error"])


def _decode_one(body: bytes | None, schema: Any, fastavro: Any) -> tuple[Any, str | None]:
    """Return (value, None), or (None, the reason) if the body cannot be decoded."""
    if not body:
        return None, "the body is empty" if body is not None else "the body is null"
    stream = io.BytesIO(body)
    try:
        value = fastavro.schemaless_reader(stream, schema)
    except Exception as error:  # invalid bytes raise many types
        return None, f"the body is not Avro of the schema: {error!r}"
    if stream.tell() != len(body):
        return None, f"the body has {len(body)} bytes, and its value ends after {stream.tell()}"
    return value, None


class _Types:
    """Converts a parsed schema to two results: the schema with which fastavro reads bodies, and the Spark type."""

    def __init__(self) -> None:
        self._named: dict[str, T.DataType | None] = {}  # None while the type is being converted

    def read(self, schema: Any, path: str) -> tuple[Any, T.DataType]:
        """Return the schema without the logical types that Spark does not have, and its Spark type.

        `path` names the schema in errors. Raises OptionError if Spark has no type for the schema.
        """
        if isinstance(schema, list):
            return self._union(schema, path)
        if isinstance(schema, str):
            if schema in _PRIMITIVES:
                return schema, _PRIMITIVES[schema]
            known = self._named.get(schema)
            if known is None:
                what = "within itself" if schema in self._named else "that no column can hold"
                raise OptionError(f"parse: {path} is a {schema} {what}, for which Spark has no type.")
            return schema, known
        return self._complex(schema, path)

    def _union(self, branches: list[Any], path: str) -> tuple[Any, T.DataType]:
        others = [one for one in branches if one != "null"]
        if len(others) != 1:
            raise OptionError(
                f"parse: {path} is a union of {len(others)} types; Spark has a type for null and one other."
            )
        plain, spark_type = self.read(others[0], path)
        return [one if one == "null" else plain for one in branches], spark_type

    def _complex(self, schema: Mapping[str, Any], path: str) -> tuple[Any, T.DataType]:
        kind, name = schema["type"], schema.get("name")
        if not isinstance(kind, str) or kind == "error":
            return self.read(kind, path)
        if kind == "record":
            assert name is not None  # checked by fastavro
            self._named[name] = None
            read = [(field, *self.read(field["type"], f"{path}.{field['name']}")) for field in schema["fields"]]
            struct = T.StructType([T.StructField(field["name"], one) for field, _, one in read])
            self._named[name] = struct
            return {**schema, "fields": [{**field, "type": plain} for field, plain, _ in read]}, struct
        if kind == "array":
            plain, item = self.read(schema["items"], f"{path}[]")
            return {"type": kind, "items": plain}, T.ArrayType(item)
        if kind == "map":
            plain, item = self.read(schema["values"], f"{path}{{}}")
            return {"type": kind, "values": plain}, T.MapType(T.StringType(), item)
        if kind not in _PRIMITIVES:
            return self.read(kind, path)
        logical, spark_type = schema.get("logicalType"), _PRIMITIVES[kind]
        kept = dict(schema)
        if logical == "decimal" and kind in ("bytes", "fixed") and schema.get("precision", 0) <= _MAX_PRECISION:
            spark_type = T.DecimalType(schema["precision"], schema.get("scale", 0))
        elif (kind, logical) in _LOGICAL:
            spark_type = _LOGICAL[kind, str(logical)]
        else:
            kept.pop("logicalType", None)
        if name is not None:
            self._named[name] = spark_type
        return kept, spark_type
