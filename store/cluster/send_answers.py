"""What the response codes mean to requests that store messages: stored, not stored, or not known.

These rules come before those for all requests (`answer_rules`). After BackendUnavailableError nothing is stored, and
the same messages may be sent again, also to another broker. Nothing is stored after NoPermissionError, NotFoundError,
OptionError and BrokerError either, and the same request would be refused again. UnknownOutcomeError means that the
broker may have stored the messages.

A broker with DLedger is an exception. If its replicas are late, it answers "[PC_SYNCHRONIZED]" (4.9) or "in-sync
replicas not enough" (5.3), as if nothing was stored, but the messages may appear later. So they may be doubled, with
equal ids.

To a request that sends a message back, a broker answers 0 only if all went well. Each other PutMessageStatus is
SYSTEM_ERROR with the name of the status as remark.

Source: SendMessageProcessor#handlePutMessageResult, #consumerSendMsgBack, AbstractSendMessageProcessor#msgCheck,
#consumerSendMsgBack, PutMessageStatus, DLedgerCommitLog#asyncPutMessage (4.9, 5.3).
"""

from rmq_spark.store.cluster.answer_rule import AnswerRule, Retry, rules_of_rights
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    NoPermissionError,
    NotFoundError,
    UnknownOutcomeError,
)

_SENDS = frozenset({RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE})
_SEND_BACK = frozenset({RequestCode.CONSUMER_SEND_MSG_BACK})
_STORES = _SENDS | _SEND_BACK
_CREATES = frozenset({RequestCode.UPDATE_AND_CREATE_TOPIC})
_ASK_FOR_PUB = (
    "Ask an administrator for the right: PUB of the topic (4.9), or Pub of the topic (5.3); to send messages back, Sub "
    "of the group."
)
_ASK_FOR_CREATE = (
    "Ask an administrator to create the topic (mqadmin updateTopic), or for the right: an account with admin: true "
    "(4.9), or Create of the topic (5.3)."
)
_CHECK_LOAD = "Check the load of the broker's disk; the messages can be sent again."
_REFUSED_SIZE = "the broker refuses the size or the properties of the message, and stored nothing"
_SMALLER = "Send a smaller message, with properties of at most 32,500 bytes, or raise maxMessageSize at the broker."

# Rules about rights of an account, which come before those of other requests.
SEND_RIGHTS = rules_of_rights({_STORES: _ASK_FOR_PUB, _CREATES: _ASK_FOR_CREATE})

