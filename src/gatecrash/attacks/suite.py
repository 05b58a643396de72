"""The suite of attacks behind `worst_case`: each in turn on the samples that are left, the best point counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from gatecrash.attacks.averaged import Averaged
from gatecrash.attacks.classifier import stepper_for
from gatecrash.attacks.draws import drawn, draws_of, looked_at
from gatecrash.attacks.latent import latents
from gatecrash.attacks.ranked import Ranked
from gatecrash.attacks.rounding import RoundedFound, to_8bit
from gatecrash.attacks.simpler import simpler
from gatecrash.attacks.surrogates import SURROGATES, logits_read, unprocessed
from gatecrash.ball import Ball
from gatecrash.found import Found
from gatecrash.objective import LowerScore, RaiseScore, squared_difference
from gatecrash.protocols import Detector, Latent, Objective, Stepper, as_vectors, rows_of
from gatecrash.search import search
from gatecrash.stepper import Adamax, Apgd, Square, choose

Side = Literal["out", "in"]

SHORT = 25
"""The steps of a short run."""

HOP = 0.15
"""The share of the pixels that a hop draws anew."""


@dataclass(frozen=True)
class Budget:
    """How much work the suite may do on one sample."""

    steps: int
    restarts: int
    """Long runs on the score."""
    starts: int
    """Short runs on the score from random points, which find more of its valleys than long ones do."""
    averaged: int
    """Runs along mean gradients."""
    hops: int
    """Short runs from the best point with some of its pixels drawn anew."""
    surrogate_steps: int
    targets: int
    """Classes to aim at, and latents to collide with."""
    collision_steps: int
    square_steps: int
    falling: int
    """The steps of the last run, from the best point of all."""


@dataclass(frozen=True)
class WorstCase(RoundedFound):
    """What the suite found, with the attack that won for every sample and what each of them spent."""

    winner: tuple[str, ...] = ()
    spent: dict[str, int] = field(default_factory=dict)
    """Evaluations per attack, over all samples; those of images to collide with, which are no samples, as "targets"."""


class Suite:
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
        self.detector, self.images, self.ball = detector, images.detach(), ball
        self.budget, self.others = budget, others
        self.sign = 1.0 if side == "out" else -1.0
        self.objective = LowerScore(detector) if side == "out" else RaiseScore(detector)
        self.generator, self.batch_size = generator, batch_size
        self.evaluations = torch.zeros(len(images), dtype=torch.long, device=images.device)
        self.spent: dict[str, int] = {}
        everyone = torch.arange(len(images), device=images.device)
        self.passes = draws_of(detector, self.images, batch_size)
        self._count("start", looked_at(images), 2)
        self.start = self._scored("start", everyone, self.images)
        self.stop = None if stop is None else (self.sign * torch.as_tensor(stop).to(self.start)).expand_as(self.start)
        self.x, self.value = self.images.clone(), self.start.clone()
        self.winner = ["start"] * len(images)
        self.steps = torch.zeros_like(self.evaluations)
        with torch.no_grad():
            example = logits_read(detector, detector.encode(self.images[:2]))  # some networks take one for no batch
        self._count("start", everyone[:2])
        self.classes = 0 if example is None else example.shape[1]
        self.reads_logits_only = getattr(getattr(detector, "card", None), "reads", None) in ("logits", "scores")
        # Where logits do not tell all, more starts look for what they leave out.
        self.width = 1 if self.reads_logits_only else 2

    def run(self, warm: Tensor | None) -> WorstCase:
        """All attacks in turn, each on the samples that are left."""
        if warm is not None:
            rows = self._left()
            self._take("warm start", rows, warm[rows])
        for name, attack in self._attacks():
            rows = self._left()
            if len(rows):
                attack(name, rows)
        inside = self.ball.contains(self.x, self.images)
        if not bool(inside.all()):
            raise RuntimeError(f"{int((~inside).sum())} samples left the {self.ball} they started in")
        if self.passes > 1:
            self.value = self._scored("fresh draws", torch.arange(len(self.x), device=self.x.device), self.x)
        return WorstCase(
            x=self.x,
            value=self.value,
            start=self.images,
            start_value=self.start,
            success=self._success(self.value),
            steps=self.steps,
            evaluations=self.evaluations,
            score=self.sign * self.value,
            start_score=self.sign * self.start,
            winner=tuple(self.winner),
            spent=self.spent,
        )

    def rounded(self, found: WorstCase) -> WorstCase:
        """What was found in whole grey levels."""
        rounded = to_8bit(found.x, found.start, self.ball, lambda x, rows: self._scores(x), batch_size=self.batch_size)
        self._count("rounding", torch.arange(len(found.x), device=found.x.device), 2 * self.passes)
        return replace(
            found,
            x=rounded.x,
            value=rounded.value,
            success=self._success(rounded.value) & rounded.inside,
            score=self.sign * rounded.value,
            rounding=rounded,
        )

    def _attacks(self) -> Iterator[tuple[str, Callable[[str, Tensor], None]]]:
        budget, eps = self.budget, self.ball.eps
        yield "score", partial(self._descend, Apgd(), budget.steps, restarts=budget.restarts * self.width)
        if budget.starts:
            yield (
                "many starts",
                partial(self._descend, Apgd(), SHORT, restarts=budget.starts * self.width, random_start=True),
            )
        yield (
            "mean gradients",
            partial(self._descend, Averaged(), budget.surrogate_steps, restarts=budget.averaged * self.width),
        )
        # Small steps from the image itself pass through places that large ones leap over, the smaller the more of them.
        small = 2 * budget.steps
        yield "small steps", partial(self._descend, stepper_for(self.ball, share=2.5 / small), small)
        if budget.starts and not self.reads_logits_only:
            # A score with many jumps has its best points here and there along the way.
            even = stepper_for(self.ball, share=0.05)
            yield "even steps", partial(self._descend, even, small, restarts=2 * budget.restarts, random_start=True)
        if budget.starts:
            # Steps that fall slowly, whatever the score does meanwhile, cross valleys that APGD settles in.
            falling = stepper_for(self.ball, share=0.25, schedule="linear")
            yield (
                "falling steps",
                partial(self._descend, falling, budget.steps, restarts=budget.restarts * self.width, random_start=True),
            )
        if getattr(getattr(self.detector, "card", None), "gradient", "exact") != "exact":
            for name, simplify in simpler(self.ball, self.images[0].numel()).items():
                yield name, partial(self._simplify, simplify)
        if self.classes > 1:
            for name, surrogate in SURROGATES.items():
                yield name, partial(self._follow, surrogate)
            for rank in range(min(budget.targets, self.classes)):
                yield f"class {rank + 1}", partial(self._aim, rank)
        if getattr(self.detector, "preprocesses", False):
            yield "without preprocessing", self._transfer
        if self.others is not None:
            for nearest in range(min(budget.targets, len(self.others))):
                yield f"collision {nearest + 1}", partial(self._collide, nearest)
        yield "square", partial(self._polish, Square(), budget.square_steps)
        if budget.hops:
            yield "hops from the best", self._hop
        yield "score from the best", partial(self._polish, Apgd(step=eps / 4), budget.steps)
        yield "mean gradients from the best", partial(self._polish, Averaged(0.03, 0.0005), budget.steps)
        # Steps that fall whatever the score does meanwhile leave the kink that the others have come to rest at.
        falling = stepper_for(self.ball, share=0.08, schedule="cosine")
        yield "falling steps from the best", partial(self._polish, falling, budget.falling)

    def _scores(self, x: Tensor) -> Tensor:
        """The detector's score of images, smaller is better for the attacker; of a randomised one a mean, (B,)."""
        return self.sign * drawn(self.detector, x, self.passes, self.batch_size).mean(dim=0)

    def _scored(self, name: str, rows: Tensor, x: Tensor) -> Tensor:
        """The same, counted as work."""
        self._count(name, rows, self.passes)
        return self._scores(x)

    def _count(self, name: str, rows: Tensor, each: int | Tensor = 1) -> None:
        """So many evaluations for each of these samples."""
        self.evaluations[rows] += each
        self.spent[name] = self.spent.get(name, 0) + (each * len(rows) if isinstance(each, int) else int(each.sum()))

    def _success(self, value: Tensor) -> Tensor:
        """Whether a value reached `stop`; without one, whether it is below the start's, (B,)."""
        return value <= self.stop if self.stop is not None else value < self.start

    def _left(self) -> Tensor:
        """The samples that have not crossed the threshold."""
        if self.stop is None:
            return torch.arange(len(self.images), device=self.images.device)
        return (self.value > self.stop).nonzero().flatten()

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
        self._count(name, rows, found.evaluations)
        return found

    def _take(self, name: str, rows: Tensor, x: Tensor, claimed: Tensor | None = None) -> None:
        """Keep what is better than before, as the detector itself scores it.

        What a search claims is its value in another layout or precision, or of one draw. Where a score jumps, as at a
        kink where two classes tie, that may be far off; of many draws the best is the luckiest.
        """
        if claimed is not None and self.passes == 1:
            likely = claimed < self.value[rows]
            rows, x = rows[likely], x[likely]
        if len(rows) == 0:
            return
        value = self._scored(name if self.passes == 1 else "fresh draws", rows, x)
        better = value < self.value[rows]
        self.x[rows] = choose(better, x, self.x[rows])
        self.value[rows] = torch.where(better, value, self.value[rows])
        for row in rows[better].tolist():
            self.winner[row] = name

    def _descend(
        self, stepper: Stepper, steps: int, name: str, rows: Tensor, *, restarts: int = 1, random_start: bool = False
    ) -> None:
        """The score itself, from the image and from random points."""
        found = self._search(
            name,
            rows,
            self.objective,
            stepper,
            steps,
            restarts=restarts,
            random_start=random_start,
            own_stop=True,
        )
        self._take(name, rows, found.x, found.value)

    def _polish(self, stepper: Stepper, steps: int, name: str, rows: Tensor) -> None:
        """The score itself, from the best point of all."""
        found = self._search(name, rows, self.objective, stepper, steps, first=self.x[rows], own_stop=True)
        self._take(name, rows, found.x, found.value)

    def _simplify(self, simplify: Callable[[Tensor], Tensor], name: str, rows: Tensor) -> None:
        """The score itself, from a simpler version of every image; that version counts too."""
        start = self.ball.project(simplify(self.images[rows]), self.images[rows])
        stepper = Apgd(step=self.ball.eps / 4)
        found = self._search(name, rows, self.objective, stepper, SHORT, first=start, own_stop=True)
        self._take(name, rows, found.x, found.value)

    def _hop(self, name: str, rows: Tensor) -> None:
        """From the best point with some pixels drawn anew to the bottom of that valley, again and again."""
        for _ in range(self.budget.hops * self.width):
            anew = self.ball.random_start(self.images, self._uniform())
            start = torch.where(self._uniform() < HOP, anew, self.x)
            rows = self._left()
            if len(rows) == 0:
                return
            found = self._search(
                name, rows, self.objective, Apgd(step=self.ball.eps / 2), SHORT, first=start[rows], own_stop=True
            )
            self._take(name, rows, found.x, found.value)

    def _uniform(self) -> Tensor:
        source, like = self.generator, self.images
        return torch.rand(like.shape, generator=source, device=source.device, dtype=like.dtype).to(like.device)

    def _follow(self, surrogate: Callable[[Tensor], Tensor], name: str, rows: Tensor) -> None:
        """A function of the logits attacked, its points ranked by the score."""
        ranked = Ranked(
            self.detector, self.sign, lambda z, at: self.sign * surrogate(self._logits(z)), self.images[rows]
        )
        self._search(name, rows, ranked, Apgd(), self.budget.surrogate_steps)
        self._rank(name, rows, ranked)

    def _rank(self, name: str, rows: Tensor, ranked: Ranked) -> None:
        """Keep the points that ranked best, where they are better than before."""
        self._take(name, rows, ranked.x, None if ranked.rough else ranked.value)

    def _aim(self, rank: int, name: str, rows: Tensor) -> None:
        """The logit of one class raised above the others, the class that the clean image ranks at this place."""
        clean = self._logits(rows_of(self._own, rows))
        aimed = clean.argsort(dim=1, descending=True)[:, rank]

        def away(z: Latent, at: Tensor) -> Tensor:
            logits, chosen = self._logits(z), aimed[at].unsqueeze(1)
            return logits.scatter(1, chosen, -torch.inf).logsumexp(dim=1) - logits.gather(1, chosen).squeeze(1)

        ranked = Ranked(self.detector, self.sign, away, self.images[rows])
        found = self._search(name, rows, ranked, Apgd(), self.budget.surrogate_steps)
        self._rank(name, rows, ranked)
        if not self.reads_logits_only:
            # The score jumps where the predicted class changes, which its gradient does not see: climb on from there.
            beyond = self._search(name, rows, self.objective, Apgd(), self.budget.steps, first=found.x, own_stop=True)
            self._take(name, rows, beyond.x, beyond.value)

    def _logits(self, z: Latent) -> Tensor:
        logits = logits_read(self.detector, z)
        if logits is None:
            raise RuntimeError(f"{type(self.detector).__name__} reads no logits")
        return logits

    def _transfer(self, name: str, rows: Tensor) -> None:
        """The score of the unprocessed input attacked; what that gives is scored in full."""
        found = self._search(
            name,
            rows,
            lambda x, at: self.sign * self.detector.judge(unprocessed(self.detector, x)),
            Apgd(),
            self.budget.steps,
        )
        self._take(name, rows, found.x)

    def _collide(self, nearest: int, name: str, rows: Tensor) -> None:
        """A collision with the n-th nearest of the other side's latents that lie on the right side of the score."""
        targets = nearest_latents(rows_of(self._own, rows), self._theirs, nearest)
        ranked = Ranked(
            self.detector, self.sign, lambda z, at: squared_difference(z, rows_of(targets, at)), self.images[rows]
        )
        self._search(name, rows, ranked, Adamax(), self.budget.collision_steps, random_start=True)
        self._rank(name, rows, ranked)

    @cached_property
    def _own(self) -> Latent:
        """The latents of all samples."""
        self._count("start", torch.arange(len(self.images), device=self.images.device))
        return latents(self.detector.encode, self.images, self.batch_size)

    @cached_property
    def _theirs(self) -> Latent:
        """The latents of that half of the other side's images that the detector is surest of."""
        if self.others is None:
            raise RuntimeError("there are no images of the other side to collide with")
        self.spent["targets"] = self.spent.get("targets", 0) + len(self.others)
        z = latents(self.detector.encode, self.others, self.batch_size)
        rows = torch.arange(len(self.others), device=self.others.device).split(self.batch_size or len(self.others))
        with torch.no_grad():
            value = self.sign * torch.cat([self.detector.judge(rows_of(z, part)) for part in rows])
        return rows_of(z, value.argsort()[: max(1, len(value) // 2)])


def nearest_latents(own: Latent, theirs: Latent, nearest: int) -> Latent:
    """For every latent the n-th nearest of the others."""
    order = torch.cdist(as_vectors(own), as_vectors(theirs)).argsort(dim=1)
    return rows_of(theirs, order[:, nearest % order.shape[1]])
