from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gatecrash.detectors import CCU
from gatecrash.detectors.certified import APART
from gatecrash.encoder import Encoder
from gatecrash.fitting import Batch, Material, Recipe, fit, seeded
from gatecrash.mixture import Mixture
from gatecrash.training import CertifiedUncertainty
from gatecrash.training.ccu import log_density, mixture_of, unconstrained
from small_models import blank, one_thread, squares, trained_net

assert one_thread


def network(seed: int = 0) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 3))


def begun(model: nn.Module, **options: Any) -> CertifiedUncertainty:
    """Ready for its first batch; the metric is nearly the pixels' own, so that in and out are not far apart."""
    detector = CCU(Encoder(model), components=3, ridge=1.0, floor=0.05)
    step = CertifiedUncertainty(detector, squares(60)[0], blank(40), **options)
    step.begin_epoch(0, 1)
    return step


def batch(count: int = 6) -> Batch:
    x, y = squares(count, 5)
    return Batch(x, y, torch.arange(count), blank(4, 6), 0, 1, torch.Generator())


def mixture(components: int = 3, width: int = 5) -> Mixture:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(components, generator=generator, dtype=torch.float64)
    means = torch.randn(components, width, generator=generator, dtype=torch.float64)
    roots = 0.5 + torch.rand(components, generator=generator, dtype=torch.float64)
    return Mixture(weights / weights.sum(), means, roots, "spherical")


def test_the_density_with_a_gradient_is_the_mixtures() -> None:
    given, z = mixture(), torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(log_density(z, unconstrained(given)), given.log_prob(z))
    for ours, theirs in zip(mixture_of(unconstrained(given)).tensors, given.tensors, strict=True):
        torch.testing.assert_close(ours, theirs)


def posterior(detector: CCU, logits: Tensor, images: Tensor) -> Tensor:
    """p(y|x) as the paper writes it, with plain exponentials of what is far from underflow."""
    z = detector.whitened(images)
    shift = detector.inside.log_prob(z).maximum(detector.outside.log_prob(z))
    inside, outside = (part.log_prob(z).sub(shift).exp()[:, None] for part in (detector.inside, detector.outside))
    return (inside * logits.double().softmax(dim=1) + outside / 3) / (inside + outside)


def test_one_step_is_the_papers_loss_written_out() -> None:
    model, given = network(), batch()
    step = begun(model, weight=0.7)
    detector = deepcopy(step.trained)
    images = torch.cat([given.x, given.outliers])
    p = posterior(detector, model(images), images)
    expected = -p[torch.arange(6), given.y].log().mean() - 0.7 * p[6:].log().mean(dim=1).mean()
    outcome = step(model, given)
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-6, atol=1e-6)
    found = torch.autograd.grad(outcome.loss, list(model.parameters()))
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(outcome.facts["loss in"] + 0.7 * outcome.facts["loss out"], expected.detach())


def test_the_mixtures_take_adams_first_step_against_the_same_loss() -> None:
    model, given = network(), batch()
    step = begun(model, weight=0.7, lr=0.01)
    before = {name: parameter.detach().clone().requires_grad_() for name, parameter in step.parameters.items()}
    images = torch.cat([given.x, given.outliers])
    z = step.detector.whitened(images)

    def part(side: str) -> dict[str, Tensor]:
        return {name.removeprefix(f"{side}_"): t for name, t in before.items() if name.startswith(f"{side}_")}

    inside, outside = (log_density(z, part(side)).exp()[:, None] for side in ("in", "out"))
    p = (inside * model(images).detach().double().softmax(dim=1) + outside / 3) / (inside + outside)
    loss = -p[torch.arange(6), given.y].log().mean() - 0.7 * p[6:].log().mean()
    gradients = dict(zip(before, torch.autograd.grad(loss, list(before.values())), strict=True))
    step(model, given)
    for name, gradient in gradients.items():
        if name != "out_log_variances":  # which may have been raised after the step
            moved = before[name].detach() - 0.01 * gradient / (gradient.abs() + 1e-8)
            torch.testing.assert_close(step.parameters[name].detach(), moved, rtol=1e-5, atol=1e-6)


