"""An open session: a write session that stays open between single appends, while nobody waits for the store's lock.

It ends when a writer waits for the lock or a broker starts, when nothing was appended for LINGER_S, and after LONGEST_S
in any case. The append that runs looks for them every LOOK_S. Between appends a thread does that. So whoever waits gets
the lock after LOOK_S and one append, or later if the process is stopped or Python's interpreter lock is taken.

If a starting broker would not wait for the lock but fail, the session ends after each append. That is so if the kernel
grants no lease (`BrokerLock`).
"""

import contextlib
import logging
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

from rmq_spark.store.errors import RmqError, StoreError
from rmq_spark.store.format.single_message import SingleRecord
from rmq_spark.store.log.single_append import SingleAppender
from rmq_spark.store.log.store_writer import StoreWriter
from rmq_spark.store.log.write_session import WriteSession
from rmq_spark.store.synchronized import Synchronized, start_thread

LINGER_S = 0.05
LONGEST_S = 1.0
LOOK_S = 0.003
_AT_LAST_S = 1.0
_LOG = logging.getLogger("rmq_spark")


class OpenSession(Synchronized):
    """The write session of `writer` that stays open between appends. Several threads may call its methods.

    Call `end` before any method of `writer` that takes the lock, and do not append meanwhile.
    """

    def __init__(self, writer: StoreWriter) -> None:
        super().__init__()  # its lock serves all methods here
        self._writer = writer
        self._section: AbstractContextManager[WriteSession] | None = None  # not None: a session is open, or begins
        self._session: WriteSession | None = None
        self._appender: SingleAppender | None = None
        self._number = 0  # of the session, so that the thread of one session does not end the next one
        self._is_changing = False  # an append has begun and not ended; stays True after an interrupt
        self._topics: object = None
        self._begun_s = self._used_s = self._looked_s = 0.0

    def append(
        self, record: SingleRecord, topics: object, ensure_topic: Callable[[WriteSession, SingleRecord], None]
    ) -> tuple[int, int]:
        """Append a message. Return its queue offset and its physical offset.

        `topics` is a stamp of topics.json. `ensure_topic` is called first unless the last append of the session had
        the same stamp and its queue is known to the session. Raises the errors of `StoreWriter.section`, of
        `WriteSession.append` and of `ensure_topic`. After an error no session is open.
        """
        with self._mutex:
            self._drop_unusable()
            self._is_changing = True
            try:
                is_new = self._session is None
                if is_new:
                    self._begin()
                assert self._session is not None
                assert self._appender is not None
                if topics != self._topics or not self._appender.has_open(record.queue):
                    self._appender.finish()
                    ensure_topic(self._session, record)
                    self._topics = topics
                offsets = self._appender.append(record)
            except BaseException as error:
                self._leave(error)
                raise
            self._is_changing = False
            self._used_s = now_s = time.monotonic()
            if is_new:
                self._looked_s = now_s  # the first append opens files; the next ones are fast
            is_due = now_s - self._looked_s >= LOOK_S or now_s - self._begun_s >= LONGEST_S
            if is_due or not self._writer.lock.lets_brokers_wait:
                self._look(now_s)
            return offsets

    def end(self) -> None:
        """End the session if one is open.

        If its end cannot be recorded on disk, this is only logged: the messages are complete, and the next session
        recovers the store.
        """
        with self._mutex:
            self._drop_unusable()
            self._end()

    def end_at_last(self) -> None:
        """End the session, unless a call of this object is under way. For a finalizer, which may run inside of one.

        Such a call ends the session itself, or the process ends, and then the next writer recovers the store.
        """
        if self._mutex.acquire(timeout=_AT_LAST_S):
            try:
                if not self._is_changing:
                    self.end()
            finally:
                self._mutex.release()

    def release(self) -> None:
        """Release the lock if it is held although no session is open, because of an interrupt."""
        with self._mutex:
            self._drop_unusable()
            if self._section is None:
                self._writer.lock.release()

    def _begin(self) -> None:
        self._number += 1
        self._section = self._writer.section()
        # The thread starts first, so that it also ends a session in which an interrupt comes before the next line.
        has_thread = start_thread(_watch, weakref.ref(self), self._number)
        self._session = self._section.__enter__()
        self._appender = self._writer.single_appender(self._session)
        self._topics = None
        self._begun_s = time.monotonic()
        if not has_thread:
            self._begun_s -= LONGEST_S  # the session ends after this append

    def _look(self, now_s: float) -> None:
        """End the session if it is time."""
        self._looked_s = now_s
        is_over = now_s - self._used_s >= LINGER_S or now_s - self._begun_s >= LONGEST_S
        if is_over or not self._writer.lock.lets_brokers_wait or self._writer.lock.is_wanted:
            self._end()

    def look_if_idle(self, number: int) -> bool:
        """End session `number` if it is time and no append runs. Return whether it may still be open."""
        if not self._mutex.acquire(blocking=False):
            return True
        try:
            self._drop_unusable()
            if self._section is None or number != self._number:
                return False
            self._look(time.monotonic())
            return self._section is not None
        finally:
            self._mutex.release()

    def _end(self) -> None:
        appender = self._appender
        if appender is None:
            return
        try:
            self._is_changing = True
            appender.finish()
            self._is_changing = False
        except RmqError as error:
            _LOG.warning("rmq: %s: could not record the end of a write session: %s", self._writer.root, error)
            with contextlib.suppress(RmqError):
                self._leave(error)
        except BaseException as error:
            self._leave(error)
            raise
        else:
            self._leave(None)

    def _drop_unusable(self) -> None:
        """Leave a session that an interrupt has left in an unknown state, or that belongs to the parent process."""
        if self._section is not None and (self._is_changing or not self._writer.lock.is_held):
            # ValueError: another thread of the parent was inside the session when this process was forked.
            with contextlib.suppress(StoreError, ValueError):
                self._leave(StoreError("the session was interrupted, or is the parent process's"))

    def _leave(self, error: BaseException | None) -> None:
        """Close the files and release the lock. If `error` is given, the next session recovers the store."""
        section, appender = self._section, self._appender
        self._section = self._session = self._appender = None
        self._is_changing = False
        try:
            if appender is not None:
                appender.close()
        finally:
            if section is not None:
                if error is None:
                    section.__exit__(None, None, None)
                else:
                    section.__exit__(type(error), error, error.__traceback__)


def _watch(session: "weakref.ref[OpenSession]", number: int) -> None:
    """Look at a session until it has ended."""
    while True:
        time.sleep(LOOK_S)
        found = session()
        if found is None or not found.look_if_idle(number):
            return
        del found
