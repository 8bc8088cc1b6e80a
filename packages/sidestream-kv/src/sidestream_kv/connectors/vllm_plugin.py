"""Makes Sidestream's names known to vLLM, in each of its processes: vLLM finds this plugin by the entry point
`vllm.general_plugins` of this package.
"""

from __future__ import annotations

import contextlib
import logging

_log = logging.getLogger(__name__)

TIER, TIER_CONNECTOR, CONNECTOR = "sidestream", "SidestreamOffloadingConnector", "SidestreamConnector"


def register() -> None:
    """Register the secondary tier "sidestream" and its connector. Imports no more than vLLM's registries. May be called
    several times.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as error:  # a vLLM that has no tiers must start as it would without this package
        _log.info("this vLLM has no tiered KV offload, so Sidestream's tier is not registered: %s", error)
        return
    with contextlib.suppress(ValueError):  # registered already
        SecondaryTierFactory.register_tier(TIER, "sidestream_kv.connectors.vllm_tier", "SidestreamTier")
        KVConnectorFactory.register_connector(TIER_CONNECTOR, "sidestream_kv.connectors.vllm_connector", TIER_CONNECTOR)
        KVConnectorFactory.register_connector(CONNECTOR, "sidestream_kv.connectors.vllm", CONNECTOR)
    log = logging.getLogger("sidestream_kv")
    if not log.handlers:  # vLLM shows only its own INFO lines, and configures its log after its plugins
        log.addHandler(_ToVllmsLog())
        log.setLevel(logging.INFO)
        log.propagate = False


class _ToVllmsLog(logging.Handler):
    """Lets vLLM's own handlers and level decide on our lines."""

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        theirs = logging.getLogger("vllm")
        if theirs.isEnabledFor(record.levelno):
            theirs.handle(record)
