"""dcr's vLLM plugin: weight-transfer backend "dcr" patches running workers in place, bit for bit.

Start a server with `--weight-transfer-config '{"backend": "dcr"}'` and `DCR_RELAY` set; nothing else is needed.
"""

BACKEND = "dcr"


def register() -> None:
    """Entry point of `vllm.general_plugins`: vLLM calls it in every process, also more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from dcr_vllm.loader_layout import keep_loader_layout

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "dcr_vllm.engine", "DcrWeightTransferEngine")
    keep_loader_layout()
