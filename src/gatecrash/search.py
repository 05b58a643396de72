"""The one loop. Attacks, inner maximisation, purification and Langevin sampling all call `search`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor

from gatecrash.ball import L2, Ball, distance
from gatecrash.found import Found, Trajectory, joined
from gatecrash.images import check_images
from gatecrash.objective import name_of
from gatecrash.progress import Bar, progress
from gatecrash.protocols import Objective, State, Stepper, Walk
from gatecrash.speed import Pace, at_pace
from gatecrash.stepper import choose, waits

Precision = Literal["auto", "float32", "mixed"]

LOOK_EVERY = 10
"""Steps from one look at who is done to the next, where a look makes the host wait for the device."""

FAR = 0.7
"""The share of a mixed run, at its beginning, that is evaluated in half precision."""

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
    precision: Precision = "float32",
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
        precision: "float32" evaluates the networks as they are. "mixed" evaluates most of a run in half precision and
            the rest with networks prepared for speed; what it returns is evaluated as with "float32", and a sample
            leaves at `stop` only after that. "auto" is "mixed" on CUDA for the best of 50 steps or more with gradients,
            in half precision only where a pixel may change by more than that rounds.

    Raises:
        ValueError: the start is no batch of images, the objective is NaN at it or has no gradient, or an option is off.
    """
    check_options(start, first, ball, steps, restarts, keep, stop, batch_size, precision)
    with torch.inference_mode(False):
        start = start.detach().clone() if start.is_inference() else start.detach()
        chosen = precision == "auto" and not record and pays_off(start.device, stepper, steps, keep)
        mixed = chosen or precision == "mixed"
        half = precision == "mixed" or (chosen and change_per_pixel(ball, start) >= FINEST)
        every = LOOK_EVERY if mixed or waits(start) else 1
        settings = _Settings(objective, ball, stepper, steps, restarts, keep, record, random_start, mixed, half, every)
        parts = start.split(batch_size or len(start))
        sources = generators_for(generator, start.device, len(parts))
        offset, found = 0, []
        runs = restarts + (len(ball.ladder) - 1) * (restarts + 1)
        with progress("searching", len(parts) * runs * (steps + 1)) as bar:
            for part, source in zip(parts, sources, strict=True):
                rows = torch.arange(offset, offset + len(part), device=start.device)
                limit = stop.to(rows.device)[rows] if isinstance(stop, Tensor) and stop.ndim == 1 else stop
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
    mixed: bool
    half: bool
    look_every: int

    @property
    def far(self) -> int:
        """The steps of a run that are evaluated in half precision."""
        return int(FAR * self.steps) if self.half else 0

    def pace(self, step: int) -> Pace:
        """The pace at which a step is evaluated."""
        return "plain" if not self.mixed else "half" if step < self.far else "prepared"


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
    elsewhere = settings.random_start or first is not None
    best = _at_start(settings, start, rows) if elsewhere or settings.mixed else None
    start_value = None if best is None else best.value
    for number in range(settings.restarts + (warm is not None)):
        left = _unfinished(best, limit) if elsewhere or number > 0 else None
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
    value, _ = _evaluate(settings, start, rows)
    check_start_value(settings.objective, value, rows)
    trajectory = _still(value, settings.steps) if settings.record else None
    return _Run(start.clone(), value, value, torch.zeros_like(rows), torch.ones_like(rows), trajectory)


def _unfinished(best: _Run | None, limit: Tensor | None) -> Tensor | None:
    """The samples that still want a run; None for all of them."""
    return None if best is None or limit is None else (best.value > limit).nonzero().flatten()


