"""Stores for the measurements, built once and kept in a folder.

The name of a store's folder has its shape and a checksum of the code that wrote it, so that a change of that code
builds new stores. An interrupted build leaves a folder with another name, which the next build replaces.
"""

import inspect
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from rmq_spark.store.format import record
from rmq_spark.store.testing import sample_store, uniform_records
from rmq_spark.store.testing.sample_store import build_uniform_store

TOPIC = "bench"
BODY_BYTES = 200
_READ_BYTES = 128 << 10  # the block size of cp and cat
RECORD_BYTES = 380  # at most: for the space that is needed


@dataclass(frozen=True)
class Shape:
    """Contents of a store. `interleave` is "message" or "batch" (runs of 32), as in build_uniform_store."""

    messages: int
    queues: int = 4
    interleave: str = "batch"
    segment_bytes: int = 1 << 30
    messages_per_ms: int = 100

    def name(self) -> str:
        """Return a folder name with all fields."""
        pace = "" if self.messages_per_ms == 100 else f"-{self.messages_per_ms}-a-ms"
        return f"{self.messages}-in-{self.queues}-by-{self.interleave}-{self.segment_bytes >> 10}k{pace}"


class SampleStores:
    """Stores in `folder`, built on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sources = [inspect.getsource(module) for module in (record, sample_store, uniform_records)]
        self._make = f"{zlib.crc32(''.join(sources).encode()):08x}"

    def path(self, shape: Shape) -> Path:
        """Return the store of that shape. Raises OSError where its disk has no room for it."""
        path = self.folder / f"{shape.name()}-{self._make}"
        if path.exists():
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        needed = shape.messages * RECORD_BYTES
        if shutil.disk_usage(self.folder).free < needed + (1 << 30):
            raise OSError(f"{self.folder} has no room for {needed >> 20} MiB: name another folder with --data")
        print(f"building {path.name} in {self.folder} ...", flush=True)
        building = path.with_suffix(".building")
        shutil.rmtree(building, ignore_errors=True)
        build_uniform_store(
            building,
            topic=TOPIC,
            queue_count=shape.queues,
            message_count=shape.messages,
            body_bytes=BODY_BYTES,
            interleave=shape.interleave,
            segment_bytes=shape.segment_bytes,
            messages_per_ms=shape.messages_per_ms,
        )
        building.rename(path)
        return path

    def read_into_cache(self, shape: Shape) -> Path:
        """Return the store of that shape with its log in the page cache as reading from a disk leaves it there.

        Pages that were just written are cached in larger pieces, which cost less to map, and a busy machine breaks the
        pieces up. Dropping the pages and reading them again makes runs comparable.
        """
        path = self.path(shape)
        for segment in sorted((path / "commitlog").iterdir()):
            with open(segment, "rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):
                    os.fsync(file.fileno())  # only clean pages can be dropped
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while file.read(_READ_BYTES):
                    pass
        return path

    def scratch(self, name: str) -> Path:
        """Return an empty folder for the files of one measurement."""
        path = self.folder / "scratch" / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path
