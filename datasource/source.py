"""`format("rmq")`: the class that Spark makes for one load() or one write, and the readers and writers it asks for."""

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
from rmq_spark.datasource.options import ReadOptions, parse_options
from rmq_spark.datasource.schema import Field, check_schema, columns_ddl, resolve_columns
from rmq_spark.datasource.send_back_schema import check_send_back_schema
from rmq_spark.datasource.settings import ReadSettings
from rmq_spark.datasource.sink_options import SinkOptions, looks_like_reading, parse_sink_options
from rmq_spark.datasource.sink_schema import check_sink_schema
from rmq_spark.datasource.store_view import StoreView
from rmq_spark.datasource.stream_reader import RefusedStream, RmqStreamReader
from rmq_spark.store.errors import OptionError, RmqError

Parsed = TypeVar("Parsed", ReadOptions, SinkOptions)


class RmqDataSource(DataSource):
    """A store of RocketMQ to read from or to write to, as batch or as stream.

    Spark makes one for each load() and each write and does not say for which. So the options are parsed as both, and
    what is wrong with them waits until Spark asks for a reader or a writer, unless they look like those of a load().
    Relative times count back from there, and a relative path counts from the driver's working directory. Raises
    OptionError, and StorePathError from `schema` and the writers.
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
        """Return the columns that the option `columns` asks for, as DDL; asked by load() without a schema."""
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
        """Return the reader of a stream, or one that raises what is wrong when Spark first asks it something."""
        try:
            options = _value(self._reading)
            options.check_complete()
            options.check_stream()
            return RmqStreamReader(options, _read_settings(schema, options), wall_clock_ms)
        except RmqError as error:
            return RefusedStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of one df.write, after a look at columns and path; the store is made where nothing is."""
        from rmq_spark.datasource.batch_writer import RmqBatchWriter  # half of the engine, which no reader needs

        options = _value(self._writing)
        store_id = _prepare_write(options, schema, 'mode("append")' if overwrite else None)
        return RmqBatchWriter(options, store_id)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of one batch of a stream. Asked in every batch, and again for the batch's commit."""
        from rmq_spark.datasource.stream_writer import RmqStreamWriter

        options = _value(self._writing)
        options.check_stream()
        store_id = _prepare_write(options, schema, 'outputMode("append")' if overwrite else None)
        return RmqStreamWriter(options, store_id)


def _prepare_write(options: SinkOptions, schema: StructType, remedy: str | None) -> str | None:
    """Raise what is wrong with a write before its first task, else see that there is a store and return its id.

    `remedy` is the mode to use instead of the user's, if that is wrong.
    """
    from rmq_spark.datasource.sink_commit import ensure_store

    options.check_complete()
    if remedy is not None:
        raise OptionError(
            f"a store is only ever added to: nothing in it can be overwritten. Write with .{remedy}. To begin anew, "
            "write to another path or topic."
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
    """Return what `parse` returns, or the error that it raises, for whoever asks for it later."""
    try:
        return parse()
    except RmqError as error:
        return error


def _value(outcome: Parsed | RmqError) -> Parsed:
    if isinstance(outcome, RmqError):
        raise outcome
    return outcome


def _absolute(options: Parsed) -> Parsed:
    """Return the options with absolute paths, so that executors need not share the driver's directory and user."""
    log = options.commit_log_path
    return replace(
        options,
        path=None if options.path is None else _absolute_path(options.path),
        commit_log_path=None if log is None else tuple(map(_absolute_path, log)),
    )


def _absolute_path(path: str) -> str:
    """Return the path as the driver's user sees it from its working directory; `~` is that user's home."""
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:  # no such user, so `~name` is a folder
        return str(Path(path).absolute())
