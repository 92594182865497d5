"""SQL92 filters: which messages an expression over their properties wants, as a RocketMQ broker decides it."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.filter.sql92_columns import TRUE, Rows, evaluate_columns
from rmq_spark.store.filter.sql92_parser import parse_sql92
from rmq_spark.store.filter.sql92_rows import EvaluationError, evaluate_row
from rmq_spark.store.filter.sql92_tree import JavaValue, Node, Property, children


class Sql92Filter:
    """A compiled expression. Never changes, so any number of threads may ask at the same time; survives pickling.

    `text` is the expression as it was given, `property_names` are the properties that it names, in order of first use:
    the only ones that have to be decoded.
    """

    __slots__ = ("_tree", "property_names", "text")

    def __init__(self, text: str, tree: Node) -> None:
        self.text = text
        self._tree = tree
        self.property_names = _property_names(tree)

    def __repr__(self) -> str:
        return f"Sql92Filter({self.text!r})"

    def matches(self, columns: Mapping[str, pa.Array], count: int) -> NDArray[np.bool_]:
        """Return which of `count` messages match. `columns` has their properties by name, null where there is none.

        A column is string, large_string or a dictionary of them, `count` long; one that is left out is null in every
        row, more than are named do no harm. Only what is plainly true matches: not what is unknown (null), not what
        RocketMQ fails to evaluate (a text where a number must be).
        """
        arrays = {}
        for name in self.property_names:
            array = columns.get(name)
            if array is not None:
                assert len(array) == count, (name, len(array), count)
                arrays[name] = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        if count == 0:
            return np.zeros(0, np.bool_)
        is_match: NDArray[np.bool_] = evaluate_columns(self._tree, Rows(arrays, count)) == TRUE
        return is_match

    def matches_row(self, properties: Mapping[str, JavaValue]) -> bool:
        """Return whether one message matches: the slow twin of `matches`."""
        try:
            return self.evaluate_row(properties) is True
        except EvaluationError:
            return False

    def evaluate_row(self, properties: Mapping[str, JavaValue]) -> JavaValue:
        """Return True, False or None (unknown) for one message. Raises EvaluationError where RocketMQ throws."""
        return evaluate_row(self._tree, properties)


def compile_sql92(text: str, *, strict_end: bool = True) -> Sql92Filter:
    """Return the filter for an expression such as `region IN ('eu', 'us') AND price BETWEEN 0 AND 3`.

    Raises OptionError for a wrong one, with the place in the text. RocketMQ ignores whatever stands behind the longest
    expression that the text begins with: `a LIKE 'x%'` is only `a` there, `a > 01` is `a > 0`. Such a text is an error
    here, because it filters otherwise than it reads; `strict_end=False` takes it as RocketMQ does.
    Follows SelectorParser#parse (5.3).
    """
    return Sql92Filter(text, parse_sql92(text, strict_end=strict_end))


def _property_names(tree: Node) -> tuple[str, ...]:
    names: dict[str, None] = {}
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Property):
            names[node.name] = None
        waiting.extend(reversed(children(node)))
    return tuple(names)
