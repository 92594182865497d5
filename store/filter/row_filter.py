"""What a reader asks of a subscription's expression: first of units, then of messages.

A unit has its message's tag as a hash. So most messages that nobody wants are passed over before a byte of the commit
log is touched; what a hash lets through is asked again by its properties, for hashes collide. Units that have no hash
are let through: those of a queue of batches (the messages of a batch may differ), those whose tags code is an address
in the queue's extension, and those of messages that wait for their delay level, where the time of delivery stands
in its place. SQL92 is asked of properties alone.

Source: ExpressionMessageFilter (a broker's), PullAPIWrapper#processPullResult (a client's), 4.9 and 5.3.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.tag_expression import parse_tag_expression
from rmq_spark.store.format.chosen_rows import PropertyTest
from rmq_spark.store.format.filenames import RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.properties import TAGS
from rmq_spark.store.format.unit_ext import MAX_ADDRESS

TAG, SQL92 = "TAG", "SQL92"  # RocketMQ's names (ExpressionType)
_FEW_CODES = 8  # from more on one search is cheaper than a comparison each


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression as a subscription has it: its kind, TAG or SQL92, and its text. Small, and it pickles."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f'{"tags" if self.kind == TAG else "sql92"}="{self.text}"'


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A compiled expression, or several. Any number of threads may ask it at once.

    `codes` are the hashes of the wanted tags, None where units cannot be asked.
    """

    codes: frozenset[int] | None
    _test: PropertyTest

    @property
    def property_names(self) -> tuple[str, ...]:
        """The properties that `matches` needs."""
        return self._test.property_names

    def asks_units_of(self, topic: str, *, are_batches: bool) -> bool:
        """Say whether the units of a queue can tell anything, by its topic and whether a unit may hold several."""
        return self.codes is not None and not are_batches and topic != SCHEDULE_TOPIC

    def may_match(self, tags_codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each unit's tags code whether its message may be wanted, where units can be asked."""
        assert self.codes is not None
        hashes = tags_codes.astype(np.int32)  # the low 32 bits, signed
        found = tags_codes <= MAX_ADDRESS
        if len(self.codes) <= _FEW_CODES:
            for code in self.codes:
                found |= hashes == code
            return found
        return found | np.isin(hashes, np.array(sorted(self.codes), np.int32))

    def matches(self, columns: Mapping[str, Any], count: int) -> NDArray[np.bool_]:
        """Return for each of `count` messages whether it is wanted; `columns` has an array for each property's name."""
        return self._test.matches(columns, count)


@dataclass(frozen=True, slots=True)
class _TagTest:
    wanted: pa.StringArray
    property_names: tuple[str, ...] = (TAGS,)

    def matches(self, columns: Mapping[str, Any], count: int) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = pc.is_in(columns[TAGS], value_set=self.wanted).to_numpy(zero_copy_only=False)
        return found


@dataclass(frozen=True, slots=True)
class _BothTests:
    tests: tuple[PropertyTest, PropertyTest]

    @property
    def property_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for test in self.tests for name in test.property_names))

    def matches(self, columns: Mapping[str, Any], count: int) -> NDArray[np.bool_]:
        one, other = self.tests
        return one.matches(columns, count) & other.matches(columns, count)


def compile_filter(expression: Expression | None) -> RowFilter | None:
    """Return the filter of an expression, None for one that wants every message.

    Raises OptionError for what is no expression of its kind; the message marks the place.
    """
    if expression is None:
        return None
    if expression.kind == SQL92:
        from rmq_spark.store.filter.sql92_filter import compile_sql92  # a parser that few queries need

        return RowFilter(None, compile_sql92(expression.text))
    tags = parse_tag_expression(expression.text)
    return None if tags.tags is None else RowFilter(tags.codes, _TagTest(tags.values))


def only_tags(tags: Collection[str], wanted: RowFilter | None = None) -> RowFilter:
    """Return the filter that wants what `wanted` does, if its message has one of the tags.

    Tags are texts as they are, blanks and `||` included; "" is a tag that is there, and empty.
    """
    codes, test = frozenset(map(string_hash, tags)), _TagTest(pa.array(sorted(tags), pa.string()))
    if wanted is None:
        return RowFilter(codes, test)
    return RowFilter(codes if wanted.codes is None else codes & wanted.codes, _BothTests((test, wanted)))


def make_expression(*, tags: str | None = None, sql92: str | None = None) -> Expression | None:
    """Return the expression that is given by one of two texts, None for neither.

    Raises OptionError for both: as in RocketMQ a subscription has one kind of expression.
    """
    if tags is not None and sql92 is not None:
        raise OptionError(ONE_KIND)
    if sql92 is not None:
        return Expression(SQL92, sql92)
    return None if tags is None else Expression(TAG, tags)


ONE_KIND = (
    "tags and sql92 are both given, and a subscription has one kind of expression, as in RocketMQ. Keep one; in sql92 "
    "the tag is the property TAGS, as in TAGS IN ('A', 'B')."
)


def is_filtered_by_default(topic: str) -> bool:
    """Say whether an expression that is given for all topics applies to this one.

    A message that failed was wanted once. So RocketMQ's consumers subscribe to all of a retry topic
    (DefaultMQPushConsumerImpl#copySubscription), and a broker filters none of it (filterSupportRetry=false).
    """
    return not topic.startswith(RETRY_TOPIC_PREFIX)
