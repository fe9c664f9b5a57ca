"""dcr's vLLM plugin: weight-transfer backend "dcr" patches running workers in place, bit for bit.

Start a server with `--weight-transfer-config '{"backend": "dcr"}'` and `DCR_RELAY` set; nothing else is needed.
"""

import logging

BACKEND = "dcr"


def register() -> None:
    """Entry point of `vllm.general_plugins`: vLLM calls it in every process, also more than once.

    It does not raise: that would end vLLM for those who only have dcr installed. Where it could not register, vLLM
    itself refuses `--weight-transfer-config '{"backend": "dcr"}'`.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        from dcr_vllm.loader_layout import keep_loader_layout

        if BACKEND not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(BACKEND, "dcr_vllm.engine", "DcrWeightTransferEngine")
        keep_loader_layout()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        logging.getLogger("vllm.dcr").error("dcr: this vLLM does not take its weight-transfer backend: %s", reason)
