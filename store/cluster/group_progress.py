"""Questions to the brokers of a cluster about consumer groups: their names, committed offsets and members.

Each broker knows the offsets of its own queues, and the members that are connected to it. So all masters are asked, at
the same time. A broker that does not answer is named, and the others count.

| question | request | without the right (5.3) |
| --- | --- | --- |
| names of all groups | 43, the offsets of all groups | the names of retry topics, which name servers list |
| offsets of a group | 208, and 14 for queues with the offset 0 | an error |
| members of a group | 203 | 38, which has only the client ids |

The answer to 208 has the offset 0 also for a queue in which the group has none. Request 14 tells, but a broker of 4.9
answers 0 in a young queue (`group_starts`). While a group has members, 208 leaves out the topics to which they do not
subscribe, as mqadmin consumerProgress does.

Source: AdminBrokerProcessor#getConsumeStats, #getAllConsumerOffset, #getConsumerConnectionList (4.9, 5.3).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.diagnosis import list_names
from rmq_spark.store.cluster.group_requests import (
    AllGroupOffsetsRequest,
    CommittedOffsetRequest,
    GroupConnectionsRequest,
    GroupMembersRequest,
    GroupStatsRequest,
)
from rmq_spark.store.cluster.namespace import is_in_namespace, is_shared_name, unwrap_name, wrap_name
from rmq_spark.store.cluster.positions import describe_missing
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.cluster.responses import GroupConnectionsResponse, GroupQueueStats, MemberConnection
from rmq_spark.store.errors import BackendUnavailableError, NoPermissionError, NotFoundError, RmqError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import RETRY_TOPIC_PREFIX, list_other_groups, retry_topic

_LOG = logging.getLogger("rmq_spark")


@dataclass(slots=True)
class Progress:
    """The committed offsets of one group.

    `offsets` has the queues of all brokers that answered, and None where the group has no offset. `stats` is what the
    brokers said about the same queues. `silent` are the brokers that did not answer, each with the reason.
    """

    offsets: dict[QueueKey, int | None] = field(default_factory=dict)
    stats: dict[QueueKey, GroupQueueStats] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)

    @property
    def topics(self) -> list[str]:
        """The topics in which the group has offsets, sorted."""
        return sorted({queue.topic for queue in self.offsets})


class GroupProgress:
    """Questions about consumer groups to the masters of a cluster. For one thread.

    Every method raises BackendUnavailableError if no name server or no broker answers.
    """

    def __init__(self, backend: ClusterBackend) -> None:
        self._backend, self._namespace = backend, backend.location.namespace
        self._silent: dict[str, str] = {}  # the brokers that did not answer the last question, with the reason
        self.answering: frozenset[str] = frozenset()  # the other brokers

    def names(self) -> list[str]:
        """Return the names of the groups that have committed an offset, sorted.

        Where a broker refuses to list them, or does not answer, the groups with a retry topic are added, and the log
        says so. A group gets a retry topic with its first member.
        """
        pairs, refused = self._topics_and_groups()
        found = {group for _, group in pairs}
        if refused is not None or self._silent:
            found |= self._retrying_groups(refused)
        return sorted(unwrap_name(self._namespace, group) for group in found if self._is_ours(group))

    def topics(self, group: str) -> set[str]:
        """Return the topics in which a group has offsets, whether members subscribe to them or not.

        Topics that were deleted may be among them. Where a broker refuses to list them, or does not answer, some may be
        missing.
        """
        stored = wrap_name(self._namespace, group)
        pairs, _ = self._topics_and_groups()
        return {unwrap_name(self._namespace, topic) for topic, one in pairs if one == stored and self._is_ours(topic)}

    def _topics_and_groups(self) -> tuple[set[tuple[str, str]], NoPermissionError | None]:
        """Return topic and group of each committed offset, by the cluster's names, and the error of a broker's refusal.

        A broker that refuses to list them is left out.
        """
        found: set[tuple[str, str]] = set()
        refused: NoPermissionError | None = None
        for _, (outcome,) in self._ask(lambda broker: [AllGroupOffsetsRequest(broker)]):
            if isinstance(outcome, NoPermissionError):
                refused = outcome
                continue
            for key in _require(outcome).offsets:
                topic, _, group = key.partition("@")
                if topic and group:
                    found.add((topic, group))
        return found, refused

    def _retrying_groups(self, refused: NoPermissionError | None) -> set[str]:
        """Return the cluster's names of the groups that have a retry topic, and log why they are listed."""
        reason = describe_silent(self._silent) if refused is None else str(refused)
        _LOG.warning("rmq: groups with a retry topic are listed, and others may be missing: %s", reason)
        topics = [wrap_name(self._namespace, topic) for topic in self._backend.topics()]
        return {topic.removeprefix(RETRY_TOPIC_PREFIX) for topic in topics if topic.startswith(RETRY_TOPIC_PREFIX)}

    def read(self, groups: Sequence[str]) -> dict[str, Progress | NoPermissionError]:
        """Return the committed offsets of groups, or the error of a broker that refuses to tell them.

        A group that no broker knows has no offsets.
        """
        if len(groups) == 1:  # a proxy lists no brokers, but knows those of the group's retry topic
            self._backend.queues([retry_topic(groups[0])], missing_ok=[retry_topic(groups[0])])
        stored = [wrap_name(self._namespace, group) for group in groups]
        found: dict[str, Progress | NoPermissionError] = {group: Progress() for group in groups}
        for _, outcomes in self._ask(lambda broker: [GroupStatsRequest(group, broker) for group in stored]):
            for group, outcome in zip(groups, outcomes, strict=True):
                progress = found[group]
                if isinstance(outcome, NoPermissionError):
                    found[group] = outcome
                elif isinstance(progress, Progress):
                    self._add(progress, _require(outcome).queues)
        known = {group: progress for group, progress in found.items() if isinstance(progress, Progress)}
        for progress in known.values():
            progress.silent = self._silent
        self._ask_for_zeros(known)
        return found

    def _add(self, progress: Progress, stats: Mapping[QueueKey, GroupQueueStats]) -> None:
        for stored, one in stats.items():
            if self._is_ours(stored.topic):
                queue = QueueKey(unwrap_name(self._namespace, stored.topic), stored.queue_id, stored.broker)
                progress.stats[queue] = one
                progress.offsets[queue] = one.consumer_offset if one.consumer_offset > 0 else None

    def _ask_for_zeros(self, found: Mapping[str, Progress]) -> None:
        """Ask for the offsets in the queues for which the brokers said 0. Without the right to ask there are none."""
        asked = [(group, queue) for group, one in found.items() for queue, at in one.offsets.items() if at is None]
        address = self._backend.catalog.book.address
        names = {group: PullTerms(group, self._namespace) for group in found}
        calls = [
            (
                address(queue.broker) or "",
                CommittedOffsetRequest(names[group].stored_group, names[group].stored_queue(queue)),
            )
            for group, queue in asked
        ]
        for (group, queue), outcome in zip(asked, self._backend.client.call_all(calls), strict=True):
            if not isinstance(outcome, NoPermissionError | NotFoundError):  # the topic may just have been deleted
                found[group].offsets[queue] = _require(outcome).offset

    def committed(self, group: str) -> dict[QueueKey, int]:
        """Return the committed offsets of a group, {} if it has none.

        Raises BackendUnavailableError if any broker does not answer, because the group may have offsets there.
        """
        progress = self.read([group])[group]
        if isinstance(progress, NoPermissionError):
            raise progress
        self._refuse_silent(group, progress)
        return {queue: offset for queue, offset in progress.offsets.items() if offset is not None}

    def require(self, group: str) -> Progress:
        """Return the committed offsets of a group. Raises the errors of `find`."""
        progress: Progress = _require(self.find([group])[group])
        return progress

    def find(self, groups: Sequence[str]) -> dict[str, Progress | RmqError]:
        """Return the committed offsets of groups, all of which are asked for at the same time, or their errors.

        These are NotFoundError if a group has neither offsets nor a retry topic, NoPermissionError if a broker refuses,
        and BackendUnavailableError if no offset is known and a broker does not answer.
        """
        topics = [retry_topic(group) for group in groups]
        known = self._backend.queues(topics, missing_ok=topics)
        found: dict[str, Progress | RmqError] = dict(self.read(groups))
        for group, progress in found.items():
            if isinstance(progress, Progress) and not progress.offsets:
                try:
                    self._refuse_silent(group, progress)
                    if retry_topic(group) not in known:
                        self._refuse_unknown(group)
                except RmqError as error:
                    found[group] = error
        return found

    def _refuse_unknown(self, group: str) -> None:
        raise NotFoundError(
            f'no consumer group "{group}" in {self._backend.location.describe()}: it has neither committed offsets nor '
            f"a retry topic; expected one of them. {list_other_groups(group, self.names(), 'The cluster')}"
        )

    def _refuse_silent(self, group: str, progress: Progress) -> None:
        if progress.silent:
            raise BackendUnavailableError(
                f"cannot read the offsets of group {group}: {describe_silent(progress.silent)}; expected all brokers, "
                "because each has offsets of its own. Repeat the call when they are back."
            )

    def connections(self, groups: Sequence[str]) -> dict[str, dict[str, GroupConnectionsResponse]]:
        """Return what each broker says about the members of each group. Brokers without members are left out.

        Where an account lacks the right, the members have only their client ids. Raises NoPermissionError if a broker
        refuses these too.
        """
        stored = [wrap_name(self._namespace, group) for group in groups]
        found: dict[str, dict[str, GroupConnectionsResponse]] = {group: {} for group in groups}
        for broker, outcomes in self._ask(lambda broker: [GroupConnectionsRequest(group, broker) for group in stored]):
            for group, outcome in zip(groups, outcomes, strict=True):
                answer = self._ids_only(group, broker, outcome)
                if answer.connections:
                    found[group][broker] = answer
        if self._silent:
            _LOG.warning("rmq: members may be missing: %s", describe_silent(self._silent))
        return found

    def _ids_only(self, group: str, broker: str, outcome: Any) -> GroupConnectionsResponse:
        """Return the answer about a group's members, or if it is a refusal, their client ids."""
        if not isinstance(outcome, NoPermissionError):
            answer: GroupConnectionsResponse = _require(outcome)
            return answer
        request = GroupMembersRequest(wrap_name(self._namespace, group), broker)
        try:
            ids = self._backend.client.call(self._backend.catalog.book.address(broker) or "", request).client_ids
        except NoPermissionError:
            raise outcome from None  # it names the right that is worth asking for
        _LOG.warning("rmq: only the client ids of the members of group %s are known: %s", group, outcome)
        return GroupConnectionsResponse(tuple(MemberConnection(client_id, "", "", 0) for client_id in ids))

    def _is_ours(self, stored: str) -> bool:
        """Return whether the cluster's name of a topic or a group is in the namespace, or in none."""
        return is_in_namespace(self._namespace, stored) or is_shared_name(stored)

    def _ask(self, make: Callable[[str], Sequence[Request[Any]]]) -> Iterator[tuple[str, list[Any]]]:
        """Send requests to the master of each broker, and yield broker and outcomes of those that answer.

        `make` returns the requests to a broker.
        """
        masters: dict[str, str] = {}
        self._silent = {}
        for listing in self._backend.catalog.brokers():
            if listing.address is None or not listing.has_master:
                self._silent[listing.broker] = describe_missing(listing)
            else:
                masters[listing.broker] = listing.address
        requests = {broker: make(broker) for broker in masters}
        outcomes = iter(
            self._backend.client.call_all(
                [(masters[broker], request) for broker, made in requests.items() for request in made]
            )
        )
        answered = []
        for broker, made in requests.items():
            of_broker = [next(outcomes) for _ in made]
            errors = [one for one in of_broker if isinstance(one, BackendUnavailableError)]
            if errors:
                self._silent[broker] = str(errors[0]).rstrip(".")
            else:
                answered.append((broker, of_broker))
        if not answered:
            reason = describe_silent(self._silent) if self._silent else "no name server lists a broker"
            raise BackendUnavailableError(
                f"no broker of {self._backend.location.describe()} answers: {reason}. Check whether the brokers run; "
                "after a restart of a name server wait 30 s."
            )
        self.answering = frozenset(broker for broker, _ in answered)
        yield from answered


def describe_silent(silent: Mapping[str, str]) -> str:
    """Return the names of the brokers that do not answer, with the first reason, for errors and logs."""
    verb = "does" if len(silent) == 1 else "do"
    return f"{list_names(silent)} {verb} not answer ({next(iter(silent.values()))})"


def _require(outcome: Any) -> Any:
    """Return an answer. Raise it if it is an error."""
    if isinstance(outcome, RmqError):
        raise outcome
    return outcome
