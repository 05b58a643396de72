"""One run of a search: the samples in play go step by step from one starting point, and leave when they are done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gatecrash.ball import Ball, distance
from gatecrash.found import Trajectory
from gatecrash.half import Half, rough, some_of
from gatecrash.kept import Kept
from gatecrash.objective import name_of
from gatecrash.portions import Evaluation, Portions
from gatecrash.progress import Bar
from gatecrash.protocols import Objective, State, Stepper, Walk
from gatecrash.speed import Pace, at_pace, current_pace, full_float32


@dataclass(frozen=True)
class Settings:
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
    portions: Portions
    measure: bool = True


@dataclass
class Run:
    """What one run, from one starting point, came to."""

    x: Tensor
    value: Tensor
    start_value: Tensor | None
    steps: Tensor
    evaluations: Tensor
    trajectory: Trajectory | None
    owned: bool = False
    """Whether nobody else has `x` and `value`, so that they may be written to."""


@dataclass
class Play:
    """The samples of a run that are still in play, and what each of them would return if the run ended here."""

    at: slice | Tensor
    """Their places in the batch."""
    rows: Tensor
    centre: Tensor
    limit: Tensor | None
    kept: Kept
    value: Tensor
    steps: Tensor | int = 0
    """(B,), or one number while it is everybody's."""
    evaluations: Tensor | int = 0
    """Likewise."""
    going: Tensor | None = None
    """(B,), False for those that reached their stop and change no more; None where nobody is held: without a stop, and
    in mixed precision, where it takes a plain evaluation to be done."""

    @property
    def x(self) -> Tensor:
        """The points that they would return."""
        return self.kept.x

    @property
    def count(self) -> Tensor | int:
        """What a step or an evaluation adds for every sample."""
        return 1 if self.going is None else self.going

    def take(self, x: Tensor, value: Tensor, keep: str) -> None:
        """Keep a point where it is better than the one before, or with "last" always."""
        if keep == "last" and self.going is None:
            self.kept.take_all(x)
            self.value = value
            return
        taken = value < self.value if keep == "best" else torch.ones_like(value, dtype=torch.bool)
        if self.going is not None:
            taken = taken & self.going
        self.kept.take(taken, x)
        self.value = torch.where(taken, value, self.value)

    def freeze(self) -> None:
        """Let those that reached their stop change no more."""
        if self.going is not None and self.limit is not None:
            self.going = self.going & (self.value > self.limit)

    def only(self, going: Tensor) -> Play:
        """The same with some of the samples."""
        return Play(
            at=going if isinstance(self.at, slice) else self.at[going],
            rows=self.rows[going],
            centre=self.centre[going],
            limit=None if self.limit is None else self.limit[going],
            kept=Kept(self.x[going]),
            value=self.value[going],
            steps=_of(self.steps, going),
            evaluations=_of(self.evaluations, going),
            going=None if self.going is None else self.going[going],
        )


