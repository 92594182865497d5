"""The living members of a group, with and without queues, as a table. Takes no lock and changes nothing on disk."""

import time
from collections import Counter
from pathlib import PurePath
from urllib.parse import unquote

import pyarrow as pa

from rmq_spark.store.disk import files
from rmq_spark.store.disk.mounts import is_remote
from rmq_spark.store.format import filenames
from rmq_spark.store.group.claims import read_claims
from rmq_spark.store.group.group_paths import GroupPaths, list_group_names
from rmq_spark.store.group.liveness import Observer
from rmq_spark.store.group.member_file import Member
from rmq_spark.store.log.store_kind import commit_log_folders

_SUFFIX = ".json"

# What `group_members` returns, a row for each living member, sorted by group and member. Null: its file is damaged.
MEMBERS = pa.schema(
    [
        ("group", pa.string()),
        ("member", pa.string()),
        ("queues", pa.int32()),  # how many it has now
        ("queryName", pa.string()),
        ("application", pa.string()),
        ("host", pa.string()),
        ("processId", pa.int32()),
        ("assignment", pa.string()),
        ("allocateStrategy", pa.string()),
        ("subscription", pa.string()),
        ("since", pa.timestamp("ms", tz="UTC")),
    ]
)


def group_members(path: str | PurePath, group: str | None = None, *, commit_log_path: str | None = None) -> pa.Table:
    """Return the living members of a group, or of all: a row for each, with the number of queues that it has now.

    Members are queries of ours with `consumerGroup`, unless they have messageModel=broadcasting. A member of another
    host may be shown for a while after its end. Changes nothing on disk. Raises OptionError for what is no group's
    name, StorePathError for a path that holds no store, DamageError.
    """
    if group is not None:
        filenames.check_group_name(group)
    root = files.absolute(path)
    commit_log_folders(root, commit_log_path)
    names = list_group_names(root) if group is None else [group]
    return pa.Table.from_pylist([row for name in names for row in _rows(root, name)], MEMBERS)


def _rows(root: str, group: str) -> list[dict[str, object]]:
    paths = GroupPaths(root, group)
    # Nothing expires within one look, so a member of another host lives as long as its file exists.
    observer = Observer(paths, 0, time.monotonic, is_shared=is_remote(paths.root))
    owned = Counter(claim.owner for claim in read_claims(paths.claims).queues.values())
    listed = (name.removesuffix(_SUFFIX) for name, _ in files.list_folder(paths.members) if name.endswith(_SUFFIX))
    return [
        {"group": group, "member": member_id, "queues": owned[member_id], **_described(observer.member(member_id))}
        for member_id in sorted(map(unquote, listed))
        if observer.is_alive(member_id)
    ]


def _described(member: Member | None) -> dict[str, object]:
    if member is None:
        return {}
    return {
        "queryName": member.query_name,
        "application": member.application,
        "host": member.process.host,
        "processId": member.process.pid,
        "assignment": member.assignment,
        "allocateStrategy": member.strategy,
        "subscription": member.subscription,
        "since": member.since_ms,
    }
