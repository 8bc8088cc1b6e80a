"""HOW BYTES MOVE between the device and the tiers."""

from sidestream.transfer.costs import CostModel
from sidestream.transfer.engine import LoadFailed, LoadReady, TransferEngine, TransferEvent
from sidestream.transfer.messages import Promoted, StoreAgain

__all__ = ["CostModel", "LoadFailed", "LoadReady", "Promoted", "StoreAgain", "TransferEngine", "TransferEvent"]
