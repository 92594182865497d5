"""The callback before the intent: called for a new batch only, under the lock."""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rmq_spark.store.backend import CommitTotals
from rmq_spark.store.errors import StoreError
from rmq_spark.store.log.write_session import WriteSession
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.crash_disk import ProcessDeathError
from rmq_spark.store.transaction.commit import commit_staged
from rmq_spark.store.transaction.intents import Intents

if TYPE_CHECKING:
    from tests.store.transaction.conftest import Kit

KEY = CommitKey("q", 0)
NAMES = [f"row{number}" for number in range(12)]


class Told:
    """State of the store at each call of `before_intent`."""

    def __init__(self, kit: "Kit", error: Exception | None = None) -> None:
        self.kit, self.error = kit, error
        self.seen: list[tuple[bool, bool, int]] = []

    def __call__(self) -> None:
        promised = Intents(self.kit.root, self.kit.disk).read(KEY.query_id) is not None
        self.seen.append((promised, self.kit.ledger("q") is not None, len(self.kit.all_rows())))
        if self.error is not None:
            raise self.error

    def commit(self, names: list[str], **options: object) -> CommitTotals:
        files = self.kit.stage(KEY, names)
        with self.kit.writer() as writer:
            chosen = replace(self.kit.options, **options)  # type: ignore[arg-type]
            return commit_staged(writer, KEY, files, chosen, before_intent=self)


@pytest.mark.parametrize("names", [NAMES, []])
def test_before_intent_is_called_once_before_the_intent(kit: "Kit", names: list[str]) -> None:
    told = Told(kit)
    told.commit(names)
    assert told.seen == [(False, False, 0)]
    assert sorted(kit.all_rows()) == sorted(names)


@pytest.mark.parametrize("again", [NAMES, NAMES[:3], []])
def test_before_intent_is_not_called_for_a_committed_batch(kit: "Kit", again: list[str]) -> None:
    Told(kit).commit(NAMES)
    told = Told(kit)
    assert told.commit(again, on_conflict="skip").skipped
    assert told.seen == []


def test_before_intent_error_aborts_the_commit_and_a_retry_calls_it_again(kit: "Kit") -> None:
    told = Told(kit, StoreError("no"))
    with pytest.raises(StoreError, match="no"):
        told.commit(NAMES)
    assert kit.all_rows() == []
    told.error = None
    assert told.commit(NAMES).rows == len(NAMES)
    assert told.seen == [(False, False, 0)] * 2


def test_before_intent_is_not_called_for_a_batch_with_a_dead_owner(kit: "Kit", monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise ProcessDeathError

    with monkeypatch.context() as patch:
        patch.setattr(WriteSession, "append", die)
        with pytest.raises(ProcessDeathError):
            Told(kit).commit(NAMES)
    told = Told(kit)
    assert told.commit(NAMES[:5], on_conflict="skip").skipped
    assert told.seen == []
    assert sorted(kit.all_rows()) == sorted(NAMES)
