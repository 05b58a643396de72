"""How much training a time is enough for, by that of a few batches: what the benchmarks' `--seconds` means."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

MARGIN = 1.1
"""A batch is taken to cost so many times what it did in the trial."""
NOISE = 0.05
"""A difference below this share of a trial says little: batches that seem to cost nothing would be trained for ever."""
TRIAL = 8
"""Batches of a trial's epoch."""


def epochs_within(seconds: float, fit: Callable[[int], Any], trial: int, images: int, batch: int) -> tuple[int, int]:
    """How many epochs of how many images `seconds` are enough for, the trial included; at least one batch.

    Args:
        seconds: that the trial and the training may take.
        fit: trains for so many epochs on a few images; it is called three times, the first of them to warm up.
        trial: batches of an epoch of `fit`.
        images: there are to train on; fewer are used only where not even an epoch fits.
        batch: images in a batch.
    """
    began = time.monotonic()
    fit(1)
    one, four = (timed(fit, epochs) for epochs in (1, 4))
    each = MARGIN * max(four - one, NOISE * four) / (3 * trial)
    left = seconds - (time.monotonic() - began)
    epochs, used = within(max(0.0, left / each), images, batch)
    print(f"{each:.4f} s per batch of {batch}: {epochs} epochs of {used} images in {left:.0f} s", flush=True)
    return epochs, used


def timed(fit: Callable[[int], Any], epochs: int) -> float:
    """The seconds that so many epochs take."""
    began = time.monotonic()
    fit(epochs)
    wait()
    return time.monotonic() - began


def within(batches: float, images: int, batch: int) -> tuple[int, int]:
    """Epochs and images for so many batches: all images where an epoch of them fits, else as many as do."""
    whole = -(-images // batch)
    if batches >= whole:
        return int(batches // whole), images
    return 1, min(images, max(1, int(batches)) * batch)


def wait() -> None:
    """Let the device finish."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
