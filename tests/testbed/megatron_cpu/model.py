"""Build a model from a Hugging Face checkpoint through Megatron Bridge."""

import contextlib
import hashlib
import logging
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.models.mamba.mamba_provider import MambaModelProvider
from megatron.bridge.models.model_provider import ModelProviderMixin
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.enums import AttnBackend

from testbed.megatron_cpu import hybrid, padding
from testbed.megatron_cpu.layers import block_spec

# Fusions and overlaps of providers that need CUDA or Transformer Engine.
NOT_ON_CPU = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_permute_fusion",
    "moe_shared_expert_overlap",
    "persist_layer_norm",
)


def initialize(
    tensor_parallel: int, pipeline_parallel: int = 1, expert_parallel: int = 1, patience_s: float = 1800.0
) -> None:
    """Join the gloo process group that the environment names, and lay Megatron's groups over it.

    A collective fails when a rank keeps the others waiting for longer than `patience_s`.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience_s))
    initialize_groups(tensor_parallel, pipeline_parallel, expert_parallel)


def initialize_groups(
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int | None = None,
) -> None:
    """Lay Megatron's groups over a process group that is there already, in place of those of a model before.

    `expert_tensor_parallel` is `tensor_parallel` where it is not given, as in Megatron.
    """
    # Each matrix here is tiny, and results must not depend on how many cores a machine has.
    torch.set_num_threads(1)
    # The Bridge tells each conversion at INFO, and megatron-core warns of everything that this machine lacks.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if parallel_state.model_parallel_is_initialized():
        _destroy_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=expert_tensor_parallel,
    )


def _destroy_groups() -> None:
    # Megatron forgets its groups but leaves most of them open, with threads and connections each.
    groups = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            with contextlib.suppress(ValueError):  # one that Megatron has closed itself
                dist.destroy_process_group(group)


def build(
    checkpoint: str | Path, *, vocabulary_multiple: int | None = None
) -> tuple[AutoBridge, list[torch.nn.Module]]:
    """The Bridge of a checkpoint, and its model with BF16 parameters, loaded and ready for training.

    The model is a list of one `DistributedDataParallel` module, as Megatron's training loop has it. With
    `vocabulary_multiple`, embedding and head are padded with rows of zeros to a multiple of that times TP.
    """
    hybrid.apply()
    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    provider = bridge.to_megatron_provider(load_weights=vocabulary_multiple is None)
    if vocabulary_multiple is not None:
        padding.pad_vocabulary(bridge, provider, vocabulary_multiple)
    _lay_out(provider)
    provider.params_dtype = provider.pipeline_dtype = torch.bfloat16
    provider.bf16 = True
    for setting in NOT_ON_CPU:
        setattr(provider, setting, False)
    provider.moe_token_dispatcher_type = "allgather"  # "alltoall" makes a CUDA stream
    if isinstance(provider, MambaModelProvider):
        provider.mamba_stack_spec = hybrid.stack_spec
    else:
        provider.transformer_layer_spec = block_spec
    # Each kind of provider has its own default, and megatron-core writes it into the environment for good.
    provider.attention_backend = AttnBackend.auto
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    return bridge, [DistributedDataParallel(provider, ddp_config, model)]


def _lay_out(provider: ModelProviderMixin) -> None:
    """Give a provider the parallel sizes of Megatron's groups."""
    provider.tensor_model_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    provider.pipeline_model_parallel_size = parallel_state.get_pipeline_model_parallel_world_size()
    provider.expert_model_parallel_size = parallel_state.get_expert_model_parallel_world_size()
    provider.expert_tensor_parallel_size = parallel_state.get_expert_tensor_parallel_world_size()
    # Training a mixture of experts with tensor parallelism requires sequence parallelism.
    provider.sequence_parallel = provider.tensor_model_parallel_size > 1


def make_optimizer(model: list[torch.nn.Module], lr: float) -> MegatronOptimizer:
    """AdamW with FP32 master weights, as megatron-core's distributed optimizer."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(config, model)


def random_batch(vocabulary: int, batch: int, sequence: int, key: str) -> torch.Tensor:
    """Token numbers of shape [batch, sequence + 1] that depend on `key` alone; the same on every rank."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
    return torch.randint(vocabulary, (batch, sequence + 1), generator=torch.Generator().manual_seed(seed))


def train_step(
    model: list[torch.nn.Module], optimizer: MegatronOptimizer, tokens: torch.Tensor
) -> tuple[float, float, bool]:
    """One optimizer step on next-token prediction: loss, gradient norm, and whether it was not skipped."""
    (module,) = model
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    length = inputs.shape[1]
    positions = torch.arange(length).expand_as(inputs)
    masked = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    module.zero_grad_buffer()
    optimizer.zero_grad()
    loss = module(inputs, positions, masked, labels=labels).float().mean()
    loss.backward()
    finalize_model_grads(model)
    updated, grad_norm, _ = optimizer.step()
    return loss.item(), float(grad_norm), bool(updated)
