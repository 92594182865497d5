"""Lets Spark find `format("rmq")` by itself; there is nothing here to call.

When Spark looks for Python data sources, it imports every installed module whose name starts with
`pyspark_` and takes the class `DefaultSource` from it (pyspark.sql.worker.lookup_data_sources,
4.3). It does so whichever Python source is asked for, and an error here would hide them all. So
this module loads only the base class, cannot fail, and imports the engine when a query names `rmq`.
"""

try:
    from pyspark.sql.datasource import DataSource
except Exception:  # no pyspark, one without Python data sources, one that this Python breaks
    pass
else:

    class DefaultSource(DataSource):
        """Stands in for `rmq_spark.datasource.spark.source.RmqDataSource` until somebody reads it."""

        @classmethod
        def name(cls) -> str:
            """Return the name that `format(...)` takes."""
            return "rmq"

        def __new__(cls, options: dict[str, str]) -> DataSource:  # type: ignore[misc]
            """Return the real source: Spark keeps and pickles that, and forgets this class."""
            import sys

            try:
                from rmq_spark.datasource.spark.source import RmqDataSource
            except ImportError as error:
                raise ImportError(
                    f'format("rmq"): {sys.executable} found pyspark_rmq, but cannot import '
                    f"rmq_spark: {error}. Install rmq-spark for that interpreter (pip install "
                    "rmq-spark), or set PYSPARK_PYTHON to one that has it."
                ) from error
            return RmqDataSource(options)
