"""An attack that follows one thing while its points are ranked by the score."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gatecrash.protocols import Detector, Latent
from gatecrash.speed import Pace, current_pace
from gatecrash.stepper import choose


class Ranked:
    """An objective that is followed, while the points it passes are ranked by the detector's own score.

    `value` and `x` hold the best score (smaller is better for the attacker) and its point for every row. Scores of two
    paces are never compared: at a change of pace the points held are scored again.
    """

    def __init__(
        self, detector: Detector, sign: float, follow: Callable[[Latent, Tensor], Tensor], start: Tensor
    ) -> None:
        self.detector, self.sign, self.follow = detector, sign, follow
        self.x = start.clone()
        self.value = torch.full((len(start),), torch.inf, dtype=start.dtype, device=start.device)
        self.pace: Pace = "plain"
        self.rough = False
        """Whether `value` is of a pace in which a network is another, if only by rounding."""

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """The followed value, (B,)."""
        if current_pace() != self.pace:
            self._change_pace(rows)
        z = self.detector.encode(x)
        score = (self.sign * self.detector.judge(z)).detach().to(self.value.dtype)
        better = score < self.value[rows]
        self.value[rows] = torch.where(better, score, self.value[rows])
        self.x[rows] = choose(better, x.detach(), self.x[rows])
        return self.follow(z, rows)

    def _change_pace(self, rows: Tensor) -> None:
        """Score the points held again, where there are some."""
        self.pace, self.rough = current_pace(), True
        with torch.no_grad():
            score = (self.sign * self.detector.judge(self.detector.encode(self.x[rows]))).to(self.value.dtype)
        self.value[rows] = torch.where(self.value[rows].isinf(), self.value[rows], score)
