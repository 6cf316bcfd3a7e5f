"""The policy as a torch module: loading, random initialisation, log-probs of given tokens.

Shapes: B rows of a microbatch, T their padded length, N tokens to predict, V vocabulary.
"""

import logging
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from typing_extensions import override

from etude.common.api.run.roles import Lora
from etude.common.blobs import Store, open_store
from etude.common.errors import CorruptError, InvalidFieldError, Problem, UserError, WrongStateError
from etude.trainer.model import packed_attention
from etude.trainer.model.compute_device import is_gpu
from etude.trainer.model.context_parallel import UNDIVIDED, ContextGroup
from etude.trainer.model.experts.expert_parallel import check_experts
from etude.trainer.model.experts.router_replay import RouterReplay
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.logit_probe import backbone, find_logit_transform
from etude.trainer.model.lora import EarlierPolicy, create_adapters, reset_adapters
from etude.trainer.model.mtp import heads
from etude.trainer.model.output_head import UNCHANGED, LogitTransform, TokenScores, score_tokens
from etude.trainer.model.parameters import local_shard
from etude.trainer.model.sharded_load import (
    LoadPlan,
    ScatteredLayoutError,
    allocate,
    build_blank_model,
    fill,
    move_buffers,
    plan_load,
    restore_buffers,
)
from etude.trainer.model.weight_files import find_weights

