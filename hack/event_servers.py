"""Gets the servers that tests of relays run against: NATS from its Go module, Kafka from Maven."""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NATS = "github.com/nats-io/nats-server/v2@v2.15.2"
KAFKA = "org.apache.kafka:kafka_2.13:4.4.0"
CACHE = Path.home() / ".cache" / "etude" / "testbed"
POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>etude</groupId><artifactId>broker</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>
  </dependency></dependencies>
</project>
"""


def nats_server() -> Path:
    """Where the server belongs: $ETUDE_NATS_SERVER, or a folder named after its module."""
    if given := os.environ.get("ETUDE_NATS_SERVER"):
        return Path(given).absolute()
    return _folder("nats", NATS) / "nats-server"


def kafka_jars() -> Path:
    """Folder of the broker's jars: $ETUDE_KAFKA_JARS, or one named after its version."""
    if given := os.environ.get("ETUDE_KAFKA_JARS"):
        return Path(given).absolute()
    return _folder("kafka", KAFKA) / "jars"


def build_nats() -> Path:
    """Build the NATS server if it is missing, and answer where it is.

    Raises:
        RuntimeError: there is no Go, or the build fails.
    """
    server = nats_server()
    with _locked(server.parent):
        if not server.exists():
            environment = dict(os.environ, CGO_ENABLED="0", GOFLAGS="", GOWORK="off")
            environment["GOBIN"] = str(server.parent)
            _run("go", "install", "-trimpath", "-ldflags", "-s -w", NATS, env=environment)
    return server


def fetch_kafka() -> Path:
    """Fetch the broker's jars if they are missing, and answer where they are.

    Raises:
        RuntimeError: there is no Maven or no Java, or the jars cannot be had.
    """
    jars = kafka_jars()
    with _locked(jars.parent):
        if not jars.exists():
            if shutil.which("java") is None:
                raise RuntimeError("there is no java on PATH; install Java 17 or newer")
            partial = jars.with_suffix(".partial")
            (jars.parent / "pom.xml").write_text(POM.format(*KAFKA.split(":")), encoding="utf-8")
            goal = ("dependency:copy-dependencies", f"-DoutputDirectory={partial}")
            _run("mvn", "-q", "-B", "-f", str(jars.parent), *goal, env=dict(os.environ))
            partial.rename(jars)
    return jars


def _folder(name: str, version: str) -> Path:
    return CACHE / f"{name}-{hashlib.sha256(version.encode()).hexdigest()[:16]}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two test runs must not build the same thing at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(program: str, *arguments: str, env: dict[str, str]) -> None:
    if shutil.which(program) is None:
        raise RuntimeError(f"there is no {program} on PATH")
    print(f"{program}: a minute when cold …", flush=True)
    command = ("nice", program, *arguments)
    done = subprocess.run(command, env=env, capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError((done.stderr + done.stdout).decode(errors="replace")[-2000:])


def main() -> int:
    """Get both; with --if-possible, say what is missing and succeed all the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--if-possible", action="store_true", help="without Go, Java or network: exit 0"
    )
    tolerant = parser.parse_args().if_possible
    code = 0
    for get in (build_nats, fetch_kafka):
        try:
            sys.stdout.write(f"{get()}\n")
        except (OSError, RuntimeError) as cause:
            sys.stderr.write(f"{cause}\n")
            code = 0 if tolerant else 1
    return code


if __name__ == "__main__":
    sys.exit(main())
