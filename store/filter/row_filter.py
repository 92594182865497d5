"""Filters of subscriptions: tag expressions, SQL92 expressions, and lookups by key or message id.

A tag filter tests each message twice. A consume-queue entry contains the hash of its message's tag, its *tags code*, so
most unwanted messages are skipped before anything is read from the commit log. Different tags may have the same hash,
so a message whose hash matches is read, and the tag in its properties is compared. Some entries have no hash, so their
messages are always read and compared:

- entries of batch queues, because the messages of one batch may have different tags;
- entries whose tags code is an address in the queue's extension file;
- entries of messages that wait for their delay level, which have the delivery time in place of the hash.

An SQL92 filter uses only the properties. Source: ExpressionMessageFilter (of the broker) and
PullAPIWrapper#processPullResult (of the client), 4.9 and 5.3.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.consume_queue_entry import MAX_ADDRESS
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.properties import TAGS
from rmq_spark.store.format.rows import PropertyTest
from rmq_spark.store.names import RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC

ALL = "*"
_SEPARATOR = "||"
_OTHER_SEPARATORS = re.compile(r"[,|]+")  # often written by mistake in place of `||`
_JAVA_BLANKS = "".join(map(chr, range(0x21)))  # the characters that String#trim removes; not U+3000 and U+0085


@dataclass(frozen=True, slots=True)
class TagExpression:
    """The tags of a subscription. `tags` has each tag once, in the order of the expression `text`.

    If `tags` is None, the expression matches every message. If `tags` is empty, it matches no message, as a text of
    blanks does at a broker.
    """

    text: str
    tags: tuple[str, ...] | None

    @property
    def codes(self) -> frozenset[int]:
        """The hashes of the tags: Java's String#hashCode, signed, as in the low 32 bits of an entry's tags code."""
        return frozenset(map(string_hash, self.tags or ()))

    @property
    def values(self) -> pa.StringArray:
        """The tags as an Arrow array."""
        return pa.array(self.tags or (), pa.string())

    def __str__(self) -> str:
        """Return the normal form of the expression. Expressions with the same tags have the same normal form."""
        return ALL if self.tags is None else " || ".join(sorted(self.tags))


def parse_tag_expression(text: str | None) -> TagExpression:
    """Parse a tag expression such as "A || B". None, an empty text and "*" match every message.

    Follows FilterAPI#buildSubscriptionData (4.9, 5.3), including three peculiarities: blanks are all characters up to
    U+0020, as in Java; a `*` among other tags is a tag with that name; and a text that consists of blanks and
    separators matches no message.

    Raises OptionError for a text that consists of separators only, as RocketMQ does, and for a tag that cannot be
    encoded in UTF-8 (half a surrogate pair). It also raises OptionError for a tag that contains a comma or a bar. This
    differs from RocketMQ deliberately, because such a tag is usually a mistake.
    """
    if text is None or text in ("", ALL):
        return TagExpression(ALL, None)
    if not any(parts := text.split(_SEPARATOR)):
        raise OptionError(
            f'the tag expression "{text}" has nothing between its separators; expected *, or tags such as "A || B".'
        )
    tags = dict.fromkeys(tag for part in parts if (tag := part.strip(_JAVA_BLANKS)))
    for tag in tags:
        try:
            tag.encode()
        except UnicodeEncodeError:
            raise OptionError(f"the tag {tag!r} is not valid Unicode, so no message can have it.") from None
        if _OTHER_SEPARATORS.search(tag):
            meant = " || ".join(part for one in _OTHER_SEPARATORS.split(text) if (part := one.strip(_JAVA_BLANKS)))
            raise OptionError(
                f'the tag expression "{text}" has the tag "{tag}"; expected tags separated by "||", as in '
                f'"{meant or "A || B"}". For messages whose tag contains a comma or a bar, use sql92, as in '
                "TAGS IN ('a,b')."
            )
    return TagExpression(text, tuple(tags))


TAG, SQL92 = "TAG", "SQL92"  # RocketMQ's names (ExpressionType)
_FEW_CODES = 8  # for more codes, one search costs less than a comparison with each code


@dataclass(frozen=True, slots=True)
class Expression:
    """The expression of a subscription: its kind, TAG or SQL92, and its text. Can be pickled."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f'{"tags" if self.kind == TAG else "sql92"}="{self.text}"'


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A compiled filter: one expression, or several that must all match. Thread-safe.

    `codes` are the hashes of the wanted tags. It is None if consume-queue entries cannot be tested, so that every
    message must be read. `expressions` are those that a broker can test: each wanted message passes all of them.
    """

    codes: frozenset[int] | None
    _test: PropertyTest
    expressions: tuple[Expression, ...] = ()

    @property
    def property_names(self) -> tuple[str, ...]:
        """The names of the properties that `matches` needs."""
        return self._test.property_names

    def asks_units_of(self, topic: str, *, are_batches: bool) -> bool:
        """Return whether the consume-queue entries of a queue of `topic` can be tested by their tags codes.

        `are_batches` is whether the queue is a batch queue, in which an entry may hold several messages.
        """
        return self.codes is not None and not are_batches and topic != SCHEDULE_TOPIC

    def may_match(self, tags_codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return, for each tags code, whether the message of its entry may match. Requires `asks_units_of`."""
        assert self.codes is not None
        hashes = tags_codes.astype(np.int32)  # the low 32 bits, signed
        found = tags_codes <= MAX_ADDRESS
        if len(self.codes) <= _FEW_CODES:
            for code in self.codes:
                found |= hashes == code
            return found
        return found | np.isin(hashes, np.array(sorted(self.codes), np.int32))

    def matches(self, columns: Mapping[str, Any], count: int) -> NDArray[np.bool_]:
        """Return, for each of `count` messages, whether it matches.

        `columns` maps each name in `property_names` to an array with the property's value for each message.
        """
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
    """Compile an expression. Return None if it matches every message.

    Raises OptionError for a syntax error; the error's message shows where it is.
    """
    if expression is None:
        return None
    if expression.kind == SQL92:
        from rmq_spark.store.filter.sql92_filter import compile_sql92  # few queries need the parser

        return RowFilter(None, compile_sql92(expression.text), (expression,))
    tags = parse_tag_expression(expression.text)
    return None if tags.tags is None else RowFilter(tags.codes, _TagTest(tags.values), (expression,))


