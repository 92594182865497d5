"""What the response codes of brokers and name servers mean: an answer to the request, or which error.

`RULES` is one table for all requests. The first rule that fits decides. docs/REMOTING.md contains the same table.
A 4.9 broker answers 1 (SYSTEM_ERROR) where a 5.x broker has codes of their own, so some rules look at the remark.

Source: ResponseCode, MQClientAPIImpl, and the processors of broker and name server (4.9, 5.3).
"""

from collections.abc import Collection
from functools import lru_cache
from typing import Any

from rmq_spark.store.cluster.admin_answers import ADMIN_RIGHTS, ADMIN_RULES
from rmq_spark.store.cluster.answer_fields import shorten_line
from rmq_spark.store.cluster.answer_rule import MISSING_RIGHT, AnswerRule, Retry, UnknownGroupError, rules_of_rights
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.cluster.send_answers import SEND_RIGHTS, SEND_RULES
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    NoPermissionError,
    NotFoundError,
    OptionError,
    RmqError,
)

__all__ = ["RULES", "AnswerRule", "Retry", "find_rule", "make_error", "name_code", "rule_for", "shorten_remark"]

_READS_QUEUE = frozenset(
    {
        RequestCode.PULL_MESSAGE,
        RequestCode.GET_MAX_OFFSET,
        RequestCode.GET_MIN_OFFSET,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        RequestCode.GET_EARLIEST_MSG_STORETIME,
    }
)
_NAME_SERVER = frozenset(
    {
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    }
)
_WRONG_ACCOUNT = "the account is unknown, or its key is wrong"
_EXPECTED_ACCOUNT = "a request that is signed by an account of the cluster"
_CHECK_ACCOUNT = "Check the options accessKey, secretKey and securityToken, or credentialsFile."
_ASK_FOR_RIGHTS = (
    "Ask an administrator for the rights: SUB of the topic and the group (4.9), or Sub and Get of the topic and Sub of "
    "the group (5.3). Or set pullGroup to a group that the account may use."
)
_MISSING_QUEUE = "the topic has fewer queues for reading than the queue's id needs"
_FEWER_QUEUES = "Ask an administrator whether readQueueNums was reduced; the topic's route has the present number."
_ASK_AGAIN = "Repeat the read later; if that does not help, ask an administrator for the load of the broker."

