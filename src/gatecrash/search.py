"""The one loop. Attacks, inner maximisation, purification and Langevin sampling all call `search`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypedDict

import torch
from torch import Tensor

from gatecrash.ball import Ball, distance
from gatecrash.found import Found, Trajectory, joined
from gatecrash.images import check_images
from gatecrash.objective import name_of
from gatecrash.progress import Bar, progress
from gatecrash.protocols import Objective, State, Stepper, Walk
from gatecrash.stepper import choose


class SearchOptions(TypedDict, total=False):
    """The options of `search` that every named attack passes on."""

    restarts: int
    stop: float | Tensor | None
    keep: Literal["best", "last"]
    record: bool
    generator: torch.Generator | int | None
    random_start: bool
    first: Tensor | None
    batch_size: int | None


def search(
    objective: Objective,
    start: Tensor,
    ball: Ball,
    *,
    stepper: Stepper,
    steps: int,
    restarts: int = 1,
    stop: float | Tensor | None = None,
    keep: Literal["best", "last"] = "best",
    record: bool = False,
    generator: torch.Generator | int | None = None,
    random_start: bool = False,
    first: Tensor | None = None,
    batch_size: int | None = None,
) -> Found:
    """Move every sample inside its ball so that the objective becomes small.

    Args:
        objective: (x, rows) → (B,), smaller is better.
        start: (B, ...), the centres of the balls; images in [0, 1] unless the ball has no box.
        ball: where the samples may go; with a list of eps, every later eps adds to the separate search one more run,
            started from what the eps before it found. So a rung is never weaker than the separate search.
        stepper: how to move.
        steps: steps per run; a run evaluates the objective steps + 1 times.
        restarts: runs in all; those after the first start at a random point, for samples that have not reached `stop`.
        stop: a sample whose value is at or below this leaves the batch; one number, or one per sample.
        keep: "best" returns the best point of every sample, the start included; "last" the last one.
        record: keep the trajectory.
        generator: where random numbers come from: a generator, a seed, or None for seed 0. Global state is not touched.
        random_start: start the first run at a random point too.
        first: (B, ...), start the first run here instead, or where this projects to.
        batch_size: search this many samples at a time; None is all at once.

    Raises:
        ValueError: the start is no batch of images, the objective is NaN at it or has no gradient, or an option is off.
    """
    check_options(start, first, ball, steps, restarts, keep, stop, batch_size)
    with torch.inference_mode(False):
        start = start.detach().clone() if start.is_inference() else start.detach()
        settings = _Settings(objective, ball, stepper, steps, restarts, keep, record, random_start)
        parts = start.split(batch_size or len(start))
        sources = generators_for(generator, start.device, len(parts))
        offset, found = 0, []
        runs = restarts + (len(ball.ladder) - 1) * (restarts + 1)
        with progress("searching", len(parts) * runs * (steps + 1)) as bar:
            for part, source in zip(parts, sources, strict=True):
                rows = torch.arange(offset, offset + len(part), device=start.device)
                limit = stop[rows] if isinstance(stop, Tensor) and stop.ndim == 1 else stop
                origin = None if first is None else first[rows].detach()
                found.append(_climb(settings, part, origin, rows, limit, source, bar))
                offset += len(part)
        return joined(found)


@dataclass(frozen=True)
class _Settings:
    """What is the same for every run of one search."""

    objective: Objective
    ball: Ball
    stepper: Stepper
    steps: int
    restarts: int
    keep: str
    record: bool
    random_start: bool


@dataclass
class _Run:
    """What one run, from one starting point, came to."""

    x: Tensor
    value: Tensor
    start_value: Tensor | None
    steps: Tensor
    evaluations: Tensor
    trajectory: Trajectory | None


def _climb(
    settings: _Settings,
    start: Tensor,
    first: Tensor | None,
    rows: Tensor,
    stop: float | Tensor | None,
    generator: torch.Generator,
    bar: Bar,
) -> Found:
    """One search per eps from small to large, each later one with a run more from what the one before found."""
    order = sorted(range(len(settings.ball.ladder)), key=lambda i: settings.ball.ladder[i])
    balls, results, warm = settings.ball.rungs, {}, None
    state = generator.get_state()
    for i in order:
        generator.set_state(state)
        results[i] = _search(replace(settings, ball=balls[i]), start, first, rows, stop, generator, bar, warm)
        warm = results[i].x if settings.keep == "best" else None
    last = results[order[-1]]
    return last if len(order) == 1 else replace(last, lower_rungs=tuple(results[i] for i in range(len(order))))


def _search(
    settings: _Settings,
    start: Tensor,
    first: Tensor | None,
    rows: Tensor,
    stop: float | Tensor | None,
    generator: torch.Generator,
    bar: Bar,
    warm: Tensor | None,
) -> Found:
    """All runs inside one ball, the best of them per sample."""
    limit = None if stop is None else torch.as_tensor(stop, dtype=start.dtype, device=start.device).expand(len(rows))
    best = _at_start(settings, start, rows) if settings.random_start or first is not None else None
    start_value = None if best is None else best.value
    for number in range(settings.restarts + (warm is not None)):
        left = _unfinished(best, limit)
        if left is not None and len(left) == 0:
            bar.advance(settings.steps + 1)
            continue
        point = start
        if number == settings.restarts and warm is not None:
            point = warm
        elif number == 0 and first is not None:
            point = settings.ball.project(first, start)
        elif number > 0 or settings.random_start:
            uniform = torch.rand(start.shape, generator=generator, device=generator.device, dtype=start.dtype)
            point = settings.ball.random_start(start, uniform.to(start.device))
        run = _walk(settings, point, start, start_value, rows, left, limit, generator, bar)
        start_value = run.start_value
        best = run if best is None else _better(best, run, anew=settings.keep == "last")
    if best is None or start_value is None:
        raise RuntimeError("a search makes at least one run")
    inside = settings.ball.contains(best.x, start)
    if not bool(inside.all()):
        raise RuntimeError(f"{int((~inside).sum())} samples left the {settings.ball} they started in")
    success = best.value <= limit if limit is not None else best.value < start_value
    return Found(best.x, best.value, start, start_value, success, best.steps, best.evaluations, best.trajectory)


def _at_start(settings: _Settings, start: Tensor, rows: Tensor) -> _Run:
    """The run that goes nowhere."""
    value, _ = _evaluate(settings, start, rows, with_gradient=False)
    check_start_value(settings.objective, value, rows)
    trajectory = _still(value, settings.steps) if settings.record else None
    return _Run(start, value, value, torch.zeros_like(rows), torch.ones_like(rows), trajectory)


def _unfinished(best: _Run | None, limit: Tensor | None) -> Tensor | None:
    """The samples that still want a run; None for all of them."""
    return None if best is None or limit is None else (best.value > limit).nonzero().flatten()


def _walk(
    settings: _Settings,
    point: Tensor,
    start: Tensor,
    start_value: Tensor | None,
    rows: Tensor,
    left: Tensor | None,
    limit: Tensor | None,
    generator: torch.Generator,
    bar: Bar,
) -> _Run:
    """One run from `point` for the samples `left`; what it returns holds all samples, the others at their start.

    Where `start_value` is None, `point` is the start, and the first evaluation finds it.
    """
    at: slice | Tensor = slice(None) if left is None else left
    x, centre = point[at], start[at]
    held = _Run(
        x=start.clone(),
        value=start.new_full((len(start),), torch.inf) if start_value is None else start_value.clone(),
        start_value=start_value,
        steps=torch.zeros_like(rows),
        evaluations=torch.zeros_like(rows),
        trajectory=_still(start.new_zeros(len(start)) if start_value is None else start_value, settings.steps)
        if settings.record
        else None,
    )
    state: State = {}

    def draw(kind: Callable[..., Tensor]) -> Tensor:
        full = kind(start.shape, generator=generator, device=generator.device, dtype=start.dtype)
        return full.to(start.device)[at]

    def evaluate(points: Tensor) -> Tensor:
        held.evaluations[at] += 1
        return _evaluate(settings, points, rows[at], with_gradient=False)[0]

    for step in range(settings.steps + 1):
        last = step == settings.steps
        value, gradient = _evaluate(settings, x, rows[at], with_gradient=settings.stepper.needs_gradient and not last)
        if held.start_value is None:
            check_start_value(settings.objective, value, rows)
            held.start_value = value
        held.evaluations[at] += 1
        if settings.keep == "best":
            replaced = value < held.value[at]
            held.x[at] = choose(replaced, x, held.x[at])
            held.value[at] = torch.where(replaced, value, held.value[at])
        else:
            held.x[at], held.value[at] = x, value
        if held.trajectory is not None:
            _record(held.trajectory, step, at, held, start)
        bar.advance()
        if last:
            break
        walk = Walk(
            x=x,
            value=value,
            gradient=gradient,
            centre=centre,
            ball=settings.ball,
            step=step,
            steps=settings.steps,
            normal=partial(draw, torch.randn),
            uniform=partial(draw, torch.rand),
            evaluate=evaluate,
        )
        if step == 0:
            state = settings.stepper.begin(walk)
        if limit is not None:
            going = (held.value[at] > limit[at]).nonzero().flatten()
            if len(going) == 0:
                bar.advance(settings.steps - step)
                break
            if len(going) < len(x):
                walk, state = _compacted(walk, state, going)
                at, centre = (going if isinstance(at, slice) else at[going]), walk.centre
        x = settings.ball.project(settings.stepper.move(walk, state), centre).detach()
        held.steps[at] += 1
    return held


def _evaluate(settings: _Settings, x: Tensor, rows: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The objective at x and, where asked for, its gradient; no parameter gets a `.grad`."""
    if not with_gradient:
        with torch.no_grad():
            return settings.objective(x, rows).detach().to(x.dtype), None
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = settings.objective(x, rows)
        gradient = None
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value.sum(), x, allow_unused=True)
    if gradient is None:
        raise ValueError(
            f"{name_of(settings.objective)} has no gradient with respect to the images, so it cannot be attacked with "
            "one; look for detach(), no_grad() or numpy between the images and its value"
        )
    return value.detach().to(x.dtype), gradient


