"""The bodies of messages that are to be stored: compressed where that was asked for, with their CRCs.

The CRCs are the one thing that costs a call for each message. Small bodies become bytes objects a thousand at a
time, which stay in the processor's cache until their CRC is taken; large ones are looked at where they lie.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.body_codec import Compression, compress_body
from rmq_spark.store.format.message_columns import RowFault, Texts
from rmq_spark.store.format.text_hashes import Digests

_LARGE_BODY_BYTES = 1 << 10  # bodies of this size on average are not worth a copy each
_COPIED_ROWS = 1 << 10


@dataclass(frozen=True, slots=True)
class BodyRules:
    """Which bodies are compressed and how, and how large (bytes) a body may be as it is stored."""

    compression: Compression | None = None
    compress_over: int = 4096  # bytes, inclusive (DefaultMQProducer#compressMsgBodyOverHowmuch)
    max_bytes: int = 4 << 20  # MessageStoreConfig#maxMessageSize


class OutgoingBodies:
    """The bodies of a batch as they are stored. Raises RowFault for one that is null or too large."""

    def __init__(self, column: pa.Array, rules: BodyRules) -> None:
        given = Texts.of(column)
        if given.given is not None:
            raise RowFault(int(np.argmin(given.given)), "its body is null: give one; a message without may have b''")
        self.stored = given
        self.sys_flags: NDArray[np.int32] | None = None  # None: no body is compressed
        # What a user knows of the bodies.
        self._given_sizes, self._given_crcs = given.sizes, _crcs(given)
        self.crcs = self._given_crcs  # 32 bits, of the bodies as they are stored
        if rules.compression is not None:
            self._compress(rules.compression, rules.compress_over)
        largest = int(np.argmax(self.stored.sizes))
        size = int(self.stored.sizes[largest])
        if size > rules.max_bytes:
            packed = self.sys_flags is not None and self.sys_flags[largest]
            raise RowFault(
                largest,
                f"its body has {size} bytes{' after compression' if packed else ''}, a store takes at most "
                f"{rules.max_bytes} (maxMessageSize): split it{'' if packed else ' or set compression'}",
            )

    def _compress(self, kind: Compression, over: int) -> None:
        """Compress the bodies of `over` bytes and more that become smaller by it."""
        given, replaced, packed = self.stored, np.zeros(len(self.stored), np.bool_), []
        for row in np.flatnonzero(given.sizes >= max(over, 1)).tolist():
            body = compress_body(given.bytes(row), kind)
            if len(body) < given.sizes[row]:
                replaced[row] = True
                packed.append(body)
        if not packed:
            return
        mask = pa.array(replaced)
        self.stored = Texts.of(pc.replace_with_mask(given.array(), mask, pa.array(packed, pa.binary())))
        self.sys_flags = np.where(replaced, np.int32(kind.sys_flag), np.int32(0))
        self.crcs = self._given_crcs.copy()
        self.crcs[replaced] = [zlib.crc32(body) for body in packed]

    def digests(self) -> Digests:
        """Return CRC and size of each body as it was given: independent of how it is stored."""
        return self._given_crcs.astype(np.uint64) | self._given_sizes.view(np.uint64) << np.uint64(32)


def _crcs(bodies: Texts) -> NDArray[np.uint32]:
    """Return the CRC-32 of each body, all 32 bits."""
    count = len(bodies)
    # Python's numbers become signed ones of 64 bits sooner than any others.
    crcs = np.empty(count, np.int64)
    if len(bodies.data) > count * _LARGE_BODY_BYTES:
        bounds, view = bodies.bounds.tolist(), bodies.data.data
        slices = map(view.__getitem__, map(slice, bounds[:-1], bounds[1:]))
        crcs[:] = np.fromiter(map(zlib.crc32, slices), np.int64, count)
    else:
        array = bodies.array()
        for begin in range(0, count, _COPIED_ROWS):
            some = array.slice(begin, _COPIED_ROWS).to_numpy(zero_copy_only=False)
            crcs[begin : begin + len(some)] = np.fromiter(map(zlib.crc32, some), np.int64, len(some))
    return crcs.astype(np.uint32)
