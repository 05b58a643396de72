"""Trains the demo's network on the embedded Fashion-MNIST and writes the weights that the package carries.

The validation images are for choosing how to train; the test images are looked at once, when the weights are written.
Run again with the same seed and number of threads on the same kind of CPU, it writes the same weights:

    python tools/train_demo.py [--seed N] [--epochs N] [--threads N] [--validate]
"""

from __future__ import annotations

import argparse
import time

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gatecrash.data import load_source
from gatecrash.encoder import Encoder
from gatecrash.files import replacing
from gatecrash.fitting import seeded
from gatecrash.networks import NETWORKS, PRETRAINED, Pretrained
from gatecrash.objective import single
from gatecrash.training import train_classifier

NAME = "fashion_small_cnn"
LIMIT = 1_000_000


def labelled(entry: Pretrained, source: str) -> tuple[Tensor, Tensor]:
    """The images and labels of a source as the network wants them."""
    data = load_source(source, channels=entry.channels, size=entry.size)
    if data.y is None:
        raise SystemExit(f"{source} has no labels")
    return data.x, data.y


def train(entry: Pretrained, seed: int, epochs: int) -> nn.Module:
    """A network trained from fresh weights."""
    with seeded(seed):
        model = NETWORKS[entry.network]()
    x, y = labelled(entry, entry.data)
    return train_classifier(model, x, y, epochs=epochs, seed=seed, mean=entry.mean, std=entry.std)


def accuracy(entry: Pretrained, model: nn.Module, source: str) -> float:
    """The share of a source's images that the network gets right."""
    x, y = labelled(entry, source)
    encoder = Encoder(model, mean=entry.mean, std=entry.std)
    with torch.no_grad():
        guesses = torch.cat([single(encoder(batch)).argmax(dim=1) for batch in x.split(500)])
    return float(guesses.eq(y).float().mean())


def main() -> None:
    """Train, say how well it went, and write the weights unless told only to validate."""
    entry = PRETRAINED[NAME]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation (%(default)s)")
    parser.add_argument("--epochs", type=int, default=entry.epochs, help="how often every image is seen (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; sums are rounded by them (%(default)s)")
    parser.add_argument("--validate", action="store_true", help="look at no test image and write nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    model = train(entry, options.seed, options.epochs)
    print(f"trained {options.epochs} epochs in {time.perf_counter() - began:.0f} s")
    validation = accuracy(entry, model, "fashion:val")
    print(f"accuracy on fashion:val {validation:.3f}")
    if options.validate:
        return
    test = accuracy(entry, model, "fashion:test")
    print(f"accuracy on fashion:test {test:.3f}")
    facts = {
        "format": "pt",
        "network": entry.network,
        "data": f"{entry.data} at {entry.size} px",
        "mean": str(list(entry.mean)),
        "std": str(list(entry.std)),
        "seed": str(options.seed),
        "epochs": str(options.epochs),
        "accuracy_val": f"{validation:.3f}",
        "accuracy_test": f"{test:.3f}",
    }
    with replacing(entry.path) as draft:
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, draft, metadata=facts)
    size = entry.path.stat().st_size
    print(f"{size:,} bytes, {LIMIT:,} allowed: {entry.path}")
    if size > LIMIT:
        raise SystemExit("too large")


if __name__ == "__main__":
    main()
