"""`etude model`: copy a model into a store, show what is in one, and compare base models."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli.examples import epilog
from etude.cli.output import console, say
from etude.cli.verbs.evaluate_base import evaluate_base
from etude.cli.verbs.options import Endpoint, Region
from etude.common.errors import Problem, UserError

if TYPE_CHECKING:
    from etude.agent.chat import ChatFormat
    from etude.common.model_sources.facts import ModelFacts
    from etude.common.model_sources.files import RemoteModel
    from etude.common.model_sources.hub_access import HubAccess
    from etude.common.model_sources.mirror import Progress

app = typer.Typer(no_args_is_help=True, help="Copy, show and compare models.")

REPORT_EVERY_S = 2.0

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="hf://organisation/name@revision, a folder or its URI."),
]


@app.command(name="import", epilog=epilog("model import"))
def import_model(
    model: Model,
    *,
    to: Annotated[
        str | None,
        typer.Option(help="Store to copy to; the user's cache folder unless given."),
    ] = None,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Copy a model's safetensors, tokenizer and configuration into a store, with their digests.

    What is printed at the end is a run's spec.model.uri. A second call goes on where the first was
    stopped. HF_ENDPOINT and HF_TOKEN name the hub and the account; code, pickles and GGUF files are
    refused.
    """
    from etude.common.blobs import open_store
    from etude.common.model_sources.mirror import copy_model

    cache = _cache_folder()
    store = open_store(
        to if to is not None else (cache / "models").as_uri(), endpoint=endpoint, region=region
    )
    source = open_model(model, endpoint, region, with_digests=True)
    total = sum(file.size for file in source.files)
    say(f"{source.uri}: {len(source.files)} files, {total / 1e6:,.1f} MB")
    prefix = copy_model(source, store, scratch=cache / "partial", progress=_print_progress())
    console().print(f"{store.url}/{prefix}", soft_wrap=True)


@app.command(epilog=epilog("model inspect"))
def inspect(model: Model, *, endpoint: Endpoint = None, region: Region = None) -> None:
    """Show architecture, size, chat template, tool format and tokens of a model, in ten lines.

    Weights are not loaded: only the headers of their files are read, also of a model on a hub.
    """
    from etude.common.model_sources.facts import read_facts
    from etude.common.model_sources.files import check_model

    source = open_model(model, endpoint, region, with_digests=False)
    check_model(source)
    rows = {"model": source.uri, **_describe(read_facts(source)), **_describe_chat(source)}
    rows["used"] = f"{len(source.files)} files: {', '.join(_grouped(source))}"
    for name, value in rows.items():
        console().print(f"{name:<13} {value}", soft_wrap=True)


@app.command(name="add-head", epilog=epilog("model add-head"))
def add_head(
    folder: Annotated[Path, typer.Argument(help="Folder of a Qwen2 model with safetensors.")],
    *,
    to: Annotated[Path, typer.Option(help="New folder, with the head.")],
) -> None:
    """Write a copy of a model with a head of multi-token prediction, which is still to be trained.

    The head starts as a copy of the last block. Phases with mtp train it, and engines with
    speculativeTokens guess tokens with it.
    """
    from etude.common.model_sources.mtp_head import add_mtp_head

    names = add_mtp_head(folder, to)
    say(f"{len(names)} tensors of the head")
    console().print(str(to), soft_wrap=True)


app.command(name="evaluate", epilog=epilog("model evaluate"))(evaluate_base)


def open_model(
    given: str, endpoint: str | None, region: str | None, *, with_digests: bool
) -> "RemoteModel":
    """Open a model in a folder, a store or on a hub.

    Raises:
        UserError: nothing is there, or the model is refused.
    """
    from etude.common.api.storage import StoreAccess
    from etude.common.hub_uri import is_hub_uri, parse_hub_uri
    from etude.common.model_sources.files import GGUF_FIX
    from etude.common.model_sources.store_model import open_store_model

    if given.lower().endswith(".gguf"):
        raise UserError(Problem("InvalidModel", "is a GGUF file", given, GGUF_FIX))
    if is_hub_uri(given):
        from etude.common.model_sources.hub import open_hub_model

        return open_hub_model(parse_hub_uri(given), _hub_access())
    uri = given if "://" in given else Path(given).absolute().as_uri()
    access = StoreAccess(endpoint=endpoint, region=region)
    return open_store_model(uri, access, with_digests=with_digests)


