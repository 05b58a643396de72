from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gatecrash.fitting import Batch, Material, Outcome, Recipe, fit
from gatecrash.training.temporal import TemporalEnsembling, few_labels
from small_models import one_thread

__all__ = ["one_thread"]

KNOWN = torch.tensor([True, False, True, False])


class Said(nn.Module):
    """A network that says what it was told: log-probabilities by epoch and image, times a factor that can learn."""

    def __init__(self, probabilities: Tensor) -> None:
        super().__init__()
        self.probabilities, self.factor, self.epoch = probabilities, nn.Parameter(torch.ones(())), 0

    def forward(self, x: Tensor) -> Tensor:
        """The image's only pixel is its number."""
        return self.factor * self.probabilities[self.epoch, x.flatten().long()].log()


def batch_of(rows: list[int], y: list[int], epoch: int = 0) -> Batch:
    x = torch.tensor(rows, dtype=torch.float32).view(-1, 1, 1, 1)
    return Batch(x, torch.tensor(y), torch.tensor(rows), None, epoch, 9, torch.Generator())


def two_classes(values: list[list[float]]) -> Tensor:
    """(epochs, images, 2) from the probability of the first class."""
    first = torch.tensor(values)
    return torch.stack([first, 1 - first], dim=2)


def test_the_targets_after_three_epochs_are_the_hand_computed_ones() -> None:
    """α = 0.6: Z₁ = 0.4·p₁, Z₂ = 0.6·Z₁ + 0.4·p₂, Z₃ = 0.6·Z₂ + 0.4·p₃, divided by 0.4, 0.64 and 0.784."""
    model = Said(two_classes([[0.5, 0.9, 0.1, 0.2], [0.8, 0.9, 0.3, 0.4], [0.2, 0.9, 0.6, 0.7]]))
    step = TemporalEnsembling(KNOWN, 2, momentum=0.6)
    by_hand = [
        [0.5, 0.9, 0.1, 0.2],
        [0.44 / 0.64, 0.9, 0.144 / 0.64, 0.208 / 0.64],
        # 0.6·0.44 + 0.4·0.2 = 0.344; 0.9 stays; 0.6·0.144 + 0.24 = 0.3264; 0.6·0.208 + 0.28 = 0.4048
        [0.344 / 0.784, 0.9, 0.3264 / 0.784, 0.4048 / 0.784],
    ]
    for epoch in range(3):
        model.epoch = epoch
        step.begin_epoch(epoch, 9)
        if epoch > 0:
            torch.testing.assert_close(step.targets, two_classes([by_hand[epoch - 1]])[0])
        step(model, batch_of([2, 0], [1, 0]))
        step(model, batch_of([3, 1], [-1, -1]))
    step.begin_epoch(3, 9)
    torch.testing.assert_close(step.targets, two_classes([by_hand[2]])[0])


def test_the_loop_gives_the_same_targets() -> None:
    values = two_classes([[0.5, 0.9, 0.1, 0.2], [0.8, 0.9, 0.3, 0.4], [0.2, 0.9, 0.6, 0.7], [0.5] * 4])
    model, seen = Said(values), []

    class Looking(TemporalEnsembling):
        def begin_epoch(self, epoch: int, epochs: int) -> None:
            super().begin_epoch(epoch, epochs)
            model.epoch = epoch
            seen.append(self.targets.clone())

    x = torch.arange(4.0).view(-1, 1, 1, 1)
    fit(model, Looking(KNOWN, 2), Material(x, torch.tensor([0, 1, 1, 0])), Recipe(4, 3, lr=1e-12))
    torch.testing.assert_close(seen[3][:, 0], torch.tensor([0.344, 0.7056, 0.3264, 0.4048]) / 0.784)
    assert torch.equal(seen[0], torch.zeros(4, 2))


