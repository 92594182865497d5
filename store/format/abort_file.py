"""The file `abort`: there while a broker runs, and after one that did not stop in order.

5.x writes its process id in ASCII, 4.9 nothing. Source: DefaultMessageStore#createTempFile.
"""

_MAX_PID_DIGITS = 10  # more is no process id, whatever it is


def decode_abort(content: bytes) -> int | None:
    """Return the process id of the broker that wrote the file, None where it names none. Never raises."""
    digits = content.strip()
    if not digits.isdigit() or len(digits) > _MAX_PID_DIGITS:
        return None
    return int(digits)


def encode_abort(pid: int | None) -> bytes:
    """Write the file of a process, or the empty one of 4.9 for None."""
    assert pid is None or pid > 0, pid
    return b"" if pid is None else str(pid).encode()
