"""Is there a Java that Spark can run on? Asked first, because Spark's own answer is obscure."""

import os
import re
import shutil
import subprocess

from rmq_spark.store.errors import OptionError

# What Spark 4 asks for.
JAVA_VERSION_MIN = 17

_ADVICE = (
    f"Install Java {JAVA_VERSION_MIN} or newer (Debian, Ubuntu: apt-get install "
    "openjdk-17-jre-headless; macOS: brew install openjdk@17) and, if it is not the first `java` "
    "on PATH, set JAVA_HOME to its folder."
)

# A cold JVM takes well under a second to print its version; a hung file system must not hang us.
_ANSWER_WITHIN_S = 30


def check_java() -> None:
    """Raise OptionError, which says what was found, unless Spark would find Java 17 or newer.

    Looks where Spark's own start script looks: `$JAVA_HOME/bin/java`, else `java` on PATH. Takes
    about a tenth of a second and starts nothing that stays.
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
            timeout=_ANSWER_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OptionError(f"Spark needs Java: {source} does not run: {error}. {_ADVICE}") from error
    # The line is `openjdk version "17.0.15" 2025-04-15`; up to Java 8 the number begins with "1.".
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    if found is None:
        text = (answer.stderr + answer.stdout).strip()[:200]
        raise OptionError(f"Spark needs Java: {source} -version says {text!r}. {_ADVICE}")
    if int(found[1]) < JAVA_VERSION_MIN:
        raise OptionError(f"Spark needs Java {JAVA_VERSION_MIN} or newer: {source} is Java {found[1]}. {_ADVICE}")
