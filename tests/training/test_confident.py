from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, logsigmoid

from gatecrash.encoder import Encoder
from gatecrash.fitting import Batch, Material, Recipe, fit, seeded
from gatecrash.networks import save_weights
from gatecrash.training.confident import (
    NOISE,
    ConfidentClassifier,
    Discriminator,
    Generator,
    gan_samples,
    load_generator,
    save_generator,
)
from small_models import one_thread

__all__ = ["one_thread"]


def classifier(classes: int = 3, seed: int = 0) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, classes))


def batch(count: int = 4, seed: int = 0, classes: int = 3) -> Batch:
    x = torch.rand(count, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    return Batch(x, torch.arange(count) % classes, torch.arange(count), None, 0, 1, torch.Generator().manual_seed(seed))


def noises(count: int = 4, seed: int = 0) -> list[Tensor]:
    """The noise of a step, drawn again."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(count, NOISE, 1, 1, generator=random) for _ in range(2)]


def begun(model: nn.Module, **options: Any) -> ConfidentClassifier:
    step = ConfidentClassifier(Encoder(model), 1, **{"width": 2, "seed": 0, **options})
    step.begin_epoch(0, 1)
    return step


def parameters(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def by_hand(model: nn.Module, step: ConfidentClassifier, weight: float) -> dict[str, Any]:
    """The three steps as the paper's equation (4) and the authors' release have them, with autograd's own backward."""
    generator, discriminator, net = deepcopy(step.generator), deepcopy(step.discriminator), deepcopy(model)
    adams = [torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in (discriminator, generator)]
    given, (first, second) = batch(), noises()

    def to_uniform(images: Tensor) -> Tensor:
        log_p = log_softmax(net(images), dim=1)
        return kl_div(log_p, torch.full_like(log_p, 1 / 3), reduction="batchmean")

    fake = generator(first)
    telling = -logsigmoid(discriminator(given.x)).mean() - logsigmoid(-discriminator(fake.detach())).mean()
    telling.backward()
    adams[0].step()
    fooling = -logsigmoid(discriminator(fake)).mean() + weight * to_uniform(fake)
    fooling.backward()
    adams[1].step()
    net.zero_grad()
    loss = cross_entropy(net(given.x), given.y) + weight * to_uniform(generator(second).detach())
    loss.backward()
    return {
        "telling": telling.detach(),
        "fooling": fooling.detach(),
        "loss": loss.detach(),
        "gradients": [parameter.grad for parameter in net.parameters()],
        "generator": parameters(generator),
        "discriminator": parameters(discriminator),
    }


@pytest.mark.parametrize("weight", [0.0, 1.0, 3.0])
def test_one_step_is_the_papers_three_written_out(weight: float) -> None:
    model = classifier()
    step = begun(model, weight=weight)
    expected = by_hand(model, step, weight)
    outcome = step(model, batch())
    torch.testing.assert_close(outcome.loss.detach(), expected["loss"])
    torch.testing.assert_close(outcome.facts["discriminator loss"], expected["telling"])
    torch.testing.assert_close(outcome.facts["generator loss"], expected["fooling"])
    gradients = torch.autograd.grad(outcome.loss, list(model.parameters()))
    torch.testing.assert_close(list(gradients), expected["gradients"])
    torch.testing.assert_close(parameters(step.generator), expected["generator"])
    torch.testing.assert_close(parameters(step.discriminator), expected["discriminator"])


def test_the_loss_of_a_two_class_toy_by_hand() -> None:
    """Logits (0, log 3) whatever the image: −log ¾ for class 1, and KL(uniform ‖ (¼, ¾)) = log 2 − ½·log 3."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 2))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([0.0, math.log(3)]))
    given = batch()
    given = Batch(given.x, torch.ones(4, dtype=torch.long), given.rows, None, 0, 1, given.generator)
    outcome = begun(model, weight=0.1)(model, given)
    expected = math.log(4 / 3) + 0.1 * (math.log(2) - math.log(3) / 2)
    assert float(outcome.loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert float(outcome.facts["accuracy"]) == 1


def test_the_gan_leaves_the_classifier_alone() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 4, 4), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(128, 3)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    begun(model)(model, batch())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert int(model[1].num_batches_tracked) == 1  # one pass in training mode, over inliers and made images
    assert model.training


def test_the_generator_is_drawn_to_where_the_classifier_is_unsure() -> None:
    """A classifier of brightness, unsure at grey 0.8 alone: with a large β the images become so bright."""
    model = nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(1, 2))
    with torch.no_grad():
        model[2].weight.copy_(torch.tensor([[-20.0], [20.0]]))
        model[2].bias.copy_(torch.tensor([16.0, -16.0]))
    brightness = []
    for weight in (0.0, 100.0):
        step = begun(model, weight=weight, lr=0.01)
        for number in range(30):
            step(model, batch(seed=number, classes=2))
        brightness.append(float(step.generator(noises(seed=99)[0]).detach().mean()))
    assert abs(brightness[1] - 0.8) < 0.07
    assert abs(brightness[0] - 0.8) > 0.15


def test_the_gan_has_the_shapes_widths_and_first_weights_of_the_release() -> None:
    with seeded(0):
        generator, discriminator = Generator(), Discriminator()
    made = generator(torch.randn(2, NOISE, 1, 1)).detach()
    assert made.shape == (2, 3, 32, 32)
    assert float(made.min()) >= 0 and float(made.max()) <= 1
    assert discriminator(made).shape == (2, 1, 1, 1)
    assert [m.weight.shape[1] for m in generator if isinstance(m, nn.ConvTranspose2d)] == [512, 256, 128, 3]
    assert [m.weight.shape[0] for m in discriminator if isinstance(m, nn.Conv2d)] == [128, 256, 512, 1]
    for module in (*generator, *discriminator):
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            assert module.bias is None
            assert float(module.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
        if isinstance(module, nn.BatchNorm2d):
            assert float(module.weight.detach().mean()) == pytest.approx(1, abs=0.01)
            assert float(module.bias.detach().abs().max()) == 0


def test_a_seed_determines_the_gan_and_leaves_global_numbers_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second, other = (begun(classifier(), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(a, b) for a, b in zip(parameters(first.generator), parameters(second.generator), strict=True)
    )
    assert not torch.equal(next(first.generator.parameters()), next(other.generator.parameters()))


def test_what_a_step_remembers_is_enough_to_go_on() -> None:
    model = classifier()
    first = begun(model)
    first(model, batch(seed=0))
    second = begun(model, seed=7)
    second.restore({name: tensor.clone() for name, tensor in first.state().items()})
    outcomes = [step(model, batch(seed=1)) for step in (first, second)]
    assert torch.equal(outcomes[0].loss, outcomes[1].loss)
    states = [step.state() for step in (first, second)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_it_learns_in_bf16_with_the_gans_newest_weights() -> None:
    """Half precision may cost digits, and nothing else: a discriminator cast before its own step would show here."""
    losses = []
    given = batch(6)
    for precision in ("float32", "bf16"):
        model = classifier()
        step = ConfidentClassifier(Encoder(model), 1, width=2, seed=0, lr=0.5)
        recipe = Recipe(1, 6, lr=0.01, precision="bf16" if precision == "bf16" else "float32")
        losses.append(fit(model, step, Material(given.x, given.y), recipe)[0])
    assert losses[1]["generator loss"] == pytest.approx(losses[0]["generator loss"], rel=0.05)
    assert losses[1]["loss"] == pytest.approx(losses[0]["loss"], rel=0.02)
    assert losses[1] != losses[0]


def test_samples_are_the_generators_and_an_image_does_not_depend_on_those_beside_it() -> None:
    model = classifier()
    step = begun(model)
    for number in range(40):
        step(model, batch(seed=number))
    made = gan_samples(step, 5, seed=3)
    assert made.shape == (5, 1, 32, 32) and not made.requires_grad
    assert float(made.min()) >= 0 and float(made.max()) <= 1 and float(made.std(dim=0).mean()) > 1e-4
    noise = torch.randn(5, NOISE, 1, 1, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = deepcopy(step.generator).eval()(noise)
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(gan_samples(step.generator, 5, seed=3, batch_size=2), made)
    assert not torch.equal(gan_samples(step, 5, seed=4), made)
    assert step.generator.training
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        gan_samples(step, 0)


def test_a_generator_is_read_back_whatever_its_size(tmp_path: Path) -> None:
    for channels, width in ((1, 2), (3, 5), (3, 100)):
        generator = Generator(channels, width).eval()
        save_generator(generator, tmp_path)
        again = load_generator(tmp_path)
        assert not again.training
        assert torch.equal(gan_samples(again, 2), gan_samples(generator, 2))
    save_weights(nn.Linear(2, 2), tmp_path / "generator.safetensors")
    with pytest.raises(ValueError, match=r"generator\.safetensors holds no generator"):
        load_generator(tmp_path)
    (tmp_path / "generator.safetensors").write_bytes(b"none")
    with pytest.raises(ValueError, match="holds no generator, or is damaged"):
        load_generator(tmp_path)
    with pytest.raises(ValueError, match=r"has no generator.safetensors; a bundle of the method `confident` does"):
        load_generator(tmp_path / "nowhere")


def test_images_of_another_size_and_negative_weights_are_refused() -> None:
    model = classifier()
    small = Batch(torch.rand(2, 1, 28, 28), torch.zeros(2).long(), torch.arange(2), None, 0, 1, torch.Generator())
    with pytest.raises(ValueError, match=r"makes images of 32×32, the training images have \(28, 28\)"):
        begun(model)(model, small)
    with pytest.raises(ValueError, match="weight must not be negative, got -1"):
        begun(model, weight=-1.0)
