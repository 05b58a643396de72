"""Randomised detectors by their expectation: scores and gradients averaged over draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gatecrash.attacks.score import require_fitted
from gatecrash.protocols import Detector, Latent, leaves


class Expected:
    """A randomised detector as the mean of its scores over several draws (expectation over transformation).

    Every evaluation draws anew, so that an attack cannot fit the noise of one draw; the sequence of draws follows from
    the seed. The detector may draw from torch's global random numbers, in `encode` or in `judge`: they are seeded for
    the time of an evaluation and put back, on CPU and CUDA. The gradient of the mean is the mean of the gradients, and
    the memory is that of `draws` passes.

    The best of many noisy values looks better than it is: judge what an attack found by a fresh `Expected`.

    Args:
        detector: any detector; one without randomness gives the same mean for any number of draws.
        draws: how many draws the mean is over, to be reported with the result.
        seed: where the draws begin.

    Raises:
        ValueError: there is no draw.
    """

    def __init__(self, detector: Detector, draws: int = 16, seed: int = 0) -> None:
        if draws < 1:
            raise ValueError(f"draws must be at least 1, got {draws}")
        self.detector, self.draws, self.seed = detector, draws, seed
        self._source = torch.Generator().manual_seed(seed)

    def encode(self, x: Tensor) -> Latent:
        """The latents of all draws, a tuple."""
        with self._drawing(x.device):
            return tuple(self.detector.encode(x) for _ in range(self.draws))

    def judge(self, z: Latent) -> Tensor:
        """The mean score over the draws, (B,)."""
        with self._drawing(leaves(z)[0].device):
            return torch.stack([self.detector.judge(part) for part in z]).mean(dim=0)

    def __call__(self, x: Tensor) -> Tensor:
        """The mean score of every image, (B,)."""
        return self.judge(self.encode(x))

    def require_fitted(self) -> None:
        """Raises a ValueError when the detector knows that it is not fitted."""
        require_fitted(self.detector)

    @contextmanager
    def _drawing(self, device: torch.device) -> Iterator[None]:
        """Global random numbers that follow from the seed, other ones every time, and put back afterwards."""
        seed = int(torch.randint(2**62, (), generator=self._source))
        cuda = [device.index] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in cuda)):
                generator.manual_seed(seed)
            yield
