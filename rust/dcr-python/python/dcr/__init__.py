"""dcr: delta-compressed refit of vLLM servers from a Megatron trainer."""
