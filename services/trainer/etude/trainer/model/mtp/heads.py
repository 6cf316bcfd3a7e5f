"""Heads of multi-token prediction: blocks behind the model that guess the token after the next.

The head of depth 1 sees at position t the trunk's hidden state there, before the final norm, and
the embedding of token t + 1; its output predicts token t + 2. Names and computation are those of
vLLM's MiMo drafts, so that engines run what is trained here.
Shapes: B rows, T their length, H hidden size.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
from typing_extensions import override

from etude.common.model_sources.mtp_head import ARCHITECTURE
from etude.trainer.model.compute_device import is_gpu
from etude.trainer.model.mtp.distillation import score_guesses
from etude.trainer.model.output_head import GuessScores

HEADS = "mtp_layers"
"""Attribute of the backbone, and part of the names of the heads' tensors."""


class MtpHead(Qwen2DecoderLayer):  # type: ignore[misc]  # transformers is untyped here
    """A block with a projection in front of it and norms around both."""

    def __init__(self, config: PretrainedConfig) -> None:
        # The block attends as the last one does: a configuration names no layer behind it.
        super().__init__(config, config.num_hidden_layers - 1)
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = Qwen2RMSNorm(size, eps=epsilon)
        self.hidden_layernorm = Qwen2RMSNorm(size, eps=epsilon)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.final_layernorm = Qwen2RMSNorm(size, eps=epsilon)

    @override
    def forward(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, **attention: Any
    ) -> Tensor:
        """Compute the states that predict the token after the next.

        Args:
            hidden: of the trunk, before its final norm. [B, T, H]
            embedded: the next token at each position. [B, T, H]
            positions: [B, T]
            attention: arguments of transformers' blocks.

        Returns:
            Input of the output layer. [B, T, H]
        """
        # vLLM blanks the token behind the first position.
        embedded = embedded.masked_fill((positions == 0)[..., None], 0)
        joined = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], dim=-1)
        result = super().forward(self.input_proj(joined), position_ids=positions, **attention)
        predicting: Tensor = self.final_layernorm(result)
        return predicting


def num_heads(config: PretrainedConfig) -> int:
    """Heads that a configuration asks for; 0 for most models.

    Raises:
        ValueError: this kind of model has none here.
    """
    if ARCHITECTURE not in (config.architectures or ()):
        return 0
    check_heads(config)
    found = getattr(config, "num_nextn_predict_layers", None)
    if found != 1:
        raise ValueError(f"{ARCHITECTURE} with num_nextn_predict_layers {found}: engines run 1")
    return 1


def check_heads(config: PretrainedConfig) -> None:
    """Check that a kind of model can have heads.

    Raises:
        ValueError: it cannot.
    """
    if config.model_type != "qwen2":
        raise ValueError(f"heads of multi-token prediction need qwen2, not {config.model_type}")
    if getattr(config, "use_sliding_window", False):
        raise ValueError("heads of multi-token prediction need use_sliding_window: false")


def attach_heads(model: PreTrainedModel) -> None:
    """Give a model the heads of its configuration; their weights are arbitrary."""
    count = num_heads(model.config)
    if count:
        heads = nn.ModuleList(MtpHead(model.config) for _ in range(count))
        model.base_model.add_module(HEADS, heads)


def find_heads(model: PreTrainedModel) -> list[MtpHead]:
    """Heads of a model; none for most."""
    return list(getattr(model.base_model, HEADS, ()))


def is_head_parameter(name: str) -> bool:
    """True for the name of a head's parameter, in the model or below it."""
    return f".{HEADS}." in f".{name}"


@torch.no_grad()
def start_heads(model: PreTrainedModel) -> None:
    """Start heads as the last block, behind the sum of hidden state and next token."""
    heads = find_heads(model)
    last = model.base_model.layers[-1].state_dict() if heads else {}
    for head in heads:
        head.load_state_dict(last, strict=False)
        size = head.input_proj.out_features
        head.input_proj.weight.zero_()
        head.input_proj.weight[:, :size].copy_(torch.eye(size))
        head.input_proj.weight[:, size:].copy_(torch.eye(size))
        for norm in (head.token_layernorm, head.hidden_layernorm, head.final_layernorm):
            norm.weight.fill_(1)


@contextmanager
def capture_trunk(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the hidden states before the final norm of a forward pass; none without heads."""
    found: list[Tensor] = []
    if not find_heads(model):
        yield found
        return

    def note(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        found.append(given[0].detach())

    handle = model.base_model.norm.register_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def guess_tokens(
    model: PreTrainedModel,
    token_ids: Tensor,
    trunk: Tensor,
    hidden: Tensor,
    *,
    guessing: Tensor,
    packing: Mapping[str, Any],
) -> GuessScores:
    """Score the head's guesses by the model's own predictions of the same tokens.

    The gradient reaches the head alone: trunk, embedding and output layer are detached.

    Args:
        model: with one head.
        token_ids: [B, T]
        trunk: hidden states before the final norm. [B, T, H]
        hidden: hidden states behind it. [B, T, H]
        guessing: positions t of the flattened rows at which the head guesses token t + 2, which
            the model predicts at t + 1.
        packing: positions and segments of packed rows; empty if rows are padded.
    """
    [head] = find_heads(model)
    device = token_ids.device
    positions = packing.get("position_ids")
    if positions is None:
        positions = torch.arange(token_ids.shape[1], device=device)[None].expand_as(token_ids)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(token_ids.roll(-1, dims=1))
        rotary = model.base_model.rotary_emb(trunk, positions)
    with torch.autocast(device.type, torch.bfloat16, enabled=is_gpu(device)):
        states = head(
            trunk,
            embedded,
            positions,
            attention_mask=None,
            position_embeddings=rotary,
            **{name: value for name, value in packing.items() if name != "position_ids"},
        )
    output = model.get_output_embeddings()
    return score_guesses(
        states.flatten(0, 1).index_select(0, guessing),
        hidden.detach().flatten(0, 1).index_select(0, guessing + 1),
        weight=output.weight,
        bias=output.bias,
    )