@dataclass
class _Play:
    """The samples of a run that are still in play, and what each of them would return if the run ended here."""

    at: slice | Tensor
    """Their places in the batch."""
    rows: Tensor
    centre: Tensor
    limit: Tensor | None
    x: Tensor
    value: Tensor
    steps: Tensor
    evaluations: Tensor
    going: Tensor | None = None
    """(B,), False for those that reached their stop and change no more; None where nobody is held: without a stop, and
    in mixed precision, where it takes a plain evaluation to be done."""

    @property
    def count(self) -> Tensor | int:
        """What a step or an evaluation adds for every sample."""
        return 1 if self.going is None else self.going

    def take(self, x: Tensor, value: Tensor, keep: str) -> None:
        """Keep a point where it is better than the one before, or with "last" always."""
        if keep == "last" and self.going is None:
            self.x, self.value = x, value
            return
        taken = value < self.value if keep == "best" else torch.ones_like(value, dtype=torch.bool)
        if self.going is not None:
            taken = taken & self.going
        self.x = choose(taken, x, self.x)
        self.value = torch.where(taken, value, self.value)

    def freeze(self) -> None:
        """Let those that reached their stop change no more."""
        if self.going is not None and self.limit is not None:
            self.going = self.going & (self.value > self.limit)

    def only(self, going: Tensor) -> _Play:
        """The same with some of the samples."""
        return _Play(
            at=going if isinstance(self.at, slice) else self.at[going],
            rows=self.rows[going],
            centre=self.centre[going],
            limit=None if self.limit is None else self.limit[going],
            x=self.x[going],
            value=self.value[going],
            steps=self.steps[going],
            evaluations=self.evaluations[going],
            going=None if self.going is None else self.going[going],
        )


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
    held, play = _begin(settings, start, start_value, rows, left, limit)
    x = point[play.at]
    state: State = {}
    drawn: dict[int, Tensor] = {}  # the generator's state before the numbers of every step since the last look

    def draw(kind: Callable[..., Tensor]) -> Tensor:
        if limit is not None and settings.look_every > 1:
            drawn.setdefault(step, generator.get_state())
        full = kind(start.shape, generator=generator, device=generator.device, dtype=start.dtype)
        return full.to(start.device)[play.at]

    def evaluate(points: Tensor) -> Tensor:
        play.evaluations += play.count
        return _evaluate(settings, points, play.rows, settings.pace(step))[0]

    for step in range(settings.steps + 1):
        last = step == settings.steps
        if 0 < step == settings.far:
            _restate(play, state, evaluate(play.x))
        with_gradient = settings.stepper.needs_gradient and not last
        value, gradient = _evaluate(settings, x, play.rows, settings.pace(step), with_gradient)
        if held.start_value is None:
            check_start_value(settings.objective, value, rows)
            held.start_value = value
        play.evaluations += play.count
        play.take(x, value, settings.keep)
        if held.trajectory is not None:
            _record(held.trajectory, step, play)
        bar.advance()
        if last:
            break
        walk = Walk(
            x=x,
            value=value,
            gradient=gradient,
            centre=play.centre,
            ball=settings.ball,
            step=step,
            steps=settings.steps,
            normal=partial(draw, torch.randn),
            uniform=partial(draw, torch.rand),
            evaluate=evaluate,
        )
        if step == 0:
            state = settings.stepper.begin(walk)
        play.freeze()
        if play.limit is not None and step % settings.look_every == 0:
            going = _going(settings, play, play.limit, held.start_value[play.at]).nonzero().flatten()
            if len(going) < len(x):
                _settle(held, play, step)
            if len(going) == 0:
                _rewind(generator, drawn, int(play.steps.max()))
                bar.advance(settings.steps - step)
                return held
            if len(going) < len(x):
                walk, state = _compacted(walk, state, going)
                play = play.only(going)
            drawn.clear()
        x = settings.ball.project(settings.stepper.move(walk, state), play.centre).detach()
        play.steps += play.count
    if settings.mixed:
        play.value, _ = _evaluate(settings, play.x, play.rows)
        play.evaluations += 1
    _settle(held, play, settings.steps)
    return held


