"""`etude images`: build or pull what microVMs boot, list it, push it to a store, remove it."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.examples import epilog
from etude.cli.verbs.options import AsJson, Endpoint, Region

app = typer.Typer(
    no_args_is_help=True, help="Build, pull, list, push and remove images of microVMs."
)

Cache = Annotated[
    Path | None, typer.Option(help="Folder of images; $ETUDE_IMAGES or ~/.cache/etude/images.")
]

Pools = Annotated[
    list[Path] | None,
    typer.Option(help="Manifests whose images stay: kubectl get envp,rlr -A -o yaml. Repeatable."),
]
Credentials = Annotated[
    Path | None, typer.Option(help="File in the format of Docker's config.json.")
]
Mirrors = Annotated[
    list[str] | None, typer.Option(help="HOST=MIRROR, tried before HOST. Repeatable.")
]
PlainHttp = Annotated[
    list[str] | None, typer.Option(help="HOST that is spoken to without TLS. Repeatable.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")]


def _run(verb: str, *arguments: str, cache: Path | None) -> None:
    # The environments part is never imported here: it is another process, as in a cluster.
    words = [sys.executable, "-m", "etude.envserver.images.command", verb, *arguments]
    done = subprocess.run([*words, *(("--cache", str(cache)) if cache else ())], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


@app.command(epilog=epilog("images build"))
def build(  # noqa: PLR0913 - a verb has as many parameters as it has options
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC", help="A YAML file, or a folder with a Dockerfile.")
    ],
    *,
    into: Annotated[
        str | None,
        typer.Option(
            help="Where the image of a Dockerfile goes: HOST/REPOSITORY, file:///… or s3://…"
        ),
    ] = None,
    credentials: Credentials = None,
    mirror: Mirrors = None,
    plain_http: PlainHttp = None,
    agent: Annotated[
        Path | None,
        typer.Option(help="The guest's agent; the one that hack/guest.py built last unless given."),
    ] = None,
    cache: Cache = None,
) -> None:
    """Build an image, or find the one that is there, and print its folder. Needs root.

    Debian's packages, each setup step and the image itself are kept: a second build takes no time.
    A Dockerfile is built by buildah and published; tasks name the reference that is printed.
    """
    words = [str(spec), *(("--agent", str(agent)) if agent else ())]
    words += ["--into", into] if into else []
    _run("build", *words, *_registry_options(credentials, mirror, plain_http), cache=cache)


@app.command(epilog=epilog("images pull"))
def pull(
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="HOST/REPOSITORY@sha256:…, or with a tag.")
    ],
    *,
    machine: Annotated[
        str, typer.Option(help="Built image that gives kernel and agent: etude images ls.")
    ],
    credentials: Credentials = None,
    mirror: Mirrors = None,
    plain_http: PlainHttp = None,
    cache: Cache = None,
) -> None:
    """Pull and convert an image that tasks name, and print its name by digest. Needs root.

    Hosts do the same when a task needs it; an image that was pulled before takes no time.
    """
    options = _registry_options(credentials, mirror, plain_http)
    _run("pull", image, "--machine", machine, *options, cache=cache)


@app.command(epilog=epilog("images ls"))
def ls(
    *,
    cache: Cache = None,
    as_json: AsJson = False,
) -> None:
    """List every image that was built, oldest first, then those that were pulled."""
    _run("ls", *(("--json",) if as_json else ()), cache=cache)


@app.command(epilog=epilog("images push"))
def push(
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="Name or address: etude images ls.")
    ],
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix")],
    *,
    endpoint: Endpoint = None,
    region: Region = None,
    cache: Cache = None,
) -> None:
    """Copy an image to an object store, and print what a pool's template names it by.

    S3 credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. What is there already is
    not sent again.
    """
    _run("push", image, url, *_store_options(endpoint, region), cache=cache)


@app.command(epilog=epilog("images rm"))
def rm(
    image: Annotated[
        str,
        typer.Argument(metavar="IMAGE", help="Name, address, or s3://bucket/prefix/ADDRESS."),
    ],
    *,
    pools: Pools = None,
    dry_run: DryRun = False,
    endpoint: Endpoint = None,
    region: Region = None,
    cache: Cache = None,
) -> None:
    """Remove an image here, or from a store.

    Refused while a host process here boots it, or a manifest of --pools names it.
    """
    words = [image, *_pool_options(pools, dry_run=dry_run), *_store_options(endpoint, region)]
    _run("rm", *words, cache=cache)


@app.command(epilog=epilog("images prune"))
def prune(  # noqa: PLR0913 - a verb has as many parameters as it has options
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="s3://bucket/prefix; images here unless given."),
    ] = None,
    *,
    pools: Pools = None,
    older_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="What is younger stays.")
    ] = 7,
    dry_run: DryRun = False,
    endpoint: Endpoint = None,
    region: Region = None,
    cache: Cache = None,
) -> None:
    """Remove the images that nothing needs, here or in a store.

    Here the newest of each name stays, and what a node boots or a manifest of --pools names. In a
    store the manifests say all: --pools is needed.
    """
    words = [*((url,) if url else ()), "--older-than", str(older_than)]
    words += [*_pool_options(pools, dry_run=dry_run), *_store_options(endpoint, region)]
    _run("prune", *words, cache=cache)


def _registry_options(
    credentials: Path | None, mirrors: list[str] | None, plain_http: list[str] | None
) -> list[str]:
    words = ["--credentials", str(credentials)] if credentials else []
    words += [word for each in mirrors or () for word in ("--mirror", each)]
    return [*words, *(word for each in plain_http or () for word in ("--plain-http", each))]


def _pool_options(pools: list[Path] | None, *, dry_run: bool) -> list[str]:
    files = [word for path in pools or () for word in ("--pools", str(path))]
    return [*files, *(("--dry-run",) if dry_run else ())]


def _store_options(endpoint: str | None, region: str | None) -> list[str]:
    words = [*(("--endpoint", endpoint) if endpoint else ())]
    return [*words, *(("--region", region) if region else ())]
