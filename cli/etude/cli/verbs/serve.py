"""`etude serve`: an OpenAI-compatible endpoint on a model folder."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from etude.common.errors import Problem, UserError


def serve(
    model: Annotated[Path, typer.Argument(help="A model folder, or a run folder.")],
    *,
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
) -> None:
    """Serve a model folder, or the newest checkpoint of a run, to any OpenAI client."""
    model = newest_model(model)
    if not (model / "config.json").is_file():
        raise UserError(
            Problem(
                "NotFound",
                what="holds no config.json, so it is no model folder",
                where=str(model),
                fix="give a run folder, or a folder with config.json and weights",
            )
        )
    arguments = ["-m", "etude.inference.serve_command", "--model", str(model.resolve())]
    os.execv(sys.executable, [sys.executable, *arguments, "--port", str(port)])  # noqa: S606


def newest_model(folder: Path) -> Path:
    """The folder itself, or the model of its newest whole checkpoint that has one."""
    # The manifest comes last: without it, a killed trainer may have left half a model.
    whole = sorted(folder.glob("checkpoints/*/manifest.json"), reverse=True)
    models = (manifest.parent / "model" for manifest in whole)
    return next((model for model in models if (model / "config.json").is_file()), folder)