def _hub_access() -> "HubAccess":
    from etude.common.model_sources.hub_access import HubAccess

    try:
        return HubAccess.from_env(os.environ)
    except ValueError as cause:
        name, _, what = str(cause).partition(": ")
        raise UserError(Problem("Usage", what, name, "correct the variable")) from cause


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude"


def _print_progress() -> "Progress":
    said_s = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= REPORT_EVERY_S or done == total:
            said_s = time.monotonic()
            percent = 100 * done // max(1, total)
            say(f"{percent:3d} %  {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

    return report


def _describe(facts: "ModelFacts") -> dict[str, str]:
    shape = {
        "layers": facts.layers,
        "wide": facts.hidden,
        "heads": facts.heads,
        "for keys and values": facts.kv_heads,
        "experts": facts.experts,
    }
    sizes = ", ".join(f"{value:,} {name}" for name, value in shape.items() if value is not None)
    formats = ", ".join(f"{count:,} in {name}" for name, count in facts.parameters.items())
    size = f"{formats} ({facts.num_bytes / 1e6:,.0f} MB in {facts.num_files} of the files)"
    tied = {True: "tied to the output", False: "not tied to the output", None: "tied or not"}
    return {
        "architecture": f"{facts.architecture} ({facts.model_type}): {sizes}",
        "parameters": size if facts.parameters else "none: weights would be drawn from seed",
        "vocabulary": f"{_number(facts.vocabulary)} rows, {tied[facts.is_tied]}",
        "context": f"{_number(facts.context)} positions",
    }


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _describe_chat(model: "RemoteModel") -> dict[str, str]:
    """Template, tool format, ends and thinking; a refusal is shown as such, with its fix."""
    from etude.agent.chat import ChatFormat
    from etude.agent.chat.trial import check_chat_format

    with _texts(model) as folder:
        try:
            check_chat_format(folder)
            chat = ChatFormat.load(folder)
            native = _describe_native(chat)
        except UserError as error:
            return {"chat": _tell_refusal(error, folder)}
    traits, tags = chat.traits, {token: tag for tag, token in chat.vocabulary.tags.items()}
    ends = ", ".join(f"{tags.get(token, '?')} ({token})" for token in sorted(chat.end_ids))
    thinking = "no markers" if traits.thinking is None else " … ".join(traits.thinking)
    return {
        "template": f"{chat.template.path.name}, "
        f"{'with' if traits.has_system else 'without'} system messages, "
        f"{'with' if traits.has_tool_role else 'without'} tool messages",
        "tool format": f"Xml, in the system prompt{native}",
        "end of turn": ends,
        "thinking": thinking,
    }


def _describe_native(chat: "ChatFormat") -> str:
    """The model's own form of calls; empty without one. The tools are rendered in the trial."""
    from etude.agent.chat.trial import check_chat_format
    from etude.agent.tool_formats.registry import find_tool_format
    from etude.agent.toolsets import toolset

    native = find_tool_format(chat.template.source, chat.vocabulary.tags)
    if native is None:
        return ""
    try:
        check_chat_format(chat.vocabulary.folder, native_tools=[toolset("Standard").schemas()])
    except UserError as error:
        return f"; Native: {_tell_refusal(error, chat.vocabulary.folder)}"
    return f"; Native: {native.name}"


def _tell_refusal(error: UserError, folder: Path) -> str:
    text = error.problem.text().replace(f"{folder}/", "").replace("\n ", "; ")
    return f"refused: {text}"


@contextmanager
def _texts(model: "RemoteModel") -> Iterator[Path]:
    """A folder with the model's small files."""
    from etude.common.model_sources.files import MAX_TEXT_BYTES

    with TemporaryDirectory(prefix="etude-model-") as name:
        for file in model.files:
            if not file.name.endswith(".safetensors") and file.size <= MAX_TEXT_BYTES:
                (Path(name) / file.name).write_bytes(model.read(file, 0, file.size))
        yield Path(name)


def _grouped(model: "RemoteModel") -> list[str]:
    """Names of files, those of weights counted."""
    names = [file.name for file in model.files]
    weights = [name for name in names if name.endswith(".safetensors")]
    if len(weights) > 1:
        names = [name for name in names if name not in weights]
        names.append(f"{len(weights)} of weights")
    return names
