"""Where the watermark lies, and reading it: see `store/format/watermark.py` for what it says."""

from rmq_spark.store.disk import files
from rmq_spark.store.disk.host import boot_id
from rmq_spark.store.format.watermark import Watermark, decode_watermark

SIDE_FOLDER = "rmq"  # below the store's folder: what RocketMQ does not know
WATERMARK = "watermark.json"


def watermark_path(root: str) -> str:
    """Return the path of a store's watermark."""
    return files.join(root, SIDE_FOLDER, WATERMARK)


def read_watermark(root: str) -> Watermark | None:
    """Return a store's watermark, None without one that can be read."""
    data = files.read_small(watermark_path(root))
    try:
        return decode_watermark(data) if data else None
    except ValueError:
        return None


def is_at_work(note: Watermark | None) -> bool:
    """Say whether our writers are at work, between two sections: all up to the watermark is whole, if not synced."""
    return note is not None and not note.is_open and not note.is_settled and bool(note.boot) and note.boot == boot_id()
