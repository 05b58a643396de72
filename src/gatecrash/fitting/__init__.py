"""The one fit loop: what trains a network, whatever it learns."""

from gatecrash.fitting.checkpoint import History
from gatecrash.fitting.devices import disband, make_fabric, several
from gatecrash.fitting.loop import fit
from gatecrash.fitting.material import Material
from gatecrash.fitting.recipe import Recipe
from gatecrash.fitting.seeds import generator_of, seed_of, seeded
from gatecrash.fitting.step import Batch, Outcome, Stateless, Step

__all__ = [
    "Batch",
    "History",
    "Material",
    "Outcome",
    "Recipe",
    "Stateless",
    "Step",
    "disband",
    "fit",
    "generator_of",
    "make_fabric",
    "seed_of",
    "seeded",
    "several",
]
