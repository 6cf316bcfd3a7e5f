"""Positions of a model: the rotary embedding that a phase's context extension asks for."""

import copy

import torch
from transformers import PretrainedConfig, PreTrainedModel

from etude.common.api.run.context_extension import ContextExtension, extend_rope


def set_positions(
    model: PreTrainedModel, source: PretrainedConfig, extension: ContextExtension | None
) -> None:
    """Give a model the positions of an extension, or those of its folder without one.

    Its configuration, and with it every export and copy, says the same. Weights stay.

    Args:
        model: as it was loaded, or with the positions of another phase.
        source: configuration of the folder.
        extension: of the folder's positions.

    Raises:
        ValueError: the model's positions cannot be extended; nothing was changed.
    """
    config = model.config
    rope = copy.deepcopy(getattr(source, "rope_parameters", None))
    positions = getattr(source, "max_position_embeddings", None)
    if extension is not None:
        if not rope or positions is None or source.get_text_config() is not source:
            raise ValueError(f"{source.model_type} has no RoPE that could be changed")
        rope = extend_rope(rope, extension, positions=positions)
        positions = extension.positions
    known = [getattr(config, name, None) for name in ("rope_parameters", "max_position_embeddings")]
    if [rope, positions] == known:
        return
    config.rope_parameters, config.max_position_embeddings = rope, positions
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if "inv_freq" in module._buffers:
            # Type and scale of RoPE are attributes: only the constructor sets all of them.
            with torch.device(module.inv_freq.device):
                fresh = type(module)(config)
            model.set_submodule(name, fresh.train(module.training))