SEND_RULES = (
    AnswerRule(
        ResponseCode.FLUSH_DISK_TIMEOUT,
        "the broker stored the messages; their copy on its disk is late",
        requests=_SENDS,
    ),
    AnswerRule(
        ResponseCode.SLAVE_NOT_AVAILABLE,
        "the broker stored the messages, and has no slave to copy them to",
        requests=_SENDS,
    ),
    AnswerRule(
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        "the broker stored the messages; the copy at its slave is late",
        requests=_SENDS,
    ),
    AnswerRule(
        ResponseCode.SYSTEM_BUSY,
        "the broker stored nothing: its page cache is busy, or the broker is a slave",
        BackendUnavailableError,
        Retry.NEW_ROUTE,
        "a master with capacity",
        f"{_CHECK_LOAD} If the broker is a slave, check its addresses in the route and in the option brokerAddresses.",
        requests=_STORES,
        remark=r"^\[REJECTREQUEST\]",
    ),
    AnswerRule(
        ResponseCode.SERVICE_NOT_AVAILABLE,
        "the broker stored nothing: it is shutting down, its disk is full, or it is a slave",
        BackendUnavailableError,
        Retry.NEW_ROUTE,
        "a master with free space on its disk",
        "Free space on the disk of the broker, or lower its retention (fileReservedTime); the messages can be sent "
        "again.",
        requests=_STORES,
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker stored nothing: it cannot create a file of its log",
        BackendUnavailableError,
        Retry.NEW_ROUTE,
        "a broker that can write its files",
        "Check the disk and the log of the broker; the messages can be sent again.",
        requests=_STORES,
        remark=r"create mapped file failed",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker stored nothing: its page cache is busy",
        BackendUnavailableError,
        Retry.LATER,
        "a broker with capacity",
        _CHECK_LOAD,
        requests=_SENDS,
        remark=r"^\[PC_SYNCHRONIZED\]",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker stored nothing: it has too few replicas in sync",
        BackendUnavailableError,
        Retry.NEW_ROUTE,
        "a broker with enough replicas",
        "Check the slaves of the broker, and its minInSyncReplicas; the messages can be sent again.",
        requests=_SENDS,
        remark=r"in-sync replicas not enough",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker stored the copy; the copy on its disk or at its slave is late, or it has no slave",
        requests=_SEND_BACK,
        remark=r"^(FLUSH_DISK_TIMEOUT|FLUSH_SLAVE_TIMEOUT|SLAVE_NOT_AVAILABLE)$",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker stored nothing: it is busy, is shutting down, cannot write its files, is a slave, or has too few "
        "replicas",
        BackendUnavailableError,
        Retry.NEW_ROUTE,
        "a master that can store messages",
        "Check the disk, the log and the slaves of the broker; the messages can be sent back again.",
        requests=_SEND_BACK,
        remark=r"^(SERVICE_NOT_AVAILABLE|OS_PAGE_?CACHE_BUSY|CREATE_MAPP?ED_?FILE_FAILED|IN_SYNC_REPLICAS_NOT_ENOUGH"
        r"|LMQ_CONSUME_QUEUE_NUM_EXCEEDED|WHEEL_TIMER_FLOW_CONTROL)$|^No master available",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker refuses the copy, for its size, its properties or its delivery time, and stored nothing",
        BrokerError,
        expected="a message whose copy the broker accepts",
        next_step="Send the content of the row as a new message, or leave the row out.",
        requests=_SEND_BACK,
        remark=r"^(MESSAGE_ILLEGAL|PROPERTIES_SIZE_EXCEEDED|WHEEL_TIMER_MSG_ILLEGAL|WHEEL_TIMER_NOT_ENABLE)$",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker stored nothing: too many messages wait for the same delivery time",
        BackendUnavailableError,
        Retry.NEW_ROUTE,
        "fewer timed messages",
        "Spread the delivery times, or raise timerCongestNumEachSlot at the broker.",
        requests=_SENDS,
        remark=r"timer message is under flow control",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker stored nothing: it does not deliver messages at a time",
        BrokerError,
        expected="a broker with a timer",
        next_step="Set timerWheelEnable=true at the broker, or use a delay level.",
        requests=_SENDS,
        remark=r"timer message is not enabled",
    ),
    AnswerRule(
        ResponseCode.MESSAGE_ILLEGAL,
        "the broker refuses the delivery time of the message, and stored nothing",
        BrokerError,
        expected="a delivery time that the broker accepts",
        next_step="Give an earlier delivery time: a delay must be within timerMaxDelaySec (3 days unless the broker's "
        "configuration says otherwise). Or raise timerMaxDelaySec at the broker, or use a delay level.",
        requests=_STORES,
        remark=r"timer message illegal|WHEEL_TIMER_MSG_ILLEGAL",
    ),
    AnswerRule(
        ResponseCode.MESSAGE_ILLEGAL,
        _REFUSED_SIZE,
        BrokerError,
        expected="a message that the broker accepts",
        next_step=_SMALLER,
        requests=_STORES,
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        _REFUSED_SIZE,
        BrokerError,
        expected="a message that the broker accepts",
        next_step=_SMALLER,
        requests=_SENDS,
        remark=r"message body size exceeded|message is illegal|body length limit",
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the queue does not exist, and nothing was stored",
        NotFoundError,
        Retry.NEW_ROUTE,
        "a queue of the topic",
        "Ask an administrator whether writeQueueNums was reduced; the topic's route has the present number.",
        requests=_SENDS,
        remark=r"queueId\[-?\d+\] is illegal",
    ),
    AnswerRule(
        ResponseCode.INVALID_PARAMETER,
        "the queue or the topic's name is not valid, and nothing was stored",
        NotFoundError,
        Retry.NEW_ROUTE,
        "a queue of the topic",
        "Ask an administrator whether writeQueueNums was reduced; the topic's route has the present number.",
        requests=_SENDS,
    ),
    AnswerRule(
        ResponseCode.TOPIC_NOT_EXIST,
        "the broker does not have the topic, and nothing was stored",
        NotFoundError,
        Retry.NEW_ROUTE,
        "a topic of the broker",
        "Check whether the topic was deleted. Create it with mqadmin updateTopic.",
        requests=_SENDS,
    ),
    AnswerRule(
        ResponseCode.NO_PERMISSION,
        "the topic or the broker does not allow sending, and nothing was stored",
        NoPermissionError,
        expected="a topic with write permission on a broker with write permission",
        next_step="Ask an administrator to allow sending (perm 6 of the topic, brokerPermission of the broker).",
        requests=_STORES,
    ),
    AnswerRule(
        ResponseCode.NO_PERMISSION,
        "the broker does not allow to create the topic",
        NoPermissionError,
        expected="a topic that exists, or the right to create it",
        next_step=_ASK_FOR_CREATE,
        requests=_CREATES,
    ),
    AnswerRule(
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        "the group does not exist at the broker, and nothing was stored",
        NoPermissionError,
        expected="a group that exists",
        next_step="Create the group (mqadmin updateSubGroup), or let the broker create groups "
        "(autoCreateSubscriptionGroup=true) and start a consumer of the group once.",
        requests=_STORES,
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the message is no longer in the broker's log, and nothing was stored",
        NotFoundError,
        expected="a message that has not expired",
        next_step="Send the content of the row as a new message, or leave the row out.",
        requests=_SEND_BACK,
        remark=r"look message by offset failed",
    ),
    AnswerRule(
        ResponseCode.NOT_LEADER_FOR_QUEUE,
        "the topic is a static topic, whose queues move between brokers",
        BrokerError,
        expected="an ordinary topic",
        next_step="Send to another topic.",
        requests=_SENDS,
    ),
    AnswerRule(
        ResponseCode.SYSTEM_ERROR,
        "the broker failed, and has stored the messages or not",
        UnknownOutcomeError,
        expected="a success",
        next_step="Look for the answer in the log of the broker, and for the messages by their ids.",
        requests=_STORES,
    ),
)
