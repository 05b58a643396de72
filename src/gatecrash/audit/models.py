"""Networks by name: torchvision's, timm's, our own, a CLIP's, a bundle's, or a user's function."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from pydantic import ValidationError
from torch import nn

from gatecrash.audit.plan import ModelPlan
from gatecrash.files import at_home
from gatecrash.networks import NETWORKS, PRETRAINED, check_hash, load_weights
from gatecrash.networks.clip import load_clip, read_preprocessing
from gatecrash.registry import Registry, unknown

Maker = Callable[[str, ModelPlan, Path], nn.Module]
"""What makes a network of a name, its plan, and the folder that paths are relative to."""

MAKERS: Registry[Maker] = Registry("kind of model")

WITH_WEIGHTS = ("clip",)
"""Kinds whose networks are never without weights."""


def load_model(plan: ModelPlan, folder: Path, *, trust: bool = False, modules: Path | None = None) -> nn.Module:
    """The network of a plan with its weights, in eval mode; paths are relative to `folder`.

    Args:
        plan: name, weights and options.
        folder: what paths are relative to.
        trust: let a model named `module:function` run its code.
        modules: where such a module is looked for first; `folder` by default.

    Raises:
        ValueError: in one line: an unknown name, weights that are missing, damaged or do not fit, a `module:function`
            without `trust`.
    """
    kind, _, name = plan.name.partition(":")
    if not name:
        raise ValueError(
            f"model.name must be KIND:NAME with KIND one of {', '.join(MAKERS)} or a module, got {plan.name!r}"
        )
    if kind == "bundle":
        inner = bundled(folder / name)
        if inner.name.startswith("bundle:"):
            raise ValueError(f"{folder / name} is a bundle of a bundle")
        model = load_model(inner, folder / name, trust=trust, modules=folder)
        check_weights(model, folder / name)
        return model
    if kind not in MAKERS:
        model = call_function(kind, name, plan, modules or folder, trust=trust)
        needs_weights = False
    else:
        model = MAKERS[kind](name, plan, folder)
        needs_weights = kind not in WITH_WEIGHTS
    if needs_weights and plan.weights is None:
        raise ValueError(
            f"model.weights is missing: {plan.name} comes without any; give a .safetensors or .pth file, "
            '"default" for the library\'s own, or "random" to audit an untrained network'
        )
    if plan.weights is not None and plan.weights not in ("default", "random"):
        load = load_numpy if plan.weights.lower().endswith(".npz") else load_weights
        load(model, at_home(folder, plan.weights))
    return model.eval()


@MAKERS.register("torchvision")
def _torchvision(name: str, plan: ModelPlan, folder: Path) -> nn.Module:
    from torchvision import models

    known = models.list_models()
    if name not in known:
        raise ValueError(unknown("torchvision model", name, known))
    options: dict[str, Any] = {"weights": "DEFAULT" if plan.weights == "default" else None}
    if "weights_backbone" in signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # else they are fetched even for random weights
    return made(plan, lambda: models.get_model(name, **(options | plan.options)))


@MAKERS.register("timm")
def _timm(name: str, plan: ModelPlan, folder: Path) -> nn.Module:
    import timm

    if not timm.is_model(name):
        near = timm.list_models(f"{name.split('_')[0]}*")
        raise ValueError(unknown("timm model", name, near[:40] or timm.list_modules()[:40]))
    return made(plan, lambda: timm.create_model(name, pretrained=plan.weights == "default", **plan.options))


@MAKERS.register("builtin")
def _builtin(name: str, plan: ModelPlan, folder: Path) -> nn.Module:
    model = made(plan, lambda: NETWORKS[name](**plan.options))
    if plan.weights != "default":
        return model
    shipped = [PRETRAINED[key] for key in PRETRAINED if PRETRAINED[key].network == name]
    if not shipped:
        raise ValueError(f"the package carries no weights for {plan.name}; give a .safetensors or .pth file")
    return load_weights(model, shipped[0].path)


@MAKERS.register("clip")
def _clip(name: str, plan: ModelPlan, folder: Path) -> nn.Module:
    for key in ("weights", "options"):
        if getattr(plan, key):
            raise ValueError(f"model.{key}: {plan.name} is all in its folder; leave {key} out")
    return load_clip(at_home(folder, name))


def load_numpy(model: nn.Module, path: Path) -> None:
    """Fill a ViT of timm's from the .npz file that its authors published; timm resizes position embeddings.

    Raises:
        ValueError: the network or the file is no such thing, or a weight is left without a value.
    """
    load = getattr(model, "load_pretrained", None)
    if load is None:
        raise ValueError(f"weights {path}: {type(model).__name__} has no .npz format; give a .safetensors or .pth file")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # timm leaves alone what it does not find, such as a head of another size
    try:
        load(str(path))
    except Exception as error:  # timm checks little, and damaged bytes can fail anywhere
        raise ValueError(f"weights {path} do not fit {type(model).__name__}: {' '.join(str(error).split())}") from error
    for key, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ValueError(f"weights {path} do not fit {type(model).__name__}: no finite {key} of its shape")


def call_function(module: str, function: str, plan: ModelPlan, folder: Path, *, trust: bool) -> nn.Module:
    """The network that a function of the user's returns; runs the user's code, so only where it was asked for.

    The module is looked for in `folder` first, the plan's own.
    """
    if not trust:
        known = [*MAKERS, "bundle"]
        raise ValueError(
            f"model.name {plan.name!r}: {module!r} is not one of {', '.join(known)}; if it is a module of yours whose "
            "code may run, say --trust"
        )
    sys.path.insert(0, str(folder.resolve()))
    try:
        model = getattr(importlib.import_module(module), function)(**plan.options)
    except Exception as error:  # the user's own code may fail in any way
        raise ValueError(f"model.name {plan.name!r}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(folder.resolve()))
    return made(plan, lambda: model)


def bundled(folder: Path) -> ModelPlan:
    """What a model bundle says of its network in `model.json`: name, options, layer, normalisation, size."""
    about = folder / "model.json"
    if not about.is_file():
        raise ValueError(f"{folder} is no model bundle: model.json is missing")
    try:
        content = json.loads(about.read_text(encoding="utf-8"))
        known = {key: value for key, value in content.items() if key in ModelPlan.model_fields}
        return ModelPlan.model_validate(known | {"weights": "model.safetensors"})
    except (json.JSONDecodeError, AttributeError, ValidationError) as error:
        raise ValueError(f"{about} does not describe a network: {' '.join(str(error).split())}") from error


def check_weights(model: nn.Module, folder: Path) -> None:
    """Raises a ValueError where a model bundle's weights are not those that its manifest has the hash of."""
    if (folder / "manifest.json").is_file():
        check_hash(model, folder, required=False)


def completed(plan: ModelPlan, folder: Path) -> ModelPlan:
    """The plan with what a model bundle or the folder of a CLIP knows filled in where the plan says nothing."""
    kind, _, name = plan.name.partition(":")
    if kind == "bundle":
        known = bundled(folder / name).model_dump(exclude={"name", "weights", "options"})
    elif kind == "clip":
        mean, std, size = read_preprocessing(at_home(folder, name))
        known = {"mean": list(mean), "std": list(std), "resize": size, "channels": len(mean)}
    else:
        return plan
    return ModelPlan.model_validate(known | plan.model_dump(exclude_unset=True))


def made(plan: ModelPlan, make: Callable[[], Any]) -> nn.Module:
    """What a constructor makes; options that it does not take, or weights that cannot be fetched, are a ValueError."""
    try:
        model = make()
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ValueError(f"model.options {plan.options} do not suit {plan.name}: {error}") from error
    except (URLError, OSError) as error:
        raise ValueError(f"the weights of {plan.name} cannot be fetched: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model.name {plan.name!r} must give a torch.nn.Module, got {type(model).__name__}")
    return model
