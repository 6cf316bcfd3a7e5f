"""The programs behind `etude images`: build one, list all.

python -m etude.envserver.images.command build SPEC
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.common.errors import CorruptError, Problem, UserError
from etude.envserver.images import build as builder
from etude.envserver.images.build import Image
from etude.envserver.images.cache import Cache
from etude.envserver.images.spec import read_spec
from etude.envserver.tasks import exits


def agent_of(given: Path | None, environment: Mapping[str, str], home: Path) -> Path:
    """The guest's agent: the one that is named, $ETUDE_GUEST, or the one that was built last.

    Raises:
        UserError: there is none.
    """
    named = given or (Path(environment["ETUDE_GUEST"]) if "ETUDE_GUEST" in environment else None)
    built = (home / ".cache" / "etude" / "guest").glob("*/guestagent")
    found = named or max(built, key=lambda path: path.stat().st_mtime_ns, default=None)
    if found is None or not found.is_file():
        what = "is no file" if found else "was never built"
        fix = "build it: python hack/guest.py, or name one: --agent FILE"
        raise UserError(Problem("NotFound", what, str(found or "the guest's agent"), fix))
    return found


def main(arguments: Sequence[str]) -> int:
    """Build an image, or list what was built."""
    given = _parser().parse_args(arguments)
    cache = Cache(given.cache or builder.default_cache(os.environ))
    try:
        if given.verb == "build":
            _build(given, cache)
        else:
            _list(cache, as_json=given.json)
    except (UserError, OSError) as error:
        return exits.explain(error)
    except CorruptError as error:
        sys.stderr.write(f"{error}\n")
        return exits.NO
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m etude.envserver.images.command")
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build")
    build.add_argument("spec", type=Path, help="a YAML file")
    build.add_argument("--agent", type=Path, help="static program that is the guest's process 1")
    ls = verbs.add_parser("ls")
    ls.add_argument("--json", action="store_true", help="one JSON object per line")
    for verb in (build, ls):
        verb.add_argument("--cache", type=Path, help="folder of images")
    return parser


def _build(given: argparse.Namespace, cache: Cache) -> None:
    began_s = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began_s:6.1f} s  {text}\n")
        sys.stderr.flush()

    agent = agent_of(given.agent, os.environ, Path.home())
    image = builder.build(read_spec(given.spec), agent=agent, cache=cache, say=say)
    say(f"{image.name}: {_mib(image):.0f} MiB")
    sys.stdout.write(f"{image.folder}\n")


def _list(cache: Cache, *, as_json: bool) -> None:
    for image in builder.images(cache):
        built_s = image.folder.stat().st_mtime
        if as_json:
            row = {"name": image.name, "address": image.address, "folder": str(image.folder)}
            sys.stdout.write(json.dumps({**row, "files": image.files, "built_s": built_s}) + "\n")
            continue
        built = time.strftime("%Y-%m-%d %H:%M", time.localtime(built_s))
        sys.stdout.write(f"{image.name:24} {image.address}  {_mib(image):6.0f} MiB  {built}\n")


def _mib(image: Image) -> float:
    """What the image takes on the disk: an empty file system is mostly holes."""
    return sum((image.folder / name).stat().st_blocks for name in image.files) / 2048


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
