"""The programs behind `etude images`: build, pull, list, push, remove.

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
from etude.envserver.images import (
    builder,
    built_image,
    command_removal,
    image_store,
)
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.images.dockerfile_build import build_dockerfile
from etude.envserver.images.pull import pulled_image
from etude.envserver.images.pull.pinning import pin_image
from etude.envserver.images.pull.pulled_image import ImagePuller
from etude.envserver.images.pull.registry_access import RegistryAccess
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
    """Build or pull an image, list what was built, push one, or remove some."""
    given = _parser().parse_args(arguments)
    cache = BuildCache(given.cache or images_folder())
    try:
        match given.verb:
            case "build":
                _build(given, cache)
            case "pull":
                _pull(given, cache)
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
    build.add_argument("spec", type=Path, help="a YAML file, or a folder with a Dockerfile")
    build.add_argument("--into", help="of a Dockerfile: HOST/REPOSITORY, file:// or s3:// folder")
    build.add_argument("--agent", type=Path, help="static program that is the guest's process 1")
    pull = verbs.add_parser("pull")
    pull.add_argument("image", help="HOST/REPOSITORY@sha256:…, or with a tag")
    pull.add_argument("--machine", required=True, help="image that gives kernel and agent")
    for verb in (build, pull):
        verb.add_argument("--credentials", type=Path, help="Docker's config.json")
        verb.add_argument("--mirror", action="append", default=[], help="HOST=MIRROR")
        verb.add_argument("--plain-http", action="append", default=[], help="HOST without TLS")
    ls = verbs.add_parser("ls")
    ls.add_argument("--json", action="store_true", help="one JSON object per line")
    push = verbs.add_parser("push")
    push.add_argument("image", help="name or address; of several with a name the newest")
    push.add_argument("url", help="s3://bucket/prefix")
    push.add_argument("--endpoint", help="S3 endpoint, for stores other than AWS")
    push.add_argument("--region", help="S3 region")
    for verb in (build, pull, ls, push, *command_removal.add_verbs(verbs)):
        verb.add_argument("--cache", type=Path, help="folder of images")
    return parser


def _build(given: argparse.Namespace, cache: BuildCache) -> None:
    say = _progress_printer()
    if given.spec.is_dir():
        if given.into is None:
            fix = "--into HOST/REPOSITORY, or --into file:///FOLDER"
            raise exit_codes.option_error("--into", "is needed for a Dockerfile", fix)
        storage, registries = cache.root / "buildah", _registries(given)
        built = build_dockerfile(
            given.spec, given.into, storage=storage, registries=registries, say=say
        )
        sys.stdout.write(f"{built.image}\n")
        return
    agent = find_agent(given.agent, os.environ, Path.home())
    image = builder.build(read_spec(given.spec), agent=agent, cache=cache, say=say)
    say(f"{image.name}: {_mib(image):.0f} MiB")
    sys.stdout.write(f"{image.folder}\n")


def _pull(given: argparse.Namespace, cache: BuildCache) -> None:
    say = _progress_printer()
    machine = _find_built(given.machine, cache)
    registries = _registries(given)
    image = pin_image(given.image, registries)
    puller = ImagePuller(cache=cache, registries=registries)
    found = puller.find(image, machine)
    if found is None:
        say(f"pull {image} …")
        found = puller.pull(image, machine)
    say(f"{found.name}: {_mib(found):.0f} MiB")
    sys.stdout.write(f"{image}\n")


def _registries(given: argparse.Namespace) -> RegistryAccess:
    return RegistryAccess(
        credentials=given.credentials,
        mirrors=_mirrors(given.mirror),
        insecure=frozenset(given.plain_http),
    )


def _mirrors(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    mirrors: dict[str, tuple[str, ...]] = {}
    for text in given:
        host, _, mirror = text.partition("=")
        if not host or not mirror:
            raise exit_codes.option_error("--mirror", f"is {text!r}", "give HOST=MIRROR")
        mirrors[host] = (*mirrors.get(host, ()), mirror)
    return mirrors


def _push(given: argparse.Namespace, cache: BuildCache) -> None:
    image = _find_built(given.image, cache)
    store = open_store(given.url, endpoint=given.endpoint, region=given.region)
    name = image_store.push_image(image, store, _progress_printer())
    sys.stdout.write(f"{given.url.rstrip('/')}/{name}\n")


def _find_built(name: str, cache: BuildCache) -> BuiltImage:
    """The newest built image of a name or address.

    Raises:
        UserError: there is none.
    """
    image = built_image.newest_image(name, cache)
    if image is None:
        fix = "build it first: etude images build SPEC; etude images ls shows what there is"
        raise UserError(Problem("NotFound", "is not an image in the cache", name, fix))
    return image


def _list(cache: BuildCache, *, as_json: bool) -> None:
    pulled = built_image.list_images(cache, pulled_image.KIND)
    for image in [*built_image.list_images(cache), *pulled]:
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
    """Disk space of the image."""
    return sum((image.folder / name).stat().st_blocks for name in image.files) / 2048


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
