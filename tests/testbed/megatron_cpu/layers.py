"""Layers in plain torch with Transformer Engine's class names and parameter names.

The Bridge finds a parameter's mapping by its name and, in automatic mappings, by the class name of its
module: `linear_qkv.layer_norm_weight`, `experts.linear_fc1.weight0`, `TERowParallelGroupedLinear` and so on.
With these layers a model on the CPU has exactly the parameters, and the mappings, of a production one.
"""

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm in FP32, back in the input's dtype."""
    normal = torch.nn.functional.rms_norm(hidden.float(), hidden.shape[-1:], weight.float(), epsilon)
    return normal.to(hidden.dtype)


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    # Each rank sees only its part of the sequence; this mark makes megatron-core add up the gradients.
    weight.sequence_parallel = config.sequence_parallel
    return weight


class TENorm(torch.nn.Module):
    """RMSNorm: parameter `weight` of shape [hidden_size]."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.config = config
        self.epsilon = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self.weight, self.epsilon)


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear layer: parameters `layer_norm_weight` and `weight`."""

    def __init__(self, input_size: int, output_size: int, **kwargs: object) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.layer_norm_weight = _norm_weight(self.config, input_size)

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object):
        normal = rms_norm(hidden, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normal, *args, **kwargs)


class TEColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear layer under its production name."""


class TERowParallelLinear(RowParallelLinear):
    """A row-parallel linear layer under its production name."""


class _GroupedLinear(torch.nn.Module):
    """One linear layer for each local expert: parameters `weight0`, `weight1`, ..., sharded along `dim`."""

    dim: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method,
        bias: bool,
        pg_collection,
        **_: object,
    ) -> None:
        super().__init__()
        if bias:
            raise NotImplementedError("the stand-in for grouped linear layers has no bias")
        self.config = config
        shape = [output_size, input_size]
        shape[self.dim] //= pg_collection.expt_tp.size()
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            with torch.no_grad():
                init_method(weight)
            set_tensor_model_parallel_attributes(weight, True, self.dim, 1)
            weight.allreduce = pg_collection.ep.size() == 1
            self.register_parameter(f"weight{number}", weight)

    def forward(self, hidden: torch.Tensor, tokens_per_expert: list[int]):
        parts = torch.split(hidden, list(tokens_per_expert))
        weights = self.parameters()
        results = [torch.nn.functional.linear(part, weight) for part, weight in zip(parts, weights, strict=True)]
        return torch.cat(results), None


class TEColumnParallelGroupedLinear(_GroupedLinear):
    """Experts' first layers, sharded along the output."""

    dim = 0


class TERowParallelGroupedLinear(_GroupedLinear):
    """Experts' second layers, sharded along the input."""

    dim = 1


def attention_spec(config: TransformerConfig) -> ModuleSpec:
    """Causal self-attention, with norms for each head where the model has them."""
    head_norm = TENorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=TELayerNormColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=TERowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def dense_spec() -> ModuleSpec:
    """A dense MLP, with the layer's norm inside."""
    linear = MLPSubmodules(linear_fc1=TELayerNormColumnParallelLinear, linear_fc2=TERowParallelLinear)
    return ModuleSpec(module=MLP, submodules=linear)


def experts_spec() -> ModuleSpec:
    """A mixture of experts, with shared experts where the configuration gives them a size; the norm is outside."""
    grouped = MLPSubmodules(linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear)
    shared = MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=TEGroupedMLP, submodules=grouped),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
        ),
    )


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of a decoder: `transformer_layer_spec` for a model provider."""
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention_spec(config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=TENorm if config.num_moe_experts else IdentityOp,
            mlp=experts_spec() if config.num_moe_experts else dense_spec(),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    layers = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=TENorm)
