"""`etude weights`: look at the policy versions of a run, prove them, take one out."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from etude.cli import runs
from etude.cli.examples import epilog
from etude.cli.output import Exit, console, print_row, say
from etude.cli.verbs.options import AsJson, Endpoint, Region
from etude.common.errors import Problem, UserError
from etude.common.store_urls import endpoint_of, folder_of, region_of

if TYPE_CHECKING:
    from pydantic import JsonValue

    from etude.common.blobs import Store
    from etude.common.weights import VersionId

app = typer.Typer(no_args_is_help=True, help="Look at, prove and export the versions of a run.")

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Run folder, its name, or its storage.uri.")
]
Version = Annotated[
    str, typer.Argument(metavar="VERSION", help="Like 1.37, or newest for the newest sound one.")
]
Scratch = Annotated[
    Path | None, typer.Option(help="Folder for a copy of the model; the system's own unless given.")
]


@app.command(epilog=epilog("ls"))
def ls(
    run: Run, *, endpoint: Endpoint = None, region: Region = None, as_json: AsJson = False
) -> None:
    """List every published version: what it changed, how it can be reached, whether it counts."""
    from etude.cli.weights.survey import survey
    from etude.cli.weights.tables import chain_table, reader_lines, version_rows
    from etude.cli.weights.version_names import no_versions
    from etude.common.weights.protocol.epochs import stray_keys

    store = _store(run, endpoint, region)
    found = survey(store)
    if not found:
        raise UserError(no_versions(run))
    if as_json:
        for row in version_rows(found):
            print_row(row)
    else:
        console().print(chain_table(found))
        for line in reader_lines(store):
            console().print(line)
    for key in stray_keys(store):
        say(f"{store.url}/{key}: no epoch's record has this name; passed over")
    if any(each.problem for each in found):
        raise SystemExit(Exit.NO)


@app.command(epilog=epilog("objects"))
def objects(
    run: Run,
    version: Version,
    *,
    endpoint: Endpoint = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """List what a version consists of in the store: its manifest, and each rank's payload."""
    from etude.cli.weights.survey import objects_of
    from etude.cli.weights.tables import object_table
    from etude.cli.weights.version_names import find_version, missing_version
    from etude.common.blobs import MissingError

    store = _store(run, endpoint, region)
    wanted = find_version(store, version)
    try:
        found = objects_of(store, wanted)
    except MissingError as error:
        raise UserError(missing_version(store, wanted)) from error
    if as_json:
        for each in found:
            print_row(each._asdict())
        return
    console().print(object_table(found))


@app.command(epilog=epilog("weights verify"))
def verify(
    run: Run, *, endpoint: Endpoint = None, region: Region = None, scratch: Scratch = None
) -> None:
    """Read every version, skip and keyframe, and prove that each leads to the published bits."""
    from etude.cli.weights.verification import UNPROVABLE
    from etude.cli.weights.verification import verify as verdicts
    from etude.cli.weights.version_names import no_accepted_version
    from etude.common.weights.protocol.chain_view import take_view

    store = _store(run, endpoint, region)
    seen = take_view(store)
    if not seen.chain:
        raise UserError(no_accepted_version(store, run))
    total, refused = len(seen.usable), len(seen.chain) - len(seen.usable)
    bad = ways = headless = 0
    versions: set[VersionId] = set()
    with _folder(scratch) as folder, Progress(console=console(to_stderr=True)) as progress:
        task = progress.add_task("versions", total=total)
        for verdict in verdicts(store, Path(folder) / "copy"):
            headless += verdict.way == UNPROVABLE
            ways += verdict.way != UNPROVABLE
            if verdict.problem:
                bad += 1
                console().print(f"{verdict.version}  {verdict.way}: {verdict.problem}")
            versions.add(verdict.version)
            progress.update(task, completed=min(total, len(versions)))
    unread = f", quarantined and not read {refused}" if refused else ""
    # Engines that have one go on from it; nothing else can begin there.
    unproved = f", beginning collected {headless}" if headless else ""
    console().print(f"versions {total}, ways {ways}, damaged {bad}{unread}{unproved}")
    if bad:
        raise SystemExit(Exit.NO)


@app.command(epilog=epilog("diff"))
def diff(  # noqa: PLR0913 - a verb has as many parameters as it has options
    run: Run,
    before: Version,
    after: Version,
    *,
    endpoint: Endpoint = None,
    region: Region = None,
    scratch: Scratch = None,
    as_json: AsJson = False,
) -> None:
    """Say which tensors differ between two versions, by how many elements and by how much."""
    from etude.cli.weights.differences import differences
    from etude.cli.weights.tables import difference_table
    from etude.cli.weights.version_names import copy_version

    store = _store(run, endpoint, region)
    with _folder(scratch) as folder:
        one = copy_version(store, before, Path(folder) / "before")
        other = copy_version(store, after, Path(folder) / "after")
        found = list(differences(one, other))
    if as_json:
        for each in found:
            print_row(each._asdict())
        return
    console().print(difference_table(found))


@app.command(epilog=epilog("export"))
def export(  # noqa: PLR0913 - as above
    run: Run,
    version: Version,
    folder: Annotated[Path, typer.Argument(help="New folder for the model.")],
    *,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder that the run started from, for configuration and tokenizer."),
    ] = None,
    endpoint: Endpoint = None,
    region: Region = None,
    scratch: Scratch = None,
) -> None:
    """Write a version as a Hugging Face folder, bit for bit what the trainer published."""
    from etude.cli.weights.version_names import copy_version
    from etude.common.weights.tensors.model_folder import write_folder

    source = model or find_source_model(run)
    with _folder(scratch) as copy:
        found = copy_version(
            _store(run, endpoint, region), version, Path(copy) / "copy"
        ).current_version()
        written = write_folder(folder, schema=found.schema, words=found.words, source=source)
        say(f"version {found.ref.version}, state {found.ref.state}: {len(written)} files")
    console().print(str(folder), soft_wrap=True)


def _store(run: str, endpoint: str | None, region: str | None) -> "Store":
    from etude.common.api.storage import StoreAccess
    from etude.common.stores import open_source

    uri = run if "://" in run else f"file://{runs.folder_of(run).resolve()}"
    return open_source(uri, StoreAccess(endpoint=endpoint_of(endpoint), region=region_of(region)))


def _folder(scratch: Path | None) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="etude-weights-", dir=scratch)


def find_source_model(run: str) -> Path:
    """The model folder that a run on this machine started from.

    Raises:
        UserError: the run is elsewhere, or its model is.
    """
    from etude.common.run_folder.state import read_state

    folder = None if "://" in run else runs.folder_of(run)
    state = None if folder is None else read_state(folder)
    found = folder_of(_model_uri({} if state is None else state.run))
    if found is None:
        fix = "name the folder with configuration and tokenizer: --model FOLDER"
        raise UserError(Problem("Usage", "names no model folder on this machine", run, fix))
    return found


def _model_uri(run: "Mapping[str, JsonValue]") -> str:
    """URI of the folder that a run started from: its model's, or a copy in its store."""
    from etude.common.api.run.spec import ModelSource
    from etude.common.api.storage import Storage
    from etude.common.model_sources.run_model import find_run_model, needs_copy
    from etude.common.stores import open_source

    match run:
        case {"spec": {"model": {"uri": str()} as model, **spec}}:
            key = ModelSource.model_validate(model).key
            if not needs_copy(key):
                return key
            storage = Storage.model_validate(spec.get("storage"))
            return find_run_model(key, open_source(storage.uri, storage)) or ""
        case _:
            return ""
