"""A full disk is detected before the intent: the check is at least as strict as the appends."""

from typing import TYPE_CHECKING

import pytest

from rmq_spark.store.errors import DiskFullError
from rmq_spark.store.model import CommitKey

if TYPE_CHECKING:
    from conftest import Kit

KEY = CommitKey("q", 0)
NAMES = [f"row{number:02d}" for number in range(12)]


@pytest.mark.parametrize("free_bytes", [1000, 1 << 20, 32 << 20])
def test_commit_checks_the_room_of_its_appends_before_the_intent(
    kit: "Kit", monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    files = kit.stage(KEY, NAMES)
    monkeypatch.setattr("rmq_spark.store.disk.files.free_bytes", lambda _: free_bytes)
    with pytest.raises(DiskFullError, match=r"needed to append 12 messages\. Nothing was written\. Make room"):
        kit.commit(KEY, files)
    assert not any(name.startswith("intents/") for name in kit.own_files())
    monkeypatch.undo()
    assert kit.rows() == {}
    assert kit.commit(KEY, files).rows == 12
