"""A model with further tokens is a model like any other: to the learner, transformers, exports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from etude.agent.chat import CHAT_TEMPLATE, LAYOUT_TOKENS, ChatFormat, plain
from etude.common.api.run.spec import ModelSource
from etude.common.api.storage import StoreAccess
from etude.common.blobs import open_store
from etude.common.model_sources.extended import ModelChanges
from etude.common.model_sources.run_model import extend_run_model
from etude.trainer.export.hf_folder import write_hf_folder
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import load_policy

KNOWN = 256
SHAPE: dict[str, Any] = {
    "vocab_size": KNOWN,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
}


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A base model without a chat template, and its copy with the Plain one."""
    base = tmp_path / "base"
    torch.manual_seed(3)
    config = LlamaConfig(**SHAPE, tie_word_embeddings=request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    alphabet = {byte: i for i, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(base)
    source = ModelSource(uri=base.as_uri(), add_tokens=LAYOUT_TOKENS)
    folder = extend_run_model(
        source.key,
        source.folder,
        ModelChanges(LAYOUT_TOKENS, CHAT_TEMPLATE, plain.END),
        open_store((tmp_path / "store").as_uri()),
        scratch=tmp_path,
        access=StoreAccess(),
    )
    return base, Path(folder.removeprefix("file://"))


def test_known_tokens_keep_their_logits_and_new_ones_have_the_mean(
    folders: tuple[Path, Path],
) -> None:
    before, after = (load_policy(folder, seed=0).model for folder in folders)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        old, new = before(input_ids=ids).logits, after(input_ids=ids).logits
    assert new.shape[-1] == KNOWN + len(LAYOUT_TOKENS)
    assert torch.equal(new[..., :KNOWN], old)
    mean = old.mean(dim=-1, keepdim=True).expand(-1, -1, len(LAYOUT_TOKENS))
    torch.testing.assert_close(new[..., KNOWN:], mean, atol=1e-5, rtol=1e-5)


def test_transformers_and_exports_have_tokens_template_and_rows(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    _, folder = folders
    policy = load_policy(folder, seed=0)
    ranks = RankGroup(rank=0, size=1, device=torch.device("cpu"))
    store = open_store((tmp_path / "export").as_uri())
    write_hf_folder(store, "model", policy=policy, ranks=ranks, dtype="Float32", source=folder)
    exported = tmp_path / "export" / "model"
    for each in (folder, exported):
        chat = ChatFormat.load(each)
        theirs = PreTrainedTokenizerFast.from_pretrained(each)
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "I <|end|>"}]
        prompt = chat.open("S", "I <|end|>").prompt
        assert prompt.count(chat.end_id) == 2
        harmless = [{**message, "content": "ab"} for message in messages]
        ids = theirs.apply_chat_template(harmless, add_generation_prompt=True, return_dict=False)
        assert list(ids) == chat.open("ab", "ab").prompt
        model = AutoModelForCausalLM.from_pretrained(each)
        assert model.config.vocab_size == KNOWN + len(LAYOUT_TOKENS) == chat.vocab_size
        ends = json.loads((each / "generation_config.json").read_text())["eos_token_id"]
        assert set(ends) == chat.end_ids == {0, chat.end_id}
