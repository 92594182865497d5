"""The options of a query or a write, parsed as the source parses them: with the locations of `store.places`."""

from collections.abc import Mapping

from rmq_spark.datasource.options import read_options, write_options
from rmq_spark.datasource.options.read_options import ReadOptions
from rmq_spark.datasource.options.write_options import SinkOptions
from rmq_spark.store.places import locate


def parse_options(given: Mapping[str, str], now_ms: int) -> ReadOptions:
    """Parse the options of a query."""
    return read_options.parse_options(given, now_ms, locate)


def parse_sink_options(given: Mapping[str, str]) -> SinkOptions:
    """Parse the options of a write."""
    return write_options.parse_sink_options(given, locate)
