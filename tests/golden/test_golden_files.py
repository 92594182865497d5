"""The stores in this folder stay the bytes that a RocketMQ wrote."""

import hashlib
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
STORES = (
    "basic", "propcrc", "crashed", "preblank", "truncated-stale", "batchcq-cqext", "timer",
    "demo", "broker497", "livekill533",
)  # fmt: skip


def listed() -> dict[str, str]:
    """Path below this folder -> SHA-256, from SHA256SUMS (the format of sha256sum)."""
    lines = (HERE / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    return {path: digest for digest, path in (line.split("  ", 1) for line in lines)}


@pytest.mark.parametrize("store", STORES)
def test_a_store_has_exactly_the_files_of_the_list_and_their_bytes(store: str) -> None:
    found = {
        file.relative_to(HERE).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (HERE / store).rglob("*")
        if file.is_file()
    }
    expected = {path: d for path, d in listed().items() if path.startswith(f"{store}/")}
    assert found, f"{store} has no files: was it checked out?"
    assert found == expected, (
        f"{store} is no longer what RocketMQ wrote: a test changed it in place (copy it first), or "
        "git converted it (see .gitattributes)"
    )


def test_the_list_names_no_other_store() -> None:
    assert {path.split("/")[0] for path in listed()} == set(STORES)
