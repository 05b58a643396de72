"""Randomised detectors by their expectation: scores and gradients averaged over draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gatecrash.detectors.base import Card, Detector, build, register
from gatecrash.protocols import Latent, leaves


@register("expected")
class Expected(Detector):
    """A randomised detector as the mean of its scores over several draws (expectation over transformation).

    Every evaluation draws anew, so that an attack cannot fit the noise of one draw; the sequence of draws follows from
    the seed. The detector may draw from torch's global random numbers, in `encode` or in `judge`: they are seeded for
    the time of an evaluation and put back, on CPU and CUDA. The gradient of the mean is the mean of the gradients, and
    the memory is that of `draws` passes.

    The best of many noisy values looks better than it is: `worst_case` and `minimal` evaluate what they found anew, and
    what another attack found is for a fresh `Expected` to judge.

    Args:
        detector: any detector; one without randomness gives the same mean for any number of draws.
        draws: how many draws the mean is over, to be reported with the result.
        seed: where the draws begin.

    Raises:
        ValueError: there is no draw, or nothing to draw from.
    """

    card = Card(paper="Athalye et al., ICML 2018", year=2018, reads="scores")

    def __init__(self, detector: Detector, draws: int = 16, seed: int = 0) -> None:
        if not isinstance(detector, Detector):
            raise ValueError(f"Expected averages a detector over draws, got a {type(detector).__name__}")
        if not isinstance(draws, int) or draws < 1:
            raise ValueError(f"draws must be a whole number of at least 1, got {draws!r}")
        super().__init__(detector.encoder, draws=draws, seed=seed)
        self.detector, self.draws, self.seed = detector, draws, seed
        self.card = replace(detector.card, paper=type(self).card.paper, year=type(self).card.year)
        self._source = torch.Generator().manual_seed(seed)

    @property
    def detectors(self) -> list[Detector]:
        """The detector, once for every draw."""
        return [self.detector] * self.draws

    def to_fit(self) -> list[Detector]:
        """The detector, where it must be fitted."""
        return self.detector.to_fit()

    def require_fitted(self) -> None:
        """Raises a ValueError when the detector is not fitted."""
        self.detector.require_fitted()

    def encode(self, x: Tensor) -> Latent:
        """The latents of all draws, a tuple."""
        with self._drawing(x.device):
            return tuple(detector.encode(x) for detector in self.detectors)

    def judge(self, z: Latent) -> Tensor:
        """The mean score over the draws, (B,)."""
        with self._drawing(leaves(z)[0].device):
            return torch.stack([self.detector.judge(part) for part in z]).mean(dim=0)

    def logits_in(self, z: Latent) -> list[Tensor]:
        """The logits of every draw that the detector reads."""
        return [logits for part in z for logits in self.detector.logits_in(part)]

    @property
    def preprocesses(self) -> bool:
        """Whether the detector does."""
        return self.detector.preprocesses

    @property
    def spec(self) -> dict[str, Any]:
        """The draws and the detector's spec."""
        return {"name": self.name, "options": self.options, "members": [self.detector.spec]}

    @classmethod
    def rebuild(cls, spec: dict[str, Any], encoder: nn.Module | Sequence[nn.Module] | None) -> Detector:
        """The mean that `spec` describes; the encoders are those of the detector."""
        if len(spec.get("members", ())) != 1:
            raise ValueError("expected averages one detector over draws: its spec needs `members` with that one's spec")
        return cls(build(spec["members"][0], encoder), **spec["options"])

    @contextmanager
    def _drawing(self, device: torch.device) -> Iterator[None]:
        """Global random numbers that follow from the seed, other ones every time, and put back afterwards."""
        seed = int(torch.randint(2**62, (), generator=self._source))
        cuda = [device.index] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in cuda)):
                generator.manual_seed(seed)
            yield
