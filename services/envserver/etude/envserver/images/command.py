"""The programs behind `etude images`: build, list, push, remove.

python -m etude.envserver.images.command build SPEC
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from etude.common.blobs import open_store
from etude.common.errors import CorruptError, Problem, StoreError, UserError
from etude.common.run_folder.state import images_folder
from etude.envserver import exit_codes
from etude.envserver.images import builder, built_image, command_removal, image_store
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.images.spec import read_spec


def find_agent(given: Path | None, environment: Mapping[str, str], home: Path) -> Path:
    """Find the guest's agent: the given one, $ETUDE_GUEST, or the one that was built last.

    Raises:
        UserError: there is none.
    """
    named = given or (Path(environment["ETUDE_GUEST"]) if "ETUDE_GUEST" in environment else None)
    built = (home / ".cache" / "etude" / "guest").glob("*/guestagent")
    found = named or max(built, key=lambda path: path.stat().st_mtime_ns, default=None)
    if found is None or not found.is_file():
        what = "is not a file" if found else "was never built"
        fix = "build it: python hack/guest.py, or name one: --agent FILE"
        raise UserError(Problem("NotFound", what, str(found or "the guest's agent"), fix))
    return found


def main(arguments: Sequence[str]) -> int:
    """Build an image, list what was built, push one, or remove some."""
    given = _parser().parse_args(arguments)
    cache = BuildCache(given.cache or images_folder())
    try:
        match given.verb:
            case "build":
                _build(given, cache)
            case "push":
                _push(given, cache)
            case "rm" | "prune":
                return command_removal.run(given, cache)
            case _:
                _list(cache, as_json=given.json)
    except (UserError, OSError) as error:
        return exit_codes.report_error(error)
    except StoreError as error:
        fix = "check the URL, --endpoint and the AWS_… variables: etude storage check URL"
        where = getattr(given, "url", None) or given.image
        return exit_codes.report_error(UserError(Problem("Unreachable", str(error), where, fix)))
    except CorruptError as error:
        sys.stderr.write(f"{error}\n")
        return exit_codes.NO
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m etude.envserver.images.command")
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build")
    build.add_argument("spec", type=Path, help="a YAML file")
    build.add_argument("--agent", type=Path, help="static program that is the guest's process 1")
    ls = verbs.add_parser("ls")
    ls.add_argument("--json", action="store_true", help="one JSON object per line")
    push = verbs.add_parser("push")
    push.add_argument("image", help="name or address; of several with a name the newest")
    push.add_argument("url", help="s3://bucket/prefix")
    push.add_argument("--endpoint", help="S3 endpoint, for stores other than AWS")
    push.add_argument("--region", help="S3 region")
    for verb in (build, ls, push, *command_removal.add_verbs(verbs)):
        verb.add_argument("--cache", type=Path, help="folder of images")
    return parser


def _build(given: argparse.Namespace, cache: BuildCache) -> None:
    say = _progress_printer()
    agent = find_agent(given.agent, os.environ, Path.home())
    image = builder.build(read_spec(given.spec), agent=agent, cache=cache, say=say)
    say(f"{image.name}: {_mib(image):.0f} MiB")
    sys.stdout.write(f"{image.folder}\n")


def _push(given: argparse.Namespace, cache: BuildCache) -> None:
    image = built_image.newest_image(given.image, cache)
    if image is None:
        fix = "build it first: etude images build SPEC; etude images ls shows what there is"
        raise UserError(Problem("NotFound", "is not an image in the cache", given.image, fix))
    store = open_store(given.url, endpoint=given.endpoint, region=given.region)
    name = image_store.push_image(image, store, _progress_printer())
    sys.stdout.write(f"{given.url.rstrip('/')}/{name}\n")


def _list(cache: BuildCache, *, as_json: bool) -> None:
    for image in built_image.list_images(cache):
        built_s = image.folder.stat().st_mtime
        if as_json:
            row = {"name": image.name, "address": image.address, "folder": str(image.folder)}
            sys.stdout.write(json.dumps({**row, "files": image.files, "built_s": built_s}) + "\n")
            continue
        built = time.strftime("%Y-%m-%d %H:%M", time.localtime(built_s))
        sys.stdout.write(f"{image.name:24} {image.address}  {_mib(image):6.0f} MiB  {built}\n")


def _progress_printer() -> Callable[[str], None]:
    """Make a function that prints progress with the time."""
    began_s = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began_s:6.1f} s  {text}\n")
        sys.stderr.flush()

    return say


def _mib(image: BuiltImage) -> float:
    """Disk space of the image: an empty file system is mostly holes."""
    return sum((image.folder / name).stat().st_blocks for name in image.files) / 2048


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