def run_from(
    settings: Settings,
    point: Tensor,
    start: Tensor,
    start_value: Tensor | None,
    rows: Tensor,
    left: Tensor | None,
    limit: Tensor | None,
    project: Callable[[Tensor], Tensor],
    generator: torch.Generator,
    bar: Bar,
) -> Run:
    """One run from `point` for the samples `left`; what it returns holds all samples, the others at their start.

    Where `start_value` is None, `point` is the start, or taken for it, and the first evaluation finds it. `project` is
    the ball's around `start`.
    """
    held, play = _begin(settings, start, start_value, rows, left, limit)
    x = point[play.at]
    if left is not None:
        project = settings.ball.projection(play.centre)
    state: State = {}
    half = Half(settings.stepper, settings.steps, really=settings.half)
    drawn: dict[int, Tensor] = {}  # the generator's state before the numbers of every step since the last look

    def draw(kind: Callable[..., Tensor]) -> Tensor:
        if limit is not None and settings.look_every > 1:
            drawn.setdefault(step, generator.get_state())
        full = kind(start.shape, generator=generator, device=generator.device, dtype=start.dtype)
        return full.to(start.device)[play.at]

    normal, uniform = partial(draw, torch.randn), partial(draw, torch.rand)

    def pace() -> Pace:
        return "plain" if not settings.mixed else "half" if step < half.end else "prepared"

    def try_out(points: Tensor) -> Tensor:
        play.evaluations += play.count
        return evaluate(settings, points, play.rows, pace())[0]

    for step in range(settings.steps + 1):
        last = step == settings.steps
        if last and not settings.measure:
            play.take(x, play.value, settings.keep)
            bar.advance()
            break
        if settings.half:
            half.review(step, partial(_roughness, settings, play, step))
        if 0 < step == half.end:
            _restate(play, state, try_out(play.x))
        with_gradient = settings.stepper.needs_gradient and not last
        value, gradient = evaluate(settings, x, play.rows, pace(), with_gradient)
        if held.start_value is None:
            check_start_value(settings.objective, value, rows)
            held.start_value = value
        play.evaluations += play.count
        play.take(x, value, settings.keep)
        if settings.half and gradient is not None:
            half.note(step, gradient)
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
            normal=normal,
            uniform=uniform,
            evaluate=try_out,
        )
        if step == 0:
            state = settings.stepper.begin(walk)
        play.freeze()
        if play.limit is not None and step % settings.look_every == 0:
            going = _going(settings, play, play.limit, held.start_value[play.at]).nonzero().flatten()
            if len(going) < len(x):
                _settle(held, play, step)
            if len(going) == 0:
                _rewind(generator, drawn, int(torch.as_tensor(play.steps).max()))
                bar.advance(settings.steps - step)
                return held
            if len(going) < len(x):
                walk, state = _compacted(walk, state, going)
                play = play.only(going)
                project = settings.ball.projection(play.centre)
            drawn.clear()
        with at_pace(pace()) if settings.mixed else nullcontext():
            moved = settings.stepper.move(walk, state)
            x = project(moved if _is_new(moved, walk, state) else moved.clone()).detach()
        del walk, moved, gradient  # else two batches more would be there while the next gradient is computed
        play.steps += play.count
    if settings.mixed:
        play.value = verified(settings, play.x, play.rows)
        play.evaluations += 1
    _settle(held, play, settings.steps)
    return held


def _begin(
    settings: Settings,
    start: Tensor,
    start_value: Tensor | None,
    rows: Tensor,
    left: Tensor | None,
    limit: Tensor | None,
) -> tuple[Run, Play]:
    """A run before its first step: all samples at their start, and those `left` in play."""
    unknown = start.new_full((len(start),), torch.inf)
    value = unknown if start_value is None else start_value
    first_value = start.new_zeros(len(start)) if start_value is None else start_value
    at: slice | Tensor = slice(None) if left is None else left
    held = Run(
        x=start,
        value=value,
        start_value=start_value,
        steps=torch.zeros_like(rows),
        evaluations=torch.zeros_like(rows),
        trajectory=still(first_value, settings.steps) if settings.record else None,
    )
    play = Play(
        at=at,
        rows=rows[at],
        centre=start[at],
        limit=None if limit is None else limit[at],
        kept=Kept(held.x[at]),
        value=(unknown if settings.mixed else value)[at],  # a pace's values are compared with its own only
        going=None if limit is None or settings.mixed else torch.ones_like(rows[at], dtype=torch.bool),
    )
    return held, play


def _going(settings: Settings, play: Play, limit: Tensor, start_value: Tensor) -> Tensor:
    """Who is not done, (B,). In mixed precision whoever seems to be is evaluated plainly, and stays if it is not."""
    if play.going is not None:
        return play.going
    going = (play.value > limit) & (start_value > limit)
    seem = (~going).nonzero().flatten()
    if len(seem):
        value = verified(settings, play.x[seem], play.rows[seem])
        play.evaluations = play.evaluations + torch.zeros_like(play.rows).index_fill(0, seem, 1)
        going[seem] = value > limit[seem]
        play.value[seem] = torch.where(going[seem], play.value[seem], value)
    return going


def _roughness(settings: Settings, play: Play, step: int) -> Tensor:
    """The share of samples whose values half precision is too rough for, by a look at some, ()."""
    few = some_of(len(play.rows), step).to(play.rows.device, non_blocking=True)
    value, _ = evaluate(settings, play.x[few], play.rows[few], "prepared")
    play.evaluations = play.evaluations + torch.zeros_like(play.rows).index_fill(0, few, 1)
    return rough(value, play.value[few])


