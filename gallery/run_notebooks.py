"""Run notebooks from top to bottom, and store their outputs in them: python gallery/run_notebooks.py [NAME ...]

Outputs are stored without what differs from run to run or from machine to machine, as far as that is possible: paths,
times of today, ids of messages and queries, addresses and ports are replaced, and the standard error of the kernel is
left out. Pictures of queries at work still differ. NAME is a notebook, such as 05_inside_the_files.ipynb; by default,
all run.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
CELL_S = 1_800  # only ends a hang
# A JVM that lives for a minute does not earn what its second compiler costs.
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

_TIME = re.compile(r"(\d{4}-\d\d-\d\d) \d\d:\d\d:\d\d(\.\d+)?")
# Durations between two times that were replaced.
_LATER = re.compile(r"(?<=12:00:00\.000 UTC)(, at \S+ \()[^)]*(?= later\))")
_SPAN = re.compile(r"(?<=12:00:00\.000)( to 2026-01-01 12:00:00\.000 UTC)(, | \()[\d.]+ [a-z]+(?: \d+ [a-z]+)?")
_NAME_SERVER = re.compile(r"nameServer=127\.0\.0\.1:\d+")
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_ADDRESS = re.compile(r"0x[0-9a-f]{8,}")


@dataclass
class Marks:
    """What a run of this machine leaves in outputs: its temporary folders, its days, its address, and new ids.

    `host` is the address of this machine, and `id_begin` are the first digits of the message ids that it makes. Ids get
    numbers in the order in which they appear.
    """

    days: tuple[str, ...]
    host: str
    id_begin: str
    root: Path = ROOT
    temporary: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    _numbers: dict[str, int] = field(default_factory=dict)

    def replace(self, text: str) -> str:
        """Return the text of an output without the marks."""
        text = re.sub(rf"{re.escape(str(self.temporary))}/tmp[a-z0-9_]+", "/data", text)
        text = text.replace(f"{self.root}/", "../").replace(str(self.root), "..")
        text = _TIME.sub(lambda found: f"{found[1]} 12:00:00.000" if found[1] in self.days else found[0], text)
        for day in self.days:
            text = text.replace(day, "2026-01-01")
        text = _SPAN.sub(r"\1\g<2>0 s", _LATER.sub(r"\g<1>0 s", text))
        text = re.sub(rf"\b{self.id_begin}[0-9A-F]{{24}}\b", lambda id: f"C0000201{self._number(id[0]):024X}", text)
        text = _UUID.sub(lambda id: f"00000000-0000-4000-8000-{self._number(id[0]):012}", text)
        text = re.sub(rf"(?<![\d.]){re.escape(self.host)}(:\d+)?(?![\d.])", "192.0.2.1:10911", text)
        return _NAME_SERVER.sub("nameServer=127.0.0.1:9876", text)

    def _number(self, found: str) -> int:
        return self._numbers.setdefault(found, len(self._numbers))


def find_marks() -> Marks:
    """Return the marks of this machine. Its address and its ids are those of a message that it stores."""
    import rmq_spark

    now = datetime.now(UTC)  # noqa: TID251  # the script describes the machine that it runs on
    days = tuple(str((now + timedelta(days=shift)).date()) for shift in (0, 1))
    with tempfile.TemporaryDirectory() as folder:
        with rmq_spark.open_store(f"{folder}/store") as store:
            place = store.send("orders", "x")
        with rmq_spark.open_reader(f"{folder}/store") as reader:
            (queue,) = [one for one in reader.queues("orders") if one.queue_id == place.queue_id]
            message = reader.message(queue, place.queue_offset)
    return Marks(days, message.store_host.rpartition(":")[0], message.message_id[:8])


def cleaned(outputs: list[Any], marks: Marks) -> Iterator[dict[str, Any]]:
    """Yield the outputs of a cell as they are stored: without standard error, and without the marks."""
    for output in outputs:
        if output["output_type"] == "stream":
            if output["name"] == "stdout":
                yield {**output, "text": marks.replace(output["text"])}
            continue
        data = {
            kind: marks.replace(text) if kind.startswith("text/") else text for kind, text in output["data"].items()
        }
        if {"text/html", "image/png"} & data.keys() and "text/plain" in data:
            data["text/plain"] = _ADDRESS.sub("0x0", data["text/plain"])
        yield {**output, "data": data, "metadata": {}}


def run(path: Path, marks: Marks) -> None:
    """Run a notebook in a kernel of its own, and store its outputs in it. Raises CellExecutionError if a cell fails."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, 4)
    nbclient.NotebookClient(notebook, timeout=CELL_S, resources={"metadata": {"path": str(path.parent)}}).execute()
    source = json.loads(path.read_text(encoding="utf-8"))
    for cell, executed in zip(source["cells"], notebook.cells, strict=True):
        if cell["cell_type"] == "code":
            cell["execution_count"] = executed["execution_count"]
            outputs = json.loads(json.dumps(list(cleaned(executed["outputs"], marks))))
            cell["outputs"] = [_in_lines(output) for output in outputs]
    path.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _in_lines(output: dict[str, Any]) -> dict[str, Any]:
    """Return an output with its texts as lists of lines, as Jupyter stores them."""
    if "text" in output:
        return {**output, "text": output["text"].splitlines(keepends=True)}
    data = {
        kind: text.splitlines(keepends=True) if kind.startswith("text/") else text.strip() if "png" in kind else text
        for kind, text in output["data"].items()
    }
    return {**output, "data": data}


def main(names: list[str]) -> None:
    """Run the notebooks with these names, or all."""
    os.environ["JDK_JAVA_OPTIONS"] = QUICK_JAVA
    marks = find_marks()
    for path in [NOTEBOOKS / name for name in names] or sorted(NOTEBOOKS.glob("*.ipynb")):
        print(path.name, flush=True)
        run(path, marks)


if __name__ == "__main__":
    main(sys.argv[1:])
