"""Whether a folder is a store that this project reads, and an answer in words where it is not."""

from rmq_spark.store.disk import files
from rmq_spark.store.errors import StorePathError
from rmq_spark.store.format import filenames

_KNOWN = f"a store has a folder {filenames.COMMIT_LOG}/ with segments of 20 digits"


def commit_log_folders(root: str, commit_log_path: str | None) -> tuple[str, ...]:
    """Return the folders of the commit log of the store at `root`.

    `commit_log_path` names them where they lie elsewhere, several joined by `,` (storePathCommitLog). Raises
    StorePathError where there is no store or one of a kind that is not read.
    """
    if not files.is_folder(root):
        what = "is a file" if files.file_size(root) >= 0 else "does not exist"
        raise StorePathError(
            f'path="{root}" {what}. Give the folder that a broker calls storePathRootDir; on a cluster it must be '
            "visible under the same path on the driver and on every executor."
        )
    entries = dict(files.list_folder(root))
    _refuse_other_kinds(root, entries)
    if commit_log_path is not None:
        folders = tuple(files.absolute(part.strip()) for part in commit_log_path.split(",") if part.strip())
        for folder in folders:
            if not files.is_folder(folder):
                raise StorePathError(
                    f'commitLogPath: no folder at "{folder}". Give the folder or folders, joined by commas, that '
                    "hold the segments (a broker's storePathCommitLog)."
                )
        if folders:
            return folders
    if entries.get(filenames.COMMIT_LOG):
        return (files.join(root, filenames.COMMIT_LOG),)
    raise StorePathError(f'path="{root}" is no RocketMQ store: {_KNOWN}. {_hint(root, entries)}')


def _refuse_other_kinds(root: str, entries: dict[str, bool]) -> None:
    kind = None
    queue_files = dict(files.list_folder(files.join(root, filenames.CONSUME_QUEUE)))
    if any(name.startswith("dledger-") for name in entries):
        kind = "a DLedger commit log (dledger-* folder)"
    elif any(not is_folder and name.startswith("MANIFEST-") for name, is_folder in queue_files.items()):
        kind = "consume queues in RocksDB (storeType=defaultRocksDB)"
    elif files.file_size(files.join(root, filenames.CONFIG, "tieredStoreMetadata.json")) >= 0:
        kind = "tiered storage (config/tieredStoreMetadata.json)"
    if kind is not None:
        raise StorePathError(
            f'path="{root}" is a store with {kind}, which is not supported. Supported are file stores: commitlog/, '
            "consumequeue/ and batchconsumequeue/. Let the broker copy the topics into such a store and read that."
        )


def _hint(root: str, entries: dict[str, bool]) -> str:
    if files.is_folder(files.join(root, "store", filenames.COMMIT_LOG)):
        return f'There is one at "{files.join(root, "store")}": give that path.'
    if any(not is_folder and len(name) == 20 and name.isdigit() for name, is_folder in entries.items()):
        return "The folder itself holds segments: give the folder above it."
    if not entries:
        return "The folder is empty."
    held = f"It holds: {', '.join(sorted(entries)[:8])}."
    if entries.get(filenames.CONSUME_QUEUE):
        return f"{held} If its log lies elsewhere (a broker's storePathCommitLog), name that folder with commitLogPath."
    return held
