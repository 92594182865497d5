"""Who is a member of a group: `members/<member id>.json`, which the member itself writes and keeps fresh.

Fields: host, boot_id, pid_space, pid, start_ticks (the process), application, query_name, assignment, strategy,
subscription, since_ms, beat, lease_timeout_ms, lease_heartbeat_ms. A member raises `beat` as long as it lives; by that
other machines see that it does. It is written without a sync: a power cut ends its process too, and whoever comes next
takes away what is left of the file.
"""

import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from rmq_spark.store.commit.side_file import encode_side_file, number_of, read_side_file, text_of
from rmq_spark.store.disk.host import Process

Kind = Literal["all", "shared", "broadcasting"]
KINDS: tuple[Kind, ...] = ("all", "shared", "broadcasting")

_WHAT = "the file of a member of a consumer group"
_NEXT_STEP = (
    "If its process lives it writes the file again within leaseHeartbeat (30 s unless it was set); if not, remove the "
    "file."
)
_NOT_IN_HOSTS, _HOST_CHARS = re.compile(r"[^0-9A-Za-z.-]"), 64


@dataclass(frozen=True, slots=True)
class Member:
    """One query as a member of a group. Its id is not in its file: it is the file's name."""

    process: Process
    application: str  # what the user calls the program
    query_name: str  # and this query in it; "" if it has no name
    assignment: Kind
    strategy: str  # allocateStrategy as the user wrote it
    subscription: str  # topics and filters in a canonical form: equal if and only if the subscription is
    since_ms: int  # when it joined, ms since the epoch, for people
    beat: int = 0  # counts up
    lease_timeout_ms: int = 120_000  # for how long it may keep still and lives
    lease_heartbeat_ms: int = 30_000  # how often it beats

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_ms / 1000, UTC).isoformat(timespec="seconds")
        query = f'query "{self.query_name}"' if self.query_name else "a query without a name"
        return (
            f'{query} of the application "{self.application}" (process {self.process.pid} on host '
            f"{self.process.host}, a member since {since})"
        )


def new_member_id(process: Process, unique: str) -> str:
    """Return `<host>@<pid>#<unique>`, in the way of a client's id with ClientConfig#buildMQClientId (5.3).

    `unique` is a text that no other member ever has, such as a uuid. Ids are compared and sorted as plain text.
    """
    assert unique, "two members of one process must differ"
    host = _NOT_IN_HOSTS.sub("_", process.host)[:_HOST_CHARS]  # the id is a file's name too
    return f"{host}@{process.pid}#{unique}"


def encode_member(member: Member) -> bytes:
    """Write a member as JSON."""
    fields = asdict(member)
    process = fields.pop("process")
    return encode_side_file({**process, **fields})


def read_member(path: str) -> Member | None:
    """Return what a member's file says, None without a file. Raises DamageError, or StoreError for a newer version."""
    return read_side_file(path, _WHAT, _NEXT_STEP, _build)


def _build(fields: dict[str, Any]) -> Member:
    kind = fields["assignment"]
    if kind not in KINDS:
        raise ValueError(f"assignment: expected one of {', '.join(KINDS)}, found {kind!r}")
    process = Process(
        text_of(fields, "host"),
        _any_text(fields, "boot_id"),  # "" where a system does not say
        _any_text(fields, "pid_space"),
        number_of(fields, "pid"),
        number_of(fields, "start_ticks"),
    )
    return Member(
        process,
        _any_text(fields, "application"),
        _any_text(fields, "query_name"),
        kind,
        _any_text(fields, "strategy"),
        _any_text(fields, "subscription"),
        number_of(fields, "since_ms"),
        number_of(fields, "beat"),
        number_of(fields, "lease_timeout_ms", least=1),
        number_of(fields, "lease_heartbeat_ms", least=1),
    )


def _any_text(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    if type(value) is not str:
        raise TypeError(f"{name}: expected a text, found {value!r}")
    return value