log = logging.getLogger(__name__)


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

    def __init__(
        self,
        model: PreTrainedModel,
        transform: LogitTransform = UNCHANGED,
        context: ContextGroup = UNDIVIDED,
        lora: Lora | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: of transformers.
            transform: of its logits.
            context: ranks that share packed rows.
            lora: adapters that are trained instead of the model's weights.
        """
        super().__init__()
        self.model = model
        self.transform = transform
        self.context = context
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
            # The attention of torch leaves the cap out; ours has it, for padded rows, too.
            model.set_attn_implementation(packed_attention.IMPLEMENTATION)
        self.lora = lora
        self.adapters = create_adapters(model, lora)
        """Of the model's layers; if there are any, they alone are trained."""
        self.routers = RouterReplay(model, model.config.get_text_config())

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    @override
    def forward(
        self,
        token_ids: Tensor,
        rows: Tensor,
        places: Tensor,
        lengths: tuple[int, ...] = (),
        guessing: Tensor | None = None,
    ) -> TokenScores:
        """Score the tokens at (rows, places), each given those before it.

        Rows are padded on the right, so causal attention needs no mask: no real token sees a
        padded one, and no padded one is asked for. A packed row has several sequences, each with
        positions and attention of its own; ranks of a context group compute a part of it each.

        Args:
            token_ids: [B, T]
            rows: row of each token to predict. [N]
            places: its place in the row, not the first of its sequence, and behind a token of this
                rank. [N]
            lengths: of the sequences in a packed row, of which there is one. [S]
            guessing: positions of the flattened rows at which the head of multi-token prediction
                guesses; nothing is guessed unless given.
        """
        packing = self._pack(lengths, token_ids.device) if lengths else {}
        own = self.context.own_tokens(token_ids.shape[1])
        # On a GPU the blocks compute in bf16; sums of the output layer and the losses are in fp32.
        device = token_ids.device
        with (
            torch.autocast(device.type, torch.bfloat16, enabled=is_gpu(device)),
            heads.capture_trunk(self.model) as trunk,
        ):
            output = backbone(self.model)(input_ids=token_ids[:, own], use_cache=False, **packing)
        if lengths:
            self._check_packed(packing["segments"])
        hidden = output.last_hidden_state
        before = rows * hidden.shape[1] + places - 1 - own.start
        head = self.model.get_output_embeddings()
        scores = score_tokens(
            hidden.flatten(0, 1).index_select(0, before),
            token_ids[rows, places],
            # Of the root module, whose hook has made it complete on every rank.
            weight=head.weight,
            bias=head.bias,
            transform=self.transform,
        )
        guess = partial(heads.guess_tokens, self.model, token_ids, packing=packing)
        guesses = None if guessing is None else guess(trunk[0], hidden, guessing=guessing)
        # FSDP2 hooks into what a module returns, and a view could lose the hook.
        return TokenScores(scores.logprobs.clone(), scores.entropy, guesses)

    def replay_routes(self, routes: Tensor | None) -> None:
        """Take the experts of recorded ids in the passes from now on.

        Args:
            routes: ids of all tokens of the rows; None for those of the live routers. [B, T, M, k]
        """
        if routes is not None:
            routes = routes[:, self.context.own_tokens(routes.shape[1])]
        self.routers.replay(routes)

    def _pack(self, lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
        """Arguments by which the model's layers attend within each sequence of a row."""
        if self.config._attn_implementation != packed_attention.IMPLEMENTATION:
            # For good: a checkpointed block computes its forward pass again during the backward.
            self.model.set_attn_implementation(packed_attention.IMPLEMENTATION)
        segments = packed_attention.Segments(lengths, device=device, context=self.context)
        return {"position_ids": segments.positions(), "segments": segments}

    def _check_packed(self, segments: packed_attention.Segments) -> None:
        """Refuse a model whose layers did not all attend by the segments.

        Raises:
            WrongStateError: tokens may have seen those of other sequences; nothing was changed.
        """
        num_layers = self.config.get_text_config().num_hidden_layers
        if len(segments.layers) != num_layers:
            raise WrongStateError(
                f"{len(segments.layers)} of {num_layers} layers of {type(self.model).__name__}"
                " attend within packed sequences: set roles.trainer.packing: Padded"
            )


def _refuse_pickles(store: Store, folder: Path) -> None:
    if any(info.key.endswith(".bin") and "/" not in info.key for info in store.list("")):
        # Drawing weights beside them would be a silent mistake, reading them runs their code.
        raise InvalidModelError(folder, "holds pickled weights; convert them to safetensors")


def _find_transform(config: PretrainedConfig, folder: Path) -> LogitTransform:
    try:
        return find_logit_transform(config)
    except ValueError as cause:
        raise InvalidModelError(folder, str(cause)) from cause


def load_policy(
    folder: Path,
    *,
    seed: int,
    ranks: RankGroup | None = None,
    weights: Store | None = None,
    lora: Lora | None = None,
) -> Policy:
    """Load the model of a Hugging Face folder in fp32; without weight files, draw it at random.

    Each rank reads its own shards; a drawn model is complete on each until then. Collective.

    Args:
        folder: local, with config.json.
        seed: of weights and adapters that are drawn.
        ranks: that share the weights; one alone on the CPU unless given.
        weights: store with the weight files; the folder unless given.
        lora: adapters that are trained instead of the weights.

    Raises:
        InvalidFieldError: the ranks cannot divide its experts as they are to.
        InvalidModelError: the folder holds no model, or one of an unsupported kind.
        StoreError: the store failed.
        UserError: the model has not the layers that adapters are to change.
    """
    config = read_config(folder)
    ranks = ranks or RankGroup(rank=0, size=1, device=torch.device("cpu"))
    check_experts(config, ranks.experts.size)
    store = weights or open_store(folder.resolve().as_uri())
    _refuse_pickles(store, folder)
    transform = _find_transform(config, folder)
    wrap = partial(Policy, transform=transform, context=ranks.context, lora=lora)
    try:
        stored = find_weights(store)
        # Without dropout: trainer and sampler must say the same.
        if stored is None:
            return _shard_complete(wrap(_draw_model(config, seed=seed).eval()), ranks, seed=seed)
        policy = wrap(build_blank_model(config).eval())
        try:
            plan = plan_load(policy.model, stored)
        except ScatteredLayoutError as error:
            if weights is not None:
                raise InvalidModelError(folder, str(error)) from error
            log.warning("every rank loads the complete model: %s", error)
            return _shard_complete(wrap(_load_complete(folder, config).eval()), ranks, seed=seed)
        return _load_shards(policy, plan, store, ranks, seed=seed)
    except InvalidFieldError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, CorruptError) as cause:
        raise InvalidModelError(folder, f"the model cannot be loaded: {cause}") from cause


def _load_shards(
    policy: Policy, plan: LoadPlan, store: Store, ranks: RankGroup, *, seed: int
) -> Policy:
    ranks.shard(policy)
    allocate(policy, ranks)
    fill(policy.model, plan, store)
    restore_buffers(policy.model)
    reset_adapters(policy.adapters, seed=seed)
    return policy


def copy_frozen(policy: Policy, ranks: RankGroup) -> nn.Module:
    """Copy a policy without gradients, sharded alike: each rank copies its own shards.

    Of one with adapters only these are copied, as the weights follow from them.
    """
    if policy.lora is not None:
        return EarlierPolicy(policy)
    config = deepcopy(policy.config)  # a phase may change positions of one before the other's
    copy = Policy(build_blank_model(config).eval(), policy.transform, policy.context)
    ranks.shard(copy)
    allocate(copy, ranks)
    with torch.no_grad():
        for named in (nn.Module.named_parameters, nn.Module.named_buffers):
            own = dict(named(policy))
            for name, tensor in named(copy):
                local_shard(tensor).copy_(local_shard(own[name]))
    return copy.requires_grad_(requires_grad=False)


def _shard_complete(policy: Policy, ranks: RankGroup, *, seed: int) -> Policy:
    ranks.shard(policy)
    if ranks.offload:
        move_buffers(policy, ranks.device)
    else:
        policy.to(ranks.device)
    reset_adapters(policy.adapters, seed=seed)
    return policy


def _load_complete(folder: Path, config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="sdpa",
        local_files_only=True,
    )
    return model


def _draw_model(config: PretrainedConfig, *, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
        heads.attach_heads(model)
        heads.start_heads(model)
    return model


def read_config(folder: Path) -> PretrainedConfig:
    """Read the configuration of a model folder.

    Raises:
        InvalidModelError: there is none, or none of a causal language model.
    """
    if not (folder / "config.json").is_file():
        raise InvalidModelError(folder, "holds no config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as cause:
        raise InvalidModelError(folder, f"config.json cannot be used: {cause}") from cause
    try:
        heads.num_heads(config)
    except ValueError as cause:
        raise InvalidModelError(folder, str(cause)) from cause
    return config
