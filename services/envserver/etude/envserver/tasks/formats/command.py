"""The programs behind `etude tasks import`: published tasks become task folders.

python -m etude.envserver.tasks.formats.command harbor FOLDER... --out DIR
"""

import argparse
import functools
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from etude.common import extensions
from etude.common.errors import UserError
from etude.common.harbor import task as folders
from etude.common.run_folder.state import images_folder
from etude.envserver import exit_codes
from etude.envserver.images.dockerfile_build import PublishedImage, build_dockerfile
from etude.envserver.images.pull.pinning import pin_image
from etude.envserver.images.pull.registry_access import RegistryAccess
from etude.envserver.tasks.formats import harbor, swebench, verifiers
from etude.envserver.tasks.formats.imported_task import (
    ImportedTask,
    ImportRefusedError,
    PendingImport,
    TaskFormat,
)

_MAX_TIMEOUT_S = 86_400


def write_task(task: ImportedTask, out: Path) -> None:
    """Write the task's folder and read it back: only valid tasks get a folder.

    Raises:
        ImportRefusedError: there is one of that name.
        UserError: the task is invalid.
    """
    _check_names(task)
    target = out / task.task_id
    if target.exists():
        raise ImportRefusedError(str(target), "exists already", "name a new folder with --out")
    partial = out / f".{task.task_id}.partial" / task.task_id
    try:
        for path, file in task.files.items():
            place = partial / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.content)
            place.chmod(0o755 if file.executable else 0o644)
        for part in ("environment", "tests"):
            (partial / part).mkdir(parents=True, exist_ok=True)
        folders.read_task(partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial.parent, ignore_errors=True)


def _check_names(task: ImportedTask) -> None:
    """Refuse names of folders and files that lead out of the new folder.

    Raises:
        ImportRefusedError: one does.
    """
    if "/" in task.task_id or task.task_id in {"", ".", ".."}:
        raise ImportRefusedError("task_id", f"is {task.task_id[:80]!r}, which names no folder")
    for name in task.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ImportRefusedError(name[:200], "is no path inside of the task")


def run_imports(imports: Iterable[PendingImport], out: Path) -> int:
    """Import every task that can be imported; the exit code tells if all could."""
    out.mkdir(parents=True, exist_ok=True)
    taken = refused = 0
    for each in imports:
        try:
            task = each.take()
            write_task(task, out)
        except UserError as error:
            refused += 1
            sys.stderr.write(f"{each.name}: {error}\n")
            continue
        taken += 1
        sys.stdout.write(f"{task.task_id}\n")
        for note in task.notes:
            sys.stderr.write(f"{each.name}: note: {note}\n")
        sys.stdout.flush()
    sys.stderr.write(f"{taken} tasks in {out}, {refused} refused\n")
    return exit_codes.NO if refused else 0


def _swebench(given: argparse.Namespace) -> Iterator[PendingImport]:
    if not 0 < given.timeout <= _MAX_TIMEOUT_S:
        raise exit_codes.option_error("--timeout", f"is {given.timeout}", "give seconds, to a day")
    options = swebench.SwebenchOptions(
        repositories=exit_codes.require_folder(given.repositories),
        test_command=given.test_command,
        image=given.image,
        pin=partial(pin_image, registries=RegistryAccess(credentials=given.credentials))
        if given.pin
        else None,
        timeout_s=given.timeout,
    )
    with tempfile.TemporaryDirectory(prefix="etude-import-") as scratch:
        importer = swebench.SwebenchImporter(options=options, scratch=Path(scratch))
        for place, text in swebench.read_rows(given.rows):
            yield PendingImport(name=place, take=partial(_row, importer, text))


def _row(importer: swebench.SwebenchImporter, text: bytes) -> ImportedTask:
    return importer.import_row(swebench.parse_row(text))


def _verifiers(given: argparse.Namespace) -> Iterator[PendingImport]:
    options = verifiers.VerifiersOptions(
        tests=exit_codes.require_folder(given.tests) if given.tests else None,
        environment=exit_codes.require_folder(given.environment) if given.environment else None,
        image=given.image,
        images=replace(_choose_images("", RegistryAccess()), takes_files=given.files),
    )
    for number, (place, text) in enumerate(swebench.read_rows(given.rows)):
        yield PendingImport(name=place, take=partial(verifiers.import_row, number, text, options))


