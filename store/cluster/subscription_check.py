"""Whether the members of a consumer group at a broker agree with a query that wants to join it. Pure.

Settings and subscriptions of a group are those of its newest heartbeat. So members with other topics would take the
subscription away from each other, and queues would go to members that do not read them. RocketMQ does not refuse this,
but a query compares before it joins. A broker does not show members that are connected to a proxy of 5.x (gRPC), nor
that a member consumes by POP (`MemberLists.require_agreement`).

Two queries with the same pattern may have other topics for a while, because they do not find a new topic, or that one
was deleted, at the same moment. So with a pattern only the expressions of topics that both have must be the same.

Source: ConsumerGroupInfo#updateSubscription, ConsumerManager#registerConsumer (4.9, 5.3).
"""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rmq_spark.store.cluster.member_requests import CLUSTERING
from rmq_spark.store.cluster.responses import GroupConnectionsResponse, Subscription
from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.row_filter import ALL, TAG, parse_tag_expression
from rmq_spark.store.names import RETRY_TOPIC_PREFIX

_SHOWN_MEMBERS = 3


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How a query and the members of its group differ. `text` is a clause for an error or a warning.

    `may_pass` is whether they may agree as soon as both have seen the same topics.
    """

    text: str
    may_pass: bool = False


def find_disagreement(
    ours: Collection[Subscription],
    found: GroupConnectionsResponse,
    broker: str,
    client_id: str,
    *,
    has_pattern: bool = False,
) -> Disagreement | None:
    """Return how a query differs from the group whose members a broker has shown, None if they agree.

    `ours` are the subscriptions of the query, and `client_id` its id as a member, which may be among those that the
    broker shows. `has_pattern` is whether the query finds its topics by a pattern. Retry topics are not compared.
    """
    others = sorted({one.client_id for one in found.connections} - {client_id})
    if not others:
        return None
    shown = ", ".join(others[:_SHOWN_MEMBERS])
    more = f" and {len(others) - _SHOWN_MEMBERS} more" if len(others) > _SHOWN_MEMBERS else ""
    are_many = len(others) > 1
    who = f"{'the members' if are_many else 'the member'} {shown}{more} at broker {broker}"
    if found.message_model != CLUSTERING:
        verb = "have" if are_many else "has"
        return Disagreement(f"{who} {verb} messageModel={found.message_model}, and this query {CLUSTERING}")
    wanted = {one.topic: _normal_form(one) for one in ours if not one.topic.startswith(RETRY_TOPIC_PREFIX)}
    theirs = {
        topic: _normal_form(one)
        for topic, one in found.subscriptions.items()
        if not topic.startswith(RETRY_TOPIC_PREFIX)
    }
    if wanted == theirs:
        return None
    verb = "subscribe" if are_many else "subscribes"
    both = wanted.keys() & theirs.keys()
    may_pass = has_pattern and bool(both) and all(wanted[topic] == theirs[topic] for topic in both)
    text = f"{who} {verb} to {_describe(theirs)}, and this query to {_describe(wanted)}"
    return Disagreement(text, may_pass)


def _normal_form(subscription: Subscription) -> tuple[str, str]:
    """Return kind and text of an expression, such that expressions with the same tags are equal."""
    kind, text = subscription.expression_type or TAG, subscription.expression
    if kind == TAG:
        with contextlib.suppress(OptionError):  # an expression that this query cannot have
            text = str(parse_tag_expression(text))
    return kind, text


def _describe(expressions: Mapping[str, tuple[str, str]]) -> str:
    parts = [
        f"{topic}" if (kind, text) == (TAG, ALL) else f'{topic} ({"tags" if kind == TAG else "sql92"}="{text}")'
        for topic, (kind, text) in sorted(expressions.items())
    ]
    return ", ".join(parts) or "no topic"