def test_variances_outside_stay_four_times_the_largest_inside_or_more() -> None:
    model = network()
    step = begun(model, lr=0.3)
    for _ in range(5):
        step(model, batch())
        inside, outside = (step.parameters[f"{side}_log_variances"].detach() for side in ("in", "out"))
        assert float(outside.min()) >= float(inside.max()) + math.log(APART) - 1e-12
    detector = step.trained
    assert float(detector.out_roots.double().pow(-2).min()) >= 4 * float(detector.in_roots.double().pow(-2).max()) * (
        1 - 1e-6
    )


def test_training_lowers_both_losses_and_the_detector_has_what_was_learnt() -> None:
    model = network()
    detector = CCU(Encoder(model), components=3, ridge=1.0, floor=0.05)
    step = CertifiedUncertainty(detector, squares(60)[0], blank(40), lr=0.01)
    material = Material(*squares(60), blank(40), outliers_per_image=1.0)
    history = fit(model, step, material, Recipe(20, 20, optimiser="adamw", lr=0.02))
    assert history[-1]["loss in"] < 0.1 < history[0]["loss in"]
    assert history[-1]["loss out"] < math.log(3) + 0.05
    assert history[-1]["accuracy"] == 1 and history[-1]["taken for in"] == 1
    trained = step.trained
    inside, outside = trained.scores(squares(20, 8)[0]), trained.scores(blank(20, 9))
    assert float(outside.min()) > float(inside.max())
    fresh = CCU(Encoder(model), components=3, ridge=1.0, floor=0.05).fit(squares(60), outliers=blank(40))
    assert not torch.allclose(fresh.in_means, trained.in_means)
    assert bool((trained.confidence_bound(blank(5, 9), 0.001) >= (-outside[:5]).exp() + 1 / 3 - 1e-6).all())


# Kills


class Killed(Exception):
    pass


def run(folder: Path | None, *, killed: bool = False, **options: Any) -> tuple[nn.Module, CertifiedUncertainty]:
    model = network(3)
    step = CertifiedUncertainty(CCU(Encoder(model), components=2), squares(30)[0], blank(20), **options)
    left = 1

    def evaluate(_: nn.Module) -> Mapping[str, float]:
        nonlocal left
        left -= 1
        if killed and left < 0:
            raise Killed
        return {}

    material = Material(*squares(30), blank(20))
    fit(model, step, material, Recipe(3, 10, lr=1e-2, seed=4), folder=folder, resume=True, evaluate=evaluate)
    return model, step


def test_a_killed_run_goes_on_to_the_same_weights_and_the_same_mixtures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, its = run(None)
    with pytest.raises(Killed):
        run(tmp_path, killed=True)
    monkeypatch.setattr(CCU, "learn_inside", None)  # a resumed run does not fit them again
    resumed, step = run(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    x = torch.cat([squares(5, 8)[0], blank(5, 9)])
    assert torch.equal(its.trained.scores(x), step.trained.scores(x))


def test_a_run_with_other_settings_is_not_resumed(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(ValueError, match=r"begun with other settings, step.lr"):
        run(tmp_path, lr=0.02)


# Mistakes


def test_mistakes_are_named() -> None:
    detector = CCU(trained_net(), components=3)
    for options, message in (({"weight": -1.0}, "weight must not be negative"), ({"lr": 0.0}, "lr must be positive")):
        with pytest.raises(ValueError, match=message):
            CertifiedUncertainty(detector, squares(60)[0], blank(40), **options)
    with pytest.raises(ValueError, match="the mixtures are not trained yet"):
        CertifiedUncertainty(detector, squares(60)[0], blank(40)).trained  # noqa: B018
    model = network()
    given = batch()
    alone = Batch(given.x, given.y, given.rows, None, 0, 1, given.generator)
    with pytest.raises(ValueError, match="needs outliers to be exposed to"):
        begun(model)(model, alone)


def test_half_precision_leaves_the_densities_exact() -> None:
    losses = []
    for precision in ("float32", "bf16"):
        model = network()
        step = begun(model)
        recipe = Recipe(1, 60, lr=1e-6, precision="bf16" if precision == "bf16" else "float32")
        history = fit(model, step, Material(*squares(60), blank(40)), recipe)
        losses.append(history[0])
    assert losses[1]["taken for in"] == losses[0]["taken for in"]
    assert losses[1]["loss out"] == pytest.approx(losses[0]["loss out"], rel=0.01)
    assert losses[1]["loss"] != losses[0]["loss"]
