"""The ViTs of Fort (2022): timm's classes at a small size, from local files, their pre-logits, and two detectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate

from gatecrash import audit_plan
from gatecrash.audit.job import job_of_plan
from gatecrash.audit.models import load_model
from gatecrash.audit.plan import ModelPlan, Plan
from gatecrash.detectors import Mahalanobis, RelativeMahalanobis, fit_all
from gatecrash.encoder import Encoder
from gatecrash.networks import hash_of, save_weights

CLASSES, PRE_LOGITS = 5, "fc_norm"
WIDTH = {"depth": 2, "embed_dim": 32, "num_heads": 4, "num_classes": CLASSES}
SMALL: dict[str, dict[str, Any]] = {
    "vit_large_patch16_384": {"img_size": 24, "patch_size": 8, **WIDTH},
    "vit_large_patch16_224": {"img_size": 16, "patch_size": 8, **WIDTH},
    "vit_large_r50_s32_224": {"img_size": 32, **WIDTH},  # its ResNet-50 has no smaller size
}
each_vit = pytest.mark.parametrize("name", SMALL)


def made(name: str, **changes: Any) -> nn.Module:
    import timm

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = timm.create_model(name, **SMALL[name] | changes).eval()
        for parameter in model.parameters():  # timm starts biases, heads and the class token at or near zero
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def pixels(name: str, count: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    side, generator = SMALL[name]["img_size"], torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, side, side, generator=generator, dtype=torch.float64).to(dtype)


def as_published(model: Any) -> dict[str, np.ndarray]:
    """The weights under the names and in the layout of the authors' .npz files."""
    arrays: dict[str, Tensor] = {}
    heads = model.blocks[0].attn.num_heads

    def dense(key: str, layer: nn.Linear) -> None:
        arrays[f"{key}/kernel"], arrays[f"{key}/bias"] = layer.weight.T, layer.bias

    def norm(key: str, layer: nn.Module) -> None:
        arrays[f"{key}/scale"], arrays[f"{key}/bias"] = layer.weight, layer.bias

    def conv(key: str, layer: nn.Module) -> None:
        arrays[f"{key}/kernel"] = layer.weight.permute(2, 3, 1, 0)

    conv("embedding", model.patch_embed.proj)
    arrays |= {"embedding/bias": model.patch_embed.proj.bias, "cls": model.cls_token}
    arrays["Transformer/posembed_input/pos_embedding"] = model.pos_embed
    norm("Transformer/encoder_norm", model.norm)
    dense("head", model.head)
    for i, block in enumerate(model.blocks):
        key = f"Transformer/encoderblock_{i}"
        norm(f"{key}/LayerNorm_0", block.norm1)
        norm(f"{key}/LayerNorm_2", block.norm2)
        weights, biases = block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3)
        for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            inner = f"{key}/MultiHeadDotProductAttention_1/{part}"
            arrays[f"{inner}/kernel"] = weight.T.unflatten(1, (heads, -1))
            arrays[f"{inner}/bias"] = bias.unflatten(0, (heads, -1))
        out = f"{key}/MultiHeadDotProductAttention_1/out"
        arrays[f"{out}/kernel"] = block.attn.proj.weight.T.unflatten(0, (heads, -1))
        arrays[f"{out}/bias"] = block.attn.proj.bias
        dense(f"{key}/MlpBlock_3/Dense_0", block.mlp.fc1)
        dense(f"{key}/MlpBlock_3/Dense_1", block.mlp.fc2)
    backbone = getattr(model.patch_embed, "backbone", None)
    if backbone is not None:
        conv("conv_root", backbone.stem.conv)
        norm("gn_root", backbone.stem.norm)
        for i, stage in enumerate(backbone.stages):
            for j, block in enumerate(stage.blocks):
                key = f"block{i + 1}/unit{j + 1}"
                for r in (1, 2, 3):
                    conv(f"{key}/conv{r}", getattr(block, f"conv{r}"))
                    norm(f"{key}/gn{r}", getattr(block, f"norm{r}"))
                if block.downsample is not None:
                    conv(f"{key}/conv_proj", block.downsample.conv)
                    norm(f"{key}/gn_proj", block.downsample.norm)
    return {key: tensor.detach().contiguous().numpy() for key, tensor in arrays.items()}


def write(model: nn.Module, path: Path) -> None:
    if path.suffix == ".safetensors":
        save_weights(model, path)
    elif path.suffix == ".pth":
        torch.save(model.state_dict(), path)
    else:
        np.savez(path, **as_published(model))


