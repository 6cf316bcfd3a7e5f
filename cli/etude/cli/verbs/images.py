"""`etude images`: build what microVMs boot, list it, push it to a store."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.examples import epilog

app = typer.Typer(no_args_is_help=True, help="Build, list and push images of microVMs.")

Cache = Annotated[
    Path | None, typer.Option(help="Folder of images; $ETUDE_IMAGES or ~/.cache/etude/images.")
]


def _run(verb: str, *arguments: str, cache: Path | None) -> None:
    # The environments part is never imported here: it is another process, as in a cluster.
    words = [sys.executable, "-m", "etude.envserver.images.command", verb, *arguments]
    done = subprocess.run([*words, *(("--cache", str(cache)) if cache else ())], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


@app.command(epilog=epilog("images build"))
def build(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A YAML file.")],
    *,
    agent: Annotated[
        Path | None,
        typer.Option(help="The guest's agent; the one that hack/guest.py built last unless given."),
    ] = None,
    cache: Cache = None,
) -> None:
    """Build an image, or find the one that is there, and print its folder. Needs root.

    Debian's packages, each setup step and the image itself are kept: a second build takes no time.
    """
    words = (str(spec), *(("--agent", str(agent)) if agent else ()))
    _run("build", *words, cache=cache)


@app.command(epilog=epilog("images ls"))
def ls(
    *,
    cache: Cache = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List every image that was built, oldest first."""
    _run("ls", *(("--json",) if as_json else ()), cache=cache)


@app.command(epilog=epilog("images push"))
def push(
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="Name or address: etude images ls.")
    ],
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix")],
    *,
    endpoint: Annotated[
        str | None, typer.Option(help="S3 endpoint, for stores other than AWS: http://host:port.")
    ] = None,
    region: Annotated[str | None, typer.Option(help="S3 region; us-east-1 unless given.")] = None,
    cache: Cache = None,
) -> None:
    """Copy an image to an object store, and print what a pool's template names it by.

    S3 credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. What is there already is
    not sent again.
    """
    options = [*(("--endpoint", endpoint) if endpoint else ())]
    options += [*(("--region", region) if region else ())]
    _run("push", image, url, *options, cache=cache)
