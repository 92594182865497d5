"""Tests of `export_parquet` and `import_parquet`: every message arrives once, also after a crash."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rmq_spark
from rmq_spark import OptionError, check, export_parquet, import_parquet
from rmq_spark.store.model import QueueKey
from rmq_spark.store.tools import import_parquet as parquet_import
from rmq_spark.store.tools import import_source

SAME = ["physicalTopic", "queueId", "queueOffset", "tags", "keys", "body", "flag", "reconsumeTimes"]


def fill(path: Path, count: int = 500) -> None:
    with rmq_spark.open_store(path, segment_bytes=1 << 16) as store:
        store.create_topic("orders", 3)
        store.send_many(
            pa.table(
                {
                    "topic": [("orders", "bills")[number % 2] for number in range(count)],
                    "body": [f"{number}".encode() * 9 for number in range(count)],
                    "keys": [f"k{number}" for number in range(count)],
                    "tags": [None if number % 5 else "t" for number in range(count)],
                    "properties": pa.array(
                        [[("region", "eu"), ("n", f"{number}")] for number in range(count)],
                        pa.map_(pa.string(), pa.string()),
                    ),
                }
            )
        )


def rows_of(path: Path, target: Path) -> list[dict[str, object]]:
    export_parquet(path, target, overwrite=True)
    rows = pq.read_table(target).to_pylist()
    for row in rows:
        row["properties"] = {name: value for name, value in row["properties"] if name != "UNIQ_KEY"}
    return [{name: row[name] for name in [*SAME, "properties"]} for row in rows]


def test_export_parquet_and_import_parquet_are_inverse(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    told: list[tuple[int, int]] = []
    exported = export_parquet(
        tmp_path / "a", tmp_path / "x.parquet", row_group_rows=64, progress=lambda *step: told.append(step)
    )
    assert (exported.messages, exported.topics) == (500, ("bills", "orders"))
    assert exported.bytes == (tmp_path / "x.parquet").stat().st_size
    assert told[-1] == (500, 500)
    held = pq.ParquetFile(tmp_path / "x.parquet")
    assert max(held.metadata.row_group(one).num_rows for one in range(held.num_row_groups)) == 64
    assert held.metadata.row_group(0).column(0).compression == "ZSTD"
    assert held.schema_arrow.names == list(rmq_spark.COLUMNS)
    imported = import_parquet(tmp_path / "b", tmp_path / "x.parquet")
    assert (imported.messages, imported.skipped, imported.topics) == (500, 0, ("bills", "orders"))
    assert rows_of(tmp_path / "b", tmp_path / "2.parquet") == rows_of(tmp_path / "a", tmp_path / "1.parquet")
    assert check(tmp_path / "b").is_healthy
    ids = [pq.read_table(tmp_path / f"{number}.parquet", columns=["msgId"])["msgId"].to_pylist() for number in (1, 2)]
    assert not set(ids[0]) & set(ids[1]), "copies have new ids"


def test_import_parquet_sends_once_by_content_or_name(tmp_path: Path) -> None:
    fill(tmp_path / "a", 50)
    export_parquet(tmp_path / "a", tmp_path / "x.parquet")
    assert import_parquet(tmp_path / "b", tmp_path / "x.parquet").messages == 50
    (tmp_path / "y.parquet").write_bytes((tmp_path / "x.parquet").read_bytes())
    again = import_parquet(tmp_path / "b", tmp_path / "y.parquet")
    assert (again.messages, again.skipped) == (0, 50)
    assert import_parquet(tmp_path / "b", tmp_path / "x.parquet", name="once more").messages == 50


def test_import_parquet_sends_one_file_to_each_given_topic(tmp_path: Path) -> None:
    fill(tmp_path / "a", 50)
    export_parquet(tmp_path / "a", tmp_path / "x.parquet")
    target = tmp_path / "b"
    assert import_parquet(target, tmp_path / "x.parquet").messages == 50
    for topic in ("again", "once-more"):
        assert import_parquet(target, tmp_path / "x.parquet", topic=topic, keep_queues=False).messages == 50
        assert import_parquet(target, tmp_path / "x.parquet", topic=topic, keep_queues=False).skipped == 50


@pytest.mark.parametrize("count", [30, 50, 90])
def test_import_parquet_refuses_another_file_under_the_same_name(count: int, tmp_path: Path) -> None:
    fill(tmp_path / "a", 50)
    fill(tmp_path / "c", count)
    export_parquet(tmp_path / "a", tmp_path / "x.parquet")
    export_parquet(tmp_path / "c", tmp_path / "y.parquet")
    import_parquet(tmp_path / "b", tmp_path / "x.parquet", name="nightly")
    with pytest.raises(OptionError, match="is not what was imported as 'nightly', of which 50 rows are in the store"):
        import_parquet(tmp_path / "b", tmp_path / "y.parquet", name="nightly")
    with pytest.raises(OptionError, match="Nothing was sent"):
        import_parquet(tmp_path / "b", tmp_path / "x.parquet", name="nightly", topic="elsewhere")
    with rmq_spark.open_reader(tmp_path / "b") as reader:
        assert reader.topics() == ["bills", "orders"]


@pytest.mark.parametrize("deadly", [0, 1, 2])
@pytest.mark.parametrize("behind", [False, True])
def test_import_parquet_resumes_after_a_crash(
    deadly: int, behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "a", 300)
    export_parquet(tmp_path / "a", tmp_path / "x.parquet", row_group_rows=50)
    commit, calls = parquet_import.commit_staged, 0

    def dying(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == deadly + 1:
            if behind:
                commit(*arguments, **named)  # type: ignore[arg-type]
            raise KeyboardInterrupt
        return commit(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(import_source, "_PART_ROWS", 100)
    with monkeypatch.context() as patched:
        patched.setattr(parquet_import, "commit_staged", dying)
        with pytest.raises(KeyboardInterrupt):
            import_parquet(tmp_path / "b", tmp_path / "x.parquet")
    done = import_parquet(tmp_path / "b", tmp_path / "x.parquet")
    assert done.skipped == 100 * (deadly + behind)
    assert done.messages + done.skipped == 300
    assert rows_of(tmp_path / "b", tmp_path / "2.parquet") == rows_of(tmp_path / "a", tmp_path / "1.parquet")


def test_export_parquet_selects_by_times_bounds_and_columns(golden: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.parquet"
    columns = ["queueOffset", "storeTimestamp", "topic"]
    export_parquet(golden / "demo", target, topics=["orders"], columns=columns)
    whole = pq.read_table(target)
    times = sorted(whole["storeTimestamp"].cast(pa.int64()).to_pylist())
    begin_ms, end_ms = times[200] // 1000, times[700] // 1000
    export_parquet(
        golden / "demo", target, topics=["orders"], columns=columns, begin_ms=begin_ms, end_ms=end_ms, overwrite=True
    )
    part = sorted(pq.read_table(target)["storeTimestamp"].cast(pa.int64()).to_pylist())
    assert part == [one for one in times if begin_ms <= one // 1000 < end_ms]
    for key in (QueueKey("orders", 1), ("orders", 1)):
        exported = export_parquet(golden / "demo", target, bounds={key: (3, 9)}, overwrite=True)
        assert exported.messages == 6
        assert pq.read_table(target)["queueOffset"].to_pylist() == [3, 4, 5, 6, 7, 8]
    with pytest.raises(OptionError, match="must map queues"):
        export_parquet(golden / "demo", target, bounds={1: (3, 9)}, overwrite=True)  # type: ignore[dict-item]


def test_export_parquet_is_atomic(
    tmp_store: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = tmp_store("demo"), tmp_path / "x.parquet"
    target.write_bytes(b"before")
    with pytest.raises(OptionError, match="overwrite=True"):
        export_parquet(path, target)

    def die(done: int, total: int) -> None:
        if done > 200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_parquet(path, target, row_group_rows=100, overwrite=True, progress=die)
    assert target.read_bytes() == b"before"
    assert [one.name for one in tmp_path.glob("x.parquet*")] == ["x.parquet"]


def test_export_parquet_refuses_a_file_of_a_running_export(
    tmp_store: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target, refused = tmp_store("demo"), tmp_path / "x.parquet", []

    def export_too(done: int, total: int) -> None:
        with pytest.raises(OptionError, match="is being written by another export") as error:
            export_parquet(path, target)
        refused.append(error)

    assert export_parquet(path, target, row_group_rows=500, progress=export_too).messages == 1493
    assert refused
    assert pq.read_table(target).num_rows == 1493
    assert [one.name for one in tmp_path.glob("x.parquet*")] == ["x.parquet"]


def test_export_parquet_deletes_what_a_killed_export_left(tmp_store: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "x.parquet.rmq-export").write_bytes(b"left over" * 1_000_000)
    export_parquet(tmp_store("demo"), tmp_path / "x.parquet")
    assert pq.read_table(tmp_path / "x.parquet").num_rows == 1493
    assert [one.name for one in tmp_path.glob("x.parquet*")] == ["x.parquet"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        "demo/commitlog/x.parquet",
        "demo/commitlog/00000000000000000000",
        "demo/abort",
        "demo/checkpoint",
        "demo/lock",
        "demo/x.parquet",
        "demo/notes/deep/x.parquet",
        "link/checkpoint",
        "to_checkpoint",
        "demo/to_outside",
        "other/checkpoint",
        "other/config/topics.json",
        "log/x.parquet",
        "far/00000000000000000000",
    ],
)
def test_export_parquet_refuses_a_target_inside_a_store(
    target: str, tmp_store: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_store("demo")
    for folder in ("demo/notes/deep", "far"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "far/00000000000000000000").write_bytes(b"a segment of a separate log")
    fill(tmp_path / "other", 5)
    (tmp_path / "log").symlink_to(path / "commitlog")
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "to_checkpoint").symlink_to(path / "checkpoint")
    (path / "to_outside").symlink_to(tmp_path / "x.parquet")
    before = {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()}
    with pytest.raises(OptionError, match="is inside the store"):
        export_parquet(path, tmp_path / target, overwrite=True)
    assert {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()} == before


def test_export_parquet_keeps_files_that_are_not_its_own(tmp_store: Callable[[str], Path], tmp_path: Path) -> None:
    path, own = tmp_store("demo"), tmp_path / "x.parquet.tmp"
    own.write_bytes(b"mine")
    export_parquet(path, tmp_path / "x.parquet")
    assert own.read_bytes() == b"mine"
    assert sorted(one.name for one in tmp_path.glob("x.*")) == ["x.parquet", "x.parquet.tmp"]


def test_export_parquet_accepts_a_target_beside_a_store_or_its_log(
    tmp_store: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_store("demo")
    log = (path / "commitlog").rename(tmp_path / "commitlog")
    assert export_parquet(path, tmp_path / "x.parquet", commit_log_path=str(log)).messages == 1493
    with pytest.raises(OptionError, match="is inside the store"):
        export_parquet(path, log / "x.parquet", commit_log_path=str(log))


def test_import_parquet_accepts_files_with_columns_of_the_sink(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a", "b"], "value": [1, 2]}), tmp_path / "x.parquet")
    with pytest.raises(OptionError, match="has no column topic"):
        import_parquet(tmp_path / "s", tmp_path / "x.parquet")
    assert import_parquet(tmp_path / "s", tmp_path / "x.parquet", topic="t").messages == 2
    (tmp_path / "y").write_bytes(b"no parquet")
    with pytest.raises(OptionError, match="is not a parquet file"):
        import_parquet(tmp_path / "s", tmp_path / "y")


def test_import_parquet_refuses_a_topic_with_too_few_queues(tmp_path: Path) -> None:
    fill(tmp_path / "a", 30)
    export_parquet(tmp_path / "a", tmp_path / "x.parquet", topics=["bills"])
    rmq_spark.create_store(tmp_path / "b", topics={"bills": 1})
    with pytest.raises(OptionError, match="keep_queues=False"):
        import_parquet(tmp_path / "b", tmp_path / "x.parquet")
    assert import_parquet(tmp_path / "b", tmp_path / "x.parquet", keep_queues=False).messages == 15


def test_create_store_adds_topics_and_keeps_existing_ones(tmp_path: Path) -> None:
    rmq_spark.create_store(tmp_path / "s", topics=["a", "b"], queues=2, segment_bytes=1 << 16)
    with rmq_spark.open_store(tmp_path / "s") as store:
        assert store.topics() == ["a", "b"]
        store.send("a", b"x")
    rmq_spark.create_store(tmp_path / "s", topics={"a": 7, "c": 1})
    with rmq_spark.open_store(tmp_path / "s") as store:
        assert {topic: len(store.bounds(topic)) for topic in store.topics()} == {"a": 2, "b": 2, "c": 1}
    assert (tmp_path / "s/commitlog/00000000000000000000").stat().st_size == 1 << 16