@each_vit
@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
def test_a_local_checkpoint_is_loaded_bit_for_bit(name: str, suffix: str, tmp_path: Path) -> None:
    source, path = made(name), tmp_path / f"weights{suffix}"
    write(source, path)
    model = load_model(ModelPlan(name=f"timm:{name}", weights=path.name, options=SMALL[name]), tmp_path)
    path.unlink()  # the hybrid's is 90 MB
    assert hash_of(model) == hash_of(source)
    assert not model.training


@each_vit
def test_the_layer_before_the_head_gives_the_pre_logits(name: str) -> None:
    model, x = made(name), pixels(name)
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(x), pre_logits=True)
        found = Encoder(model, PRE_LOGITS)(x)
        assert torch.equal(model.head(found), model(x))
    assert torch.equal(found, expected)
    assert found.shape == (3, 32)


@each_vit
def test_distances_of_pre_logits_are_those_of_the_equation_and_reach_the_pixels(name: str) -> None:
    model, side = made(name).double(), SMALL[name]["img_size"]
    images, labels = avg_pool2d(pixels(name, 48, 1, torch.float64), 2), torch.arange(48) % 3
    x = avg_pool2d(pixels(name, 2, 2, torch.float64), 2).requires_grad_()
    encoder = Encoder(model, PRE_LOGITS, [0.5] * 3, [0.5] * 3, side)
    detectors = Mahalanobis(encoder), RelativeMahalanobis(encoder)
    fit_all(detectors, (images, labels))

    def features(x: Tensor) -> Tensor:
        x = interpolate(x, size=side, mode="bilinear", antialias=True)
        latent: Tensor = model.forward_head(model.forward_features((x - 0.5) / 0.5), pre_logits=True)
        return latent

    with torch.no_grad():
        z, at = features(images), features(x)
        near, all_as_one = distance(z, labels, at), distance(z, torch.zeros_like(labels), at)
    for detector, expected in zip(detectors, (near, near - all_as_one), strict=True):
        score = detector(x)
        torch.testing.assert_close(score.detach(), expected, rtol=1e-5, atol=1e-5)
        (gradient,) = torch.autograd.grad(score.sum(), x)
        step = 1e-7  # a longer one crosses kinks of the ResNet's ReLUs
        direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        with torch.no_grad():
            low, high = (detector(x + sign * step * direction) for sign in (-1, 1))
        slope = (gradient * direction).flatten(1).sum(dim=1)
        assert slope.abs().min() > 0
        torch.testing.assert_close((high - low) / (2 * step), slope, rtol=1e-5, atol=0)


def distance(z: Tensor, y: Tensor, at: Tensor) -> Tensor:
    """The squared Mahalanobis distance to the nearest class, from its equation."""
    means = torch.stack([z[y == k].mean(dim=0) for k in y.unique()])
    # The last norm leaves a plane of features, in which alone they vary.
    inverse = torch.linalg.pinv((z - means[y]).T @ (z - means[y]) / len(z), rtol=1e-12, hermitian=True)
    return torch.stack([torch.einsum("bi,ij,bj->b", at - m, inverse, at - m) for m in means]).amin(dim=0)


