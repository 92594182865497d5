"""Accounts of the tests' brokers: signatures, and the rights that each release asks for."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rmq_spark.store.cluster.codes import BrokerRequestCode, RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command, encode_command
from rmq_spark.store.cluster.signing import sign_command
from rmq_spark.store.testing.brokers import Account, AccountTable, Broker, ConsumerData, RunningCluster
from rmq_spark.store.testing.brokers.raw_client import RawClient
from rmq_spark.store.testing.brokers.relay_requests import INVOKE_BROKER_TO_GET_CONSUMER_STATUS
from rmq_spark.store.testing.brokers.wire import text_of

RunCluster = Callable[..., RunningCluster]
BOTH = pytest.mark.parametrize("release", ["4.9", "5.3"])
REFUSED = {"4.9": ResponseCode.SYSTEM_ERROR, "5.3": ResponseCode.NO_PERMISSION}
QUEUE = {"topic": "orders", "queueId": 0}
GROUP = {"consumerGroup": "billing"}
NUMBERS = {"queueOffset": 0, "maxMsgNums": 1, "commitOffset": 0, "suspendTimeoutMillis": 0}
PULL = {**QUEUE, **GROUP, **NUMBERS, "sysFlag": 4, "subscription": "*"}
READER = Account("reader", "a secret", topics={"orders": "SUB"}, groups={"billing": "SUB"})
ADMIN = Account("admin", "another secret", is_admin=True)


@pytest.fixture
def ask(run_cluster: RunCluster) -> Callable[..., Command]:
    """A function that sends a request to a broker with accounts, signed by one of them."""
    brokers: dict[str, Broker] = {}

    def send(
        release: str, signer: Account | None, code: int, fields: dict[str, Any], body: bytes = b"", **changes: str
    ) -> Command:
        if release not in brokers:
            cluster = run_cluster(release=release)
            cluster.create_topic("orders", 1)
            cluster.send("orders", b"x")
            brokers[release] = cluster.broker
            tokened = Account("tokened", "a secret", is_admin=True, security_token="a token")
            rich = replace(READER, access_key="rich", topics={"*": "SUB|GET|CREATE"}, groups={"billing": "SUB|GET"})
            cluster.broker.accounts = AccountTable(READER, ADMIN, tokened, rich)
        command = Command(code, 1, {name: text_of(value) for name, value in fields.items()}, body)
        if signer is not None:
            command = sign_command(command, signer.access_key, signer.secret_key, signer.security_token or "")
        command = replace(command, fields={**command.fields, **changes})
        with RawClient(brokers[release].address) as client:
            client.send_bytes(encode_command(command))
            return client.receive()

    return send


@BOTH
def test_a_signed_pull_with_its_rights_is_answered(ask: Callable[..., Command], release: str) -> None:
    assert ask(release, READER, RequestCode.PULL_MESSAGE, PULL).code == 0


@pytest.mark.parametrize(
    ("signer", "remark_of_4", "remark_of_5"),
    [
        (None, "AclException: No accessKey is configured", "username cannot be null."),
        (Account("nobody", "x"), "AclException: No acl config for nobody", "User:nobody is not found."),
        (
            replace(READER, secret_key="wrong"),
            "AclException: Check signature failed for accessKey=reader",
            "check signature failed.",
        ),
    ],
)
@BOTH
def test_a_request_without_a_valid_signature_is_refused(
    ask: Callable[..., Command], release: str, signer: Account | None, remark_of_4: str, remark_of_5: str
) -> None:
    answer = ask(release, signer, RequestCode.PULL_MESSAGE, PULL)
    assert answer.code == REFUSED[release]
    assert (remark_of_4 if release == "4.9" else remark_of_5) in (answer.remark or "")


@BOTH
def test_a_signature_covers_every_field(ask: Callable[..., Command], release: str) -> None:
    assert ask(release, READER, RequestCode.PULL_MESSAGE, PULL, queueOffset="1").code == REFUSED[release]
    assert ask(release, READER, RequestCode.PULL_MESSAGE, PULL, more="field").code == REFUSED[release]


@BOTH
def test_a_security_token_is_compared(ask: Callable[..., Command], release: str) -> None:
    tokened = Account("tokened", "a secret", security_token="a token")
    assert ask(release, tokened, RequestCode.PULL_MESSAGE, PULL).code == 0
    assert ask(release, replace(tokened, security_token=None), RequestCode.PULL_MESSAGE, PULL).code == REFUSED[release]
    other = replace(tokened, security_token="another")
    assert ask(release, other, RequestCode.PULL_MESSAGE, PULL).code == REFUSED[release]


@pytest.mark.parametrize(
    ("code", "fields", "of_4", "of_5"),
    [
        (RequestCode.PULL_MESSAGE, {**PULL, "topic": "payments"}, False, False),
        (RequestCode.PULL_MESSAGE, {**PULL, "consumerGroup": "others"}, False, False),
        (RequestCode.GET_TOPIC_STATS_INFO, QUEUE, True, False),
        (RequestCode.GET_MAX_OFFSET, QUEUE, True, False),
        (RequestCode.GET_MIN_OFFSET, QUEUE, True, False),
        (RequestCode.GET_EARLIEST_MSG_STORETIME, QUEUE, True, False),
        (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, {**QUEUE, "timestamp": 1}, True, False),
        (RequestCode.QUERY_CONSUMER_OFFSET, {**QUEUE, **GROUP}, True, True),
        (RequestCode.GET_CONSUME_STATS, GROUP, True, False),
        (RequestCode.VIEW_MESSAGE_BY_ID, {"topic": "orders", "offset": 0}, True, True),
    ],
)
def test_5_asks_a_reader_for_more_rights_than_4(
    ask: Callable[..., Command], code: int, fields: dict[str, Any], of_4: bool, of_5: bool
) -> None:
    for release, is_allowed in (("4.9", of_4), ("5.3", of_5)):
        answer = ask(release, READER, code, fields)
        assert answer.code == (0 if is_allowed else REFUSED[release]), answer
        if not is_allowed:
            wanted = "no matched policies." if release == "5.3" else "No default permission for"
            assert wanted in (answer.remark or "")
        if "payments" not in fields.values() and "others" not in fields.values():
            assert ask(release, Account("rich", "a secret"), code, fields).code == 0


def heartbeat_body(group: str, topic: str) -> bytes:
    data = ConsumerData.of(group, {topic: "*"})
    return json.dumps({"clientID": "one", "consumerDataSet": [data.write()]}).encode()


def lock_body(group: str, topic: str) -> bytes:
    queues = [{"topic": topic, "brokerName": "broker-a", "queueId": 0}]
    return json.dumps({"clientId": "one", "consumerGroup": group, "mqSet": queues}).encode()


@BOTH
@pytest.mark.parametrize(
    ("code", "write", "refuses"),
    [
        (RequestCode.HEART_BEAT, heartbeat_body, ("4.9", "5.3")),
        (RequestCode.LOCK_BATCH_MQ, lock_body, ("5.3",)),
        (RequestCode.UNLOCK_BATCH_MQ, lock_body, ("5.3",)),
    ],
)
def test_a_member_needs_rights_on_its_group_and_its_topics(
    ask: Callable[..., Command],
    release: str,
    code: int,
    write: Callable[[str, str], bytes],
    refuses: tuple[str, ...],
) -> None:
    assert ask(release, READER, code, {}, write("billing", "orders")).code == 0
    for group, topic in (("others", "orders"), ("billing", "payments")):
        answer = ask(release, READER, code, {}, write(group, topic))
        assert answer.code == (REFUSED[release] if release in refuses else 0)


@BOTH
def test_a_member_needs_rights_to_leave_a_group(ask: Callable[..., Command], release: str) -> None:
    for group, code in (("billing", 0), ("others", REFUSED[release])):
        fields = {"clientID": "one", "consumerGroup": group}
        assert ask(release, READER, RequestCode.UNREGISTER_CLIENT, fields).code == code
    assert ask(release, READER, RequestCode.UNREGISTER_CLIENT, {"clientID": "one"}).code == 0


def test_5_asks_for_rights_to_reset_and_to_look_at_members(ask: Callable[..., Command]) -> None:
    group = {"topic": "orders", "group": "billing"}
    running = {"clientId": "one", **GROUP}
    for code, fields, of_rich in (
        (BrokerRequestCode.GET_CONSUMER_RUNNING_INFO, running, ResponseCode.SYSTEM_ERROR),  # nobody is online
        (INVOKE_BROKER_TO_GET_CONSUMER_STATUS, group, ResponseCode.SYSTEM_ERROR),
        (
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
            {**group, "timestamp": 0, "isForce": True},
            ResponseCode.NO_PERMISSION,
        ),
    ):
        assert ask("5.3", READER, code, fields).code == ResponseCode.NO_PERMISSION
        assert ask("5.3", Account("rich", "a secret"), code, fields).code == of_rich
        assert ask("5.3", ADMIN, code, fields).code != ResponseCode.NO_PERMISSION


@BOTH
def test_only_some_accounts_create_topics(ask: Callable[..., Command], release: str) -> None:
    numbers = {"readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    fields = {"topic": "new", "defaultTopic": "TBW102", "topicFilterType": "SINGLE_TAG", **numbers}
    assert ask(release, READER, RequestCode.UPDATE_AND_CREATE_TOPIC, fields).code == REFUSED[release]
    rich = ask(release, Account("rich", "a secret"), RequestCode.UPDATE_AND_CREATE_TOPIC, fields)
    assert rich.code == (REFUSED["4.9"] if release == "4.9" else 0)
    assert ask(release, ADMIN, RequestCode.UPDATE_AND_CREATE_TOPIC, fields).code == 0


def test_name_servers_check_no_account(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.broker.accounts = AccountTable()
    cluster.create_topic("orders")
    with RawClient(cluster.name_servers[0].address) as client:
        assert client.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"}).code == 0


@pytest.mark.parametrize(("release", "signs_it", "code"), [("4.9", False, 22), ("5.3", True, 22), ("4.9", True, 1)])
def test_4_leaves_one_field_out_of_the_signature(
    ask: Callable[..., Command], release: str, signs_it: bool, code: int
) -> None:
    fields = {"topic": "orders", "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1}
    query = RequestCode.QUERY_MESSAGE
    if signs_it:
        answer = ask(release, READER, query, {**fields, "_UNIQUE_KEY_QUERY": True})
    else:
        answer = ask(release, READER, query, fields, _UNIQUE_KEY_QUERY="true")
    assert answer.code == code
