"""KeyboardInterrupt at a chosen place of a call, among the places where CPython may raise it.

CPython looks for signals after a call, at the begin of a function and at a jump back.
"""

import dis
import os
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType

LOOKS_FOR_SIGNALS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the place number `at` (from 1), or counts the places.

    Only places in the given modules count, which are file names without ".py".
    """

    def __init__(self, at: int, modules: Iterable[str]) -> None:
        self.at, self.seen, self.place = at, 0, ""
        self._modules = frozenset(modules)
        self._names: dict[CodeType, dict[int, str]] = {}
        self._last: dict[int, str] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> "Interrupt | None":
        """Look at one event of a frame."""
        code = frame.f_code
        name = os.path.basename(code.co_filename).removesuffix(".py")
        if name not in self._modules:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        before = ""
        if event == "call":
            self._last.pop(id(frame), None)
        elif event == "opcode":
            if code not in self._names:
                self._names[code] = {one.offset: one.opname for one in dis.get_instructions(code)}
            before = self._last.get(id(frame), "")
            self._last[id(frame)] = self._names[code].get(frame.f_lasti, "")
        if event == "call" or before in LOOKS_FOR_SIGNALS:
            self.seen += 1
            if self.seen == self.at:
                self.place = f"{name}.py:{frame.f_lineno} {code.co_name}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted(call: Callable[[], object], at: int, modules: Iterable[str]) -> tuple[Interrupt, BaseException | None]:
    """Make a call, with an interrupt at its place number `at`. Return where that was, and what was raised."""
    interrupt, before = Interrupt(at, modules), sys.gettrace()
    try:
        sys.settrace(interrupt)
        call()
    except KeyboardInterrupt as error:
        return interrupt, error
    finally:
        sys.settrace(before)
    return interrupt, None
