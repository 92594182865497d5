"""Warnings when a query begins: no topic matches its pattern, or no message of a sample matches its filter.

A pattern is compared with the names of all topics. A filter is applied to a sample of limited size, the newest and
oldest messages of a few queues, only until the first match is found. So the check is cheap. Messages outside of the
sample may match nevertheless, so the warning says how many messages were sampled.
"""

import difflib
import fnmatch
import logging
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.datasource.options.filters import Filters
from rmq_spark.datasource.options.subscription import Pattern, Subscription, WithRetry
from rmq_spark.store.backend import Backend, DecodeLimits
from rmq_spark.store.errors import StoreError
from rmq_spark.store.filter.row_filter import TAG, Expression, RowFilter, compile_filter
from rmq_spark.store.model import QueueKey, QueueRange
from rmq_spark.store.names import is_system_topic

_LOG = logging.getLogger("rmq_spark")

SAMPLED_QUEUES = 16  # the maximum number of sampled queues, evenly spread over those to which a filter applies
SAMPLED_MESSAGES = 256  # the number of newest messages of each queue, and also that of oldest ones
_PLACES = SAMPLED_MESSAGES // 64  # so that the samples of `wanted_share` are adjacent
_SHOWN_NAMES = 12
_IN_COLUMNS = {"TAGS", "KEYS"}  # properties that are columns of their own


def warn_of_pattern(subscription: Subscription | None, queues: Sequence[QueueKey], backend: Backend) -> None:
    """Warn if a query has a pattern and none of its `queues` belongs to a topic that matches."""
    chosen = subscription.chosen if isinstance(subscription, WithRetry) else subscription
    if not isinstance(chosen, Pattern) or any(chosen.covers(queue) for queue in queues):
        return
    names = [name for name in backend.topics() if not is_system_topic(name)]
    as_wildcard = [name for name in names if fnmatch.fnmatchcase(name, chosen.text)]
    if as_wildcard:
        wanted = fnmatch_as_pattern(chosen.text)
        hint = f' Did you mean "{wanted}", which matches {_listed(as_wildcard)}?'
    else:
        parts = [part.strip("^$.*+?()[]") for part in chosen.text.split("|")]
        hint = _hint(parts, names)
    listed = f" Topics: {_listed(names)}." if names else " The store has no topics yet."
    _LOG.warning("rmq: %s matches no topic.%s%s", chosen, hint, listed)


def fnmatch_as_pattern(text: str) -> str:
    """Return the regular expression for a text with wildcards. For example, `pay*` becomes `pay.*`."""
    return text.replace(".", "\\.").replace("*", ".*").replace("?", ".")


def warn_of_filters(filters: Filters, ranges: Sequence[QueueRange], backend: Backend) -> None:
    """Warn of each filter that matches no message in a sample of the `ranges` to which it applies.

    Does not warn if there are no messages. If messages cannot be read, does not warn either, because the query will
    raise the error.
    """
    of_filter: dict[Expression, list[QueueRange]] = {}
    for part in ranges:
        expression = filters.of(part.queue.topic)
        if expression is not None and part.count:
            of_filter.setdefault(expression, []).append(part)
    for expression, parts in of_filter.items():
        wanted = compile_filter(expression)
        if wanted is None:
            continue
        try:
            sample = list(_sample(parts))
            if not any(_has_match(backend, part, wanted) for part in sample):
                _warn(backend, expression, wanted, parts, sample)
        except StoreError as error:
            _LOG.debug("rmq: cannot check whether %s matches a message: %s", expression, error)


def _sample(parts: Sequence[QueueRange]) -> Iterator[QueueRange]:
    """Yield the newest messages of up to SAMPLED_QUEUES ranges, then their oldest messages, no message twice."""
    step = -(-len(parts) // SAMPLED_QUEUES)
    chosen = parts[::step]
    for part in chosen:
        yield QueueRange(part.queue, max(part.begin, part.end - SAMPLED_MESSAGES), part.end)
    for part in chosen:
        end = min(part.begin + SAMPLED_MESSAGES, part.end - SAMPLED_MESSAGES)
        if part.begin < end:
            yield QueueRange(part.queue, part.begin, end)


def _has_match(backend: Backend, part: QueueRange, wanted: RowFilter) -> bool:
    """Return whether a message of the range matches.

    For tags only the hashes in consume-queue entries are compared. An entry without a hash, such as that of a batch, is
    treated as a match.
    """
    if wanted.codes is not None and backend.sizes is not None:
        return backend.sizes.share_wanted(part, wanted, _PLACES) > 0
    found = backend.read(part, ("queueOffset",), DecodeLimits(), wanted)
    return any(one.batch.num_rows for one in found)


def _warn(
    backend: Backend,
    expression: Expression,
    wanted: RowFilter,
    parts: Sequence[QueueRange],
    sample: Sequence[QueueRange],
) -> None:
    sampled, total = sum(part.count for part in sample), sum(part.count for part in parts)
    topics = sorted({part.queue.topic for part in parts})
    of_all = f"{sampled} messages" if sampled == total else f"{sampled} sampled messages, of {total},"
    if expression.kind == TAG:
        names = _values(backend, sample, "tags")
        asked = [tag.strip() for tag in expression.text.split("||") if tag.strip()]
        what = "Tags"
    else:
        names = _values(backend, sample, "properties")
        asked = [name for name in wanted.property_names if name not in names and name not in _IN_COLUMNS]
        what = "Properties"
    listed = f" {what}: {_listed(names)}." if names else f" {what}: none."
    _LOG.warning(
        "rmq: %s matches none of the %s in %s.%s%s", expression, of_all, _listed(topics), _hint(asked, names), listed
    )


def _values(backend: Backend, sample: Sequence[QueueRange], column: str) -> list[str]:
    """Return the distinct values of a column in the sample, sorted; for the column properties, their names."""
    found: set[str] = set()
    for part in sample:
        for found_batch in backend.read(part, [column], DecodeLimits(), None):
            values = found_batch.batch.column(0)
            texts = values.keys if pa.types.is_map(values.type) else values
            found.update(pc.unique(texts).drop_null().to_pylist())
    return sorted(found)


def _hint(asked: Sequence[str], names: Sequence[str]) -> str:
    folded = {name.casefold(): name for name in names}
    near = [
        folded[match]
        for one in asked
        for match in difflib.get_close_matches(one.casefold(), list(folded), 1)
        if folded[match] != one
    ]
    return f" Did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:_SHOWN_NAMES])}{' …' if len(names) > _SHOWN_NAMES else ''}"
