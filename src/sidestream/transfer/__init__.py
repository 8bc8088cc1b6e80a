"""HOW BYTES MOVE between the device and the tiers."""

from sidestream.transfer.engine import LoadFailed, Promoted, TransferEngine, TransferEvent
from sidestream.transfer.pacing import CostModel

__all__ = ["CostModel", "LoadFailed", "Promoted", "TransferEngine", "TransferEvent"]
