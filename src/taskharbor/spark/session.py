"""A SparkSession on this machine, with the settings that PySpark needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from taskharbor.drivers.contract import Driver
from taskharbor.drivers.registry import connect
from taskharbor.errors import InvalidRequest, TaskHarborError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINIMUM_JAVA = 17

# For annotations in modules that do not import PySpark.
Session: TypeAlias = "SparkSession"


class SparkUnavailable(TaskHarborError):
    """Spark cannot run here; the message says what to install."""


def check() -> None:
    """Raise SparkUnavailable unless PySpark is installed and a Java that can run it is found."""
    try:
        import pyspark  # noqa: F401
    except ImportError:
        raise SparkUnavailable("PySpark is not installed: pip install 'taskharbor[spark]'") from None
    version = java_version()
    if version is None or version < MINIMUM_JAVA:
        found = "no Java found" if version is None else f"Java {version} is too old for Spark"
        raise SparkUnavailable(
            f"{found}: install a JDK or JRE {MINIMUM_JAVA} or newer (set JAVA_HOME, or put java on the PATH)"
        )


def require_shared_store(store: str | Driver) -> None:
    """Raise InvalidRequest for a store that the processes of Spark cannot reach."""
    if not (connect(store) if isinstance(store, str) else store).capabilities.multi_process:
        raise InvalidRequest(
            "this store lives in the memory of one process, and Spark works in others: use one they all can reach, like "
            "sqlite:////path/to/jobs.db or postgresql://host/database"
        )


def java_version() -> int | None:
    """Return the major version of the Java that Spark would use; None if there is none."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        return None
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    # Java 8 calls itself 1.8.
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return None if found is None else int(found[1])


def local_session(
    name: str = "taskharbor",
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    archive: bool = False,
) -> SparkSession:
    """Return the running session, or a new one. Under spark-submit the master is that of the submission.

    `archive`: Java loads its classes from the archive that an earlier session left, or leaves one when it ends.
    """
    check()
    # Executors would otherwise use the first python3 on the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    is_submitted = "SPARK_ENV_LOADED" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ
    own: dict[str, str] = {"spark.app.name": name}
    if not is_submitted:
        own |= {"spark.master": master or "local[*,4]", **_LOCAL}
        if own["spark.master"].startswith("local"):
            # One machine: nothing to reach from outside, and a start that does not wait for a name server.
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            own |= _LOOPBACK
    wanted: dict[str, bool | float | int | str | None] = {**own, **_ALWAYS, **(settings or {})}
    if not is_submitted:
        options = [str(wanted[_JAVA_OPTIONS]), _archive_options() if archive else ""]
        if " " not in str(_LOGGING):
            options.append(f"-Dlog4j2.configurationFile={_LOGGING}")
        wanted[_JAVA_OPTIONS] = " ".join(options)
    session = SparkSession.builder.config(map=wanted).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _archive_options() -> str:
    import pyspark

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "taskharbor"
    # An archive fits one Java with these jars at this place. Java itself ignores one that does not fit.
    place = sha256(f"{pyspark.__file__} {os.environ.get('JAVA_HOME')} {shutil.which('java')}".encode())
    file = cache / f"spark-{pyspark.__version__}-{java_version()}-{place.hexdigest()[:12]}.jsa"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Java writes it when it ends: one that has been there for a minute is whole.
        for draft in [] if file.exists() else sorted(cache.glob(f"{file.name}.*")):
            if draft.stat().st_mtime < time.time() - 60:
                draft.replace(file)
    except OSError:
        return ""
    if " " in str(file):
        # It would end the option.
        return ""
    use = f"SharedArchiveFile={file}" if file.exists() else f"ArchiveClassesAtExit={file}.{os.getpid()}"
    return f"-XX:{use} -Xlog:cds=off -Xlog:cds+dynamic=off"


_LOGGING = Path(__file__).with_name("log4j2.properties")
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
# Settings for a session on one machine that works for minutes rather than seconds.
FOR_MILLIONS = {
    # The quick start-up of `_LOCAL` leaves out the compiler that makes long work fast: checked arithmetic alone is many times
    # slower without it. Spark makes code for every query. With the usual thresholds, a third of the CPU time of a run of a
    # million rows goes into compiling code that is soon over.
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC -Xms1g -XX:Tier4InvocationThreshold=50000 "
    "-XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000",
    "spark.driver.memory": "3g",
}
# Up to so many rows, a run, an audit or a report takes less time with the quick start-up.
FEW_ROWS = 300_000

_ALWAYS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
}
_LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
_LOCAL = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "2g",
    # A JVM without its second compiler has room for 48 MB of compiled code: a session of some dozen queries fills that, and from
    # then on compiles the same methods over and over.
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m",
    "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "32",
}
