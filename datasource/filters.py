"""The expressions of a query, by topic: what the options tags and sql92 say, for planning and for tasks."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rmq_spark.datasource.values import Unacceptable, check_topic, parse_object
from rmq_spark.store import SQL92, TAG, Expression, compile_filter, is_filtered_by_default, parse_tag_expression
from rmq_spark.store.errors import OptionError

_TAGS_EXAMPLE = '"A || B", "*", {"TopicA": "A || B"}'
_SQL92_EXAMPLE = '"amount > 5 AND region IS NOT NULL", {"TopicA": "amount > 5"}'


@dataclass(frozen=True, slots=True)
class TopicTexts:
    """An option's text for all topics, or its texts by topic."""

    for_all: str | None = None
    topics: tuple[tuple[str, str], ...] = ()


def parse_tags(text: str) -> TopicTexts:
    """Return the tags that are wanted, of all topics or by topic; raises what is wrong with an expression."""
    found = _parse(text, _TAGS_EXAMPLE)
    for topic, expression in _all(found):
        try:
            tags = parse_tag_expression(expression).tags
        except OptionError as error:
            raise Unacceptable(f"is no expression{_of(topic)}: {error}") from None
        if tags is not None and not tags:
            raise Unacceptable(f"names no tag{_of(topic)}, so that nothing would be read. Accepted: {_TAGS_EXAMPLE}.")
    return found


def parse_sql92(text: str) -> TopicTexts:
    """Return the expressions over properties, of all topics or by topic; raises what is wrong with one, and where."""
    found = _parse(text, _SQL92_EXAMPLE)
    for topic, expression in _all(found):
        try:
            compile_filter(Expression(SQL92, expression))
        except OptionError as error:
            raise OptionError(f"{f'For the topic {topic}: ' if topic else ''}{error}") from None
    return found


def _parse(text: str, example: str) -> TopicTexts:
    if not text.strip():
        raise Unacceptable(f"is empty. Accepted: {example}.")
    if not text.lstrip().startswith("{"):
        return TopicTexts(text)
    topics = []
    for topic, expression in parse_object(text, example).items():
        check_topic(topic)
        if not isinstance(expression, str):
            raise Unacceptable(f"gives {topic} no text. Accepted: {example}.")
        topics.append((topic, expression))
    if not topics:
        raise Unacceptable(f"names no topic. Accepted: {example}.")
    return TopicTexts(None, tuple(topics))


def _all(texts: TopicTexts) -> Iterable[tuple[str, str]]:
    return texts.topics if texts.for_all is None else [("", texts.for_all)]


def _of(topic: str) -> str:
    return f" for {topic}" if topic else ""


@dataclass(frozen=True, slots=True)
class Filters:
    """The expression of each topic, and the one for all others. Small, and it pickles into every task."""

    for_all: Expression | None = None
    topics: tuple[tuple[str, Expression], ...] = ()

    def of(self, topic: str) -> Expression | None:
        """Return the topic's expression, None where all of it is wanted: its own, else that for all.

        That for all does not apply to retry topics: what is there was wanted once.
        """
        own = next((expression for name, expression in self.topics if name == topic), None)
        return own if own is not None or not is_filtered_by_default(topic) else self.for_all

    @property
    def topic_names(self) -> tuple[str, ...]:
        """The topics that have an expression of their own."""
        return tuple(name for name, _ in self.topics)

    def describe(self, topics: Collection[str] | None) -> str:
        """Return what members of a group compare, "" without a filter; `topics` are all of the query's, if known.

        Alike for expressions that mean the same: the order of tags says nothing, and neither does who names a topic.
        """
        if topics is None:
            shown = [("", self.for_all), *sorted(self.topics, key=lambda one: one[0])]
        else:
            shown = [(topic, self.of(topic)) for topic in sorted(topics)]
            distinct = {_form(expression) for _, expression in shown}
            if len(distinct) == 1:
                shown = [("", shown[0][1])]
        parts = [f"{_form(one)}{f' for {topic}' if topic else ''}" for topic, one in shown if _form(one)]
        return ", ".join(parts)


NO_FILTERS = Filters()


def make_filters(tags: TopicTexts | None, sql92: TopicTexts | None) -> Filters:
    """Return the filters that two options give. Raises OptionError where both are for one topic."""
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


def _form(expression: Expression | None) -> str:
    if expression is None:
        return ""
    if expression.kind == SQL92:
        return str(expression)
    form = str(parse_tag_expression(expression.text))
    return "" if form == "*" else f'tags="{form}"'
