"""The one loop. Attacks, inner maximisation, purification and Langevin sampling all call `search`."""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Real
from operator import index
from typing import Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from gatecrash.ball import L2, Ball, waits
from gatecrash.found import Found, Trajectory, joined
from gatecrash.images import check_images, extremes
from gatecrash.play import Run, Settings, check_start_value, run_from, still, verified
from gatecrash.portions import Portions
from gatecrash.progress import Bar, progress
from gatecrash.protocols import Objective, Stepper
from gatecrash.speed import is_plainly, laid_out, unchanged
from gatecrash.stepper import choose

Precision = Literal["auto", "float32", "mixed"]

LOOK_EVERY = 10
"""Steps from one look at who is done to the next, where a look makes the host wait for the device."""

FINEST = 0.01
"""The change of a pixel from which on half precision, which rounds it to 1/256 and worse, is of use."""

MANY = 50
"""The steps from which on "auto" takes mixed precision."""


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
    precision: Precision
    measure: bool


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
    precision: Precision = "auto",
    measure: bool = True,
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
        batch_size: search this many samples at a time; None is all at once. They are evaluated in portions that fit
            into memory, whatever it is.
        precision: "float32" evaluates the networks as they are. "mixed" evaluates most of a run in half precision and
            the rest with networks prepared for speed; what it returns is evaluated as with "float32", and a sample
            leaves at `stop` only after that. "auto" is "mixed" on CUDA for the best of 50 steps or more with gradients,
            in half precision only where a pixel may change by more than that rounds; inside `speed.plainly()` never.
        measure: False leaves out what is only there to tell, with keep="last" and no `stop`: `start_value` is then that
            of the point where the run began, random or not, and `value` that of the last one but one.

    Raises:
        ValueError: the start is no batch of images, the objective is NaN at it or has no gradient, or an option is off.
        TypeError: the stepper is none.
    """
    check_start(start, ball)
    check_stepper(stepper)
    check_options(
        start,
        steps,
        first=first,
        restarts=restarts,
        keep=keep,
        stop=stop,
        batch_size=batch_size,
        precision=precision,
    )
    if not measure and (keep != "last" or stop is not None or record or precision == "mixed"):
        raise ValueError("measure=False goes with keep='last', without stop, record and mixed precision")
    with torch.inference_mode(False):
        start = start.detach().clone() if start.is_inference() else start.detach()
        able = precision == "auto" and not record and not is_plainly()
        chosen = able and pays_off(start.device, stepper, steps, keep)
        mixed = chosen or precision == "mixed"
        half = precision == "mixed" or (chosen and change_per_pixel(ball, start[0].numel()) >= FINEST)
        every = LOOK_EVERY if mixed or waits(start) else 1
        portions = Portions(start.device, gradient=stepper.needs_gradient)
        settings = Settings(
            objective, ball, stepper, steps, restarts, keep, record, random_start, mixed, half, every, portions, measure
        )
        parts = start.split(batch_size or len(start))
        sources = generators_for(generator, start.device, len(parts))
        offset, found = 0, []
        runs = restarts + (len(ball.ladder) - 1) * (restarts + 1)
        with progress("searching", len(parts) * runs * (steps + 1)) as bar:
            for part, source in zip(parts, sources, strict=True):
                rows = torch.arange(offset, offset + len(part), device=start.device)
                limit = stop.to(rows.device)[rows] if isinstance(stop, Tensor) and stop.ndim == 1 else stop
                origin = None if first is None else first[rows].detach()
                with unchanged() if mixed else laid_out(really=precision == "auto" and not is_plainly()):
                    found.append(_climb(settings, part, origin, rows, limit, source, bar))
                offset += len(part)
        return joined(found)


def _climb(
    settings: Settings,
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
    settings: Settings,
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
    elsewhere = settings.random_start or first is not None
    project = settings.ball.projection(start)
    best = _at_start(settings, start, rows) if settings.measure and (elsewhere or settings.mixed) else None
    start_value = None if best is None else best.value
    for number in range(settings.restarts + (warm is not None)):
        left = _unfinished(best, limit) if elsewhere or number > 0 else None
        if left is not None and len(left) == 0:
            bar.advance(settings.steps + 1)
            continue
        point = start
        if number == settings.restarts and warm is not None:
            point = warm.clone()  # else two results could be one tensor
        elif number == 0 and first is not None:
            point = project(first.clone())
        elif number > 0 or settings.random_start:
            uniform = torch.rand(start.shape, generator=generator, device=generator.device, dtype=start.dtype)
            point = project(settings.ball.scattered(start, uniform.to(start.device)))
        run = run_from(settings, point, start, start_value, rows, left, limit, project, generator, bar)
        start_value = run.start_value
        best = run if best is None else _better(best, run, anew=settings.keep == "last")
    if best is None or start_value is None:
        raise RuntimeError("a search makes at least one run")
    inside = settings.ball.contains(best.x, start)
    if not bool(inside.all()):
        raise RuntimeError(f"{int((~inside).sum())} samples left the {settings.ball} they started in")
    success = best.value <= limit if limit is not None else best.value < start_value
    x = best.x.clone() if best.x.data_ptr() == start.data_ptr() else best.x  # the start is the caller's
    return Found(x, best.value, start, start_value, success, best.steps, best.evaluations, best.trajectory)


def _at_start(settings: Settings, start: Tensor, rows: Tensor) -> Run:
    """The run that goes nowhere."""
    value = verified(settings, start, rows)
    check_start_value(settings.objective, value, rows)
    trajectory = still(value, settings.steps) if settings.record else None
    return Run(start, value, value, torch.zeros_like(rows), torch.ones_like(rows), trajectory)


def _unfinished(best: Run | None, limit: Tensor | None) -> Tensor | None:
    """The samples that still want a run; None for all of them."""
    return None if best is None or limit is None else (best.value > limit).nonzero().flatten()


def _better(best: Run, run: Run, *, anew: bool) -> Run:
    """The better of two runs for every sample, or with `anew` the later one; the work of both is counted."""
    won = torch.ones_like(best.value, dtype=torch.bool) if anew else run.value < best.value
    trajectory = best.trajectory
    if best.trajectory is not None and run.trajectory is not None:
        trajectory = Trajectory(
            torch.where(won, run.trajectory.value, best.trajectory.value),
            torch.where(won, run.trajectory.l2, best.trajectory.l2),
            torch.where(won, run.trajectory.linf, best.trajectory.linf),
        )
    return Run(
        x=choose(won, run.x, best.x),
        value=torch.where(won, run.value, best.value),
        start_value=best.start_value,
        steps=best.steps + run.steps,
        evaluations=best.evaluations + run.evaluations,
        trajectory=trajectory,
    )


def pays_off(device: torch.device, stepper: Stepper, steps: int, keep: str) -> bool:
    """Whether "auto" means mixed precision."""
    return device.type == "cuda" and steps >= MANY and stepper.needs_gradient and keep == "best"


def change_per_pixel(ball: Ball, pixels: int) -> float:
    """How far each of an image's numbers may be moved when all are moved alike, in the smallest ball."""
    smallest = min(ball.ladder)
    return smallest / math.sqrt(pixels) if isinstance(ball, L2) else smallest


