"""The weight-transfer engine that vLLM makes for backend "dcr" in every worker."""

from __future__ import annotations

import logging
import math
import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from dcr_vllm.prewarm import one_line
from dcr_vllm.receiver import ReceiverThread

logger = logging.getLogger("vllm.dcr")


@dataclass
class DcrInitInfo(WeightTransferInitInfo):
    """What `init_transfer_engine` takes: the relay's address when `DCR_RELAY` is not set."""

    relay: str | None = None


@dataclass
class DcrUpdateInfo(WeightTransferUpdateInfo):
    """Updates arrive through the relay; vLLM's own update call has nothing to add."""


class DcrWeightTransferEngine(WeightTransferEngine[DcrInitInfo, DcrUpdateInfo]):
    """Starts a receiver in the worker; refits then come through the relay, driven by dcr's coordinator.

    Nothing here raises: a worker that raises makes vLLM's executor lose step with its other ranks.
    """

    init_info_cls = DcrInitInfo
    update_info_cls = DcrUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.receiver: ReceiverThread | None = None
        if os.environ.get("DCR_RELAY"):
            self._start(None)
        else:
            logger.warning("dcr: DCR_RELAY is not set: waiting for init_weight_transfer_engine with a relay")

    @property
    def name(self) -> str:
        """This receiver's name: host, process and parallel rank make it unique."""
        parallel = self.parallel_config
        replica = getattr(parallel, "data_parallel_rank", 0) or 0
        return f"receiver/{socket.gethostname()[:64]}-{os.getpid()}/dp{replica}-rank{parallel.rank}"

    @property
    def shards(self) -> int:
        """The largest number of ranks among which the loader may divide one tensor: experts may be divided among the
        ranks of all replicas, everything else among those of one."""
        parallel = self.parallel_config
        sizes = ("tensor_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
        return math.prod(getattr(parallel, size, 1) or 1 for size in sizes)

    def parse_init_info(self, init_dict: dict[str, Any]) -> DcrInitInfo:
        """Takes the relay's address; ignores what it does not know."""
        relay = init_dict.get("relay") if isinstance(init_dict, dict) else None
        return DcrInitInfo(relay=relay if isinstance(relay, str) else None)

    def init_transfer_engine(self, init_info: DcrInitInfo) -> None:
        """Starts the receiver, if the environment has not done so already."""
        if self.receiver is None:
            self._start(init_info.relay)

    def start_weight_update(self) -> None:
        """Nothing to do: attempts begin with the coordinator's prepare."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Nothing to do: payloads come through the relay."""

    def receive_weights(self, update_info: DcrUpdateInfo) -> None:
        """Nothing to do: payloads come through the relay."""

    def finish_weight_update(self) -> None:
        """Nothing to do: attempts end with the coordinator's commit."""

    def shutdown(self) -> None:
        """Closes the receiver."""
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            try:
                receiver.close()
            except Exception as error:
                logger.warning("dcr: closing %s: %s", receiver.name, one_line(error))

    def _start(self, relay: str | None) -> None:
        try:
            self.receiver = ReceiverThread(self.model, self.name, relay, shards=self.shards)
            logger.info("dcr: %s started", self.name)
        except Exception as error:
            logger.error("dcr: no receiver in this worker, refits will wait for it in vain: %s", one_line(error))
