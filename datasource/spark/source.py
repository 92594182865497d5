"""Data source of `format("rmq")`, which creates the reader of a load() and the writer of a write."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from rmq_spark.datasource.options.read_options import ReadOptions, ReadSettings, parse_options
from rmq_spark.datasource.options.schema import Field, check_schema, columns_ddl, resolve_columns
from rmq_spark.datasource.options.write_options import SinkOptions, looks_like_reading, parse_sink_options
from rmq_spark.datasource.spark import clocks
from rmq_spark.datasource.spark.batch_reader import RmqBatchReader
from rmq_spark.datasource.spark.clocks import wall_clock_ms
from rmq_spark.datasource.spark.hand_over import make_hand_over
from rmq_spark.datasource.spark.log_lines import configure_from_environment
from rmq_spark.datasource.spark.refused_stream import RefusedStream
from rmq_spark.datasource.spark.stream_reader import RmqStreamReader
from rmq_spark.datasource.spark.worker_errors import without_frames
from rmq_spark.store import places
from rmq_spark.store.backend import Capability, Guarantee
from rmq_spark.store.errors import BackendUnavailableError, NotFoundError, OptionError, RmqError

Parsed = TypeVar("Parsed", ReadOptions, SinkOptions)
_LOG = logging.getLogger("rmq_spark")
configure_from_environment()  # the Python processes of Spark import this module first
# Spark refuses its own default mode, and suggests Append or Overwrite for any source.
_APPEND = (
    'Write with .mode("append"), or save(…, mode="append"). (If the mode is missing, Spark suggests Overwrite too, '
    "without asking the source.)"
)
_APPEND_STREAM = (
    'Write with .outputMode("append"). (For an aggregation that needs the mode complete, write each batch in '
    "foreachBatch.)"
)
_SERVERS_MS, _PAUSE_S = 30_000, 1.0  # how long a batch of a stream waits for servers, and between two attempts


@without_frames
class RmqDataSource(DataSource):
    """A RocketMQ store or cluster that Spark reads from or writes to, in batches or streams.

    Spark creates an instance for each load() and for each write, and does not say for which of the two. So the options
    are parsed as options of a read and as options of a write. An invalid option raises OptionError only when Spark asks
    for a reader or a writer; if the options look like those of a load(), it raises OptionError at once. Relative times
    such as "-10m" are before the creation of the instance. Relative paths start at the driver's working directory.
    `schema` and the methods for writers raise StorePathError if the path is not a suitable store.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._reading = _outcome(lambda: parse_options(options, wall_clock_ms(), places.locate))
        self._writing = _outcome(lambda: parse_sink_options(options, places.locate))
        if looks_like_reading(options):
            _value(self._reading)

    @classmethod
    def name(cls) -> str:
        """Return the name that `format(...)` takes."""
        return "rmq"

    def schema(self) -> str:
        """Return the columns of the query as DDL text. Spark calls it in load() unless the user gave a schema."""
        options = _value(self._reading)
        location, _ = options.check_complete()
        with contextlib.closing(location.open()) as backend:
            backend.identity()  # raises StorePathError if the path is not a suitable store
        has_brokers = Capability.BROKERS in location.capabilities
        return columns_ddl(resolve_columns(options.columns, has_brokers=has_brokers))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query."""
        options = _waiting(_value(self._reading), is_stream=False)
        options.check_batch()
        return RmqBatchReader(options, _read_settings(schema, options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a stream.

        If the options are invalid, returns a reader that raises the error at Spark's first call.
        """
        try:
            options = _waiting(_value(self._reading), is_stream=True)
            options.check_stream()
            settings = _read_settings(schema, options)
            hand_over = make_hand_over(options.hand_over_bytes, settings, schema)
            return RmqStreamReader(options, settings, wall_clock_ms, hand_over=hand_over)
        except RmqError as error:
            return RefusedStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of one df.write, after checking the columns and the place.

        If the place is a folder that is empty or missing, the store is created there.
        """
        from rmq_spark.datasource.spark.writer import RmqBatchWriter  # the writing part of the engine: import late

        options = _value(self._writing)
        _check_write(options, schema, _APPEND if overwrite else None)
        return RmqBatchWriter(options, options.sink().prepare())

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of one batch of a stream. Spark calls it for every batch, and again for its commit.

        Waits up to 30 s for servers that are away. Then the tasks get the error, and a commit goes without this look at
        the servers: it needs none because the tasks have stored all rows, or it waits for them itself. So it is with a
        topic that is not found: after a restart of the name servers its brokers may not have registered yet.
        """
        from rmq_spark.datasource.spark.writer import RmqStreamWriter

        options = _value(self._writing)
        options.check_stream()
        _check_write(options, schema, _APPEND_STREAM if overwrite else None)
        until_ms = clocks.monotonic_ms() + _SERVERS_MS
        while True:
            sink = options.sink()
            try:
                return RmqStreamWriter(options, sink.prepare(), None)
            except BackendUnavailableError as error:
                if clocks.monotonic_ms() >= until_ms:
                    return RmqStreamWriter(options, None, error)
                _LOG.warning("rmq: a batch waits for the servers of its sink: %s", error)
            except RmqError as error:
                if sink.guarantee is Guarantee.EXACTLY_ONCE and not isinstance(error, NotFoundError):
                    raise
                return RmqStreamWriter(options, None, error)
            clocks.sleep(_PAUSE_S)


def _check_write(options: SinkOptions, schema: StructType, remedy: str | None) -> None:
    """Check a write before its first task, as far as that is possible without the place.

    `remedy` is None if the user's write mode is supported, else the sentence that says how to set a supported mode.
    Raises OptionError for an unsupported mode or invalid columns.
    """
    options.check_complete()
    if remedy is not None:
        raise OptionError(
            f"a topic supports appending only, no message can be overwritten. {remedy} For an empty topic write to "
            "another topic or to another place."
        )
    options.check_columns(_fields(schema))


def _waiting(options: ReadOptions, *, is_stream: bool) -> ReadOptions:
    """Return the options, which must be complete, with the time that tasks wait for a broker in the location."""
    location, _ = options.check_complete()
    wait_ms = (options.broker_down_timeout_ms or 0) if is_stream else options.wait_ms()
    return replace(options, location=places.with_wait(location, wait_ms))


def _read_settings(schema: StructType, options: ReadOptions) -> ReadSettings:
    location = options.location
    return ReadSettings(
        check_schema(_fields(schema), options.columns),
        options.check_crc,
        options.max_decompressed_bytes,
        options.fail_on_data_loss,
        options.filters,
        None if location is None or location.without_secrets() == location else location,
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
