"""Message ids that a repeated task gives its rows again, whatever their order: UNIQ_KEYs made from the rows' contents.

An id depends on three things: the *seed*, which stands for one partition of one batch; the digest of the row's content;
and the row's number among the rows of the partition with the same digest. So a task that runs again with the same rows
makes the same ids, also if the rows come in another order. Equal rows have different ids. Two different rows whose
64-bit digests are equal by chance have different numbers, so they have different ids too.

The id has the form of a client's UNIQ_KEY, 32 hex digits. The bytes of the time are 0: RocketMQ's tools read that as
the begin of the month, and search from there (MessageClientIDSetter#getNearlyTimeFromID). The first bit of the process
id is 1, so that the id is never a valid offsetMsgId. The other 95 bits are mixed from seed, digest and number.
"""

import hashlib

import numpy as np

from rmq_spark.store.format.byte_ranges import Bytes
from rmq_spark.store.format.message_ids import Digests, scatter

ID_CHARS = 32
# UNIQ_KEY: `mixed` takes the place of address and process id, `more` that of the hash, `last` that of the counter.
CONTENT_ID = np.dtype([("mixed", ">u8"), ("more", ">u2"), ("month_ms", ">u4"), ("last", ">u2")])
_IS_NO_PORT = np.uint64(1 << 31)  # bytes 4 to 7 of an offsetMsgId are a port; here their first bit is 1
_NUMBER_FACTOR = np.uint64(0xD1B54A32D192ED03)  # odd, with irregular bits
_HEX = np.frombuffer(b"".join(b"%02X" % byte for byte in range(256)), "<u2")


class ContentIds:
    """Makes the ids of one task's rows, piece by piece. Not thread-safe. It needs about 16 bytes of memory for a row.

    `seed` is a text that no other partition or batch has.
    """

    def __init__(self, seed: str) -> None:
        hashed = np.frombuffer(hashlib.blake2b(seed.encode(), digest_size=16).digest(), "<u8")
        self._first_seed, self._second_seed = hashed
        self._runs: list[Digests] = []  # sorted digests of all rows so far

    def take(self, digests: Digests) -> Bytes:
        """Return the ids of the next rows in ASCII, as an array of bytes with one row per id.

        `digests` are the digests of the rows' contents.
        """
        numbers = self._number(digests)
        first = scatter(digests + self._first_seed)
        first += numbers * _NUMBER_FACTOR
        scatter(first)
        second = scatter(digests ^ self._second_seed)
        second += numbers * _NUMBER_FACTOR + first
        scatter(second)
        ids = np.zeros(len(digests), CONTENT_ID)
        ids["mixed"] = first | _IS_NO_PORT
        ids["more"] = second
        ids["last"] = second >> np.uint64(48)
        return _HEX[ids.view(np.uint8).reshape(len(digests), CONTENT_ID.itemsize)].view(np.uint8)

    def _number(self, digests: Digests) -> Digests | np.uint64:
        """Return the number of each row among all rows so far with the same digest. A single 0 if all are new."""
        found = np.sort(digests)
        earlier = np.zeros(len(found), np.int64)
        for run in self._runs:
            at = np.searchsorted(run, found)
            if (run[np.minimum(at, len(run) - 1)] == found).any():
                earlier += np.searchsorted(run, found, "right") - at
        self._add(found)
        are_equal = found[1:] == found[:-1]
        if not are_equal.any() and not earlier.any():
            return np.uint64(0)
        firsts = np.zeros(len(found), np.int64)  # for each row in `found` the first one with its digest
        firsts[1:] = np.where(are_equal, 0, np.arange(1, len(found)))
        np.maximum.accumulate(firsts, out=firsts)
        numbers = np.empty(len(found), np.uint64)
        numbers[np.argsort(digests, kind="stable")] = earlier + np.arange(len(found)) - firsts
        return numbers

    def _add(self, found: Digests) -> None:
        """Add sorted digests. Runs of similar size are joined, so that there are few, and each row is joined rarely."""
        while self._runs and len(self._runs[-1]) <= 2 * len(found):
            found = np.sort(np.concatenate([self._runs.pop(), found]), kind="stable")  # it merges sorted parts
        if len(found):
            self._runs.append(found)