def _restate(play: Play, state: State, value: Tensor) -> None:
    """Give the points held the values they have at another pace, and shift those in the stepper's state as far."""
    shift = (value - play.value).nan_to_num(0, 0, 0)
    play.value = value
    for name in state:
        if name.endswith("value"):
            state[name] = state[name] + shift


def _of(counts: Tensor | int, rows: Tensor) -> Tensor | int:
    """Some samples' counts."""
    return counts if isinstance(counts, int) else counts[rows]


def _settle(held: Run, play: Play, step: int) -> None:
    """Write what the samples in play have come to, for the rows of the trajectory still to come too."""
    if isinstance(play.at, slice):
        held.x, held.value = play.x, play.value
    else:
        if not held.owned:
            held.x, held.value, held.owned = held.x.clone(), held.value.clone(), True
        held.x[play.at], held.value[play.at] = play.x, play.value
    held.steps[play.at], held.evaluations[play.at] = play.steps, play.evaluations
    if held.trajectory is not None:
        _record(held.trajectory, slice(step, None), play)


def _rewind(generator: torch.Generator, drawn: dict[int, Tensor], steps: int) -> None:
    """Take back the random numbers drawn after so many steps: all were done by then, and nobody had looked."""
    late = [step for step in drawn if step >= steps]
    if late:
        generator.set_state(drawn[min(late)])


def evaluate(
    settings: Settings, x: Tensor, rows: Tensor, pace: Pace = "plain", with_gradient: bool = False
) -> Evaluation:
    """The objective at x and, where asked for, its gradient; no parameter gets a `.grad`."""
    function = partial(_evaluated, settings.objective, with_gradient)
    if pace == current_pace():
        return settings.portions.evaluate(function, x, rows)
    with at_pace(pace):
        return settings.portions.evaluate(function, x, rows)


def verified(settings: Settings, x: Tensor, rows: Tensor) -> Tensor:
    """The objective as it is reported, (B,): of a mixed search, which rounds on its way, in float32 without TF32."""
    with full_float32() if settings.mixed else nullcontext():
        value, _ = evaluate(settings, x, rows)
    return value


def _evaluated(objective: Objective, with_gradient: bool, x: Tensor, rows: Tensor) -> Evaluation:
    if not with_gradient:
        with torch.no_grad():
            return objective(x, rows).detach().to(x.dtype), None
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return _evaluated(objective, with_gradient, x, rows)
    x = x.detach().requires_grad_()
    value, gradient = objective(x, rows), None
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, x, torch.ones_like(value), allow_unused=True)
    if gradient is None:
        raise ValueError(
            f"{name_of(objective)} has no gradient with respect to the images, so it cannot be attacked with one; look "
            "for detach(), no_grad() or numpy between the images and its value"
        )
    if gradient.stride() != x.stride():  # arithmetic on two layouts is slow
        gradient = torch.empty_like(x).copy_(gradient)
    value = value.detach()
    return value if value.dtype == x.dtype else value.to(x.dtype), gradient


def _is_new(moved: Tensor, walk: Walk, state: State) -> bool:
    """Whether a stepper's next point has memory of its own, all of it, which may be written to."""
    held = (walk.x, walk.centre, walk.gradient, *state.values())
    others = {tensor.untyped_storage().data_ptr() for tensor in held if tensor is not None}
    return moved.is_contiguous() and moved.untyped_storage().data_ptr() not in others


def _compacted(walk: Walk, state: State, going: Tensor) -> tuple[Walk, State]:
    """The walk and the stepper's state without the samples that are done."""
    gradient = None if walk.gradient is None else walk.gradient[going]
    walk = replace(walk, x=walk.x[going], value=walk.value[going], gradient=gradient, centre=walk.centre[going])
    return walk, {name: tensor[going] for name, tensor in state.items()}


def still(start_value: Tensor, steps: int) -> Trajectory:
    """The trajectory of samples that never move."""
    nowhere = torch.zeros_like(start_value).repeat(steps + 1, 1)
    return Trajectory(start_value.repeat(steps + 1, 1), nowhere, nowhere.clone())


def _record(trajectory: Trajectory, when: int | slice, play: Play) -> None:
    """Write where the samples in play stand into some rows of the trajectory."""
    trajectory.value[when, play.at] = play.value
    trajectory.l2[when, play.at] = distance(play.x, play.centre, "l2")
    trajectory.linf[when, play.at] = distance(play.x, play.centre, "linf")


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
