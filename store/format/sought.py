"""Keys and ids that are looked for, and which rows have one of them."""

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

# What `has_sought` must see of a row.
SOUGHT_COLUMNS = ("keys", "msgId", "offsetMsgId")


class Sought(NamedTuple):
    """What is looked for: `keys` are words of KEYS, or UNIQ_KEYs; `message_ids` are UNIQ_KEYs or offsetMsgIds."""

    keys: tuple[str, ...] = ()
    message_ids: tuple[str, ...] = ()


def has_sought(batch: pa.RecordBatch, sought: Sought) -> pa.BooleanArray:
    """Return which rows have one of the keys or ids; the batch has SOUGHT_COLUMNS. Case counts, but in offsetMsgIds."""
    keys, ids, places = (batch.column(name) for name in SOUGHT_COLUMNS)
    own = pc.if_else(pc.equal(ids, places), None, ids)  # a message without UNIQ_KEY shows its place as its id
    found = _is_in(own, (*sought.keys, *sought.message_ids))
    if sought.message_ids:
        found = pc.or_(found, _is_in(places, tuple(one.upper() for one in sought.message_ids)))
    if sought.keys:
        words = pc.split_pattern(keys, " ")
        rows = pc.list_parent_indices(words).filter(_is_in(pc.list_flatten(words), sought.keys))
        found = pc.or_(found, pc.is_in(pa.array(range(batch.num_rows), pa.int64()), value_set=rows.cast(pa.int64())))
    return found


def _is_in(column: pa.Array, texts: tuple[str, ...]) -> pa.BooleanArray:
    return pc.is_in(column, value_set=pa.array([text for text in texts if text], pa.string()), skip_nulls=True)