def _compacted(walk: Walk, state: State, going: Tensor) -> tuple[Walk, State]:
    """The walk and the stepper's state without the samples that are done."""
    gradient = None if walk.gradient is None else walk.gradient[going]
    walk = replace(walk, x=walk.x[going], value=walk.value[going], gradient=gradient, centre=walk.centre[going])
    return walk, {name: tensor[going] for name, tensor in state.items()}


def _better(best: _Run, run: _Run, *, anew: bool) -> _Run:
    """The better of two runs for every sample, or with `anew` the later one; the work of both is counted."""
    won = torch.ones_like(best.value, dtype=torch.bool) if anew else run.value < best.value
    trajectory = best.trajectory
    if best.trajectory is not None and run.trajectory is not None:
        trajectory = Trajectory(
            torch.where(won, run.trajectory.value, best.trajectory.value),
            torch.where(won, run.trajectory.l2, best.trajectory.l2),
            torch.where(won, run.trajectory.linf, best.trajectory.linf),
        )
    return _Run(
        x=choose(won, run.x, best.x),
        value=torch.where(won, run.value, best.value),
        start_value=best.start_value,
        steps=best.steps + run.steps,
        evaluations=best.evaluations + run.evaluations,
        trajectory=trajectory,
    )


def _still(start_value: Tensor, steps: int) -> Trajectory:
    """The trajectory of samples that never move."""
    nowhere = torch.zeros_like(start_value).repeat(steps + 1, 1)
    return Trajectory(start_value.repeat(steps + 1, 1), nowhere, nowhere.clone())


