"""The filter of each topic of a query, from the options tags and sql92. Used on the driver and in tasks."""

from collections.abc import Collection
from dataclasses import dataclass

from rmq_spark.datasource.options.option_parsers import InvalidValueError, check_topic, parse_object
from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.row_filter import (
    SQL92,
    TAG,
    Expression,
    compile_filter,
    is_filtered_by_default,
    parse_tag_expression,
)

_TAGS_EXAMPLE = '"A || B", "*" or {"TopicA": "A || B"}'
_SQL92_EXAMPLE = '"amount > 5 AND region IS NOT NULL" or {"TopicA": "amount > 5"}'


@dataclass(frozen=True, slots=True)
class TopicTexts:
    """The value of the option tags or sql92: one text for all topics (`for_all`), or a text for each topic."""

    for_all: str | None = None
    topics: tuple[tuple[str, str], ...] = ()

    def by_topic(self) -> tuple[tuple[str, str], ...]:
        """Return (topic, text) for each expression. The topic is "" if the expression is for all topics."""
        return self.topics if self.for_all is None else (("", self.for_all),)


def parse_tags(text: str) -> TopicTexts:
    """Parse the option tags: one expression for all topics, or JSON with an expression for each topic.

    Raises InvalidValueError if an expression is invalid or matches no message.
    """
    found = _parse(text, _TAGS_EXAMPLE)
    for topic, expression in found.by_topic():
        where = f" for topic {topic}" if topic else ""
        try:
            tags = parse_tag_expression(expression).tags
        except OptionError as error:
            raise InvalidValueError(f"expected a tag expression{where}: {error}") from None
        if tags is not None and not tags:
            raise InvalidValueError(f"found no tag{where}, which matches no message; expected {_TAGS_EXAMPLE}.")
    return found


def parse_sql92(text: str) -> TopicTexts:
    """Parse the option sql92: one expression for all topics, or JSON with an expression for each topic.

    Raises InvalidValueError if the text has no expressions, and OptionError for a syntax error in an expression; the
    error's message shows where it is.
    """
    found = _parse(text, _SQL92_EXAMPLE)
    for topic, expression in found.by_topic():
        try:
            compile_filter(Expression(SQL92, expression))
        except OptionError as error:
            raise OptionError(f"{f'topic {topic}: ' if topic else ''}{error}") from None
    return found


def _parse(text: str, example: str) -> TopicTexts:
    if not text.strip():
        raise InvalidValueError(f"expected {example}.")
    if not text.lstrip().startswith("{"):
        return TopicTexts(text)
    topics = []
    for topic, expression in parse_object(text, example).items():
        check_topic(topic)
        if not isinstance(expression, str):
            raise InvalidValueError(f"found no text for topic {topic}; expected {example}.")
        topics.append((topic, expression))
    if not topics:
        raise InvalidValueError(f"found no topic; expected {example}.")
    return TopicTexts(None, tuple(topics))


@dataclass(frozen=True, slots=True)
class Filters:
    """The filter expressions of single topics (`topics`), and the expression for all other topics (`for_all`).

    Every task gets a pickled copy.
    """

    for_all: Expression | None = None
    topics: tuple[tuple[str, Expression], ...] = ()

    def of(self, topic: str) -> Expression | None:
        """Return the expression that applies to a topic: its own, else the one for all topics. None means no filter.

        The expression for all topics does not apply to retry topics, because their messages have passed it before.
        """
        own = next((expression for name, expression in self.topics if name == topic), None)
        return own if own is not None or not is_filtered_by_default(topic) else self.for_all

    def describe(self, topics: Collection[str] | None) -> str:
        """Return a text of the filters, which members of a group compare; "" if there is no filter.

        `topics` are all topics that the query reads, or None if they are unknown. Filters with the same effect on
        `topics` have the same text: the order of tags does not matter, nor whether an expression is given for all
        topics or for each.
        """
        if topics is None:
            shown = [("", self.for_all), *sorted(self.topics, key=lambda one: one[0])]
        else:
            shown = [(topic, self.of(topic)) for topic in sorted(topics)]
            distinct = {_canonical(expression) for _, expression in shown}
            if len(distinct) == 1:
                shown = [("", shown[0][1])]
        parts = [f"{_canonical(one)}{f' for {topic}' if topic else ''}" for topic, one in shown if _canonical(one)]
        return ", ".join(parts)


NO_FILTERS = Filters()


def make_filters(tags: TopicTexts | None, sql92: TopicTexts | None) -> Filters:
    """Return the filters of a query from its options tags and sql92. Raises OptionError if a topic has both."""
    if tags is not None and sql92 is not None:
        both = sorted(set(dict(tags.topics)) & set(dict(sql92.topics)))
        if both or tags.for_all is not None or sql92.for_all is not None:
            where = f" for {', '.join(both)}" if both else ", one of them for all topics"
            raise OptionError(
                f"tags and sql92 are both given{where}. As in RocketMQ a topic has one expression. Keep one; in sql92 "
                "the tag is the property TAGS, as in sql92=TAGS IN ('A', 'B') AND amount > 5."
            )
    given = [(kind, texts) for kind, texts in ((TAG, tags), (SQL92, sql92)) if texts is not None]
    for_all = next((Expression(kind, texts.for_all) for kind, texts in given if texts.for_all is not None), None)
    return Filters(
        for_all, tuple((topic, Expression(kind, one)) for kind, texts in given for topic, one in texts.topics)
    )


def _canonical(expression: Expression | None) -> str:
    if expression is None:
        return ""
    if expression.kind == SQL92:
        return str(expression)
    tags = str(parse_tag_expression(expression.text))
    return "" if tags == "*" else f'tags="{tags}"'
