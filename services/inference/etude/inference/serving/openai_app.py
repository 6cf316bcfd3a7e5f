"""vLLM's OpenAI application over an engine that is already running."""

from pathlib import Path

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from etude.agent.chat.folder import read_json
from etude.agent.chat.template import read_template
from etude.agent.tool_formats.registry import find_tool_format
from etude.inference.engine.replica import Replica
from etude.inference.serving.openai import AsgiApp

_PARSERS = {
    "xml": "qwen3_xml",
    "hermes": "hermes",
    "llama3": "llama3_json",
    "mistral": "mistral",
    "mistral_list": "mistral",
    "deepseek": "deepseek_v31",
    "deepseek_fenced": "deepseek_v3",
    "deepseek_v4": "deepseek_v4",
    "glm": "glm47",
}
"""vLLM's names by ours."""


def tool_parser(model: Path) -> str | None:
    """Name of vLLM's parser for the tool calls that the folder's chat template writes.

    Raises:
        UserError: the template or the tokenizer cannot be read.
    """
    template = read_template(model, read_json(model / "tokenizer_config.json"))
    if template is None:
        return None
    added = read_json(model / "tokenizer.json").get("added_tokens") or ()
    tool_format = find_tool_format(template[0], [str(token["content"]) for token in added])
    return None if tool_format is None else _PARSERS[tool_format.name]


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