def _harbor(given: argparse.Namespace) -> Iterator[PendingImport]:
    registries = RegistryAccess(credentials=given.credentials)
    images = replace(
        _choose_images(given.build, registries),
        pin=partial(pin_image, registries=registries) if given.pin else None,
        takes_files=given.files,
    )
    places = [exit_codes.require_folder(place) for place in given.folders]
    for folder in harbor.find_tasks(places):
        yield PendingImport(name=str(folder), take=partial(harbor.import_task, folder, images))


def _installed(given: argparse.Namespace) -> Iterator[PendingImport]:
    form = extensions.load_extension(extensions.TASK_FORMATS, given.format, TaskFormat)
    try:
        for each in form.find_tasks(given.source):
            yield replace(each, take=partial(_take_installed, given.format, each))
    except UserError:
        raise
    except Exception as cause:
        raise _format_error(given.format, str(given.source), cause) from cause


def _take_installed(name: str, pending: PendingImport) -> ImportedTask:
    try:
        return pending.take()
    except UserError:
        raise
    except Exception as cause:
        raise _format_error(name, pending.name, cause) from cause


def _format_error(name: str, where: str, cause: Exception) -> ImportRefusedError:
    what = f"cannot be read by {name}: {type(cause).__name__}: {str(cause)[:400]}"
    return ImportRefusedError(where, what, "correct the source, or the package of the format")


def _choose_images(build: str, registries: RegistryAccess) -> harbor.ImageChoice:
    """Images that are built into a folder or a store; into the folder of layouts unless given."""
    into = build or (images_folder() / "layouts").as_uri()
    return harbor.ImageChoice(build=partial(_build_image, into=into, registries=registries))


def _build_image(context: Path, into: str, registries: RegistryAccess) -> PublishedImage:
    storage = images_folder() / "buildah"
    say = functools.partial(print, file=sys.stderr, flush=True)
    return build_dockerfile(context, into, storage=storage, registries=registries, say=say)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m etude.envserver.tasks.formats.command")
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("harbor")
    one.add_argument("folders", type=Path, nargs="+", help="task folders, or folders of them")
    one.add_argument("--pin", action="store_true", help="ask registries for the digests of tags")
    one.add_argument("--build", metavar="INTO", help="where images of Dockerfiles are published")
    one.set_defaults(imports=_harbor)
    rows = verbs.add_parser("swebench")
    rows.add_argument("rows", type=Path, help="a JSONL file, one instance per line")
    rows.add_argument("--repositories", type=Path, required=True, help="folder of mirrors")
    rows.add_argument("--test-command", default=swebench.TEST_COMMAND)
    rows.add_argument("--image", default="", help="name of the image that the tasks need")
    rows.add_argument("--pin", action="store_true", help="ask the image's registry for its digest")
    rows.add_argument("--timeout", type=float, default=swebench.TIMEOUT_S, help="seconds")
    rows.set_defaults(imports=_swebench)
    data = verbs.add_parser("verifiers")
    data.add_argument("rows", type=Path, help="a JSONL file, one task's data per line")
    data.add_argument("--tests", type=Path, help="tests/ of every task")
    data.add_argument("--environment", type=Path, help="first files of every workspace")
    data.add_argument("--image", default="", help="name of the image that the tasks need")
    data.set_defaults(imports=_verifiers)
    other = verbs.add_parser("installed")
    other.add_argument("format", help="name that an installed package registers")
    other.add_argument("source", type=Path, help="file or folder, as the format says")
    other.set_defaults(imports=_installed)
    for verb in (one, data):
        verb.add_argument("--files", action="store_true", help="build nothing: take environment/")
    for verb in (one, rows):
        verb.add_argument("--credentials", type=Path, help="of registries, as Docker writes them")
    for verb in (one, rows, data, other):
        verb.add_argument("--out", type=Path, required=True, help="folder of the new tasks")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Import, say what was taken, and what was refused and why."""
    given = _parser().parse_args(arguments)
    try:
        return run_imports(given.imports(given), given.out)
    except (UserError, OSError) as error:
        return exit_codes.report_error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
