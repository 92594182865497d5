"""`pushFilters` of the batch reader: Spark's filters as predicates, and what it is to ask of the rows itself.

Spark refuses a reader with a `pushFilters` of its own where spark.sql.python.filterPushdown.enabled is off, which is
its default, and a reader is not told. It compares the `__func__` of the bound method with the base class's
(pyspark.sql.worker.plan_data_source_read); where it is on, it only calls what is there
(data_source_pushdown_filters). So what the reader has is no method but a callable with that `__func__`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from pyspark.sql.datasource import DataSourceReader, Filter, Not

from rmq_spark.datasource.predicates import Predicate
from rmq_spark.datasource.pushdown import Pushdown, plan_pushdown


class PushedFilters:
    """Takes filters from Spark, and gives what they leave to be read to `tell`. To be a reader's `pushFilters`."""

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, tell: Callable[[Pushdown], None]) -> None:
        self._tell = tell

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Return the filters that Spark is still to ask of each row: all but those that are answered exactly."""
        pushdown = plan_pushdown([to_predicate(one) for one in filters])
        self._tell(pushdown)
        return [one for number, one in enumerate(filters) if number not in pushdown.exact]


def to_predicate(one: Filter) -> Predicate | None:
    """Return a filter as a predicate, None for one on a part of a column, and for what is no comparison."""
    is_negated = isinstance(one, Not)
    inner: Any = one.child if isinstance(one, Not) else one
    path: tuple[str, ...] = getattr(inner, "attribute", ())
    if len(path) != 1 or isinstance(inner, Not):
        return None
    return Predicate(path[0], type(inner).__name__, getattr(inner, "value", None), is_negated)
