"""The import rules of docs/ARCHITECTURE.md as a test: it reads our files and imports none."""

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Folder on disk -> dotted name once installed; as in package_dir of setup.cfg.
PACKAGES = {
    "rmq_spark": "rmq_spark",
    "store": "rmq_spark.store",
    "datasource": "rmq_spark.datasource",
}

# In both tables a name means itself and all below it, and after "=" only itself; the longest match
# decides.

# Lowest first. A module imports its own row and the rows before it. Modules without a match are facade.
LAYERS = {
    "words": (
        "store.errors store.model store.names store.arrival store.argument_checks store.offset_memory "
        "store.reset_arguments store.synchronized store.html_tables"
    ),
    "format": "store.format",
    "filter": "store.filter",
    "rebalance": "store.rebalance",
    "contract": (
        "store.batch_sink store.batch_order store.group_contract store.backend store.pull_result store.send_result "
        "store.group_tables"
    ),
    "cluster": "store.cluster",
    "disk": "store.disk",
    "log": "store.log",
    "transaction": "store.transaction",
    "group": "store.group",
    "delivery": "store.delivery",
    "client": "store.client",
    "tools": "store.tools",
    "view": "store.view",
    "local": "store.local",
    "places": "store.places",
    "door": "store",
    "testing": "store.testing",
    "options": "datasource.options",
    "plan": "datasource.plan",
    "spark": "datasource",
    "facade": "",
}

# The parts of the engine that the Spark side may import: words, the contract and filters. Its adapters to Spark, and
# the facade, may also turn options into a place.
CONTRACT = "store.errors store.model store.names store.arrival store.argument_checks store.backend store.filter"
DOORS = {"": f"=store {CONTRACT} store.places", "datasource": CONTRACT, "datasource.spark": f"{CONTRACT} store.places"}

# Imports -> modules that may import them: external packages, and the parts of the standard library that
# depend on the machine, the time or chance.
ONLY = {
    "numpy": "store",
    "pyarrow": (
        "=store store.backend store.batch_sink store.pull_result store.group_tables store.consumer_groups store.format "
        "store.filter store.log store.transaction store.group store.delivery store.client store.tools store.view "
        "store.local store.cluster store.testing "
        "datasource group_listeners command avro_bodies metrics"
    ),
    "pyspark": (
        "datasource.spark spark_session gateway_launch group_listeners metrics_listener stop consuming parsing "
        "avro_bodies"
    ),
    "hypothesis": "store.testing",
    "pytest": "store.testing",
    "random": "store.testing",
    "ctypes": "store.disk",
    "fcntl": "store.disk",
    "fastavro": "avro_bodies",
    "prometheus_client": "joined_collectors metric_table metrics metrics_listener",
    "io": "store.disk store.testing avro_bodies drawing",
    "mmap": "store.disk",
    "pathlib": "store consuming plots command metrics",
    "os": (
        "store.disk store.places store.cluster.client store.synchronized store.testing "
        "datasource.spark.worker_daemon datasource.spark.log_lines datasource.spark.worker_errors java spark_session "
        "gateway_launch "
        "command.message_output command.all_commands command.place command.cluster_options "
        "command.default_place command.completion command.intents command.colours"
    ),
    "shutil": "store.testing java command.tables",
    "signal": "store.disk store.testing command",
    "click": "command",
    "rich": "command",
    "textual": "command.browse_app command.browse_lists command.browse_messages command.browse_screens",
    "socket": "store.disk.host store.cluster.connection store.cluster.waker store.testing.brokers",
    "ssl": "store.cluster.connection store.testing.brokers",
    "select": "store.cluster.connection store.cluster.waker",
    "selectors": "store.testing.brokers",
    "subprocess": "store.testing java spark_session gateway_launch",
    "tempfile": "store.cluster.message_spool store.testing command.demo command.message_output",
    "threading": "datasource gateway_launch group_listeners joined_collectors metrics metrics_listener new_lines "
    "store.synchronized store.group store.testing command.output store.cluster.client store.cluster.membership",
    "multiprocessing": "",
    "concurrent": "store.transaction.commit store.testing.brokers command.browse command.browse_app",
    "json": (
        "store.format store.rebalance store.cluster store.transaction store.group store.delivery store.tools "
        "store.view store.testing datasource "
        "group_listeners stop command avro_bodies metrics_listener"
    ),
    "matplotlib": "plots drawing byte_cells",
}


