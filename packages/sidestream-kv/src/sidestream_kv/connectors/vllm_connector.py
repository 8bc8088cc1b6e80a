"""vLLM's OffloadingConnector, which also lets its tiers know the engine's configuration.

A tier of vLLM 0.32 is told the name of the model, but neither its revision nor `--hf-overrides`. A connector is told
all, and vLLM has a public function for the current configuration.
"""

from __future__ import annotations

from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector


class SidestreamOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """OffloadingConnector with the current configuration set while it makes its tiers."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """See OffloadingConnector."""
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)
