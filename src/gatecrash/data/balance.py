"""Classes made equally large, as Chen et al. (2020) do with the traffic signs of GTSRB."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Generator, Tensor

from gatecrash.data.augment import Augmentation
from gatecrash.data.image_set import ImageSet
from gatecrash.images import check_form, check_labels

CLASS_PRESERVING = Augmentation(rotation=15, translation=2, projection=2)
"""What leaves a traffic sign of 32×32 pixels the sign it is; mirrored it would be another one.

Chen et al. name the transforms and not their amounts. Rotation and translation are those of Sermanet and LeCun (IJCNN
2011) for these signs; the corners move about as far as their change of scale by a tenth moves them.
"""

CHUNK = 1024


def balanced(
    x: Tensor,
    y: Tensor,
    per_class: int,
    augmentation: Callable[[Tensor, Generator], Tensor] = CLASS_PRESERVING,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """As many images of every class: the originals, in their order, then changed copies, class by class.

    A class that is too small is filled with changed copies of originals chosen at random; Chen et al. do so until each
    of the 43 classes has 10,000, which none has at first. Of a class that is larger than `per_class`, as happens with a
    smaller number than theirs, as many originals as are wanted are chosen at random, none twice.

    Args:
        x: images (N, C, H, W) in [0, 1].
        y: labels (N,); a class is a label that occurs.
        per_class: how many images each class has afterwards.
        augmentation: what changes the copies.
        seed: determines which images are chosen and how copies are changed, apart from any global random state.

    Returns:
        images (K·per_class, C, H, W) and labels (K·per_class,) of K classes, on the devices of `x` and `y`. The memory
        taken beyond them does not grow with their number.

    Raises:
        ValueError: x are no images, the labels do not fit them, or per_class is less than 1.
    """
    check_form(x)
    check_labels(y, len(x))
    if per_class < 1:
        raise ValueError(f"per_class must be at least 1, got {per_class}")
    generator = Generator().manual_seed(seed)
    kept, copied = _chosen(y.cpu(), per_class, generator)
    rows = torch.cat([kept, copied])
    images = x.new_empty(len(rows), *x.shape[1:])
    done = 0
    for part in kept.split(CHUNK):
        images[done : done + len(part)] = x[part.to(x.device)]
        done += len(part)
    for part in copied.split(CHUNK):
        images[done : done + len(part)] = augmentation(x[part.to(x.device)], generator)
        done += len(part)
    return images, y[rows.to(y.device)]


def balanced_set(
    images: ImageSet,
    per_class: int,
    augmentation: Callable[[Tensor, Generator], Tensor] = CLASS_PRESERVING,
    seed: int = 0,
) -> ImageSet:
    """The images of a source with as many of every class, and a note that says so; see `balanced`.

    Raises:
        ValueError: also when the images have no labels.
    """
    if images.y is None:
        raise ValueError(f"{images.name} has no labels, so its classes cannot be balanced")
    x, y = balanced(images.x, images.y, per_class, augmentation, seed)
    note = f"{len(images):,} images → {per_class:,} of every class, {len(x):,} in all"
    return replace(images, x=x, y=y, notes=[*images.notes, note])


def _chosen(y: Tensor, per_class: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """The rows that are kept as they are, in order, and those that are copied, class by class."""
    kept, copied = [], []
    for label in y.unique():
        rows = (y == label).nonzero().flatten()
        if len(rows) > per_class:
            rows = rows[torch.randperm(len(rows), generator=generator)[:per_class]]
        kept.append(rows)
        copied.append(rows[torch.randint(len(rows), (per_class - len(rows),), generator=generator)])
    return torch.cat(kept).sort().values, torch.cat(copied)
