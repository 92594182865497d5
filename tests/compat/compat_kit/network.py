"""A network in which RocketMQ starts: it looks for its own address, and with only a loopback interface
MixAll#localhost recurses until the stack overflows (4.9, 5.3)."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from compat_kit.build import UnavailableError, class_path, java_program

ADDRESS = "192.0.2.10"  # of a range reserved for documentation: no machine has it
_HAND_OUT = f"ip link set lo up && ip address add {ADDRESS}/32 dev lo && echo ready && exec cat"


class Network:
    """The network for programs: this machine's if RocketMQ starts in it, otherwise a namespace with one more address.

    Put `prefix` in front of every command, so that all share the network. Close it in the end.
    """

    def __init__(self, version: str, home: Path) -> None:
        self.prefix: tuple[str, ...] = ()
        self._holder: subprocess.Popen[str] | None = None
        why = _refusal(self.prefix, version, home)
        if why is None:
            return
        tried = [f"in this machine's network: {why}"]
        for options, entry in (("-n", "-n"), ("-rn", "-Un")):
            found = self._hold(options, entry)
            why = _refusal(self.prefix, version, home) if found is None else found
            if why is None:
                return
            tried.append(f"in a namespace of its own (unshare {options}): {why}")
            self.close()
        raise UnavailableError("RocketMQ does not start; " + "; ".join(tried))

    def close(self) -> None:
        """Close the namespace, if one was created."""
        if self._holder is not None:
            self._holder.communicate()  # the end of its input ends it
            self._holder = None
        self.prefix = ()

    def _hold(self, options: str, entry: str) -> str | None:
        try:
            self._holder = subprocess.Popen(
                ["unshare", options, "sh", "-c", _HAND_OUT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            return str(error)
        assert self._holder.stdout
        if self._holder.stdout.readline() != "ready\n":
            return self._holder.communicate()[1].strip() or "no answer"
        self.prefix = ("nsenter", "--preserve-credentials", "-t", str(self._holder.pid), *_split(entry))
        return None


def _split(letters: str) -> Sequence[str]:
    return [f"-{letter}" for letter in letters[1:]]


def _refusal(prefix: Sequence[str], version: str, home: Path) -> str | None:
    """Return why RocketMQ's classes find no address in this network, None if they do."""
    command = [*prefix, java_program("java"), "-cp", class_path(version), "Harness", "probe", "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("\tat", " "))]
    return next((line for line in lines if "Error" in line or "Exception" in line), done.stderr.strip()[-300:])
