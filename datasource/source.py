"""Data source of `format("rmq")`, which creates the reader of a load() and the writer of a write."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from rmq_spark.datasource.batch_reader import RmqBatchReader
from rmq_spark.datasource.clocks import wall_clock_ms
from rmq_spark.datasource.read_options import ReadOptions, ReadSettings, parse_options
from rmq_spark.datasource.schema import Field, check_schema, columns_ddl, resolve_columns
from rmq_spark.datasource.sink_schema import check_send_back_schema, check_sink_schema
from rmq_spark.datasource.source_view import StoreView
from rmq_spark.datasource.stream_reader import RefusedStream, RmqStreamReader
from rmq_spark.datasource.write_options import SinkOptions, looks_like_reading, parse_sink_options
from rmq_spark.store.errors import OptionError, RmqError

Parsed = TypeVar("Parsed", ReadOptions, SinkOptions)


class RmqDataSource(DataSource):
    """A RocketMQ store that Spark reads from or writes to, in batches or streams.

    Spark creates an instance for each load() and for each write, and does not say for which of the two. So the options
    are parsed as options of a read and as options of a write. An invalid option raises OptionError only when Spark asks
    for a reader or a writer; if the options look like those of a load(), it raises OptionError at once. Relative times
    such as "-10m" are before the creation of the instance. Relative paths start at the driver's working directory.
    `schema` and the methods for writers raise StorePathError if the path is not a suitable store.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._reading = _outcome(lambda: _absolute(parse_options(options, wall_clock_ms())))
        self._writing = _outcome(lambda: _absolute(parse_sink_options(options)))
        if looks_like_reading(options):
            _value(self._reading)

    @classmethod
    def name(cls) -> str:
        """Return the name that `format(...)` takes."""
        return "rmq"

    def schema(self) -> str:
        """Return the columns of the query as DDL text. Spark calls it in load() unless the user gave a schema."""
        options = _value(self._reading)
        StoreView(options).store.close()
        return columns_ddl(resolve_columns(options.columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query."""
        options = _value(self._reading)
        options.check_complete()
        options.check_batch()
        return RmqBatchReader(options, _read_settings(schema, options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a stream.

        If the options are invalid, returns a reader that raises the error at Spark's first call.
        """
        try:
            options = _value(self._reading)
            options.check_complete()
            options.check_stream()
            return RmqStreamReader(options, _read_settings(schema, options), wall_clock_ms)
        except RmqError as error:
            return RefusedStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of one df.write, after checking the columns and the path.

        If the folder is empty or missing, the store is created there.
        """
        from rmq_spark.datasource.writer import RmqBatchWriter  # the writing part of the engine: import late

        options = _value(self._writing)
        store_id = _prepare_write(options, schema, 'mode("append")' if overwrite else None)
        return RmqBatchWriter(options, store_id)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of one batch of a stream. Spark calls it for every batch, and again for its commit."""
        from rmq_spark.datasource.writer import RmqStreamWriter

        options = _value(self._writing)
        options.check_stream()
        store_id = _prepare_write(options, schema, 'outputMode("append")' if overwrite else None)
        return RmqStreamWriter(options, store_id)


def _prepare_write(options: SinkOptions, schema: StructType, remedy: str | None) -> str | None:
    """Check a write before its first task, and create the store if necessary. Return the id of the store.

    `remedy` is None if the user's write mode is supported, else the call that sets a supported mode. Raises OptionError
    for an unsupported mode or invalid columns.
    """
    from rmq_spark.datasource.writer import ensure_store

    options.check_complete()
    if remedy is not None:
        raise OptionError(
            f"a store supports appending only, no message can be overwritten. Write with .{remedy}. For an empty store "
            "write to another path, or to another topic."
        )
    if options.is_sending_back:
        check_send_back_schema(_fields(schema))
    else:
        check_sink_schema(_fields(schema), options.topic)
    return ensure_store(options)


def _read_settings(schema: StructType, options: ReadOptions) -> ReadSettings:
    return ReadSettings(
        check_schema(_fields(schema), options.columns),
        options.check_crc,
        options.max_decompressed_bytes,
        options.read_mode,
        options.fail_on_data_loss,
        options.filters,
    )


def _fields(schema: StructType) -> list[Field]:
    return [Field(field.name, field.dataType.simpleString(), field.nullable) for field in schema.fields]


def _outcome(parse: Callable[[], Parsed]) -> Parsed | RmqError:
    """Return the result of `parse`, or the RmqError that it raises, for `_value`."""
    try:
        return parse()
    except RmqError as error:
        return error


def _value(outcome: Parsed | RmqError) -> Parsed:
    if isinstance(outcome, RmqError):
        raise outcome
    return outcome


def _absolute(options: Parsed) -> Parsed:
    """Return the options with absolute paths, because executors may have another working directory and user."""
    log = options.commit_log_path
    return replace(
        options,
        path=None if options.path is None else _absolute_path(options.path),
        commit_log_path=None if log is None else tuple(map(_absolute_path, log)),
    )


def _absolute_path(path: str) -> str:
    """Return an absolute path. A relative one starts at the driver's working directory, `~` at the user's home."""
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:  # the user does not exist, so `~name` is a folder
        return str(Path(path).absolute())
