"""The lists that brokers have of a consumer group: its members, and their subscriptions. For one thread."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.cluster.group_requests import GroupConnectionsRequest, GroupMembersRequest
from rmq_spark.store.cluster.member_requests import POP_MODE, AssignmentRequest, AssignmentResponse
from rmq_spark.store.cluster.responses import GroupConnectionsResponse, GroupMembersResponse, Subscription
from rmq_spark.store.cluster.subscription_check import Disagreement, find_disagreement
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    GroupConflictError,
    NoPermissionError,
    RmqError,
)
from rmq_spark.store.names import RETRY_TOPIC_PREFIX

_LOG = logging.getLogger("rmq_spark")

_ATTEMPTS = 3  # a broker of 5.x can lose a registration; then a second heartbeat helps


class Registrar(Protocol):
    """The member towards the brokers (`membership.Membership`)."""

    def registered(self, brokers: Collection[str]) -> list[str]:
        """Return those of `brokers` at which the member is registered."""

    def beat(self, brokers: Collection[str]) -> dict[str, RmqError | None]:
        """Send heartbeats to brokers now, and return for each the error, None for success."""


class MemberLists:
    """The lists of the members of a group. `group` is the cluster's name; `client_id` is that of the asking member.

    `has_pattern` is whether the member finds its topics by a pattern (`find_disagreement`).
    """

    def __init__(self, client: ClusterClient, group: str, client_id: str, *, has_pattern: bool = False) -> None:
        self._client, self._group, self._client_id, self._has_pattern = client, group, client_id, has_pattern
        self._is_unclear = False  # whether the last comparison has failed
        self._is_known: set[str] = set()  # brokers that have listed the member
        self._members: frozenset[str] = frozenset({client_id})  # at the last call of `warn_of_disagreement`

    def find(self, member: Registrar, addresses: Mapping[str, str]) -> dict[str, tuple[str, ...] | None]:
        """Return the client ids that each broker lists, None for a broker that does not know the member or is away.

        `addresses` has the brokers. One that does not list the asking member gets another heartbeat first. If it then
        lists other members only, its list is returned nevertheless. Raises NoPermissionError if no broker has ever
        listed the member, because they do not know the group.
        """
        lists: dict[str, tuple[str, ...] | None] = dict.fromkeys(addresses)
        asked = member.registered(addresses)
        for attempt in range(_ATTEMPTS):
            lists |= self._ask({broker: addresses[broker] for broker in asked})
            found = {broker: ids for broker in asked if (ids := lists[broker]) is not None}
            self._is_known |= {broker for broker, ids in found.items() if self._client_id in ids}
            asked = [broker for broker, ids in found.items() if self._client_id not in ids]
            if not asked:
                break
            if attempt < _ATTEMPTS - 1:
                member.beat(asked)
        unknown = [broker for broker in asked if not lists[broker]]
        if unknown and not self._is_known:
            raise NoPermissionError(
                f"broker {unknown[0]} accepts heartbeats of {self._client_id} and lists no member of group "
                f"{self._group}: the group does not exist there, and the broker creates no groups "
                "(autoCreateSubscriptionGroup=false); expected a group that exists. Create it at every broker (mqadmin "
                "updateSubGroup)."
            )
        return lists | dict.fromkeys(unknown)

    def _ask(self, addresses: Mapping[str, str]) -> dict[str, tuple[str, ...] | None]:
        """Return what brokers list. None for a broker that does not answer. Raises the error of one that refuses."""
        calls = [(to, GroupMembersRequest(self._group, broker)) for broker, to in addresses.items()]
        lists: dict[str, tuple[str, ...] | None] = {}
        for broker, answer in zip(addresses, self._client.call_all(calls), strict=True):
            if isinstance(answer, GroupMembersResponse):
                lists[broker] = answer.client_ids
            elif isinstance(answer, BackendUnavailableError):
                lists[broker] = None
            else:
                raise answer
        return lists

    def require_agreement(self, ours: Collection[Subscription], addresses: Mapping[str, str]) -> None:
        """Raise GroupConflictError if members of the group at a broker do not agree with these subscriptions.

        Also if a broker lets the group consume one of the topics by POP: a broker of 5.x shows members that do so like
        others. A broker that is away is left out. A disagreement that may pass is logged. Raises the error of a broker
        that refuses a question.
        """
        found = self._find_disagreement(ours, addresses)
        if found is not None and found.may_pass:
            self._warn(found)
            found = None
        why = self._find_pop(ours, addresses) if found is None else found.text
        if why is not None:
            raise GroupConflictError(
                f"{self._client_id} cannot join consumer group {self._group}: {why}; expected members that "
                "pull, with the same topics and filters, because the newest heartbeat decides for the group. Give all "
                "of them the same subscription, or use another group. No offset was changed."
            )

    def warn_of_disagreement(
        self,
        ours: Collection[Subscription],
        lists: Mapping[str, Collection[str] | None],
        address_of: Callable[[str], str | None],
    ) -> None:
        """Log a warning if members that have joined since the last call do not agree with these subscriptions.

        `lists` are the members at each broker, and `address_of` returns its address. Raises nothing: a broker that
        refuses the question is logged once, until one answers.
        """
        members = frozenset(one for ids in lists.values() if ids is not None for one in ids)
        before, self._members = self._members, members
        if members <= before:
            return
        addresses = {name: at for name, ids in lists.items() if ids is not None and (at := address_of(name))}
        try:
            found = self._find_disagreement(ours, addresses)
        except RmqError as error:
            if not self._is_unclear:
                _LOG.warning(
                    "rmq: whether the members of consumer group %s have the same subscription is not known: %s",
                    *(self._group, error),
                )
            self._is_unclear, self._members = True, before
            return
        self._is_unclear = False
        if found is not None:
            self._warn(found)

    def _warn(self, found: Disagreement) -> None:
        _LOG.warning(
            "rmq: the members of consumer group %s do not agree: %s. Queues that belong to a member which does not "
            "subscribe to their topic are not read. Give all members the same subscription",
            *(self._group, found.text),
        )

    def _find_pop(self, ours: Collection[Subscription], addresses: Mapping[str, str]) -> str | None:
        """Return why members may consume by POP, which does not share queues. None if they do not."""
        topics = [one.topic for one in ours if not one.topic.startswith(RETRY_TOPIC_PREFIX)]
        calls = [
            (to, AssignmentRequest(self._client_id, self._group, topic, broker))
            for broker, to in addresses.items()
            for topic in topics
        ]
        for (_, request), answer in zip(calls, self._client.call_all(calls), strict=True):
            if isinstance(answer, AssignmentResponse):
                if POP_MODE in answer.modes:
                    return (
                        f"broker {request.broker} lets the group consume topic {request.topic} by POP (mqadmin "
                        "setConsumeMode), which shares messages and not queues"
                    )
            elif isinstance(answer, BrokerError) and answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                continue  # a broker of 4.9, which has no POP
            elif not isinstance(answer, BackendUnavailableError):
                raise answer
        return None

    def _find_disagreement(self, ours: Collection[Subscription], addresses: Mapping[str, str]) -> Disagreement | None:
        """Return the first disagreement at a broker, one that does not pass before others."""
        found: list[Disagreement] = []
        calls = [(to, GroupConnectionsRequest(self._group, broker)) for broker, to in addresses.items()]
        for broker, answer in zip(addresses, self._client.call_all(calls), strict=True):
            if isinstance(answer, GroupConnectionsResponse):
                one = find_disagreement(ours, answer, broker, self._client_id, has_pattern=self._has_pattern)
                if one is not None:
                    found.append(one)
            elif not isinstance(answer, BackendUnavailableError):
                raise answer
        return min(found, key=lambda one: one.may_pass, default=None)
