"""`rmq/settings.json`: which version of our own side files a store has, its id, and what retention may delete."""

import json
from dataclasses import dataclass

VERSION = 1


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A store's id, and the limits of its retention (ms, bytes of log), None for none."""

    store_id: str
    retention_ms: int | None = None
    retention_bytes: int | None = None


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
    }
    return json.dumps(value, indent=2).encode() + b"\n"


def decode_settings(data: bytes) -> StoreSettings | OtherVersion:
    """Read settings. Raises ValueError for what is none."""
    value = json.loads(data)
    try:
        if value["v"] != VERSION:
            return OtherVersion(value["v"])
        return StoreSettings(value["storeId"], value.get("retentionMs"), value.get("retentionBytes"))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no settings of a store: {error}") from error
