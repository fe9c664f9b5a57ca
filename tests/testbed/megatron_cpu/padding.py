"""A vocabulary that Megatron pads, which Megatron Bridge 0.3.1 cannot load by itself."""

from collections.abc import Mapping

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.model_provider import ModelProviderMixin
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size

EMBEDDINGS = frozenset(("model.embed_tokens.weight", "lm_head.weight", "backbone.embeddings.weight"))


def pad_vocabulary(bridge: AutoBridge, provider: ModelProviderMixin, multiple: int) -> None:
    """Have `provider` pad its vocabulary to a multiple of `multiple` times TP, and load the checkpoint padded.

    The Bridge compares a padded parameter's shape with that of the checkpoint's tensor and gives up, and at
    TP > 1 scatters pieces of the wrong size. So rows of zeros are added to what it reads.
    """
    provider.should_pad_vocab = True
    provider.make_vocab_size_divisible_by = multiple
    provider.perform_initialization = False
    loader = bridge._model_bridge
    read = loader.maybe_modify_loaded_hf_weight

    def read_padded(hf_param: str | dict[str, str], state: Mapping[str, torch.Tensor]):
        weight = read(hf_param, state)
        if not isinstance(hf_param, str) or hf_param not in EMBEDDINGS:
            return weight
        # Here, not outside: the parallel sizes are set only after this function.
        size = calculate_padded_vocab_size(provider.vocab_size, multiple, provider.tensor_model_parallel_size)
        return torch.cat([weight, weight.new_zeros(size - len(weight), *weight.shape[1:])])

    loader.maybe_modify_loaded_hf_weight = read_padded
    provider.register_pre_wrap_hook(lambda model: loader.load_weights_hf_to_megatron(bridge.hf_pretrained, model))
