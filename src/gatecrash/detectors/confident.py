"""The score of a classifier that was trained beside a GAN whose images it must not be sure of."""

from __future__ import annotations

from gatecrash.detectors.base import Card, register
from gatecrash.detectors.logits import MSP


@register("confident")
class Confident(MSP):
    """Maximum softmax probability of a confident classifier: τ = −max_k softmax(z)_k (Liang et al., App. G).

    The network is one that `harden` trained with the method `confident`; there is nothing to fit.
    """

    card = Card(paper="Lee et al., ICLR 2018", year=2018, reads="logits")
