"""Check that Spark will find a Java version that it supports, because Spark's own error is obscure."""

import os
import re
import shutil
import subprocess

from rmq_spark.store.errors import OptionError

# The minimum of Spark 4.
JAVA_VERSION_MIN = 17

_ADVICE = (
    f"Install Java {JAVA_VERSION_MIN} or newer (Debian, Ubuntu: apt-get install "
    "openjdk-17-jre-headless; macOS: brew install openjdk@17) and, if it is not the first `java` "
    "on PATH, set JAVA_HOME to its folder."
)

# A cold JVM prints its version in less than a second. The limit is for hung file systems.
_TIMEOUT_S = 30


def check_java() -> None:
    """Raise OptionError unless Spark would find Java 17 or newer. The message names the Java that was found.

    As Spark's start script does, it uses `$JAVA_HOME/bin/java` if JAVA_HOME is set, else `java` on PATH. The check
    takes about 0.1 s.
    """
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None:
        raise OptionError(f"Spark needs Java: no `java` on PATH, and JAVA_HOME is not set. {_ADVICE}")
    source = f"{java} (from JAVA_HOME)" if home else java
    try:
        answer = subprocess.run(
            [java, "-version"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OptionError(f"Spark needs Java: {source} does not run: {error}. {_ADVICE}") from error
    # The line is `openjdk version "17.0.15" 2025-04-15`; up to Java 8 the number begins with "1.".
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    if found is None:
        text = (answer.stderr + answer.stdout).strip()[:200]
        raise OptionError(f"Spark needs Java: {source} -version printed {text!r}. {_ADVICE}")
    if int(found[1]) < JAVA_VERSION_MIN:
        raise OptionError(f"Spark needs Java {JAVA_VERSION_MIN} or newer: {source} is Java {found[1]}. {_ADVICE}")
