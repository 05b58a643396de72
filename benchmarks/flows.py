"""Glow by normflows, by torchflows and as it is here, trained equally long: the choice in docs/results/generative.md.

    python benchmarks/flows.py DATA OUT [--seconds 150] [--train 8000] [--test 256]

DATA holds cifar10_train.npz and cifar10_test.npz (x uint8 N×32×32×3). torchflows is no dependency: install it with
`pip install --no-deps --target FOLDER torchflows torchdiffeq` and add FOLDER to PYTHONPATH; without it its row is left
out. Every model gets the same batches with uniform noise in the bins and the same Adam. OUT gets flows.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import normflows as nf
import numpy as np
import torch
from torch import Tensor, nn

from gatecrash.densities import Glow
from gatecrash.files import write_text

SHAPE = (3, 32, 32)
LEVELS, STEPS, HIDDEN = 3, 8, 64


def of_normflows() -> nn.Module:
    """The Glow of normflows itself, as its documentation puts it together."""
    base, flows, merges = [], [], []
    for level in range(LEVELS):
        channels = SHAPE[0] * 2 ** (LEVELS + 1 - level)
        blocks = [nf.flows.GlowBlock(channels, HIDDEN, split_mode="channel", scale=True) for _ in range(STEPS)]
        flows.append([*blocks, nf.flows.Squeeze()])
        depth = LEVELS - level
        width = SHAPE[0] * 2 ** (depth if level else LEVELS + 1)
        base.append(nf.distributions.DiagGaussian((width, SHAPE[1] // 2**depth, SHAPE[2] // 2**depth)))
        if level:
            merges.append(nf.flows.Merge())
    model: nn.Module = nf.MultiscaleFlow(base, flows, merges)
    return model


def of_torchflows() -> nn.Module:
    """AffineGlow of torchflows, with three layers."""
    from torchflows.bijections.finite.multiscale.architectures import AffineGlow
    from torchflows.flows import Flow

    model: nn.Module = Flow(AffineGlow(SHAPE, n_layers=LEVELS))
    return model


def bits(log_prob: Tensor) -> Tensor:
    """Bits per dimension of images in [0, 1] that were grey levels."""
    return -log_prob / (math.log(2) * math.prod(SHAPE)) + 8


WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "normflows": (of_normflows, lambda model, x: bits(model.log_prob(x - 0.5, None))),
    "torchflows": (of_torchflows, lambda model, x: bits(model.log_prob(x - 0.5))),
    "as here": (
        lambda: Glow(SHAPE, levels=LEVELS, steps=STEPS, hidden=HIDDEN, bits=8),
        lambda model, x: model.bits_per_dimension(x),
    ),
}


def main() -> None:
    """Train one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--train", type=int, default=8000)
    parser.add_argument("--test", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train, test = (
        torch.from_numpy(np.load(options.data / f"cifar10_{name}.npz")["x"][:count]).permute(0, 3, 1, 2)
        for name, count in (("train", options.train), ("test", options.test))
    )
    rows = []
    for name, (make, bits_of) in WAYS.items():
        torch.manual_seed(0)
        try:
            model = make()
        except ModuleNotFoundError as missing:
            print(f"{name} is left out: {missing}", flush=True)
            continue
        random = torch.Generator().manual_seed(0)

        def batch(random: torch.Generator = random) -> Tensor:
            x = train[torch.randint(len(train), (options.batch,), generator=random)]
            return (x + torch.rand(x.shape, generator=random)) / 256

        if isinstance(model, Glow):
            with torch.no_grad():
                model.begin(batch())
        else:
            bits_of(model, batch())  # sets what is set by a first batch
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
        began, steps = time.monotonic(), 0
        while time.monotonic() - began < options.seconds:
            loss = bits_of(model, batch()).mean()
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimiser.step()
            steps += 1
        seconds = time.monotonic() - began
        model.eval()
        with torch.no_grad():
            found = torch.cat([bits_of(model, (part + 0.5) / 256) for part in test.split(64)])
        parameters = sum(parameter.numel() for parameter in model.parameters())
        row = {"model": name, "parameters": parameters, "steps": steps, "ms": 1000 * seconds / steps}
        rows.append(row | {"bits_per_dimension": float(found.mean())})
        print(json.dumps(rows[-1]), flush=True)
        write_text(options.out / "flows.json", json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
