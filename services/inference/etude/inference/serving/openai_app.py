"""vLLM's OpenAI application over an engine that is already running."""

import json
from pathlib import Path

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from etude.inference.engine.replica import Replica
from etude.inference.serving.openai import AsgiApp


def tool_parser(model: Path) -> str | None:
    """Name of vLLM's parser for the tool calls that the folder's chat template writes.

    Ours, like Qwen3-Coder's, are <function=NAME> with <parameter=NAME> inside; many others write
    JSON between <tool_call> tags.
    """
    template = _template(model)
    if "<function=" in template:
        return "qwen3_xml"
    return "hermes" if "<tool_call>" in template else None


def _template(model: Path) -> str:
    own_file = model / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text("utf-8")
    config = model / "tokenizer_config.json"
    if not config.exists():
        return ""
    template = json.loads(config.read_bytes()).get("chat_template")
    return template if isinstance(template, str) else ""


async def build_openai_app(replica: Replica) -> AsgiApp:
    """The application: models, completions, chat with tools, streaming, log-probs."""
    options = replica.options
    words = ["--model", str(options.model), "--served-model-name", options.served_name]
    words += ["--disable-fastapi-docs", "--disable-uvicorn-access-log"]
    parser = tool_parser(options.model)
    if parser is not None:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    tasks = await replica.llm.get_supported_tasks()
    app: AsgiApp = build_app(args, tasks, replica.llm.model_config)
    await init_app_state(replica.llm, app.state, args, tasks)  # type: ignore[attr-defined]  # FastAPI's
    return app
