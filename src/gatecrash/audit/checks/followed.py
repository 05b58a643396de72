"""The check that what is attacked is what is deployed: along an attack's trajectory both go the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gatecrash.attacks.draws import apart
from gatecrash.audit.checks.evidence import Evidence, aims_at_score
from gatecrash.audit.checks.exact import redrawn, repeatable
from gatecrash.audit.checks.registry import Finding, check, per_detector
from gatecrash.objective import Entropy, LowerScore
from gatecrash.protocols import Objective
from gatecrash.search import search

FOLLOWED = 4
"""Images whose trajectory is followed."""

TRAJECTORY = 8
"""Steps of that trajectory at most."""

FOLLOWS = 0.9
"""The rank correlation with the objective from which the score counts as attacked."""

OTHER, ALIKE = 1e-3, 0.999
"""How far apart two scores are, as a share of their size, that are not the same, and the rank correlation over all
images and steps from which on one may stand for the other."""


@check("score_is_attacked", price=lambda e: sum(e.passes.values()) * 2 * FOLLOWED * (TRAJECTORY + 1), attack="own")
def score_is_attacked(evidence: Evidence) -> Finding:
    """Along the attack's trajectory the deployed score follows the objective, and an attack on the score is there."""
    on_score = any(aims_at_score(attack) for attack in evidence.job.attacks)
    by_softmax = not on_score and any(attack.name == "softmax" for attack in evidence.job.attacks)

    def look(title: str) -> Finding:
        detector = evidence.detector(title)
        objective: Objective = (
            Entropy(evidence.job.output) if by_softmax else lambda x, rows: LowerScore(redrawn(detector))(x, rows)
        )
        effort = evidence.effort(title)
        recorded = Recorded(objective, evidence.job.seed)
        few = evidence.outliers[: min(FOLLOWED, evidence.job.batch_size)]
        steps = min(effort.steps, TRAJECTORY)
        search(recorded, few, effort.ball, stepper=effort.stepper, steps=steps, generator=evidence.job.seed)

        def deployed(x: Tensor) -> Tensor:
            with repeatable(evidence.job.seed, x.device), torch.no_grad():
                score: Tensor = redrawn(detector)(x)
                return score

        ways = recorded.ways(deployed)
        follows = ways.follows
        if len(follows) == 0:
            return Finding("warn", f"{title}: the objective did not move in {steps} steps, so nothing could follow it")
        middle = float(follows.median())
        aim = "the softmax's entropy" if by_softmax else "its score"
        words = (
            f"{title}: the median rank correlation of what is attacked, {aim}, and its deployed score is {middle:.3f}"
        )
        if middle < FOLLOWS:
            return Finding("fail", f"{words} over {len(follows)} trajectories; another thing is attacked than deployed")
        alike = 1.0 if by_softmax or evidence.random(title) else agreement(evidence, title, ways)
        if alike < ALIKE:
            return Finding(
                "warn" if alike >= FOLLOWS else "fail",
                f"{title}: what is deployed, detector(x), is another number than judge(encode(x)), which attacks and "
                f"tables take, and ranks images otherwise: their rank correlation over all images and steps is "
                f"{alike:.3f}",
            )
        if not on_score:
            return Finding("warn", f"{words}, but no attack of the plan is on the score itself; add admit, side: both")
        return Finding("pass", f"{words} over {len(follows)} trajectories", -middle)

    return per_detector(evidence, look)


def agreement(evidence: Evidence, title: str, ways: Ways) -> float:
    """The rank correlation of the score that tables have with the deployed one, on both sides' images and on the way.

    It is 1 where they are the same number.
    """
    clean = evidence.clean(title)
    tables = torch.cat([clean.inside.to(ways.value), clean.outside.to(ways.value), ways.value])
    deployed = torch.cat([evidence.twice(title)[0].to(ways.score), ways.score])
    if bool((apart(tables, deployed) <= OTHER).all()):
        return 1.0
    return float(rank_correlations(tables[:, None], deployed[:, None]).sum())


class Portion(NamedTuple):
    """Some samples, evaluated together."""

    rows: Tensor
    """Their indices in the starting batch, (B,)."""
    x: Tensor
    value: Tensor


class Ways(NamedTuple):
    """What was evaluated on the way of every sample, portion after portion, on the CPU."""

    rows: Tensor
    """Whose points they are, (N,)."""
    value: Tensor
    """The objective there, (N,)."""
    score: Tensor
    """The deployed score, (N,)."""

    @property
    def follows(self) -> Tensor:
        """The rank correlation of objective and score along the way of every sample that moved."""
        ways = [self.rows == row for row in self.rows.unique()]
        return torch.cat([rank_correlations(self.value[way, None], self.score[way, None]) for way in ways])


class Recorded:
    """An objective that keeps what it was evaluated at, portion by portion; a random one draws alike at all."""

    def __init__(self, objective: Objective, seed: int) -> None:
        self.objective, self.seed = objective, seed
        self.portions: list[Portion] = []

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """The objective's value, (B,)."""
        with repeatable(self.seed, x.device):
            value = self.objective(x, rows)
        self.portions.append(Portion(rows, x.detach(), value.detach()))
        return value

    def ways(self, score: Callable[[Tensor], Tensor]) -> Ways:
        """The way of every sample; the score is taken of the same portions, so that a random one draws alike."""
        rows, values = (
            torch.cat(parts).cpu() for parts in zip(*[(p.rows, p.value) for p in self.portions], strict=True)
        )
        scored = torch.cat([score(portion.x) for portion in self.portions]).cpu()
        return Ways(rows, values, scored)


def rank_correlations(objective: Tensor, score: Tensor) -> Tensor:
    """Spearman's correlation over the steps (T, B), for every image whose objective moved."""
    moved = (objective != objective[0]).any(dim=0)
    first, second = (centred_ranks(values[:, moved]) for values in (objective, score))
    length = first.norm(dim=0) * second.norm(dim=0)
    correlations: Tensor = (first * second).sum(dim=0) / length.clamp_min(1e-12)
    return correlations


def centred_ranks(values: Tensor) -> Tensor:
    """The ranks along the first dimension less their mean, ties at their mean rank."""
    below = (values[None] < values[:, None]).sum(dim=1)
    ties = (values[None] == values[:, None]).sum(dim=1)
    ranks = below + (ties + 1) / 2
    return (ranks - ranks.mean(dim=0)).double()
