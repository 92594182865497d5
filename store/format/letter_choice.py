"""The choice of dead letters to republish: an Arrow expression over their columns, or a function of the caller."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError

# A function that gets a batch of dead letters, with all columns of the source, and returns a mask: which to republish.
Chooser = Callable[[pa.RecordBatch], Any]
LetterFilter: TypeAlias = pc.Expression | Chooser | None


def make_chooser(filter: LetterFilter) -> Chooser:
    """Return the function that chooses dead letters by `filter`. None chooses all. Raises OptionError for others."""
    if filter is None:
        return lambda batch: pa.repeat(pa.scalar(True), batch.num_rows)
    if isinstance(filter, pc.Expression):
        expression = filter

        def choose(batch: pa.RecordBatch) -> Any:
            names = batch.schema.names
            numbered = pa.table({**dict(zip(names, batch.columns, strict=True)), "@": range(len(batch))})
            try:
                kept = numbered.filter(expression)["@"].to_numpy()
            except (pa.ArrowException, KeyError) as error:
                raise OptionError(f"filter: {error}. Columns are: {', '.join(names)}.") from None
            return np.isin(np.arange(len(batch)), kept)

        return choose
    if not callable(filter):
        raise OptionError(
            f"filter={filter!r} is neither an Arrow expression nor a function; expected an expression such as "
            "pyarrow.compute.field('tags') == 'A', or a function of a batch of dead letters."
        )
    return filter


def choose_letters(choose: Chooser, batch: pa.RecordBatch) -> NDArray[np.bool_]:
    """Return which rows of a batch are chosen. Raises OptionError if the function returns no mask of them."""
    found = choose(batch)
    mask = pa.array(found) if not isinstance(found, pa.Array | pa.ChunkedArray) else found
    if not pa.types.is_boolean(mask.type) or len(mask) != batch.num_rows:
        raise OptionError(
            f"filter: returned {len(mask)} values of type {mask.type} for {batch.num_rows} dead letters; expected "
            "true or false for each."
        )
    return np.asarray(pc.fill_null(mask, False).to_numpy(zero_copy_only=False), np.bool_)
