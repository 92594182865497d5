"""Shared libraries in C that a test loads before the C library (LD_PRELOAD), compiled when the test runs."""

import os
import shutil
import subprocess
from pathlib import Path

_COMPILERS = ("cc", "gcc", "clang")


class NoCompilerError(Exception):
    """No C compiler is installed. The message names what to install."""


def compile_preload(source: Path, folder: Path) -> Path:
    """Compile a C file into a shared library in `folder`; return the library's path.

    Raises NoCompilerError if no compiler is installed, RuntimeError with the compiler's output if it fails.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NoCompilerError(f"no C compiler found (looked for {', '.join(_COMPILERS)}): install gcc or clang")
    library = folder / f"{source.stem}.so"
    command = [compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return library


def preloaded(library: Path, **variables: str) -> dict[str, str]:
    """Return this process's environment with a library to load first, and more variables."""
    others = os.environ.get("LD_PRELOAD")
    return {**os.environ, "LD_PRELOAD": ":".join(filter(None, [str(library), others])), **variables}
