"""Names of a commit's files: distinct for distinct query ids, and always inside their folder."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark.store.format.side_file import safe_name
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.disk_effects import Create, SyncFolder
from rmq_spark.store.transaction.ledger import batch_of_folder, folder_of, make_folders

ODD = ["..", ".", "a/b", "a%2Fb", "txn:app", "txn:App", "a@3", "a+b", "ä", "\ud800", "x" * 150, "x" * 151, "\0", " "]


@given(st.sets(st.text(min_size=1) | st.sampled_from(ODD), min_size=2, max_size=20))
def test_safe_name_is_distinct_and_one_part_of_a_path(ids: set[str]) -> None:
    names = {safe_name(one) for one in ids}
    assert len(names) == len(ids)
    for name in names:
        assert "/" not in name
        assert not name.startswith(".")
        assert len(name.encode()) <= 150


def test_safe_name_keeps_an_ordinary_id() -> None:
    assert safe_name("0c6de66d-2b5c-4b4e-8b5a-7ee2b7bcf3c7") == "0c6de66d-2b5c-4b4e-8b5a-7ee2b7bcf3c7"
    assert safe_name("txn:nightly load") == "txn%3Anightly%20load"


@given(st.text(min_size=1) | st.sampled_from(ODD), st.integers(0, 1 << 62))
def test_batch_of_folder_parses_the_folder_of_a_key(query_id: str, batch_id: int) -> None:
    assert batch_of_folder(folder_of(CommitKey(query_id, batch_id))) == (safe_name(query_id), batch_id)
    assert batch_of_folder(folder_of(CommitKey(query_id))) is None


@pytest.mark.parametrize("folder", ["", "@3", "q@", "q@x", "q@-1", "q@٣", "q"])
def test_batch_of_folder_is_none_for_other_folders(folder: str) -> None:
    assert batch_of_folder(folder) is None


def test_CommitKey_pickles_and_has_a_text() -> None:
    key = CommitKey("q", 7)
    assert pickle.loads(pickle.dumps(key)) == key
    assert str(key) == "batch 7 of query q"
    assert str(CommitKey("w")) == "write w"


def test_make_folders_syncs_folders_before_it_creates_the_marker(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    make_folders(str(tmp_path / "store"), disk)
    made = disk.effects
    assert made[-1] == Create("store/rmq/commits-v1", made[-1].file, 0)
    assert {SyncFolder("."), SyncFolder("store"), SyncFolder("store/rmq")} <= set(made[:-1])
    make_folders(str(tmp_path / "store"), disk)
    assert disk.effects == made, "the second time it is one look"
