"""The strongest perturbation we know, per sample: a suite of attacks, the best of which counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gatecrash.attacks.classifier import stepper_for
from gatecrash.attacks.latent import latents
from gatecrash.attacks.registry import register
from gatecrash.attacks.score import require_fitted, scores
from gatecrash.ball import Ball
from gatecrash.found import Found
from gatecrash.images import check_images
from gatecrash.objective import squared_difference
from gatecrash.protocols import Detector, Latent, Objective, Stepper, leaves, rows_of
from gatecrash.search import generator_for, search
from gatecrash.speed import Pace, current_pace
from gatecrash.stepper import Adamax, Apgd, Square, choose

Side = Literal["out", "in"]


@dataclass(frozen=True)
class Budget:
    """How much work the suite may do on one sample."""

    steps: int
    restarts: int
    surrogate_steps: int
    targets: int
    """Classes to aim at, and latents to collide with."""
    collision_steps: int
    square_steps: int


BUDGETS = {
    "quick": Budget(steps=30, restarts=1, surrogate_steps=20, targets=1, collision_steps=20, square_steps=50),
    "standard": Budget(steps=100, restarts=8, surrogate_steps=50, targets=3, collision_steps=50, square_steps=200),
    "thorough": Budget(steps=200, restarts=10, surrogate_steps=100, targets=9, collision_steps=100, square_steps=1000),
}


@dataclass(frozen=True)
class WorstCase(Found):
    """What the suite found, with the attack that won for every sample and what each of them spent."""

    winner: tuple[str, ...] = ()
    spent: dict[str, int] = field(default_factory=dict)
    """Evaluations per attack, over all samples."""


@register("worst_case", aim="score", paper="a suite; Croce & Hein 2020 for APGD, Andriushchenko et al. 2020 for Square")
def worst_case(
    detector: Detector,
    images: Tensor,
    ball: Ball,
    side: Side,
    budget: Literal["quick", "standard", "thorough"] = "standard",
    *,
    others: Tensor | None = None,
    stop: float | Tensor | None = None,
    generator: torch.Generator | int | None = None,
    batch_size: int | None = None,
) -> WorstCase:
    """The strongest perturbation that a suite of attacks finds, per sample; there is nothing to tune.

    In turn: APGD on the score itself, then plain small steps; where the detector reads logits, APGD on surrogates that
    do not saturate (log-odds, margin, spread of the logits) and towards each of the likeliest classes; transfer from
    the score without preprocessing where it has one; collision with the nearest latents of `others`; a gradient-free
    Square search; and the score once more from the best point of all, with halved and with annealed steps. Whatever an
    attack follows, its points are ranked by the detector's own score.

    Args:
        detector: any detector, fitted.
        images: (B, C, H, W) in [0, 1].
        ball: how far an image may be moved; with a list of eps, each starts from what the one before found.
        side: "out" lowers the score of outliers, "in" raises that of inliers.
        budget: how much work.
        others: images of the other side to collide with: inliers for "out", outliers for "in".
        stop: a score; a sample that has crossed it is left alone by the attacks that follow.
        generator: a generator or a seed.
        batch_size: attack this many samples at a time.

    Returns:
        What was found; `found.score` is the detector's score, `found.winner` the attack behind it.
    """
    require_fitted(detector)
    check_images(images)
    if side not in ("out", "in"):
        raise ValueError(f"side must be 'out' or 'in', got {side!r}")
    if budget not in BUDGETS:
        raise ValueError(f"budget must be one of {', '.join(BUDGETS)}, got {budget!r}")
    source = generator_for(generator, images.device)
    rungs: dict[int, WorstCase] = {}
    order = sorted(range(len(ball.ladder)), key=lambda i: ball.ladder[i])
    warm = None
    for i in order:
        suite = _Suite(detector, images, ball.rungs[i], side, BUDGETS[budget], others, stop, source, batch_size)
        rungs[i] = suite.run(warm)
        warm = rungs[i].x
    last = rungs[order[-1]]
    return last if len(order) == 1 else replace(last, lower_rungs=tuple(rungs[i] for i in range(len(order))))


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

    def verified(self, batch_size: int | None) -> Tensor:
        """The best scores as the detector itself gives them, (B,)."""
        return self.sign * scores(self.detector, self.x, batch_size) if self.rough else self.value


class _Suite:
    """One pass of all attacks inside one ball."""

    def __init__(
        self,
        detector: Detector,
        images: Tensor,
        ball: Ball,
        side: Side,
        budget: Budget,
        others: Tensor | None,
        stop: float | Tensor | None,
        generator: torch.Generator,
        batch_size: int | None,
    ) -> None:
        self.detector, self.images, self.ball, self.budget, self.others = (
            detector,
            images.detach(),
            ball,
            budget,
            others,
        )
        self.sign = 1.0 if side == "out" else -1.0
        self.generator, self.batch_size = generator, batch_size
        self.start = self.sign * scores(detector, self.images, batch_size)
        self.stop = None if stop is None else (self.sign * torch.as_tensor(stop).to(self.start)).expand_as(self.start)
        self.x, self.value = self.images.clone(), self.start.clone()
        self.winner = ["start"] * len(images)
        self.steps = torch.zeros(len(images), dtype=torch.long, device=images.device)
        self.evaluations = torch.ones_like(self.steps)
        self.spent: dict[str, int] = {}
        with torch.no_grad():
            example = logits_read(detector, detector.encode(self.images[:1]))
        self.classes = 0 if example is None else example.shape[1]
        self.reads_logits_only = getattr(getattr(detector, "card", None), "reads", None) in ("logits", "scores")

    def run(self, warm: Tensor | None) -> WorstCase:
        """All attacks in turn, each on the samples that are left."""
        if warm is not None:
            rows = self._left()
            self._take("warm start", rows, warm[rows], self.sign * scores(self.detector, warm[rows], self.batch_size))
        for name, attack in self._attacks():
            rows = self._left()
            if len(rows):
                attack(name, rows)
        success = self.value <= self.stop if self.stop is not None else self.value < self.start
        inside = self.ball.contains(self.x, self.images)
        if not bool(inside.all()):
            raise RuntimeError(f"{int((~inside).sum())} samples left the {self.ball} they started in")
        return WorstCase(
            x=self.x,
            value=self.value,
            start=self.images,
            start_value=self.start,
            success=success,
            steps=self.steps,
            evaluations=self.evaluations,
            score=self.sign * self.value,
            start_score=self.sign * self.start,
            winner=tuple(self.winner),
            spent=self.spent,
        )

    def _attacks(self) -> Iterator[tuple[str, Callable[[str, Tensor], None]]]:
        yield "score", self._descend
        yield "small steps", self._walk
        if self.classes > 1:
            for name, surrogate in SURROGATES.items():
                yield name, partial(self._follow, surrogate)
            for rank in range(min(self.budget.targets, self.classes)):
                yield f"class {rank + 1}", partial(self._aim, rank)
        if getattr(self.detector, "preprocesses", False):
            yield "without preprocessing", self._transfer
        if self.others is not None:
            for nearest in range(min(self.budget.targets, len(self.others))):
                yield f"collision {nearest + 1}", partial(self._collide, nearest)
        yield "square", self._square
        yield "score from the best", partial(self._polish, Apgd(step=self.ball.eps / 4))
        yield "annealed from the best", partial(self._polish, Adamax(step=self.ball.eps / 10))

    def _left(self) -> Tensor:
        """The samples that have not crossed the threshold."""
        if self.stop is None:
            return torch.arange(len(self.images), device=self.images.device)
        return (self.value > self.stop).nonzero().flatten()

    def _objective(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.sign * self.detector.judge(self.detector.encode(x))

    def _search(
        self,
        name: str,
        rows: Tensor,
        objective: Objective,
        stepper: Stepper,
        steps: int,
        *,
        restarts: int = 1,
        first: Tensor | None = None,
        random_start: bool = False,
        own_stop: bool = False,
    ) -> Found:
        found = search(
            objective,
            self.images[rows],
            self.ball,
            stepper=stepper,
            steps=steps,
            restarts=restarts,
            first=first,
            random_start=random_start,
            stop=self.stop[rows] if own_stop and self.stop is not None else None,
            generator=self.generator,
            batch_size=self.batch_size,
        )
        self.steps[rows] += found.steps
        self.evaluations[rows] += found.evaluations
        self.spent[name] = self.spent.get(name, 0) + int(found.evaluations.sum())
        return found

    def _take(self, name: str, rows: Tensor, x: Tensor, value: Tensor) -> None:
        """Keep what is better than before."""
        better = value < self.value[rows]
        self.x[rows] = choose(better, x, self.x[rows])
        self.value[rows] = torch.where(better, value, self.value[rows])
        for row in rows[better].tolist():
            self.winner[row] = name

    def _descend(self, name: str, rows: Tensor) -> None:
        found = self._search(
            name,
            rows,
            self._objective,
            Apgd(),
            self.budget.steps,
            # Where logits do not tell all, more random starts look for what they leave out.
            restarts=self.budget.restarts * (1 if self.reads_logits_only else 2),
            own_stop=True,
        )
        self._take(name, rows, found.x, found.value)

    def _walk(self, name: str, rows: Tensor) -> None:
        """Plain small steps from the image itself, which pass through places that large ones leap over."""
        steps = self.budget.steps
        stepper = stepper_for(self.ball, share=2.5 / steps)
        found = self._search(name, rows, self._objective, stepper, steps, own_stop=True)
        self._take(name, rows, found.x, found.value)

    def _polish(self, stepper: Stepper, name: str, rows: Tensor) -> None:
        found = self._search(name, rows, self._objective, stepper, self.budget.steps, first=self.x[rows], own_stop=True)
        self._take(name, rows, found.x, found.value)

    def _square(self, name: str, rows: Tensor) -> None:
        found = self._search(
            name, rows, self._objective, Square(), self.budget.square_steps, first=self.x[rows], own_stop=True
        )
        self._take(name, rows, found.x, found.value)

    def _follow(self, surrogate: Callable[[Tensor], Tensor], name: str, rows: Tensor) -> None:
        """A function of the logits attacked, its points ranked by the score."""
        ranked = Ranked(
            self.detector, self.sign, lambda z, at: self.sign * surrogate(self._logits(z)), self.images[rows]
        )
        self._search(name, rows, ranked, Apgd(), self.budget.surrogate_steps)
        self._take(name, rows, ranked.x, ranked.verified(self.batch_size))

    def _aim(self, rank: int, name: str, rows: Tensor) -> None:
        """The logit of one class raised above the others, the class that the clean image ranks at this place."""
        clean = self._logits(latents(self.detector.encode, self.images[rows], self.batch_size))
        aimed = clean.argsort(dim=1, descending=True)[:, rank]

        def away(z: Latent, at: Tensor) -> Tensor:
            logits, chosen = self._logits(z), aimed[at].unsqueeze(1)
            return logits.scatter(1, chosen, -torch.inf).logsumexp(dim=1) - logits.gather(1, chosen).squeeze(1)

        ranked = Ranked(self.detector, self.sign, away, self.images[rows])
        found = self._search(name, rows, ranked, Apgd(), self.budget.surrogate_steps)
        self._take(name, rows, ranked.x, ranked.verified(self.batch_size))
        if not self.reads_logits_only:
            # The score jumps where the predicted class changes, which its gradient does not see: climb on from there.
            beyond = self._search(name, rows, self._objective, Apgd(), self.budget.steps, first=found.x, own_stop=True)
            self._take(name, rows, beyond.x, beyond.value)

    def _logits(self, z: Latent) -> Tensor:
        logits = logits_read(self.detector, z)
        if logits is None:
            raise RuntimeError(f"{type(self.detector).__name__} reads no logits")
        return logits

    def _transfer(self, name: str, rows: Tensor) -> None:
        """The score of the unprocessed input attacked; what that gives is scored in full."""
        encoder = getattr(self.detector, "encoder", None)
        if encoder is None:
            return
        found = self._search(
            name, rows, lambda x, at: self.sign * self.detector.judge(encoder(x)), Apgd(), self.budget.steps
        )
        self._take(name, rows, found.x, self.sign * scores(self.detector, found.x, self.batch_size))

    def _collide(self, nearest: int, name: str, rows: Tensor) -> None:
        """A collision with the n-th nearest of the other side's latents that lie on the right side of the score."""
        targets = nearest_latents(self.detector, self.images[rows], self.targets(), nearest, self.batch_size)
        ranked = Ranked(
            self.detector, self.sign, lambda z, at: squared_difference(z, rows_of(targets, at)), self.images[rows]
        )
        self._search(name, rows, ranked, Adamax(), self.budget.collision_steps, random_start=True)
        self._take(name, rows, ranked.x, ranked.verified(self.batch_size))

    def targets(self) -> Tensor:
        """The half of the other side's images that the detector is surest of."""
        if self.others is None:
            raise RuntimeError("there are no images of the other side to collide with")
        value = self.sign * scores(self.detector, self.others, self.batch_size)
        return self.others[value.argsort()[: max(1, len(value) // 2)]]


def nearest_latents(detector: Detector, images: Tensor, others: Tensor, nearest: int, batch_size: int | None) -> Latent:
    """For every image the latent of the n-th nearest of the others."""
    own, theirs = (latents(detector.encode, x, batch_size) for x in (images, others))
    flat = [torch.cat([leaf.flatten(1) for leaf in leaves(z)], dim=1) for z in (own, theirs)]
    order = torch.cdist(flat[0], flat[1]).argsort(dim=1)
    return rows_of(theirs, order[:, nearest % order.shape[1]])


def log_odds(logits: Tensor) -> Tensor:
    """Minus the log-odds of the largest softmax probability, (B,); it never saturates."""
    top = logits.max(dim=1, keepdim=True)
    return logits.scatter(1, top.indices, -torch.inf).logsumexp(dim=1) - top.values.squeeze(1)


def margin(logits: Tensor) -> Tensor:
    """Minus the distance between the two largest logits, (B,)."""
    top = logits.topk(2, dim=1).values
    return top[:, 1] - top[:, 0]


def spread_of(logits: Tensor) -> Tensor:
    """The mean logit less logsumexp, (B,)."""
    return logits.mean(dim=1) - logits.logsumexp(dim=1)


SURROGATES: dict[str, Callable[[Tensor], Tensor]] = {"log-odds": log_odds, "margin": margin, "logit spread": spread_of}
"""Functions of logits that, like a score, are higher the less sure the classifier is, and do not saturate."""


def logits_read(detector: Detector, z: Latent) -> Tensor | None:
    """The logits that a detector reads off its latent, (B, K); of several networks' the log of their mean softmax.

    None where it reads none: of an ensemble's members, those that read logits count.
    """
    parts = [part for part in logit_parts(detector, z) if part.ndim == 2]
    if not parts or any(part.shape != parts[0].shape for part in parts) or parts[0].shape[1] < 2:
        return None
    return parts[0] if len(parts) == 1 else torch.stack([p.log_softmax(dim=1) for p in parts]).logsumexp(dim=0)


def logit_parts(detector: Detector, z: Latent) -> list[Tensor]:
    """The tensors in a latent that are logits; none where the detector does not say."""
    told: Callable[[Latent], list[Tensor]] | None = getattr(detector, "logits_in", None)
    return [] if told is None else told(z)
