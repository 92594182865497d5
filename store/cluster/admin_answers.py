"""Rules for the response codes of requests of administrators: about groups, members, resets, topics and statistics.

These rules come before those for all requests (`answer_rules`). A broker of 4.9 checks no right of these requests,
except that an administrator deletes topics.

Source: AdminBrokerProcessor, Broker2Client#resetOffset, PlainAccessValidator (4.9, 5.3),
DefaultAuthorizationContextBuilder (5.3).
"""

from rmq_spark.store.cluster.answer_rule import AnswerRule, rules_of_rights
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.errors import NotFoundError

_RESET = frozenset({RequestCode.INVOKE_BROKER_TO_RESET_OFFSET})
_ASKS_GROUP = frozenset({RequestCode.GET_CONSUME_STATS})
_ASKS_MEMBERS = frozenset({RequestCode.GET_CONSUMER_CONNECTION_LIST})
_ASKS_ALL_GROUPS = frozenset({RequestCode.GET_ALL_CONSUMER_OFFSET})
_ASKS_BROKER = frozenset({RequestCode.GET_BROKER_RUNTIME_INFO, RequestCode.VIEW_BROKER_STATS_DATA})
_ASKS_CONSUMERS = frozenset({RequestCode.QUERY_TOPIC_CONSUME_BY_WHO})
_DELETES_TOPIC = frozenset({RequestCode.DELETE_TOPIC_IN_BROKER})
_DELETES_ROUTE = frozenset({RequestCode.DELETE_TOPIC_IN_NAMESRV})
_DELETION_RIGHTS = (
    "Ask an administrator for the right: an account with admin: true (4.9), or Delete of the topic (5.3)."
)

# Rules about rights of an account, which come before those of other requests.
ADMIN_RIGHTS = rules_of_rights(
    {
        _RESET: "Ask an administrator for the rights: Update of the topic and of the group (5.3).",
        _ASKS_GROUP: "Ask an administrator for the right: Get of the group (5.3).",
        _ASKS_MEMBERS: "Ask an administrator for the right: Get of the group (5.3). A query that joins also needs "
        "Sub of the group and of its topics.",
        _ASKS_ALL_GROUPS: "Ask an administrator for the right: Get of the cluster (5.3).",
        _ASKS_BROKER: "Ask an administrator for the right: Get of the cluster (5.3); 4.9 asks for none.",
        _ASKS_CONSUMERS: "Ask an administrator for the right: Get of the topic (5.3); 4.9 asks for none.",
        _DELETES_TOPIC: _DELETION_RIGHTS,
        _DELETES_ROUTE: "Ask an administrator for the right: Update of the cluster (5.3); 4.9 asks for none.",
    }
)

ADMIN_RULES = (
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker sent no offsets to the members, because the group lacks one in a queue of the topic",
        requests=_RESET,
        remark=r"consumer group <.*> not exist",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker does not have the topic",
        NotFoundError,
        expected="a topic of the broker",
        next_step="Check the topic's name, and whether it was deleted.",
        requests=_RESET,
        remark=r"no topic in this broker",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker has counted nothing yet for this name and key",
        requests=frozenset({RequestCode.VIEW_BROKER_STATS_DATA}),
        remark=r"The stats <.*> not exist",
    ),
)
