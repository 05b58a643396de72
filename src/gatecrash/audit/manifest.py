"""What is needed to trust and repeat a run: hashes, versions, seed, device, and the threat model in words."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gatecrash.audit.plan import AttackPlan, SearchPrecision
from gatecrash.audit.steps import is_long, is_wide
from gatecrash.data import ImageSet, fingerprint
from gatecrash.half import FAR_ANNEALED
from gatecrash.prepared import facts

LIBRARIES = ("gatecrash", "torch", "torchvision", "timm", "numpy", "scikit-learn", "safetensors")


def manifest_of(
    *,
    seed: int,
    device: torch.device,
    networks: Mapping[str, str],
    sets: Mapping[str, ImageSet],
    attacks: Sequence[AttackPlan],
    precision: SearchPrecision,
    prepares: bool = True,
) -> dict[str, Any]:
    """The manifest of a run; the same again has the same one, apart from `device`, `precision` and `versions`.

    `prepares` says whether a network may be run as a prepared copy at all.
    """
    return {
        "seed": seed,
        "device": device_name(device),
        "precision": precision_path(device, precision, attacks, sets, prepares=prepares),
        "versions": versions(),
        "code_sha256": code_hash(),
        "networks": dict(networks),
        "data": {
            name: {"source": images.name, "n": len(images), "sha256": fingerprint(images), "notes": images.notes}
            for name, images in sets.items()
        },
        "threat_model": threat_model(attacks),
    }


def precision_path(
    device: torch.device,
    precision: SearchPrecision,
    attacks: Sequence[AttackPlan],
    sets: Mapping[str, ImageSet],
    *,
    prepares: bool = True,
) -> str:
    """The precision that numbers come from, and how attacks run the networks otherwise than as they are."""
    fast = [attack for attack in attacks if is_long(attack)]
    if device.type == "cpu" and precision == "auto" and attacks and prepares:
        return "float32, the networks as they are; in attacks those with convolutions may get their channels last"
    if device.type != "cuda" or precision == "float32" or not fast or not prepares:
        return "float32, the networks as they are"
    pixels = next(iter(sets.values())).x[0].numel()
    half = [attack for attack in fast if is_wide(attack, pixels)]
    words = f"float32, prepared copies of the networks, where there can be one, for the steps of {named(fast)}"
    return f"{words}, at most {FAR_ANNEALED:.0%} of them in bf16 in {named(half)}" if half else words


def with_copies(manifest: Mapping[str, Any], networks: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The manifest of a run that is over: also how the prepared copies of its networks have run, where there were any.

    Of a run that was killed and went on, these are the copies since then.
    """
    copies = {name: facts(network) for name, network in networks.items()}
    told = {name: each for name, each in copies.items() if each}
    return dict(manifest) | ({"prepared_copies": told} if told else {})


def named(attacks: Sequence[AttackPlan]) -> str:
    """Some attacks, each once."""
    return ", ".join(dict.fromkeys(attack.title for attack in attacks))


def threat_model(attacks: Sequence[AttackPlan]) -> dict[str, str]:
    """Goal, knowledge and capability of the attacker, in the words of NIST AI 100-2."""
    balls = sorted({f"{attack.ball.ball()!r}" for attack in attacks})
    return {
        "goal": "integrity: outliers are taken for inliers, and inliers for outliers",
        "knowledge": "white box: the network, the detector and its fitted state are known",
        "capability": f"query access with pixel changes inside {', '.join(balls)}"
        if balls
        else "none: no attack was run",
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that numbers depend on."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def code_hash() -> str:
    """The SHA-256 of the package's own source files."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return device.type if device.type != "cpu" else f"cpu: {platform.machine()}, {torch.get_num_threads()} threads"


def pick_device(name: str) -> torch.device:
    """The device of a name; "auto" is the fastest there is.

    Raises:
        ValueError: the name is none, or this machine has no such device.
    """
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if available[kind]))
    kind = name.partition(":")[0]
    if kind not in available:
        raise ValueError(f"device must be auto, cpu, cuda or mps, got {name!r}")
    if not available[kind]:
        raise ValueError(f"device {name!r} was asked for, but this machine has none; use --device auto or cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or mps, got {name!r}") from error
