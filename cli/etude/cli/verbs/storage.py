"""`etude storage`: make the store of runs, and prove that it is good enough."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from etude.cli.examples import epilog
from etude.cli.output import Exit, console, say
from etude.cli.verbs.options import Endpoint, Region
from etude.common.errors import Problem, StoreError, UserError
from etude.common.store_urls import folder_of

if TYPE_CHECKING:
    from etude.common.blobs.conformance import PromiseCheck

app = typer.Typer(no_args_is_help=True, help="Make and check the object store of runs.")

Url = Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix or file:///folder.")]


@app.command(epilog=epilog("init"))
def init(
    url: Url,
    *,
    endpoint: Endpoint = None,
    region: Region = None,
    rule: Annotated[
        bool, typer.Option(help="Let the store delete uploads that are unfinished for a day.")
    ] = True,
) -> None:
    """Make the bucket or folder of a URL, unless it is there.

    S3 credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
    """
    if (folder := folder_of(url)) is not None:
        is_new = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        say(f"{'made' if is_new else 'found'} folder {folder}")
        return
    from etude.cli.buckets import make_bucket
    from etude.common.blobs.store import DeniedError

    try:
        bucket = make_bucket(url, endpoint=endpoint, region=region, with_rule=rule)
    except DeniedError as error:
        fix = "set credentials that may CreateBucket, ListBucket and PutLifecycleConfiguration"
        raise UserError(Problem("PermissionDenied", _error_text(error, url), url, fix)) from error
    except StoreError as error:
        fix = "check --endpoint, --region and the bucket's name, and that the store is up"
        raise UserError(Problem("Unreachable", _error_text(error, url), url, fix)) from error
    say(f"{'made' if bucket.is_new else 'found'} bucket {bucket.name}: {bucket.cleaning}")


@app.command(epilog=epilog("check"))
def check(url: Url, *, endpoint: Endpoint = None, region: Region = None) -> None:
    """Prove that a store keeps each promise that runs rest on; exit code 1 if it does not.

    It writes, reads and deletes a few small objects below probe/.
    """
    from etude.common.blobs.conformance import check_promises
    from etude.common.blobs.factory import Deadlines, open_store

    folder = folder_of(url)
    if folder is not None and not folder.is_dir():
        is_file = folder.exists()
        fix = "name a folder: this is a file" if is_file else f"make it: etude storage init {url}"
        raise UserError(Problem("NotFound", "is not a folder", str(folder), fix))
    # A user waits: one retry distinguishes a transient error from a store that is away.
    patience = Deadlines(request_s=30, retries=1, retry_s=5)
    store = open_store(url, endpoint=endpoint, region=region, deadlines=patience)
    found = list(check_promises(store))
    console().print(_table(found))
    if any(verdict.trouble for verdict in found):
        raise SystemExit(Exit.NO)


def _table(found: "list[PromiseCheck]") -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("", "call", "promise", "fix"):
        table.add_column(title, overflow="fold")
    for verdict in found:
        mark = Text("fail", "red") if verdict.trouble else Text("pass", "green")
        what = f"{verdict.promise}: {verdict.trouble}" if verdict.trouble else verdict.promise
        table.add_row(mark, verdict.call, what, verdict.fix)
    return table


def _error_text(error: StoreError, url: str) -> str:
    return str(error).removeprefix(f"{url}: ")
