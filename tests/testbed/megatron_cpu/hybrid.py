"""Hybrid models (Nemotron-H) without mamba_ssm: every parameter of a production model, but no forward pass.

megatron-core's own `MambaMixer` makes the parameters. It refuses to be built without mamba_ssm, which it needs for
one class with a parameter, the gated norm, and otherwise for kernels that only a forward pass calls.
"""

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm import mamba_block, mamba_mixer
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from transformers import AutoConfig, PretrainedConfig

from testbed.megatron_cpu.layers import (
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
    attention_spec,
    dense_spec,
    experts_spec,
)


class ExtendedRMSNorm(torch.nn.Module):
    """The mixer's gated norm under its production name: parameter `weight` of shape [local inner size]."""

    def __init__(self, hidden_size: int, *, device: object = None, dtype: torch.dtype | None = None, **_: object):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))


class NemotronHConfig(PretrainedConfig):
    """transformers 4 has no Nemotron-H; its checkpoints bring a class of this name along.

    `auto_map` is what such a class has, and what makes the Bridge look an architecture up by its name.
    """

    model_type = "nemotron_h"
    auto_map = {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}  # noqa: RUF012


def apply() -> None:
    """Let transformers read Nemotron-H configurations and megatron-core build Mamba layers."""
    AutoConfig.register(NemotronHConfig.model_type, NemotronHConfig, exist_ok=True)
    mamba_block.TENorm = TENorm  # not part of the specification of a stack
    if not mamba_mixer.HAVE_MAMBA_SSM:
        mamba_mixer.HAVE_MAMBA_SSM = True
        mamba_mixer.ExtendedRMSNorm = ExtendedRMSNorm


def stack_spec(config: TransformerConfig) -> ModuleSpec:
    """The layers of a hybrid decoder: `mamba_stack_spec` for a model provider."""
    mixer = ModuleSpec(
        module=MambaMixer,
        submodules=MambaMixerSubmodules(in_proj=TELayerNormColumnParallelLinear, out_proj=TERowParallelLinear),
    )
    return ModuleSpec(
        module=MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=get_bias_dropout_add),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    self_attention=attention_spec(config), self_attn_bda=get_bias_dropout_add
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(mlp=dense_spec(), mlp_bda=get_bias_dropout_add),
            ),
            moe_layer=ModuleSpec(
                module=MoETransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=TENorm, mlp=experts_spec(), mlp_bda=get_bias_dropout_add
                ),
            ),
        ),
    )
