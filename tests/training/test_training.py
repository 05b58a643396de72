from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gatecrash.fitting import seeded
from gatecrash.training import classifier, train_classifier

SIDE = 8
CLASSES = 3


def striped(count: int = 60) -> tuple[Tensor, Tensor]:
    """Dark images with a bright stripe at the top, in the middle or at the bottom: the label says which."""
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(count) % CLASSES
    x = 0.1 * torch.rand(count, 1, SIDE, SIDE, generator=generator)
    for image, label in zip(x, y.tolist(), strict=True):
        image[0, 3 * label : 3 * label + 2] += 0.8
    return x, y


def network(seed: int = 0, dropout: float = 0.2) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(8 * SIDE * SIDE, CLASSES),
        )


class Witness(nn.Module):
    """A linear classifier that remembers the images it was trained on, batch by batch."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(channels * SIDE * SIDE, CLASSES)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(x.detach().clone())
        logits: Tensor = self.linear(x.flatten(1))
        return logits


def train(model: nn.Module, **options: Any) -> nn.Module:
    x, y = striped()
    settings: dict[str, Any] = {"epochs": 2, "seed": 0, "shift": 1, "batch_size": 20}
    return train_classifier(model, options.pop("x", x), options.pop("y", y), **(settings | options))


def accuracy(model: nn.Module) -> float:
    x, y = striped()
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == y).double().mean())


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_separable_problem_is_learnt_completely() -> None:
    model = network()
    assert accuracy(model.eval()) < 0.7
    assert train(model, epochs=10) is model
    assert accuracy(model) == 1


def test_images_and_labels_may_be_of_another_precision() -> None:
    x, y = striped()
    model = train(network(), x=x.double(), y=y.to(torch.int32), epochs=10)
    assert accuracy(model) == 1
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_a_seed_determines_the_weights_bit_for_bit() -> None:
    first, again, other = (train(network(), seed=seed) for seed in (3, 3, 4))
    assert same_weights(first, again)
    assert not same_weights(first, other)


def test_the_seed_determines_dropout_too() -> None:
    same_order = {"shift": 0, "flip": False, "batch_size": 60, "epochs": 1}
    torch.manual_seed(1)
    first = train(network(dropout=0.5), **same_order)
    torch.manual_seed(2)
    assert same_weights(first, train(network(dropout=0.5), **same_order))


def test_no_global_random_state_changes() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    train(network())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert str(np.random.get_state()) == before[2]  # noqa: NPY002


def test_images_and_labels_are_not_written_to() -> None:
    x, y = striped()
    train(network(), x=x, y=y)
    assert torch.equal(x, striped()[0])
    assert torch.equal(y, striped()[1])


def test_the_model_comes_back_in_eval_mode_on_its_device_without_gradients() -> None:
    model = train(network().train(), device="cpu")
    assert not any(module.training for module in model.modules())
    assert all(parameter.device.type == "cpu" and parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_it_trains_where_the_caller_has_switched_gradients_off() -> None:
    with torch.no_grad():
        assert accuracy(train(network(), epochs=10)) == 1


def test_frozen_parameters_stay() -> None:
    model = network()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.get_parameter("0.weight").requires_grad_(False)
    train(model)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == before.keys() - {"0.weight"}


def test_every_image_is_seen_once_an_epoch_in_batches_of_one_size_and_another_order_each_time() -> None:
    x, y = striped(50)
    model = Witness()
    train(model, x=x, y=y, epochs=2, shift=0, flip=False, batch_size=15)
    assert [len(batch) for batch in model.seen] == [13, 13, 12, 12] * 2
    orders = [
        (torch.cat(part).flatten(1)[:, None] == x.flatten(1)).all(dim=2).int().argmax(dim=1)
        for part in (model.seen[:4], model.seen[4:])
    ]
    for order in orders:
        assert sorted(order.tolist()) == list(range(50))
        assert order.tolist() != list(range(50))
    assert not torch.equal(*orders)


def test_images_are_normalised_channel_by_channel() -> None:
    x = torch.rand(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    model, mean, std = Witness(channels=3), (0.2, 0.4, 0.6), (0.5, 1.0, 2.0)
    train(model, x=x, y=torch.zeros(4).long(), epochs=1, shift=0, flip=False, mean=mean, std=std)
    expected = torch.stack([(x[:, c] - mean[c]) / std[c] for c in range(3)], dim=1)
    order = [int((expected - seen).flatten(1).abs().sum(dim=1).argmin()) for seen in model.seen[0]]
    assert sorted(order) == [0, 1, 2, 3]
    torch.testing.assert_close(model.seen[0], expected[order])


def test_every_image_is_seen_mirrored_and_as_it_is() -> None:
    x, model = striped(1)[0], Witness()
    train(model, x=x, y=torch.zeros(1).long(), epochs=30, shift=0)
    mirrored = [torch.equal(seen, x.flip(3)) for seen in model.seen]
    assert mirrored == [not torch.equal(seen, x) for seen in model.seen]
    assert 5 <= sum(mirrored) <= 25


def test_every_image_is_moved_by_every_offset_up_to_the_largest() -> None:
    x, model = striped(1)[0], Witness()
    train(model, x=x, y=torch.zeros(1).long(), epochs=200, shift=1, flip=False)
    places = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    moved = {
        place: pad(x, (1 + place[1], 1 - place[1], 1 + place[0], 1 - place[0]))[..., 1:-1, 1:-1] for place in places
    }
    seen = [next(place for place in places if torch.equal(moved[place], image)) for image in model.seen]
    assert set(seen) == set(places)


def test_images_are_moved_down_and_right_with_black_coming_in() -> None:
    x = torch.rand(4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([[0, 0], [2, -1], [-3, 1], [1, 3]])
    expected = torch.zeros_like(x)
    for image, (down, right) in enumerate(offsets.tolist()):
        for row in range(5):
            for column in range(6):
                if 0 <= row - down < 5 and 0 <= column - right < 6:
                    expected[image, :, row, column] = x[image, :, row - down, column - right]
    assert torch.equal(classifier.shifted(x, offsets), expected)


@pytest.mark.parametrize("steps", [1, 2, 5, 100])
def test_the_learning_rate_rises_to_its_largest_then_falls_to_zero(steps: int) -> None:
    rates = [classifier._rate(step, steps) for step in range(steps + 1)]
    top = rates.index(1.0)
    assert top == max(1, round(0.2 * steps)) - 1
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert all(rate > 0 for rate in rates[:-1])
    assert math.isclose(rates[-1], 0, abs_tol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": (striped()[0] * 255).byte()}, "images must be float in .*, got uint8"),
        ({"x": striped()[0] * 2}, r"images must lie in \[0, 1\]"),
        ({"x": striped()[0][0]}, "one image needs a batch dimension"),
        ({"y": striped()[1].float()}, r"labels must be whole numbers of shape \(60,\), got \(60,\) float32"),
        ({"y": striped()[1][:-1]}, r"labels must be whole numbers of shape \(60,\), got \(59,\) int64"),
        ({"y": striped()[1] + 1}, "labels must be from 0 to 2, as the model has 3 outputs; got 1 to 3"),
        ({"y": striped()[1] - 1}, "labels must be from 0 to 2, as the model has 3 outputs; got -1 to 1"),
        ({"mean": (0.5, 0.5, 0.5)}, "mean has 3 channels, the images have 1"),
        ({"std": (0.0,)}, "std must be positive"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"lr": -0.1}, "lr must be positive, got -0.1"),
        ({"shift": -1}, "shift must not be negative, got -1"),
    ],
)
def test_what_cannot_be_trained_on_is_an_error_and_leaves_the_model_alone(
    options: dict[str, Any], message: str
) -> None:
    model = network().train()
    with pytest.raises(ValueError, match=message):
        train(model, **options)
    assert same_weights(model, network())
    assert model.training


def test_a_model_without_a_trainable_parameter_is_an_error() -> None:
    with pytest.raises(ValueError, match="Sequential has no parameter that could be trained"):
        train(network().requires_grad_(False))


def test_a_loss_that_is_not_finite_is_an_error_and_the_model_is_in_eval_mode_after_it() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) after \d+ of 30 steps; a smaller lr may help"):
        train(model, lr=1e38, epochs=10)
    assert not model.training


def test_seeded_gives_the_same_numbers_and_puts_the_state_back_even_after_an_error() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with seeded(1):
        first = torch.rand(3)
    with pytest.raises(KeyError), seeded(1):
        assert torch.equal(torch.rand(3), first)
        raise KeyError
    with seeded(2):
        assert not torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)
