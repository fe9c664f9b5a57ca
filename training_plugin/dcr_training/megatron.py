"""Refits from Megatron Bridge's own training loop, through its training callbacks.

    from dcr_training.megatron import RefitCallback

    pretrain(config, forward_step, callbacks=[RefitCallback(bridge, RefitConfig.from_environment())])

The Bridge's configuration container has no room for other sections: read the configuration of refits from
wherever yours lives with `RefitConfig.from_mapping` or `RefitConfig.from_environment`.
"""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.training.callbacks import (
    Callback,
    CallbackContext,
    CallbackManager,
    normalize_callbacks,
)

from dcr_training.bridge import MegatronBridgeSource
from dcr_training.client import RefitClient
from dcr_training.config import RefitConfig
from dcr_training.report import RefitReport

REPORT = "dcr_refit_report"
"""Key of the last `RefitReport` in the callbacks' user state."""


class RefitCallback(Callback):
    """Refits the rollout servers after every optimizer step.

    `bridge` is the `AutoBridge` of the model in training. With `at_start`, the servers get the model's
    weights (a dense refit) before the first step.
    """

    def __init__(
        self, bridge: Any, config: RefitConfig | Mapping[str, Any] | None = None, *, at_start: bool = True
    ) -> None:
        if config is None:
            config = RefitConfig.from_environment()
        elif isinstance(config, Mapping):
            config = RefitConfig.from_mapping(config)
        self.config = config
        self.report: RefitReport | None = None
        """Of the last refit."""
        self._bridge = bridge
        self._at_start = at_start
        self._client: RefitClient | None = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Take the baseline and connect."""
        direct = self.config.direct_projection
        source = MegatronBridgeSource(self._bridge, context.model, direct_projection=direct)
        self._client = RefitClient(source, self.config)
        self._client.initialize()
        if self._at_start:
            self._refit(context)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Refit, unless the optimizer skipped the iteration: then nothing has changed."""
        if not context.skipped_iter:
            self._refit(context)

    def on_train_end(self, context: CallbackContext) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _refit(self, context: CallbackContext) -> None:
        self.report = context.user_state[REPORT] = self._client.refit()


def register(
    bridge: Any,
    config: RefitConfig | Mapping[str, Any] | None = None,
    callbacks: CallbackManager | list[Callback] | None = None,
) -> CallbackManager:
    """All callbacks for `pretrain(..., callbacks=register(bridge))`: those given, then the refit."""
    manager = normalize_callbacks(callbacks) or CallbackManager()
    manager.add(RefitCallback(bridge, config))
    return manager