def fit(module: str, names: str) -> int:
    """Return how long the longest of the names is that the module fits, 0 for none."""
    inner = module.removeprefix("rmq_spark").removeprefix(".")
    return max(
        (
            len(name)
            for name in names.split()
            if (inner == name[1:] if name[0] == "=" else f"{inner}.".startswith(f"{name}."))
        ),
        default=0,
    )


def row(module: str) -> int:
    """Return the number of the module's layer."""
    fits = [fit(module, names) for names in LAYERS.values()]
    return fits.index(max(fits)) if any(fits) else len(LAYERS) - 1


def read_imports(source: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each import; `from package import module` names the module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in modules else base


def read_checker_imports(source: str, modules: set[str]) -> set[str]:
    """Return the names of imports that only a type checker makes."""
    blocks = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    return {name for block in blocks for _, name in read_imports(ast.unparse(block), modules)}


def find_modules() -> dict[str, Path]:
    """Return every module of ours by its dotted name."""
    modules = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return modules


MODULES = find_modules()
IMPORTS = {name: list(read_imports(path.read_text(), set(MODULES))) for name, path in MODULES.items()}


def breach(module: str, name: str) -> str | None:
    """Return why the module must not import that name; None if it may."""
    top = name.split(".")[0]
    if top == "rmq_spark":
        if row(name) > row(module):
            return f"{list(LAYERS)[row(name)]} is a layer above {list(LAYERS)[row(module)]}"
        # The kit for tests is not part of the engine, so it may use the door too.
        if fit(module, "store") and not fit(module, "store.testing"):
            if name == "rmq_spark.store":
                return "inside the engine, name the module it comes from"
        elif not fit(module, "store") and fit(name, "store"):
            door = DOORS[max(DOORS, key=lambda part: fit(module, part) if part else 0)]
            if not fit(name, door):
                return f"only through {door}"
    elif top in ONLY:
        if not fit(module, ONLY[top]):
            return f"only {ONLY[top] or 'nobody'} may"
    elif top not in sys.stdlib_module_names:
        return "not absolute, or a new dependency"
    return None


def test_modules_import_only_what_their_layers_may() -> None:
    breaches = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {name}: {why}"
        for module, imports in IMPORTS.items()
        for line, name in imports
        if (why := breach(module, name)) is not None
    ]
    assert not breaches


def read_paths(source: str) -> list[int]:
    """Return the lines that read an attribute `path`."""
    nodes = ast.walk(ast.parse(source))
    return [node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr == "path"]


def test_the_spark_side_knows_no_path() -> None:
    assert read_paths("a = options.path\nb = view.store.path + '/x'") == [1, 2]
    found = {name: read_paths(path.read_text()) for name, path in MODULES.items() if fit(name, "datasource")}
    assert not {name: lines for name, lines in found.items() if lines}