def _begin(
    settings: _Settings,
    start: Tensor,
    start_value: Tensor | None,
    rows: Tensor,
    left: Tensor | None,
    limit: Tensor | None,
) -> tuple[_Run, _Play]:
    """A run before its first step: all samples at their start, and those `left` in play."""
    unknown = start.new_full((len(start),), torch.inf)
    value = unknown if start_value is None else start_value
    still = start.new_zeros(len(start)) if start_value is None else start_value
    at: slice | Tensor = slice(None) if left is None else left
    held = _Run(
        x=start.clone(),
        value=value.clone(),
        start_value=start_value,
        steps=torch.zeros_like(rows),
        evaluations=torch.zeros_like(rows),
        trajectory=_still(still, settings.steps) if settings.record else None,
    )
    play = _Play(
        at=at,
        rows=rows[at],
        centre=start[at],
        limit=None if limit is None else limit[at],
        x=held.x[at],
        value=(unknown if settings.mixed else value)[at],  # a pace's values are compared with its own only
        steps=torch.zeros_like(rows[at]),
        evaluations=torch.zeros_like(rows[at]),
        going=None if limit is None or settings.mixed else torch.ones_like(rows[at], dtype=torch.bool),
    )
    return held, play


def _going(settings: _Settings, play: _Play, limit: Tensor, start_value: Tensor) -> Tensor:
    """Who is not done, (B,). In mixed precision whoever seems to be is evaluated plainly, and stays if it is not."""
    if play.going is not None:
        return play.going
    going = (play.value > limit) & (start_value > limit)
    seem = (~going).nonzero().flatten()
    if len(seem):
        value, _ = _evaluate(settings, play.x[seem], play.rows[seem])
        play.evaluations[seem] += 1
        going[seem] = value > limit[seem]
        play.value[seem] = torch.where(going[seem], play.value[seem], value)
    return going


def _restate(play: _Play, state: State, value: Tensor) -> None:
    """Give the points held the values they have at another pace, and shift those in the stepper's state as far."""
    shift = (value - play.value).nan_to_num(0, 0, 0)
    play.value = value
    for name in state:
        if name.endswith("value"):
            state[name] = state[name] + shift


def _settle(held: _Run, play: _Play, step: int) -> None:
    """Write what the samples in play have come to, for the rows of the trajectory still to come too."""
    held.x[play.at], held.value[play.at] = play.x, play.value
    held.steps[play.at], held.evaluations[play.at] = play.steps, play.evaluations
    if held.trajectory is not None:
        _record(held.trajectory, slice(step, None), play)


def _rewind(generator: torch.Generator, drawn: dict[int, Tensor], steps: int) -> None:
    """Take back the random numbers drawn after so many steps: all were done by then, and nobody had looked."""
    late = [step for step in drawn if step >= steps]
    if late:
        generator.set_state(drawn[min(late)])


def _evaluate(
    settings: _Settings, x: Tensor, rows: Tensor, pace: Pace = "plain", with_gradient: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The objective at x and, where asked for, its gradient; no parameter gets a `.grad`."""
    with at_pace(pace):
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


def _record(trajectory: Trajectory, when: int | slice, play: _Play) -> None:
    """Write where the samples in play stand into some rows of the trajectory."""
    trajectory.value[when, play.at] = play.value
    trajectory.l2[when, play.at] = distance(play.x, play.centre, "l2")
    trajectory.linf[when, play.at] = distance(play.x, play.centre, "linf")


def pays_off(device: torch.device, stepper: Stepper, steps: int, keep: str) -> bool:
    """Whether "auto" means mixed precision."""
    return device.type == "cuda" and steps >= MANY and stepper.needs_gradient and keep == "best"


def change_per_pixel(ball: Ball, start: Tensor) -> float:
    """How far every pixel may be moved when all are moved alike, in the smallest ball."""
    smallest = min(ball.ladder)
    return smallest / math.sqrt(start[0].numel()) if isinstance(ball, L2) else smallest


def check_options(
    start: Tensor,
    first: Tensor | None,
    ball: Ball,
    steps: int,
    restarts: int,
    keep: str,
    stop: float | Tensor | None,
    batch_size: int | None,
    precision: str,
) -> None:
    """Raises a ValueError for whatever a search cannot start with."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be 'auto', 'float32' or 'mixed', got {precision!r}")
    if ball.box is not None:
        check_images(start, "start")
    if ball.box is not None and (ball.box[0] > 0 or ball.box[1] < 1):
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
