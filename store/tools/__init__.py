"""Operator tools: check a store, repair it, dump a file, and export or import messages as parquet files.

Call the functions from `rmq_spark` or `rmq_spark.store`. This package exports only the classes of their results, so
that callers can use them in type annotations. Each class is imported when it is first used.

Modules in this package may import all lower layers. They start no threads.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmq_spark.store.tools.check_report import CheckReport
    from rmq_spark.store.tools.export_parquet import Exported
    from rmq_spark.store.tools.finding import Finding
    from rmq_spark.store.tools.import_parquet import Imported
    from rmq_spark.store.tools.repair import Repaired
    from rmq_spark.store.tools.repair_plan import RepairPlan, RepairStep

__all__ = ["CheckReport", "Exported", "Finding", "Imported", "RepairPlan", "RepairStep", "Repaired"]

_MODULES = {
    "CheckReport": "check_report",
    "Exported": "export_parquet",
    "Finding": "finding",
    "Imported": "import_parquet",
    "RepairPlan": "repair_plan",
    "RepairStep": "repair_plan",
    "Repaired": "repair",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # later lookups bypass this function
    return value