_ANSWERS = (
    AnswerRule(ResponseCode.SUCCESS, "the request was executed"),
    AnswerRule(
        ResponseCode.PULL_NOT_FOUND,
        "the queue has no message at the offset yet",
        requests=frozenset({RequestCode.PULL_MESSAGE}),
    ),
    AnswerRule(
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        "no message matched, or the messages were deleted: the next pull begins at the next offset",
        requests=frozenset({RequestCode.PULL_MESSAGE}),
    ),
    AnswerRule(
        ResponseCode.PULL_OFFSET_MOVED,
        "the offset is outside of the queue, or the group's offset was reset",
        requests=frozenset({RequestCode.PULL_MESSAGE}),
    ),
    AnswerRule(
        ResponseCode.QUERY_NOT_FOUND,
        "the group has no offset in the queue",
        requests=frozenset({RequestCode.QUERY_CONSUMER_OFFSET}),
    ),
    AnswerRule(
        ResponseCode.QUERY_NOT_FOUND,
        "no message has the key",
        requests=frozenset({RequestCode.QUERY_MESSAGE}),
    ),
    AnswerRule(
        ResponseCode.CONSUMER_NOT_ONLINE,
        "the group has no member",
        requests=frozenset({RequestCode.GET_CONSUMER_CONNECTION_LIST, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET}),
    ),
)
# What a member of a group sends. The other rights of its account are those of a reader.
_OF_MEMBERS = frozenset(
    {
        RequestCode.HEART_BEAT,
        RequestCode.UNREGISTER_CLIENT,
        RequestCode.GET_CONSUMER_LIST_BY_GROUP,
        RequestCode.LOCK_BATCH_MQ,
        RequestCode.UNLOCK_BATCH_MQ,
        RequestCode.QUERY_ASSIGNMENT,
    }
)
_ASK_FOR_MEMBERSHIP = (
    "Ask an administrator for the rights of a member: SUB of the group (4.9), or Sub and Get of the group and Sub of "
    "its topics (5.3)."
)
_OF_PRODUCERS = frozenset({RequestCode.GET_PRODUCER_CONNECTION_LIST})
_ASK_FOR_CLUSTER = (
    "Ask an administrator for the right: Get of the cluster (5.3); 4.9 asks for none. Or set delivery=atLeastOnce."
)
_ASK_FOR_SETTINGS = "Ask an administrator for the right: Get of the cluster (5.3); 4.9 asks for none."
_MEMBER_RIGHTS = rules_of_rights(
    {
        _OF_MEMBERS: _ASK_FOR_MEMBERSHIP,
        _OF_PRODUCERS: _ASK_FOR_CLUSTER,
        frozenset({RequestCode.GET_BROKER_CONFIG}): _ASK_FOR_SETTINGS,
    }
)
_ACCOUNTS = (
    AnswerRule(
        None,
        _WRONG_ACCOUNT,
        OptionError,
        Retry.NEW_KEYS,
        _EXPECTED_ACCOUNT,
        next_step=_CHECK_ACCOUNT,
        remark=r"(?s)AclException.*(No accessKey is configured|No acl config for|Check signature failed)",
    ),
    AnswerRule(
        None,
        MISSING_RIGHT,
        NoPermissionError,
        expected="an account with the right",
        next_step=_ASK_FOR_RIGHTS,
        remark=r"AclException",
    ),
    AnswerRule(
        ResponseCode.NO_PERMISSION,
        _WRONG_ACCOUNT,
        OptionError,
        Retry.NEW_KEYS,
        _EXPECTED_ACCOUNT,
        next_step=_CHECK_ACCOUNT,
        remark=r"username cannot be null|User:.* is not found|check signature failed",
    ),
    AnswerRule(
        ResponseCode.NO_PERMISSION,
        MISSING_RIGHT,
        NoPermissionError,
        expected="an account with the right",
        next_step=_ASK_FOR_RIGHTS,
        remark=r"has no permission to access",
    ),
)
_AFTER_ACCOUNTS = (
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the group has no member",
        requests=frozenset({RequestCode.GET_CONSUMER_LIST_BY_GROUP}),
        remark=r"no consumer for this group",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the group has no producer",
        requests=_OF_PRODUCERS,
        remark=r"the producer group\[.*\] not exist",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "no group has an offset",
        requests=frozenset({RequestCode.GET_ALL_CONSUMER_OFFSET}),
        remark=r"No consumer offset",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the commit log has no record at the offset",
        requests=frozenset({RequestCode.VIEW_MESSAGE_BY_ID}),
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker does not evaluate SQL92 (enablePropertyFilter=false)",
        requests=frozenset({RequestCode.CHECK_CLIENT_CONFIG}),
        remark=r"does not support consumer to filter",
    ),
)
_REFUSALS = (
    AnswerRule(
        ResponseCode.SYSTEM_BUSY,
        "the broker is a slave that serves no pulls",
        BackendUnavailableError,
        Retry.NEW_ROUTE,
        "the master of the broker",
        "Check the addresses of the broker in the route, and in the option brokerAddresses.",
        requests=frozenset({RequestCode.PULL_MESSAGE}),
        remark=r"^\[REJECTREQUEST\]",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_BUSY,
        "the broker is overloaded and did not execute the request",
        BackendUnavailableError,
        Retry.LATER,
        "a broker with capacity",
        _ASK_AGAIN,
    ),
    AnswerRule(
        ResponseCode.GO_AWAY,
        "the server is shutting down and did not execute the request",
        BackendUnavailableError,
        Retry.LATER,
        "a server that runs",
        "Repeat the read when the server is back.",
    ),
    AnswerRule(
        ResponseCode.SERVICE_NOT_AVAILABLE,
        "the broker is shutting down, or its disk is full",
        BackendUnavailableError,
        Retry.NEW_ROUTE,
        "a broker that serves",
        _ASK_AGAIN,
    ),
    AnswerRule(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        "the server answers for no routes, so it is a broker",
        BrokerError,
        expected="a name server",
        next_step="Set nameServer to the name servers of the cluster (their default port is 9876).",
        requests=frozenset({RequestCode.GET_ROUTEINFO_BY_TOPIC}),
    ),
    AnswerRule(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        "the server lists no topics, so it is a proxy or a broker",
        BrokerError,
        expected="a name server",
        next_step="Set nameServer to the name servers of the cluster (their default port is 9876), or name the topics "
        "with subscribe.",
        requests=frozenset({RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER}),
    ),
    AnswerRule(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        "the server lists no producers, so it is a proxy",
        BrokerError,
        expected="a broker",
        next_step="Connect to the name servers and brokers themselves instead, or set delivery=atLeastOnce.",
        requests=_OF_PRODUCERS,
    ),
    AnswerRule(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        "the server does not know the request",
        BrokerError,
        expected="a broker or name server of RocketMQ 4.9.4 or later",
        next_step="Check the version of the server, whether it is a proxy, and whether nameServer names a broker.",
    ),
    AnswerRule(
        ResponseCode.VERSION_NOT_SUPPORTED,
        "the server does not accept this version of the request",
        BrokerError,
        expected="a broker or name server of RocketMQ 4.9.4 or later",
        next_step="Check the version of the server.",
    ),
    AnswerRule(
        ResponseCode.NO_PERMISSION,
        "the topic, the group or the broker does not allow reading",
        NoPermissionError,
        expected="a topic with read permission, and a group with consumeEnable=true",
        next_step="Ask an administrator to allow reading, or set pullGroup to a group that may read.",
    ),
    AnswerRule(
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        "the group does not exist, and the broker creates no groups (autoCreateSubscriptionGroup=false)",
        UnknownGroupError,
        expected="a group that exists",
        next_step="Create the group (mqadmin updateSubGroup), or set pullGroup to a group that exists.",
    ),
    AnswerRule(
        ResponseCode.TOPIC_NOT_EXIST,
        "the name server has no route of the topic",
        NotFoundError,
        Retry.ELSEWHERE,
        "a topic whose broker runs",
        "Check the topic's name; after a restart of the name servers wait 30 s.",
        requests=frozenset({RequestCode.GET_ROUTEINFO_BY_TOPIC}),
    ),
    AnswerRule(
        ResponseCode.TOPIC_NOT_EXIST,
        "the broker does not have the topic",
        NotFoundError,
        Retry.NEW_ROUTE,
        "a topic of the broker",
        "Check the topic's name, and whether it was deleted.",
    ),
    AnswerRule(
        ResponseCode.INVALID_PARAMETER,
        _MISSING_QUEUE,
        NotFoundError,
        Retry.NEW_ROUTE,
        "a queue for reading",
        _FEWER_QUEUES,
        requests=_READS_QUEUE,
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        _MISSING_QUEUE,
        NotFoundError,
        Retry.NEW_ROUTE,
        "a queue for reading",
        _FEWER_QUEUES,
        requests=_READS_QUEUE,
        remark=r"queueId\[-?\d+\] is illegal",
    ),
    AnswerRule(
        ResponseCode.SUBSCRIPTION_PARSE_FAILED,
        "the broker cannot parse the filter",
        OptionError,
        expected="an expression that RocketMQ accepts",
        next_step="Correct the option sql92 or tags.",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker does not evaluate SQL92 (enablePropertyFilter=false)",
        BrokerError,
        expected="a broker that does",
        next_step="Set enablePropertyFilter=true at the broker.",
        requests=frozenset({RequestCode.PULL_MESSAGE}),
        remark=r"does not support consumer to filter",
    ),
    AnswerRule(
        ResponseCode.NOT_LEADER_FOR_QUEUE,
        "the topic is a static topic, whose queues move between brokers",
        BrokerError,
        expected="an ordinary topic",
        next_step="Read another topic.",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the name server has just started",
        BackendUnavailableError,
        Retry.ELSEWHERE,
        "a name server that knows the brokers",
        "Wait 45 s (needWaitForService=true), or name more servers in nameServer.",
        requests=_NAME_SERVER,
        remark=r"name server not ready",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the name server does not list its topics (enableAllTopicList=false)",
        BrokerError,
        Retry.ELSEWHERE,
        "a name server that lists them",
        "Name the topics with subscribe instead of subscribePattern, or set enableAllTopicList=true.",
        requests=frozenset({RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER}),
    ),
    AnswerRule(
        None,
        "the server refused the request",
        BrokerError,
        expected="a success",
        next_step="Look for the answer in the log of the server.",
    ),
)
RULES = (
    _ANSWERS
    + SEND_RIGHTS
    + ADMIN_RIGHTS
    + _MEMBER_RIGHTS
    + _ACCOUNTS
    + SEND_RULES
    + ADMIN_RULES
    + _AFTER_ACCOUNTS
    + _REFUSALS
)

