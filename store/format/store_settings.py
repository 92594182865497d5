"""`rmq/settings.json`: version of our own side files, the store's id, what retention may delete, sizes of its files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

VERSION = 1


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A store's id, and the limits of its retention (ms, bytes of log), None for none.

    `file_sizes` are those with which the store was made, by name: for whoever makes its first files. {} where a broker
    made it.
    """

    store_id: str
    retention_ms: int | None = None
    retention_bytes: int | None = None
    file_sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """The settings are of another release, which alone knows what they mean."""

    version: object


def encode_settings(settings: StoreSettings) -> bytes:
    """Write settings as JSON."""
    value = {
        "v": VERSION,
        "storeId": settings.store_id,
        "retentionMs": settings.retention_ms,
        "retentionBytes": settings.retention_bytes,
        "fileSizes": dict(settings.file_sizes),
    }
    return json.dumps(value, indent=2).encode() + b"\n"


def decode_settings(data: bytes) -> StoreSettings | OtherVersion:
    """Read settings. Raises ValueError for what is none."""
    value = json.loads(data)
    try:
        if value["v"] != VERSION:
            return OtherVersion(value["v"])
        sizes = {name: int(size) for name, size in value.get("fileSizes", {}).items()}
        return StoreSettings(value["storeId"], value.get("retentionMs"), value.get("retentionBytes"), sizes)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no settings of a store: {error}") from error