def test_an_audit_of_a_vit_in_a_local_file(tmp_path: Path) -> None:
    name = "vit_large_patch16_384"
    write(made(name), tmp_path / "weights.npz")
    grey = {"mean": [0.5] * 3, "std": [0.5] * 3, "channels": 3, "size": 12, "resize": 24}
    plan = {
        "model": {
            "name": f"timm:{name}",
            "weights": "weights.npz",
            "options": SMALL[name],
            "layer": PRE_LOGITS,
            **grey,
        },
        "data": {
            "fit": {"source": "fashion:train", "limit": 120},
            "inliers": {"source": "fashion:test", "limit": 10},
            "outliers": {"noise": {"source": "noise", "limit": 8}},
        },
        "detectors": ["mahalanobis", "rmd"],
        "attacks": [{"name": "admit", "ball": {"norm": "linf", "eps": "8/255"}, "steps": 3, "step": 0.01}],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    results = audit_plan(tmp_path / "plan.yaml", out=tmp_path / "run", device="cpu")
    assert {row["detector"] for row in results["rows"]} == {"mahalanobis", "rmd"}
    attacked = {row["detector"]: row for row in results["rows"] if row["attack"] == "admit"}
    clean = {row["detector"]: row for row in results["rows"] if row["attack"] == "none"}
    for detector in ("mahalanobis", "rmd"):
        assert attacked[detector]["auroc"] <= clean[detector]["auroc"]


@each_vit
def test_the_full_size_is_known_by_name_and_has_the_layer(name: str) -> None:
    import timm

    with torch.device("meta"):
        model = load_model(ModelPlan(name=f"timm:{name}", weights="random"), Path())
    assert sum(parameter.numel() for parameter in model.parameters()) > 300_000_000
    assert PRE_LOGITS in dict(model.named_modules())
    assert isinstance(model, timm.models.vision_transformer.VisionTransformer)
    assert model.num_features == 1024


# Published files that do not fit


def load_published(tmp_path: Path, arrays: dict[str, np.ndarray], **changes: Any) -> nn.Module:
    name = "vit_large_patch16_224"
    np.savez(tmp_path / "weights.npz", **arrays)
    return load_model(ModelPlan(name=f"timm:{name}", weights="weights.npz", options=SMALL[name] | changes), tmp_path)


def test_position_embeddings_of_another_size_are_resized(tmp_path: Path) -> None:
    from timm.layers import resample_abs_pos_embed

    source = made("vit_large_patch16_224")
    model = load_published(tmp_path, as_published(source), img_size=32)
    expected = resample_abs_pos_embed(source.pos_embed, [4, 4], interpolation="bilinear", antialias=False)
    assert torch.allclose(model.pos_embed, expected, atol=1e-6)


def test_a_head_of_another_size_is_not_left_random(tmp_path: Path) -> None:
    arrays = as_published(made("vit_large_patch16_224"))
    with pytest.raises(
        ValueError, match=r"weights.npz do not fit VisionTransformer: no finite head.weight of its shape"
    ):
        load_published(tmp_path, arrays, num_classes=7)
    assert load_published(tmp_path, arrays, num_classes=0)(pixels("vit_large_patch16_224")).shape == (3, 32)


def test_a_layer_that_is_missing_or_of_another_shape_is_an_error_of_one_line(tmp_path: Path) -> None:
    arrays = as_published(made("vit_large_patch16_224"))
    with pytest.raises(ValueError, match=r"do not fit VisionTransformer: .*encoderblock_2"):
        load_published(tmp_path, arrays, depth=3)
    with pytest.raises(ValueError, match="do not fit VisionTransformer") as caught:
        load_published(tmp_path, arrays, embed_dim=16)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04garbage", b"\x93NUMPY"])
def test_a_damaged_file_is_an_error_of_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "weights.npz").write_bytes(content)
    plan = ModelPlan(name="timm:vit_large_patch16_224", weights="weights.npz", options=SMALL["vit_large_patch16_224"])
    with pytest.raises(ValueError, match="do not fit VisionTransformer") as caught:
        load_model(plan, tmp_path)
    assert "\n" not in str(caught.value)


def test_pickled_objects_in_a_published_file_are_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return (Path.touch, (tmp_path / "ran",))

    arrays = as_published(made("vit_large_patch16_224")) | {"embedding/kernel": np.array([Bomb()], dtype=object)}
    with pytest.raises(ValueError, match="allow_pickle"):
        load_published(tmp_path, arrays)
    assert not (tmp_path / "ran").exists()


def vit_plan(tmp_path: Path, checkpointing: bool, **model: Any) -> Plan:
    """An audit of a tiny ViT on the embedded images."""
    name = "vit_large_patch16_224"
    write(made(name), tmp_path / "vit.safetensors")
    about = {"name": f"timm:{name}", "weights": "vit.safetensors", "options": SMALL[name], "channels": 3, "size": 16}
    return Plan.model_validate(
        {
            "model": {**about, "checkpointing": checkpointing, **model},
            "data": {
                "inliers": {"source": "fashion:test", "limit": 4},
                "outliers": {"d": {"source": "digits", "limit": 4}},
            },
            "detectors": ["msp"],
            "attacks": [{"name": "admit", "ball": {"norm": "linf", "eps": 0.1}, "steps": 2}],
        }
    )


def test_a_plan_can_ask_for_checkpointing_and_the_scores_are_the_same(tmp_path: Path) -> None:
    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    gradients = []
    for checkpointing in (False, True):
        job = job_of_plan(vit_plan(tmp_path, checkpointing), tmp_path, torch.device("cpu"))
        assert job.encoder is not None
        assert job.encoder.checkpointing is checkpointing
        leaf = x.clone().requires_grad_()
        gradients += torch.autograd.grad(job.detectors["msp"](leaf).sum(), leaf)
    assert torch.allclose(*gradients, atol=1e-7)


def test_a_plan_that_asks_for_checkpointing_of_a_network_without_blocks_says_so(tmp_path: Path) -> None:
    plan = vit_plan(tmp_path, True, name="builtin:small_cnn", options={"num_classes": 3}, weights="random")
    with pytest.raises(ValueError, match="checkpointing needs a chain of blocks"):
        job_of_plan(plan, tmp_path, torch.device("cpu"))
