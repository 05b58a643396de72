from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from gatecrash.data import load_source
from gatecrash.encoder import Encoder
from gatecrash.networks import NETWORKS, PRETRAINED, SmallCNN, pretrained_path
from gatecrash.objective import single

NAME = "fashion_small_cnn"


def fashion(split: str) -> tuple[Tensor, Tensor]:
    entry = PRETRAINED[NAME]
    data = load_source(f"fashion:{split}", channels=entry.channels, size=entry.size)
    assert data.y is not None
    return data.x, data.y


def facts() -> dict[str, str]:
    """What the shipped file says about itself."""
    with safe_open(pretrained_path(NAME), framework="pt") as file:
        return dict(file.metadata())


def test_it_is_built_by_name_with_its_options() -> None:
    model = NETWORKS["small_cnn"](num_classes=7, in_channels=3, latent=5, width=4, size=28).eval()
    assert model(torch.rand(2, 3, 28, 28)).shape == (2, 7)
    latent = Encoder(model, "latent")(torch.rand(2, 3, 28, 28))
    assert isinstance(latent, Tensor)
    assert latent.shape == (2, 5)


def test_taps_have_half_a_quarter_and_an_eighth_of_the_side() -> None:
    layers = ["conv1", "conv2", "conv3", "latent", "fc"]
    taps = Encoder(SmallCNN(), layers, pool=None)(torch.rand(2, 1, 56, 56))
    assert [tuple(tap.shape[1:]) for tap in taps] == [(16, 28, 28), (32, 14, 14), (64, 7, 7), (32,), (10,)]


def test_the_parameters_are_those_of_the_layers() -> None:
    convolutions = 9 * (1 * 16 + 16 * 32 + 32 * 64)
    norms = 2 * (16 + 32 + 64)
    linear = (64 * 7 * 7 * 32 + 32) + (32 * 10 + 10)
    assert sum(parameter.numel() for parameter in SmallCNN().parameters()) == convolutions + norms + linear


def test_without_norms_it_is_the_same_in_both_modes_and_its_units_leak() -> None:
    model, x = SmallCNN(norm="none"), torch.rand(4, 1, 56, 56)
    assert torch.equal(model.train()(x), model.eval()(x))
    assert bool((model.conv1(x) < 0).any())
    with pytest.raises(ValueError, match="norm must be 'batch' or 'none', got 'layer'"):
        SmallCNN(norm="layer")  # type: ignore[arg-type]


def test_the_latent_is_what_the_head_reads() -> None:
    encoder, x = Encoder(SmallCNN().eval()), torch.rand(3, 1, 56, 56)
    head, latent = encoder.head, single(encoder.at("latent")(x))
    assert head is not None
    assert head.bias is not None
    torch.testing.assert_close(encoder(x), latent @ head.weight.T + head.bias)


def test_the_latent_takes_negative_values_so_that_no_unit_goes_dead() -> None:
    latent = single(Encoder(SmallCNN(), "latent")(torch.rand(64, 1, 56, 56)))
    assert bool((latent < 0).any())


def test_no_layer_is_overwritten_by_the_one_after_it() -> None:
    model = SmallCNN().eval()
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def keep(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[module] = (output.clone(), output)

    for module in model.modules():
        module.register_forward_hook(keep)
    model(torch.randn(2, 1, 56, 56))
    assert len(seen) == len(list(model.modules()))
    for module, (then, after) in seen.items():
        assert torch.equal(then, after), module


@pytest.mark.parametrize("option", ["num_classes", "in_channels", "latent", "width", "size"])
def test_an_option_out_of_range_is_named(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        SmallCNN(**{option: 0})


def test_the_shipped_weights_are_small_and_fit_exactly() -> None:
    path = pretrained_path(NAME)
    assert path.stat().st_size <= 1_000_000
    model = PRETRAINED[NAME].load()
    assert not any(module.training for module in model.modules())
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert torch.equal(file.get_tensor(name), tensor), name


def test_the_shipped_weights_classify_the_test_images_as_well_as_they_say() -> None:
    entry, (x, y) = PRETRAINED[NAME], fashion("test")
    encoder = Encoder(entry.load(), mean=entry.mean, std=entry.std)
    with torch.no_grad():
        accuracy = (single(encoder(x)).argmax(dim=1) == y).double().mean().item()
    assert accuracy >= 0.88
    assert accuracy == pytest.approx(float(facts()["accuracy_test"]), abs=0.002)


def test_the_images_are_normalised_by_their_own_mean_and_deviation() -> None:
    entry, (x, _) = PRETRAINED[NAME], fashion("train")
    assert entry.mean == pytest.approx((x.mean().item(),), abs=1e-4)
    assert entry.std == pytest.approx((x.std().item(),), abs=1e-4)


def test_the_file_says_how_it_was_trained() -> None:
    entry = PRETRAINED[NAME]
    assert facts() | {"seed": "0", "epochs": str(entry.epochs), "network": entry.network} == facts()
    assert facts()["mean"] == str(list(entry.mean))
    assert facts()["std"] == str(list(entry.std))


def test_an_unknown_pretrained_network_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"unknown pretrained network 'fashion_cnn'; did you mean 'fashion_small_cnn'"):
        pretrained_path("fashion_cnn")