def check_start(start: Tensor, ball: Ball) -> None:
    """Raises a ValueError for points that are no images of the ball's box."""
    if ball.box is not None:
        check_images(start, "start")
    if ball.box is not None and (ball.box[0] > 0 or ball.box[1] < 1):
        low, high = extremes(start)
        if low < ball.box[0] or high > ball.box[1]:
            raise ValueError(f"start must lie in the ball's box {ball.box}, got values from {low:.4g} to {high:.4g}")


def check_options(start: Tensor, steps: int, **options: Unpack[SearchOptions]) -> None:
    """Raises a ValueError for options that no search takes, or none from such a start; looks at no image."""
    first, stop, precision = options.get("first"), options.get("stop"), options.get("precision", "auto")
    keep, restarts, batch_size = options.get("keep", "best"), options.get("restarts", 1), options.get("batch_size")
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be 'auto', 'float32' or 'mixed', got {precision!r}")
    check_counts(steps=steps, restarts=restarts, batch_size=batch_size)
    if first is not None and (not isinstance(first, Tensor) or first.shape != start.shape):
        given = tuple(first.shape) if isinstance(first, Tensor) else f"a {type(first).__name__}"
        raise ValueError(f"first must have the start's shape {tuple(start.shape)}, got {given}")
    if keep not in ("best", "last"):
        raise ValueError(f"keep must be 'best' or 'last', got {keep!r}")
    if keep == "last" and restarts > 1:
        raise ValueError("keep='last' follows one run; restarts need keep='best'")
    if stop is not None:
        check_level("stop", stop, len(start))


def check_stepper(stepper: object) -> None:
    """Raises a TypeError for what does not say how to move, a stepper's class or name among it."""
    if isinstance(stepper, type) or not (hasattr(stepper, "begin") and hasattr(stepper, "move")):
        raise TypeError(f"stepper must say how to move, such as Apgd() or Sign(0.01), got {stepper!r}")


def check_counts(**counts: int | None) -> None:
    """Raises a ValueError for a number of things that is not a whole number from 1 on; None is the default."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}")


def check_level(name: str, level: float | Tensor | None, count: int | None = None) -> None:
    """Raises a ValueError unless a score to reach is one number or, where `count` is given, one per sample, not NaN."""
    wanted = "one number" if count is None else f"one number or of shape ({count},)"
    if not isinstance(level, Real | Tensor):
        raise ValueError(f"{name} must be {wanted}, got {level!r}")
    values = torch.as_tensor(level)
    if values.ndim and (count is None or values.shape != (count,)):
        raise ValueError(f"{name} must be {wanted}, got shape {tuple(values.shape)}")
    if bool(values.isnan().any()):
        raise ValueError(f"{name} must be {wanted}, got NaN, which no score reaches; is the detector calibrated?")


def generator_for(generator: torch.Generator | int | None, device: torch.device) -> torch.Generator:
    """The generator itself, or a new one on the device with the given seed, 0 for None."""
    if isinstance(generator, torch.Generator):
        return generator
    if generator is not None and not hasattr(generator, "__index__"):
        raise TypeError(f"generator must be a torch.Generator, a seed or None, got {generator!r}")
    return torch.Generator(device).manual_seed(0 if generator is None else index(generator))


def generators_for(generator: torch.Generator | int | None, device: torch.device, count: int) -> list[torch.Generator]:
    """One generator per batch, so that what happens in one batch leaves the numbers of the next alone."""
    source = generator_for(generator, device)
    if count == 1:
        return [source]
    seeds = torch.randint(2**62, (count,), generator=source, device=source.device).tolist()
    return [torch.Generator(source.device).manual_seed(seed) for seed in seeds]
