"""The pictures of a report as PNG data URIs: inlier, start, collided, difference."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from gatecrash.bundle import Pictures
from gatecrash.images import resized

LARGEST = 224
"""Pictures with a longer side than this are shown smaller."""

BUDGET = 2_400_000
"""How many characters of pictures a page holds."""

_STEPS = (7, 5, 3, 2, 1.5, 1)


@dataclass(frozen=True)
class Strip:
    """One collision of a group: its place there and four images as data URIs."""

    number: int
    target: str
    start: str
    found: str
    difference: str

    @property
    def length(self) -> int:
        """The characters that its images take."""
        return len(self.target) + len(self.start) + len(self.found) + len(self.difference)


def strips(groups: Sequence[Pictures], budget: int = BUDGET) -> list[list[Strip]]:
    """The collisions of every group, the first ones of all groups before the second ones, until the budget is spent."""
    shown: list[list[Strip]] = [[] for _ in groups]
    left = budget
    for number in range(max((len(group.found) for group in groups), default=0)):
        for place, group in enumerate(groups):
            if number < len(group.found) and left > 0:
                strip = _strip(group, number)
                left -= strip.length
                if left > 0 or not any(shown):
                    shown[place].append(strip)
    return shown


def factor_of(group: Pictures) -> float:
    """By how much the differences of a group are multiplied: the largest round number that cuts nothing off."""
    largest = float((group.found - group.start).nan_to_num().abs().amax()) if group.found.numel() else 0.0
    if largest == 0:
        return 1.0
    limit = 0.5 / largest * (1 + 1e-6)
    power = 10.0 ** math.floor(math.log10(limit))
    return next(step * power for step in _STEPS if step * power <= limit)


def difference(start: Tensor, found: Tensor, factor: float) -> Tensor:
    """What was added to the start, times `factor`, around a middle grey that means nothing was."""
    return (0.5 + factor * (found - start)).clamp(0, 1)


def data_uri(image: Tensor) -> str:
    """An image (C, H, W) in [0, 1] as the URI of a PNG, grey or RGB; other channels are averaged."""
    image = image.detach().cpu().float().nan_to_num().clamp(0, 1)
    if image.shape[0] not in (1, 3):
        image = image.mean(dim=0, keepdim=True)
    longest = max(image.shape[-2:])
    if longest > LARGEST:
        height, width = (max(1, round(side * LARGEST / longest)) for side in image.shape[-2:])
        image = resized(image[None], (height, width))[0].clamp(0, 1)
    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _strip(group: Pictures, number: int) -> Strip:
    start, found = group.start[number], group.found[number]
    return Strip(
        number,
        target=data_uri(group.target[number]),
        start=data_uri(start),
        found=data_uri(found),
        difference=data_uri(difference(start, found, factor_of(group))),
    )
