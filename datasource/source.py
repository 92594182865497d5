"""`format("rmq")`: the class that Spark makes from the options of one load(), and the readers it asks for."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from rmq_spark.datasource.batch_reader import RmqBatchReader
from rmq_spark.datasource.options import ReadOptions, parse_options
from rmq_spark.datasource.schema import Field, check_schema, columns_ddl, resolve_columns
from rmq_spark.datasource.settings import ReadSettings
from rmq_spark.datasource.store_view import StoreView
from rmq_spark.datasource.stream_reader import RefusedStream, RmqStreamReader
from rmq_spark.store.errors import OptionError, RmqError


def wall_clock_ms() -> int:
    """Return the time, in ms since the epoch: the one place where the Spark side asks a clock for it."""
    return time.time_ns() // 1_000_000  # noqa: TID251


class RmqDataSource(DataSource):
    """A store of RocketMQ to read, as batch or as stream.

    Options are parsed at once, so a bad one fails in load(); relative times count back from there, and a relative
    path counts from the driver's working directory. Raises OptionError, and StorePathError from `schema`.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._options = _absolute(parse_options(options, wall_clock_ms()))

    @classmethod
    def name(cls) -> str:
        """Return the name that `format(...)` takes."""
        return "rmq"

    def schema(self) -> str:
        """Return the columns that the option `columns` asks for, as DDL; asked by load() without a schema."""
        StoreView(self._options).store.close()
        return columns_ddl(resolve_columns(self._options.columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query."""
        self._options.check_complete()
        self._options.check_batch()
        return RmqBatchReader(self._options, self._settings(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a stream, or one that raises what is wrong when Spark first asks it something."""
        try:
            self._options.check_complete()
            self._options.check_stream()
            return RmqStreamReader(self._options, self._settings(schema), wall_clock_ms)
        except RmqError as error:
            return RefusedStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        """Refuse to write."""
        raise OptionError(_ONLY_READS)

    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:
        """Refuse to write."""
        raise OptionError(_ONLY_READS)

    def _settings(self, schema: StructType) -> ReadSettings:
        fields = [Field(field.name, field.dataType.simpleString(), field.nullable) for field in schema.fields]
        options = self._options
        return ReadSettings(
            check_schema(fields, options.columns),
            options.check_crc,
            options.max_decompressed_bytes,
            options.read_mode,
            options.fail_on_data_loss,
        )


_ONLY_READS = (
    'writing is not supported by this version: format("rmq") only reads. Send with a RocketMQ producer, or write to '
    "another format."
)


def _absolute(options: ReadOptions) -> ReadOptions:
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
