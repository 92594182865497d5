"""Messages of several queues in the order in which they were stored: a merge of whole columns.

Each queue gives a batch at a time. What lies before the first end of any of these batches can be told to be complete,
is put together and sorted by its place in the commit log, and the queue whose batch ended gives the next one.
"""

from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc

PLACE = "commitLogOffset"


def merge(sources: Mapping[object, Iterator[pa.RecordBatch]]) -> Iterator[pa.Table]:
    """Yield the rows of all sources by `commitLogOffset`; within a source they come so, and it has that column.

    Memory: a batch of each source, and what of them is yielded.
    """
    held: dict[object, pa.Table] = {}
    waiting = dict(sources)
    while True:
        for key in [key for key in waiting if key not in held]:
            batch = next((batch for batch in waiting[key] if batch.num_rows), None)
            if batch is None:
                del waiting[key]
            else:
                held[key] = pa.Table.from_batches([batch])
        if not held:
            return
        # A source that is at its end holds nobody up.
        end = min((table[PLACE][-1].as_py() for key, table in held.items()), default=0)
        parts = []
        for key, table in list(held.items()):
            count = pc.sum(pc.less_equal(table[PLACE], end)).as_py() or 0
            parts.append(table.slice(0, count))
            if count < table.num_rows:
                held[key] = table.slice(count)
            else:
                del held[key]
        found = pa.concat_tables(parts)
        yield found.take(pc.sort_indices(found[PLACE])) if len(parts) > 1 else found
