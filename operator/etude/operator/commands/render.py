"""Renders the manifests of a run's or pool's children, for review and GitOps."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from etude.common.api import yaml_documents
from etude.common.errors import Problem, UserError
from etude.operator.builders.platform import Platform
from etude.operator.kind_registry import KINDS_BY_NAME
from etude.operator.manifests import Manifest

EXIT_INVALID = 4


def render_children(manifest: object, platform: Platform) -> Iterator[Manifest]:
    """Everything that would be applied for one object, the children of its own pools included.

    Raises:
        ValueError: the object is neither an RLRun nor an EnvPool, or is not valid.
    """
    name = manifest.get("kind") if isinstance(manifest, dict) else None
    kind = KINDS_BY_NAME.get(str(name))
    if kind is None or kind.children is None:
        raise ValueError(f"kind {name!r} has no children: give an RLRun or an EnvPool")
    for child in kind.children(kind.model.model_validate(manifest), platform):
        yield child
        if child["kind"] in KINDS_BY_NAME:
            yield from render_children(child, platform)


def main() -> None:
    """Render one file to standard output.

    Raises:
        SystemExit: the file is not readable or not valid.
    """
    parser = argparse.ArgumentParser(
        prog="python -m etude.operator.commands.render", description=__doc__
    )
    parser.add_argument("-f", "--file", type=Path, required=True, help="manifest of a run or pool")
    parser.add_argument("--registry", default="etude", help="prefix of the role images")
    parser.add_argument("--tag", default="latest", help="tag of the role images")
    options = parser.parse_args()
    roles = ("trainer", "inference", "rewards", "envserver")
    images = {role: f"{options.registry}/{role}:{options.tag}" for role in roles}
    try:
        objects = [
            document.value for document in yaml_documents.parse_documents(options.file.read_bytes())
        ]
        made = [m for each in objects for m in render_children(each, Platform(images=images))]
    except (OSError, ValueError) as cause:
        fix = f"etude lint {options.file} names each field that is wrong"
        error = UserError(Problem("InvalidSpec", str(cause), str(options.file), fix))
        sys.stderr.write(f"{error}\n")
        raise SystemExit(EXIT_INVALID) from cause
    sys.stdout.write(yaml_documents.dump_documents(made))


if __name__ == "__main__":
    main()