def test_the_loss_is_the_papers_by_hand() -> None:
    """Half the labels are known: −log(0.8)/2 for the batch, w(1) = 20·½·exp(−5·(1 − ½)²), and the squared mean."""
    model = Said(two_classes([[0.5, 0.9, 0.1, 0.2], [0.8, 0.4, 0.3, 0.4]]))
    step = TemporalEnsembling(KNOWN, 2, weight=20.0, ramp=2)
    step.begin_epoch(0, 9)
    first = [step(model, batch_of(rows, y)) for rows, y in (([0, 1], [0, -1]), ([2, 3], [1, -1]))]
    assert float(first[0].loss.detach()) == pytest.approx(-math.log(0.5) / 2)
    model.epoch = 1
    step.begin_epoch(1, 9)
    outcome = step(model, batch_of([0, 1], [0, -1]))
    apart = (0.3**2 + 0.5**2) / 2
    expected = -math.log(0.8) / 2 + 10 * math.exp(-1.25) * apart
    assert float(outcome.loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert float(outcome.facts["disagreement"]) == pytest.approx(apart, rel=1e-5)


def test_only_the_network_learns_and_not_the_targets() -> None:
    model = Said(two_classes([[0.5, 0.9, 0.1, 0.2], [0.8, 0.4, 0.3, 0.4]]))
    step = TemporalEnsembling(KNOWN, 2, weight=20.0, ramp=1)
    step.begin_epoch(0, 9)
    step(model, batch_of([0, 1, 2, 3], [0, -1, 1, -1]))
    step.begin_epoch(1, 9)
    model.epoch = 1
    (got,) = torch.autograd.grad(step(model, batch_of([1], [-1])).loss, model.factor)
    factor = torch.ones((), requires_grad=True)
    p = (factor * torch.tensor([0.4, 0.6]).log()).softmax(0)
    (wanted,) = torch.autograd.grad(10 * (p - torch.tensor([0.9, 0.1])).square().mean(), factor)
    torch.testing.assert_close(got, wanted)
    assert not step.targets.requires_grad and not step.outputs.requires_grad


def test_the_weight_rises_along_the_gaussian_and_stays() -> None:
    step = TemporalEnsembling(KNOWN, 2, weight=100.0, ramp=80)
    weights = []
    for epoch in (0, 1, 40, 79, 80, 200):
        step.epoch = epoch
        weights.append(step.weight)
    top = 100 * 0.5
    assert weights == pytest.approx(
        [0, top * math.exp(-5 * (79 / 80) ** 2), top * math.exp(-1.25), top * math.exp(-5 / 6400), top, top]
    )


def test_unknown_labels_change_nothing() -> None:
    values = two_classes([[0.5, 0.9, 0.1, 0.2]])
    outcomes = []
    for unknown in (0, 1, -1):
        model, step = Said(values), TemporalEnsembling(KNOWN, 2)
        step.begin_epoch(0, 1)
        outcomes.append(step(model, batch_of([0, 1, 2, 3], [0, unknown, 1, unknown])))
    first = outcomes[0]
    for other in outcomes[1:]:
        assert torch.equal(other.loss, first.loss)
        assert {name: float(v) for name, v in other.facts.items()} == {
            name: float(v) for name, v in first.facts.items()
        }


def test_the_accuracy_over_an_epoch_is_that_on_known_labels() -> None:
    """Image 0 is right (0.6 for class 0), image 2 wrong (0.7 for class 0 and not 1)."""
    model, step = Said(two_classes([[0.6, 0.9, 0.7, 0.2]])), TemporalEnsembling(KNOWN, 2)
    step.begin_epoch(0, 1)
    parts: list[Outcome] = [step(model, batch_of(*part)) for part in (([0, 1, 3], [0, 0, 1]), ([2], [1]))]
    assert [(float(part.facts["accuracy"]), int(part.counts["accuracy"])) for part in parts] == [(1, 1), (0, 1)]


def test_the_accuracy_of_a_batch_of_known_labels_is_at_most_1_and_without_any_it_counts_nothing() -> None:
    model, step = Said(two_classes([[0.6, 0.9, 0.3, 0.2]])), TemporalEnsembling(KNOWN, 2)
    step.begin_epoch(0, 1)
    known, unknown = (step(model, batch_of(*part)) for part in (([0, 2], [0, 1]), ([1, 3], [0, 1])))
    assert (float(known.facts["accuracy"]), int(known.counts["accuracy"])) == (1, 2)
    assert (float(unknown.facts["accuracy"]), int(unknown.counts["accuracy"])) == (0, 0)


def test_a_second_run_begins_without_the_ensemble_of_the_first() -> None:
    model, step = Said(two_classes([[0.5, 0.9, 0.1, 0.2]])), TemporalEnsembling(KNOWN, 2)
    for _ in range(2):
        step.begin_epoch(0, 9)
        assert float(step.mean.abs().sum()) == 0 and float(step.targets.abs().sum()) == 0
        step(model, batch_of([0, 1, 2, 3], [0, 0, 1, 0]))
        step.begin_epoch(1, 9)
        torch.testing.assert_close(step.targets[:, 0], torch.tensor([0.5, 0.9, 0.1, 0.2]))


def test_a_network_that_must_agree_learns_from_images_without_labels() -> None:
    """Two clusters, one label each: the others are pulled along only when the ensemble has a weight."""
    random = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 2
    x = (0.3 + 0.4 * y.view(-1, 1) + 0.05 * torch.randn(40, 2, generator=random)).clamp(0, 1)[:, None, None, :]
    known = few_labels(y, 1, seed=0)
    gaps = []
    for weight in (0.0, 100.0):
        model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
        nn.init.zeros_(model[1].weight)
        history = fit(model, TemporalEnsembling(known, 2, weight=weight, ramp=4), Material(x, y), Recipe(8, 40, lr=1.0))
        gaps.append(history[-1]["disagreement"])
    assert gaps[1] < 0.7 * gaps[0]


def test_few_labels_are_so_many_of_every_class_at_random() -> None:
    labels = torch.tensor([0, 1, 2] * 20 + [2] * 5)
    known = few_labels(labels, 4, seed=1)
    assert torch.bincount(labels[known]).tolist() == [4, 4, 4]
    assert torch.equal(known, few_labels(labels, 4, seed=1))
    assert not torch.equal(known, few_labels(labels, 4, seed=2))
    assert bool(few_labels(labels, 20, seed=0)[labels < 2].all())


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: few_labels(torch.tensor([0, 0, 1]), 2, 0), "class 1 has 1 images, fewer than 2"),
        (lambda: few_labels(torch.tensor([0, 0, 1]), 0, 0), "at least 1 label per class, got 0"),
        (lambda: TemporalEnsembling(~KNOWN & KNOWN, 2), "needs at least one known label"),
        (lambda: TemporalEnsembling(KNOWN, 2, momentum=1.0), "momentum must be at least 0 and below 1, got 1"),
        (lambda: TemporalEnsembling(KNOWN, 2, weight=-1), "weight must not be negative, got -1"),
        (lambda: TemporalEnsembling(KNOWN, 2, ramp=0), "ramp must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(work: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        work()
