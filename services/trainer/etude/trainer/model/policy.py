"""The policy as a torch module: loading, random initialisation, log-probs of given tokens.

Shapes: B rows of a microbatch, T their padded length, N tokens to predict, V vocabulary.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from typing_extensions import override

from etude.common.errors import Problem, UserError

_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


class TokenScores(NamedTuple):
    """Log-probs of the requested tokens, and the distributions at their places."""

    logprobs: Tensor
    """Of the tokens, with gradient. [N]"""
    distributions: Tensor
    """Log-probs of all tokens at the same places, without gradient. [N, V]"""

    def entropy(self) -> Tensor:
        """Of the distributions, in nats, without gradient. [N]."""
        return -(self.distributions.exp() * self.distributions).sum(dim=-1)


class InvalidModelError(UserError):
    """The folder holds no model that can be trained."""

    reason = "InvalidModel"

    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(
            Problem(
                reason=self.reason,
                what=what,
                where=f"model.uri ({folder})",
                fix="give a Hugging Face folder of a causal language model: config.json,"
                " and model.safetensors unless the weights are to be drawn at random",
            )
        )


class Policy(nn.Module):
    """A causal language model that computes logits only where a loss needs them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    @override
    def forward(self, token_ids: Tensor, rows: Tensor, places: Tensor) -> TokenScores:
        """Score the tokens at (rows, places), each given those before it.

        Rows are padded on the right, so causal attention needs no mask: no real token sees a
        padded one, and no padded one is asked for.

        Args:
            token_ids: [B, T]
            rows: row of each token to predict. [N]
            places: its place in the row, at least 1. [N]
        """
        # On a GPU the blocks compute in bf16; the output layer and the losses stay in fp32.
        with torch.autocast(token_ids.device.type, torch.bfloat16, enabled=token_ids.is_cuda):
            output = self.model.base_model(input_ids=token_ids, use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1)
        before = hidden.index_select(0, rows * token_ids.shape[1] + places - 1)
        logits = self.model.get_output_embeddings()(before.float())
        everything = logits.log_softmax(dim=-1)
        chosen = everything.gather(1, token_ids[rows, places][:, None]).flatten()
        # FSDP2 hooks into what a module returns, and a view could lose the hook.
        return TokenScores(chosen.clone(), everything.detach())


def load_policy(folder: Path, *, seed: int) -> Policy:
    """Load the model of a Hugging Face folder in fp32; without weight files, draw it at random.

    Raises:
        InvalidModelError: the folder holds no model, or one of an unsupported kind.
    """
    config = _read_config(folder)
    if any(folder.glob("*.bin")):
        # Drawing weights beside them would be a silent mistake, reading them runs their code.
        raise InvalidModelError(folder, "holds pickled weights; convert them to safetensors")
    has_weights = any((folder / name).is_file() for name in _WEIGHT_FILES)
    try:
        model = _load_model(folder, config) if has_weights else _draw_model(config, seed=seed)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as cause:
        raise InvalidModelError(folder, f"the model cannot be loaded: {cause}") from cause
    policy = Policy(model.eval())  # without dropout: trainer and sampler must say the same
    _check_scores(policy, folder)
    return policy


def empty_copy(policy: Policy) -> Policy:
    """Create a model of the same shape with arbitrary weights, to be overwritten."""
    return Policy(_draw_model(policy.config, seed=0).eval())


def _load_model(folder: Path, config: PretrainedConfig) -> PreTrainedModel:
    """Load all stored weights; transformers itself only warns about missing ones.

    Raises:
        ValueError: a tensor is missing, or has another shape than the configuration says.
    """
    model: PreTrainedModel
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="sdpa",
        local_files_only=True,
        output_loading_info=True,
    )
    faulty = sorted(map(str, {*report["missing_keys"], *report["mismatched_keys"]}))
    if faulty:
        raise ValueError(f"missing or misshapen tensors: {', '.join(faulty[:5])}")
    return model


def _draw_model(config: PretrainedConfig, *, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    return model


def _read_config(folder: Path) -> PretrainedConfig:
    if not (folder / "config.json").is_file():
        raise InvalidModelError(folder, "holds no config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as cause:
        raise InvalidModelError(folder, f"config.json cannot be used: {cause}") from cause
    return config


def _check_scores(policy: Policy, folder: Path) -> None:
    """Compare with the model's own logits: some architectures scale or cap them after the head.

    Raises:
        InvalidModelError: they differ.
    """
    length = min(8, policy.config.vocab_size)
    token_ids = torch.arange(length, dtype=torch.int64)[None]
    places = torch.arange(1, length)
    with torch.no_grad():
        ours = policy(token_ids, torch.zeros_like(places), places).logprobs
        logits = policy.model(input_ids=token_ids, use_cache=False).logits[0, :-1].float()
        theirs = logits.log_softmax(dim=-1).gather(1, token_ids[0, 1:, None])[:, 0]
    # fp32 sums in another order differ by about 1e-6; a forgotten factor by far more.
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        kind = type(policy.model).__name__
        raise InvalidModelError(folder, f"{kind} changes its logits after the output layer")
