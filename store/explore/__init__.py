"""For people who look: what a store holds, in a few numbers, and what of it is damaged.

Reads by whole columns and from few records. Modules may import the layers below: words, format, disk, log, commit,
group, delivery. No threads.

The functions are behind the engine's door and in `rmq_spark`. What they return is named here, for who annotates:
nothing is loaded until it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmq_spark.store.explore.check_report import CheckReport
    from rmq_spark.store.explore.finding import Finding
    from rmq_spark.store.explore.parquet_export import Exported
    from rmq_spark.store.explore.parquet_import import Imported
    from rmq_spark.store.explore.repair_plan import RepairPlan, RepairStep
    from rmq_spark.store.explore.repairing import Repaired

__all__ = ["CheckReport", "Exported", "Finding", "Imported", "RepairPlan", "RepairStep", "Repaired"]

_HOMES = {
    "CheckReport": "check_report",
    "Exported": "parquet_export",
    "Finding": "finding",
    "Imported": "parquet_import",
    "RepairPlan": "repair_plan",
    "RepairStep": "repair_plan",
    "Repaired": "repairing",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'rmq_spark.store.explore' has no attribute {name!r}; it has {__all__}")
    value: object = getattr(import_module(f"rmq_spark.store.explore.{_HOMES[name]}"), name)
    globals()[name] = value  # the next look-up does not come here
    return value
