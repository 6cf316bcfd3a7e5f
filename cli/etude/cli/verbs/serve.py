"""`etude serve`: an OpenAI-compatible endpoint on a model folder."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from etude.common.errors import Problem, UserError


def serve(
    model: Annotated[Path, typer.Argument(help="A Hugging Face model folder.")],
    *,
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
) -> None:
    """Serve a checkpoint's model folder to any OpenAI client."""
    if not (model / "config.json").is_file():
        raise UserError(
            Problem(
                "NotFound",
                what="holds no config.json, so it is no model folder",
                where=str(model),
                fix="give the folder that a run exported, for example runs/demo/model",
            )
        )
    arguments = ["-m", "etude.inference.serve", "--model", str(model.resolve())]
    os.execv(sys.executable, [sys.executable, *arguments, "--port", str(port)])  # noqa: S606
