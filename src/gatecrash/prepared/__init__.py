"""Copies of networks made ready for speed, used in their place while they have the same weights."""

from gatecrash.preparation import Preparation, preparing
from gatecrash.prepared.make import Unfit, prepare
from gatecrash.prepared.network import PreparedNetwork
from gatecrash.prepared.run import facts, run

__all__ = ["Preparation", "PreparedNetwork", "Unfit", "facts", "prepare", "preparing", "run"]