_MAX_REMARK_CHARS = 300


def find_rule(request: RequestCode, code: int, remark: str | None) -> AnswerRule:
    """Return the rule for a response with `code` and `remark` to a request."""
    return next(rule for rule in _rules_of(request, code) if rule.fits_remark(remark or ""))


def rule_for(request: Request[Any], command: Command) -> AnswerRule:
    """Return the rule for a response: one of the request's own, or that of `find_rule`."""
    remark = command.remark or ""
    for rule in request.rules:
        if rule.fits(request.code, command.code) and rule.fits_remark(remark):
            return rule
    return find_rule(request.code, command.code, remark)


@lru_cache(maxsize=256)
def _rules_of(request: RequestCode, code: int) -> tuple[AnswerRule, ...]:
    return tuple(rule for rule in RULES if rule.fits(request, code))


def make_error(request: Request[Any], command: Command, to: str, hidden: Collection[str] = ()) -> RmqError:
    """Return the error for a response that is not an answer. `to` is the server for the message.

    Texts in `hidden`, such as an access key, are replaced in the remark.
    """
    rule = rule_for(request, command)
    assert rule.error is not None, command
    remark = shorten_remark(command.remark, hidden)
    text = (
        f"cannot {request.purpose}: {to} answered {name_code(command.code)}{f' ({remark})' if remark else ''}: "
        f"{rule.meaning}; expected {rule.expected}. {rule.next_step}"
    )
    return BrokerError(command.code, text) if rule.error is BrokerError else rule.error(text)


def name_code(code: int) -> str:
    """Return a response code with RocketMQ's name."""
    return f"{code} {ResponseCode(code).name}" if code in _KNOWN_CODES else str(code)


_KNOWN_CODES = {int(code) for code in ResponseCode}


def shorten_remark(remark: str | None, hidden: Collection[str] = ()) -> str:
    """Return the first line of a remark for a message, with at most 300 characters and without the `hidden` texts."""
    line = next((line.strip() for line in (remark or "").splitlines() if line.strip()), "")
    for text in sorted(filter(None, hidden), key=len, reverse=True):
        line = line.replace(text, "***")
    return shorten_line(line, _MAX_REMARK_CHARS)
