"""Whether the members of a consumer group at a broker agree with a query that wants to join it. Pure.

Settings and subscriptions of a group are those of its newest heartbeat. So members with other topics would take the
subscription away from each other, and queues would go to members that do not read them. RocketMQ does not refuse this,
but a query compares before it joins. A broker does not show members that are connected to a proxy of 5.x (gRPC).

Source: ConsumerGroupInfo#updateSubscription, ConsumerManager#registerConsumer (4.9, 5.3).
"""

import contextlib
from collections.abc import Collection, Mapping

from rmq_spark.store.cluster.member_requests import CLUSTERING, POP
from rmq_spark.store.cluster.responses import GroupConnectionsResponse, Subscription
from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.row_filter import ALL, TAG, parse_tag_expression
from rmq_spark.store.names import RETRY_TOPIC_PREFIX

_SHOWN_MEMBERS = 3


def find_disagreement(
    ours: Collection[Subscription], found: GroupConnectionsResponse, broker: str, client_id: str
) -> str | None:
    """Return why a query must not join the group whose members a broker has shown, as a text for an error.

    None if it may. `ours` are the subscriptions of the query, and `client_id` its id as a member, which may be among
    those that the broker shows. Retry topics are not compared.
    """
    others = sorted({one.client_id for one in found.connections} - {client_id})
    if not others:
        return None
    shown = ", ".join(others[:_SHOWN_MEMBERS])
    more = f" and {len(others) - _SHOWN_MEMBERS} more" if len(others) > _SHOWN_MEMBERS else ""
    are_many = len(others) > 1
    who = f"{'the members' if are_many else 'the member'} {shown}{more} at broker {broker}"
    if found.consume_type == POP:
        return (
            f"{who} consume{'' if are_many else 's'} by POP (consumeType {POP}), which shares messages and not queues"
        )
    if found.message_model != CLUSTERING:
        return f"{who} {'have' if are_many else 'has'} messageModel={found.message_model}, and this query {CLUSTERING}"
    wanted = {one.topic: _normal_form(one) for one in ours if not one.topic.startswith(RETRY_TOPIC_PREFIX)}
    theirs = {
        topic: _normal_form(one)
        for topic, one in found.subscriptions.items()
        if not topic.startswith(RETRY_TOPIC_PREFIX)
    }
    if wanted == theirs:
        return None
    verb = "subscribe" if are_many else "subscribes"
    return f"{who} {verb} to {_describe(theirs)}, and this query to {_describe(wanted)}"


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