def _record(trajectory: Trajectory, step: int, at: slice | Tensor, held: _Run, start: Tensor) -> None:
    """Write this step, and all that follow in case the sample is done, into the trajectory."""
    trajectory.value[step:, at] = held.value[at]
    trajectory.l2[step:, at] = distance(held.x[at], start[at], "l2")
    trajectory.linf[step:, at] = distance(held.x[at], start[at], "linf")


def check_options(
    start: Tensor,
    first: Tensor | None,
    ball: Ball,
    steps: int,
    restarts: int,
    keep: str,
    stop: float | Tensor | None,
    batch_size: int | None,
) -> None:
    """Raises a ValueError for whatever a search cannot start with."""
    if ball.box is not None:
        check_images(start, "start")
        low, high = (float(bound) for bound in torch.aminmax(start.detach()))
        if low < ball.box[0] or high > ball.box[1]:
            raise ValueError(f"start must lie in the ball's box {ball.box}, got values from {low:.4g} to {high:.4g}")
    for name, count in (
        ("steps", steps),
        ("restarts", restarts),
        ("batch_size", 1 if batch_size is None else batch_size),
    ):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if first is not None and first.shape != start.shape:
        raise ValueError(f"first must have the start's shape {tuple(start.shape)}, got {tuple(first.shape)}")
    if keep not in ("best", "last"):
        raise ValueError(f"keep must be 'best' or 'last', got {keep!r}")
    if keep == "last" and restarts > 1:
        raise ValueError("keep='last' follows one run; restarts need keep='best'")
    if isinstance(stop, Tensor) and stop.ndim and stop.shape != start.shape[:1]:
        raise ValueError(f"stop must be one number or of shape ({len(start)},), got {tuple(stop.shape)}")


def check_start_value(objective: Objective, value: Tensor, rows: Tensor) -> None:
    """Raises a ValueError when the objective is not one number per sample; `rows` are their indices."""
    count = len(rows)
    if value.shape != (count,):
        raise ValueError(f"{name_of(objective)} must give one value per sample, ({count},), got {tuple(value.shape)}")
    bad = rows[value.isnan()].tolist()
    if bad:
        raise ValueError(
            f"{name_of(objective)} gives NaN for {len(bad)} of {count} starting images, first at index {bad[0]}; "
            "are the model's weights finite?"
        )


def generator_for(generator: torch.Generator | int | None, device: torch.device) -> torch.Generator:
    """The generator itself, or a new one on the device with the given seed, 0 for None."""
    if isinstance(generator, torch.Generator):
        return generator
    return torch.Generator(device).manual_seed(generator or 0)


def generators_for(generator: torch.Generator | int | None, device: torch.device, count: int) -> list[torch.Generator]:
    """One generator per batch, so that what happens in one batch leaves the numbers of the next alone."""
    source = generator_for(generator, device)
    if count == 1:
        return [source]
    seeds = torch.randint(2**62, (count,), generator=source, device=source.device).tolist()
    return [torch.Generator(source.device).manual_seed(seed) for seed in seeds]
