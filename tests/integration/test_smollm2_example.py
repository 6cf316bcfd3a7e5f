"""The converted SmolLM2-135M is an ordinary model folder."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tests.support.warm_etude import etude

from etude.agent.chat import ChatFormat

CONVERT = Path(__file__).parents[2] / "examples" / "smollm2" / "convert.py"
CONVERSATION = [
    {"role": "user", "content": "Fix add. "},
    {"role": "assistant", "content": "\nDone."},
    {"role": "tool", "content": "ok"},
]


@pytest.mark.long
def test_a_gguf_file_becomes_a_folder_that_answers_and_can_be_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    done = subprocess.run(
        [sys.executable, str(CONVERT), str(folder)],
        check=True,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert "Paris" in json.loads(done.stdout.splitlines()[0])["answer"]
    config = json.loads((folder / "config.json").read_bytes())
    assert "quantization_config" not in config
    shown = etude("model", "inspect", str(folder))
    assert shown.returncode == 0, shown.stderr
    assert "134,515,008 in F32" in shown.stdout
    chat = ChatFormat.load(folder)
    assert {chat.vocabulary.token_id("<|im_end|>")} == set(chat.end_ids)


def test_our_chatml_renders_as_the_models_own_template() -> None:
    module = runpy.run_path(str(CONVERT))
    reader = GGUFReader(module["packaged_gguf"]())
    own = reader.fields["tokenizer.chat_template"].contents()
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    templates = [environment.from_string(source) for source in (own, module["CHATML"])]
    system = {"role": "system", "content": "Be brief."}
    for messages in (CONVERSATION, [system, *CONVERSATION], [system]):
        for prompt in (False, True):
            texts = [t.render(messages=messages, add_generation_prompt=prompt) for t in templates]
            assert texts[0] == texts[1]
