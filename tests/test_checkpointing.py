"""Blocks that forget: the same gradients from less memory, in whatever mode the network's owner has it."""

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

from gatecrash import L2, Encoder, collide
from gatecrash.checkpointing import blocks_of, checkpointed


def small_vit() -> nn.Module:
    """A ViT with dropout, which only eval mode turns off."""
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 6, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", proj_drop_rate=0.5, drop_path_rate=0.5, **sizes)


def images(count: int = 3) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def latents_and_gradient(encoder: Encoder, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    z = encoder(x)
    parts = z if isinstance(z, tuple) else (z,)
    (gradient,) = torch.autograd.grad(sum(part.square().sum() for part in parts), x)
    return [*(part.detach() for part in parts), gradient]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("layer", [None, "blocks.3", "blocks.2.mlp.fc1", [None, "blocks.0.attn", "norm"]], ids=str)
def test_latents_and_gradients_are_the_same(layer: str | list[str | None] | None, train: bool) -> None:
    model = small_vit().train(train)
    plain = latents_and_gradient(Encoder(model, layer), images())
    forgetful = latents_and_gradient(Encoder(model, layer, checkpointing=True), images())
    for one, other in zip(plain, forgetful, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
    assert all(module.training is train for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def bytes_stored(run: Callable[[], object]) -> int:
    """What a forward pass keeps for the way back, parameters included, every memory counted once."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = run()
    del held
    return sum(kept.values())


def test_a_forward_pass_stores_less() -> None:
    model, x = small_vit().eval(), images(32).requires_grad_()
    plain = bytes_stored(lambda: Encoder(model)(x))
    forgetful = bytes_stored(lambda: Encoder(model, checkpointing=True)(x))
    assert forgetful < 0.2 * plain


def test_the_same_collisions_are_found() -> None:
    model, start = small_vit(), images(4)
    plain, forgetful = (
        collide(Encoder(model, checkpointing=which), start, start.flip(0), L2(1.0), steps=5) for which in (False, True)
    )
    assert torch.equal(plain.x, forgetful.x)
    assert (plain.value < plain.start_value).all()


def test_the_modules_are_the_same_afterwards() -> None:
    model = small_vit()
    first, second = model.blocks[:2]
    own = second.forward
    second.forward = own
    with pytest.raises(RuntimeError, match="out of the block"), checkpointed([first, second]):
        assert "forward" in vars(first)
        raise RuntimeError("out of the block")
    assert "forward" not in vars(first)
    assert vars(second)["forward"] is own


def test_the_longest_chain_of_equal_blocks_is_found() -> None:
    model = small_vit()
    assert blocks_of(model) == tuple(model.blocks)
    lists = nn.ModuleDict({"short": nn.ModuleList([nn.Linear(1, 1)] * 2), "long": nn.ModuleList(map(nn.ReLU, [0] * 3))})
    assert blocks_of(lists) == tuple(lists["long"])


def test_a_network_without_such_a_chain_is_refused_and_other_taps_stay_checkpointed() -> None:
    with pytest.raises(ValueError, match=r"chain of blocks of one class, as transformers have; Sequential has none"):
        Encoder(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), checkpointing=True)
    assert Encoder(small_vit(), checkpointing=True).at("norm").checkpointing
