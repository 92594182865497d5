"""`rmq/settings.json`: version of our own side files, the store's id, retention, sizes of its files, how it delays."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.side_json import parse_json

VERSION = 1
BROKER_VERSIONS = ("4.9", "5")
TIMER_MAX_DELAY_S = 259_200  # MessageStoreConfig#timerMaxDelaySec (5.3)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A store's id, the limits of its retention (ms, bytes of log), None for none, and how its messages are delayed.

    `file_sizes` are those with which the store was made, by name: for whoever makes its first files. {} where a broker
    made it. `delay_levels` is its `messageDelayLevel`, `timer_max_delay_s` how far ahead a message's time may lie,
    `broker_version` for which brokers it is meant, one of BROKER_VERSIONS. Where these are None the store never said.
    """

    store_id: str
    retention_ms: int | None = None
    retention_bytes: int | None = None
    file_sizes: Mapping[str, int] = field(default_factory=dict)
    delay_levels: str | None = None
    timer_max_delay_s: int | None = None
    broker_version: str | None = None

    @property
    def levels(self) -> DelayLevels:
        """The store's table of delay levels, RocketMQ's own where it never said."""
        return DEFAULT_DELAY_LEVELS if self.delay_levels is None else DelayLevels.parse(self.delay_levels)

    @property
    def timer_max_delay_ms(self) -> int:
        """How far ahead the time may lie at which a message is to be delivered."""
        return 1000 * (TIMER_MAX_DELAY_S if self.timer_max_delay_s is None else self.timer_max_delay_s)


@dataclass(frozen=True, slots=True)
class DelayTerms:
    """What somebody who opens a store says of its delays; None: as the store has it."""

    levels: DelayLevels | None = None
    timer_max_delay_s: int | None = None
    broker_version: str | None = None  # one of BROKER_VERSIONS

    def applied_to(self, settings: StoreSettings) -> StoreSettings:
        """Return the settings with what was said; the same ones where they say so already."""
        changed = settings
        if self.levels not in (None, settings.levels):
            changed = replace(changed, delay_levels=None if self.levels is None else self.levels.text)
        if self.timer_max_delay_s is not None and 1000 * self.timer_max_delay_s != settings.timer_max_delay_ms:
            changed = replace(changed, timer_max_delay_s=self.timer_max_delay_s)
        if self.broker_version not in (None, settings.broker_version):
            changed = replace(changed, broker_version=self.broker_version)
        return changed


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
        "messageDelayLevel": settings.delay_levels,
        "timerMaxDelaySec": settings.timer_max_delay_s,
        "brokerVersion": settings.broker_version,
    }
    return json.dumps(value, indent=2).encode() + b"\n"


def decode_settings(data: bytes) -> StoreSettings | OtherVersion:
    """Read settings. Raises ValueError for what is none."""
    value = parse_json(data)
    try:
        if value["v"] != VERSION:
            return OtherVersion(value["v"])
        sizes = dict(value.get("fileSizes", {}))
        settings = StoreSettings(
            value["storeId"],
            value.get("retentionMs"),
            value.get("retentionBytes"),
            sizes,
            value.get("messageDelayLevel"),
            value.get("timerMaxDelaySec"),
            value.get("brokerVersion"),
        )
        _check_types(settings)
        _check_delays(settings)
    except (AttributeError, KeyError, TypeError, OptionError) as error:
        raise ValueError(f"no settings of a store: {error}") from error
    return settings


def _check_types(settings: StoreSettings) -> None:
    if type(settings.store_id) is not str:
        raise TypeError(f"storeId is {settings.store_id!r}")
    limits: dict[str, Any] = {"retentionMs": settings.retention_ms, "retentionBytes": settings.retention_bytes}
    numbers = {**{name: limit for name, limit in limits.items() if limit is not None}, **settings.file_sizes}
    for name, number in numbers.items():
        if type(number) is not int or number < 0:
            raise TypeError(f"{name} is {number!r}")


def _check_delays(settings: StoreSettings) -> None:
    if settings.delay_levels is not None:
        DelayLevels.parse(settings.delay_levels)
    longest: Any = settings.timer_max_delay_s
    if longest is not None and (type(longest) is not int or longest < 0):
        raise TypeError(f"timerMaxDelaySec is {longest!r}")
    if settings.broker_version not in (None, *BROKER_VERSIONS):
        raise TypeError(f"brokerVersion is {settings.broker_version!r}")