def test_the_architecture_lists_the_same_layers_in_the_same_order() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    section = text.split(" Layers\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.split("\n") if line.startswith("| ")]
    assert rows[2:] == list(LAYERS), "after the head and the line below it"


def test_no_module_imports_itself_by_a_detour() -> None:
    graph = {module: {name for _, name in imports if name != module} for module, imports in IMPORTS.items()}
    for module in MODULES:
        if fit(module, "store.testing.brokers"):  # a handler has the type of the broker that imports it
            graph[module] -= read_checker_imports(MODULES[module].read_text(), set(MODULES))
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the detour


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("rmq_spark.store.errors", "rmq_spark.store.format.record"),
        ("rmq_spark.store.format.record", "rmq_spark.store.disk"),
        ("rmq_spark.store.format.record", "os"),
        ("rmq_spark.store.format.columns", "rmq_spark.store.filter.row_filter"),
        ("rmq_spark.store.filter.row_filter", "rmq_spark.store.log.consume_queue"),
        ("rmq_spark.store.disk.local_disk", "rmq_spark.store.log.end"),
        ("rmq_spark.store.disk.local_disk", "pyarrow"),
        ("rmq_spark.store.log.end", "rmq_spark.store"),
        ("rmq_spark.store.log.end", "mmap"),
        ("rmq_spark.store.log.end", "threading"),
        ("rmq_spark.store.log.end", "rmq_spark.store.transaction.ledger"),
        ("rmq_spark.store.transaction.ledger", "rmq_spark.store"),
        ("rmq_spark.store.transaction.ledger", "os"),
        ("rmq_spark.store.transaction.ledger", "rmq_spark.store.group.claims"),
        ("rmq_spark.store.group.claims", "rmq_spark.store"),
        ("rmq_spark.store.rebalance.allocation", "os"),
        ("rmq_spark.store.backend", "rmq_spark.store.log.end"),
        ("rmq_spark.store.backend", "rmq_spark.store.disk.files"),
        ("rmq_spark.store.cluster.frame", "rmq_spark.store.disk.clock"),
        ("rmq_spark.store.cluster.frame", "rmq_spark.store.local.backend"),
        ("rmq_spark.store.cluster.frame", "socket"),
        ("rmq_spark.store.cluster.client", "ssl"),
        ("rmq_spark.store.local.backend", "rmq_spark.store.places"),
        ("rmq_spark.store.disk.write", "socket"),
        ("rmq_spark.store", "rmq_spark.store.testing.samples"),
        ("rmq_spark.store", "rmq_spark.datasource.options.read_options"),
        ("rmq_spark.store", "pyspark"),
        ("rmq_spark.datasource.plan.planning", "pyspark.sql"),
        ("rmq_spark.datasource.plan.planning", "rmq_spark.datasource.spark.source"),
        ("rmq_spark.datasource.spark.source", "rmq_spark.store.log.end"),
        ("rmq_spark.datasource.spark.source", "rmq_spark.store"),
        ("rmq_spark.datasource.spark.source", "rmq_spark.store.disk.files"),
        ("rmq_spark.datasource.spark.source", "rmq_spark.store.local.backend"),
        ("rmq_spark.datasource.spark.source", "os"),
        ("rmq_spark.datasource.spark.source", "pathlib"),
        ("rmq_spark.datasource.plan.planning", "rmq_spark.store.places"),
        ("rmq_spark.datasource.options.read_options", "rmq_spark.store.places"),
        ("rmq_spark.datasource.options.read_options", "rmq_spark.datasource.plan.planning"),
        ("rmq_spark.datasource.spark.source", "store.errors"),
        ("rmq_spark.datasource.spark.source", ".options"),
        ("rmq_spark.datasource.spark.source", "rmq_spark"),
        ("rmq_spark.datasource.spark.source", "pandas"),
        ("rmq_spark.stop", "rmq_spark.store.log.end"),
    ],
)
def test_the_tables_refuse_a_planted_breach(module: str, name: str) -> None:
    assert breach(module, name) is not None


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("rmq_spark.store.format.record", "rmq_spark.store.errors"),
        ("rmq_spark.store.log.end", "rmq_spark.store.disk.local_disk"),
        ("rmq_spark.store", "rmq_spark.store.log.end"),
        ("rmq_spark.store.transaction.ledger", "rmq_spark.store.log.end"),
        ("rmq_spark.store.group.claims", "rmq_spark.store.transaction.ledger"),
        ("rmq_spark.store.log.end", "rmq_spark.store.backend"),
        ("rmq_spark.store.local.backend", "rmq_spark.store.group.claims"),
        ("rmq_spark.store.cluster.backend", "rmq_spark.store.backend"),
        ("rmq_spark.store.cluster.connection", "socket"),
        ("rmq_spark.store.testing.samples", "rmq_spark.store"),
        ("rmq_spark.datasource.spark.stream_reader", "rmq_spark.store.backend"),
        ("rmq_spark.datasource.spark.source", "rmq_spark.store.places"),
        ("rmq_spark.datasource.plan.planning", "rmq_spark.store.filter.row_filter"),
        ("rmq_spark.datasource.spark.stream_reader", "pyspark.sql.datasource"),
        ("rmq_spark.spark_session", "rmq_spark.datasource.spark.source"),
    ],
)
def test_the_tables_allow_what_is_meant(module: str, name: str) -> None:
    assert breach(module, name) is None
