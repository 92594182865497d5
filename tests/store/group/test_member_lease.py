"""Member files and member ids."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rmq_spark.store.disk.host import Process
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format.side_file import safe_name
from rmq_spark.store.group.member_lease import KINDS, Member, encode_member, new_member_id, read_member

PROCESS = Process("h", "boot", "pid:[4]", 17, 99)
MEMBER = Member(PROCESS, "app", "billing", "shared", "avg", "orders:*", 1_700_000_000_000, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_read_member_returns_the_written_member(tmp_path: Path, kind: str) -> None:
    member = replace(MEMBER, assignment=kind, process=Process("h", "", "", 17, 0), query_name="")
    (tmp_path / "m").write_bytes(encode_member(member))
    assert read_member(str(tmp_path / "m")) == member


def test_read_member_returns_none_without_a_file(tmp_path: Path) -> None:
    assert read_member(str(tmp_path / "m")) is None


@pytest.mark.parametrize(
    "change",
    [
        {"pid": "17"},
        {"pid": -1},
        {"beat": None},
        {"lease_timeout_ms": 0},
        {"lease_heartbeat_ms": None},
        {"host": ""},
        {"assignment": "both"},
        {"assignment": []},
        {"subscription": 7},
        {"boot_id": None},
    ],
)
def test_read_member_names_the_file_and_the_next_step(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "m"
    path.write_text(json.dumps(json.loads(encode_member(MEMBER)) | change))
    with pytest.raises(DamageError) as caught:
        read_member(str(path))
    assert str(path) in str(caught.value)
    assert "remove the file" in str(caught.value)


def test_read_member_refuses_every_truncated_file(tmp_path: Path) -> None:
    path, data = tmp_path / "m", encode_member(MEMBER)
    for length in range(len(data) - 2):  # the last two are a brace and a newline
        path.write_bytes(data[:length])
        with pytest.raises(DamageError):
            read_member(str(path))


def test_read_member_refuses_a_newer_version_without_calling_it_damage(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text(json.dumps(json.loads(encode_member(MEMBER)) | {"v": 2}))
    with pytest.raises(StoreError, match="version 2") as caught:
        read_member(str(path))
    assert not isinstance(caught.value, DamageError)


def test_new_member_id_has_host_and_process_and_is_a_file_name() -> None:
    assert new_member_id(PROCESS, "u") == "h@17#u"
    odd = new_member_id(replace(PROCESS, host="a/b\0ü" + "x" * 300), "f" * 32)
    assert odd.startswith("a_b__xxx")
    assert "+" not in safe_name(odd), "a name that is cut does not give the id back"