def only_tags(tags: Collection[str], wanted: RowFilter | None = None) -> RowFilter:
    """Return a filter for messages that have one of the tags and also match `wanted`, unless it is None.

    Tags are compared as they are, including blanks and `||`. The tag "" matches messages whose tag is the empty text,
    not messages that have no tag.
    """
    codes, test = frozenset(map(string_hash, tags)), _TagTest(pa.array(sorted(tags), pa.string()))
    expressions = _express_tags(tags)
    if wanted is None:
        return RowFilter(codes, test, expressions)
    both = codes if wanted.codes is None else codes & wanted.codes
    return RowFilter(both, _BothTests((test, wanted)), expressions + wanted.expressions)


def _express_tags(tags: Collection[str]) -> tuple[Expression, ...]:
    """Return the expression for tags. Return () if there is none, as for a tag that contains `||`."""
    text = " || ".join(sorted(tags))
    try:
        is_equal = set(parse_tag_expression(text).tags or ()) == set(tags)
    except OptionError:
        return ()
    return (Expression(TAG, text),) if tags and is_equal else ()


def make_expression(*, tags: str | None = None, sql92: str | None = None) -> Expression | None:
    """Return the expression whose text is given, either `tags` or `sql92`. Return None if neither is given.

    Raises OptionError if both are given, because a subscription has one kind of expression, as in RocketMQ.
    """
    if tags is not None and sql92 is not None:
        raise OptionError(ONE_KIND)
    if sql92 is not None:
        return Expression(SQL92, sql92)
    return None if tags is None else Expression(TAG, tags)


ONE_KIND = (
    "tags and sql92 are both given; expected one, because a subscription has one kind of expression, as in RocketMQ. "
    "Keep one; in sql92 the tag is the property TAGS, as in TAGS IN ('A', 'B')."
)


def is_filtered_by_default(topic: str) -> bool:
    """Return whether a filter expression that is given for all topics applies to `topic`.

    It applies to every topic except retry topics, because messages in a retry topic have passed the filter before.
    RocketMQ's consumers also subscribe to the whole retry topic (DefaultMQPushConsumerImpl#copySubscription), and a
    broker does not filter it (filterSupportRetry=false).
    """
    return not topic.startswith(RETRY_TOPIC_PREFIX)


# The columns that `matches_lookup` needs.
LOOKUP_COLUMNS = ("keys", "msgId", "offsetMsgId")


class KeyLookup(NamedTuple):
    """The keys and ids to look up; a message with any of them matches.

    Each of `keys` is compared with the words of the property KEYS and with the property UNIQ_KEY. Each of `message_ids`
    is compared with UNIQ_KEY, the id that the producer gave, and with offsetMsgId, the id that the broker gave.
    """

    keys: tuple[str, ...] = ()
    message_ids: tuple[str, ...] = ()


def matches_lookup(batch: pa.RecordBatch, lookup: KeyLookup) -> pa.BooleanArray:
    """Return, for each row of the batch, whether it has one of the keys or ids.

    Upper and lower case matter, except in offsetMsgIds. The batch must have the columns LOOKUP_COLUMNS.
    """
    keys, ids, offset_ids = (batch.column(name) for name in LOOKUP_COLUMNS)
    unique_keys = pc.if_else(pc.equal(ids, offset_ids), None, ids)  # msgId is offsetMsgId if there is no UNIQ_KEY
    found = _is_in(unique_keys, (*lookup.keys, *lookup.message_ids))
    if lookup.message_ids:
        found = pc.or_(found, _is_in(offset_ids, tuple(one.upper() for one in lookup.message_ids)))
    if lookup.keys:
        words = pc.split_pattern(keys, " ")
        rows = pc.list_parent_indices(words).filter(_is_in(pc.list_flatten(words), lookup.keys))
        found = pc.or_(found, pc.is_in(pa.array(range(batch.num_rows), pa.int64()), value_set=rows.cast(pa.int64())))
    return found


def _is_in(column: pa.Array, texts: tuple[str, ...]) -> pa.BooleanArray:
    return pc.is_in(column, value_set=pa.array([text for text in texts if text], pa.string()), skip_nulls=True)
