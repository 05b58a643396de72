"""PixelCNN++: how likely an image is, pixel by pixel, each given all that stand above it and to its left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, conv_transpose2d, elu, pad

from gatecrash.densities.base import Density, register
from gatecrash.densities.logistic_mixture import LogisticMixture, parameter_count
from gatecrash.densities.options import number, whole

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"blocks": 5, "filters": 160, "mixtures": 10, "dropout": 0.5, "levels": 2},
    "small": {"blocks": 1, "filters": 16, "mixtures": 5, "dropout": 0.0, "levels": 2},
}
SETTLED_ON = 32
"""Images from which the layers take their first scales: with the paper's sizes, 256 would need gigabytes."""


@register("pixelcnn")
class PixelCNN(Density):
    """PixelCNN++ (Salimans et al. 2017): a network gives every pixel a mixture of discretised logistics.

    log p(x) = Σ_i log p(x_i | x_1, …, x_{i−1}), pixels in reading order. Between grey levels p is the mass of a bin as
    wide as one grey level around x, so that there is a gradient; at 8-bit values it is the original's. The bins of
    black and white have no outer end: p jumps where a value comes within 0.0005 of 0 or 1, and no gradient tells of it.

    Args:
        shape: (C, H, W), any sides.
        preset: "small", or "paper" (5 blocks, 160 filters, 10 mixtures, dropout 0.5) for days on a GPU; it has the
            sizes that are not given.
        blocks: gated residual blocks per stream and resolution; without any, a pixel sees its neighbours alone.
        filters: channels of both streams.
        mixtures: components per pixel.
        dropout: in every block, while training.
        levels: how often the resolution is halved.

    Raises:
        ValueError: the samples are no images, or an option does not exist or is out of range.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        preset: str = "small",
        blocks: int | None = None,
        filters: int | None = None,
        mixtures: int | None = None,
        dropout: float | None = None,
        levels: int | None = None,
    ) -> None:
        if len(shape) != 3:
            raise ValueError(f"a PixelCNN is of images of shape (C, H, W), got {tuple(shape)}")
        if preset not in list(PRESETS):
            raise ValueError(f"preset must be {' or '.join(map(repr, PRESETS))}, got {preset!r}")
        given = {"blocks": blocks, "filters": filters, "mixtures": mixtures, "dropout": dropout, "levels": levels}
        sizes = PRESETS[preset] | {name: size for name, size in given.items() if size is not None}
        check_sizes(sizes)
        super().__init__(shape, preset=preset, **sizes)
        self.network = Streams(
            shape[0],
            parameter_count(shape[0], sizes["mixtures"]),
            blocks=sizes["blocks"],
            filters=sizes["filters"],
            dropout=sizes["dropout"],
            levels=sizes["levels"],
        )

    @torch.no_grad()
    def begin(self, x: Tensor) -> None:
        """Scale every layer so that its output has mean 0 and deviation 1 over some images.

        The last layer's mixture then is, at every pixel, one of the grey levels of all pixels.
        """
        training, x = self.training, 2 * x.to(self.network.last.bias.dtype) - 1
        hooks = [layer.register_forward_hook(settle) for layer in self.modules() if isinstance(layer, Normed)]
        try:
            self.eval().network.forward(x[:SETTLED_ON])  # not as a compiled module, which would keep the hooks
        finally:
            for hook in hooks:
                hook.remove()
            self.train(training)
        self.network.last.bias.copy_(LogisticMixture.raw_of(x, self.options["mixtures"]))

    def mixture(self, x: Tensor) -> LogisticMixture:
        """The mixture of every pixel, given the pixels before it, of images in [0, 1]."""
        return LogisticMixture.of(self.network(2 * x - 1), self.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        """The log-likelihood of every image in nats, (B,)."""
        self.check(x)
        x = x.to(self.network.last.bias.dtype)
        return self.mixture(x).log_prob(2 * x - 1).flatten(1).sum(dim=1)

    @torch.no_grad()
    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Images (count, C, H, W) in [0, 1], drawn pixel by pixel; one pass of the network for each.

        Args:
            count: how many.
            generator: on the CPU; seed 0 by default.
        """
        generator = generator or torch.Generator().manual_seed(0)
        x = self.network.last.bias.new_zeros(count, *self.shape)
        for row in range(self.shape[1]):
            for column in range(self.shape[2]):
                place = (..., slice(row, row + 1), slice(column, column + 1))
                raw = self.network(2 * x - 1)[place]
                x[place] = (LogisticMixture.of(raw, self.shape[0]).sample(generator) + 1) / 2
        return x


def check_sizes(sizes: dict[str, Any]) -> None:
    """Raises a ValueError when a size is no number or out of range."""
    whole(0, blocks=sizes["blocks"], levels=sizes["levels"])
    whole(filters=sizes["filters"], mixtures=sizes["mixtures"])
    number(dropout=sizes["dropout"])
    if not 0 <= sizes["dropout"] < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {sizes['dropout']!r}")


class Normed(nn.Module):
    """A convolution that sees nothing below its pixel and, where it is of the right stream, nothing to its right.

    Its weights are directions of length 1 times a scale per output (weight normalisation).

    Args:
        inputs: channels.
        outputs: channels.
        size: of the kernel, (rows, columns).
        right: whether the kernel ends at its pixel's column; else it is centred there.
        stride: 2 halves the resolution, rounding up.
        start: the deviation of the output once it is settled.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: tuple[int, int] = (1, 1),
        *,
        right: bool = True,
        stride: int = 1,
        start: float = 1.0,
    ) -> None:
        super().__init__()
        rows, columns = size
        self.around = (columns - 1, 0) if right else (columns // 2, columns // 2)
        self.above, self.stride, self.start = rows - 1, stride, start
        self.direction = nn.Parameter(torch.randn(outputs, inputs, rows, columns))
        self.scale = nn.Parameter(torch.full((outputs,), start))
        self.bias = nn.Parameter(torch.zeros(outputs))

    @property
    def weight(self) -> Tensor:
        """(outputs, inputs, rows, columns)."""
        length: Tensor = torch.linalg.vector_norm(self.direction, dim=(1, 2, 3), keepdim=True)
        return self.direction * (self.scale[:, None, None, None] / length)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, H, W)."""
        return conv2d(pad(x, (*self.around, self.above, 0)), self.weight, self.bias, self.stride)


class Grow(Normed):
    """The reverse of a convolution with stride 2: every pixel of the output sees the one that it was shrunk into."""

    def __init__(self, channels: int, size: tuple[int, int], *, right: bool) -> None:
        super().__init__(channels, channels, size, right=right)

    def forward(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        """(B, C, H, W) → (B, C, 2·H, 2·W), without the last row or column where `like` has one less."""
        whole = conv_transpose2d(x, self.weight.transpose(0, 1), self.bias, 2)[..., self.around[1] :]
        rows, columns = (2 * x.shape[2], 2 * x.shape[3]) if like is None else like.shape[2:]
        return whole[..., :rows, :columns]


def settle(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A forward hook: scale and shift a layer so that its output has mean 0 and the deviation that it starts with."""
    assert isinstance(layer, Normed)
    deviation, mean = torch.std_mean(output, dim=(0, 2, 3), correction=0)
    gain = layer.start / deviation.clamp_min(0.1 * layer.start)
    layer.scale.mul_(gain)
    layer.bias.sub_(mean).mul_(gain)
    return (output - mean[:, None, None]) * gain[:, None, None]


def concat_elu(x: Tensor) -> Tensor:
    """ELU of x and of −x, twice as many channels."""
    return elu(torch.cat([x, -x], dim=1))


class Gated(nn.Module):
    """A residual block whose change is gated: x + a·σ(b), with a and b from two convolutions.

    Args:
        filters: channels.
        right: of which stream.
        beside: channels of what comes from elsewhere, at the same resolution.
        dropout: between the convolutions.
    """

    def __init__(self, filters: int, *, right: bool, beside: int, dropout: float) -> None:
        super().__init__()
        size = (2, 2) if right else (2, 3)
        self.first = Normed(2 * filters, filters, size, right=right)
        self.beside = Normed(2 * beside, filters) if beside else None
        self.dropout = nn.Dropout(dropout)
        self.second = Normed(2 * filters, 2 * filters, size, right=right, start=0.1)

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        """(B, filters, H, W), as x."""
        hidden = self.first(concat_elu(x))
        if self.beside is not None and beside is not None:
            hidden = hidden + self.beside(concat_elu(beside))
        change, gate = self.second(self.dropout(concat_elu(hidden))).chunk(2, dim=1)
        updated: Tensor = x + change * torch.sigmoid(gate)
        return updated


class Descent(nn.Module):
    """One resolution on the way down; it halves the one before where there is one."""

    def __init__(self, filters: int, blocks: int, dropout: float, *, halves: bool) -> None:
        super().__init__()
        self.shrink = Normed(filters, filters, (2, 3), right=False, stride=2) if halves else None
        self.shrink_right = Normed(filters, filters, (2, 2), stride=2) if halves else None
        self.blocks = nn.ModuleList(Gated(filters, right=False, beside=0, dropout=dropout) for _ in range(blocks))
        self.blocks_right = nn.ModuleList(
            Gated(filters, right=True, beside=filters, dropout=dropout) for _ in range(blocks)
        )

    def forward(self, above: list[Tensor], left: list[Tensor]) -> None:
        """Append what both streams hold after every step."""
        if self.shrink is not None and self.shrink_right is not None:
            above.append(self.shrink(above[-1]))
            left.append(self.shrink_right(left[-1]))
        for block, block_right in zip(self.blocks, self.blocks_right, strict=True):
            above.append(block(above[-1]))
            left.append(block_right(left[-1], above[-1]))


class Ascent(nn.Module):
    """One resolution on the way up; it doubles the one before where there is one."""

    def __init__(self, filters: int, blocks: int, dropout: float, *, doubles: bool) -> None:
        super().__init__()
        self.grow = Grow(filters, (2, 3), right=False) if doubles else None
        self.grow_right = Grow(filters, (2, 2), right=True) if doubles else None
        self.blocks = nn.ModuleList(Gated(filters, right=False, beside=filters, dropout=dropout) for _ in range(blocks))
        self.blocks_right = nn.ModuleList(
            Gated(filters, right=True, beside=2 * filters, dropout=dropout) for _ in range(blocks)
        )

    def forward(self, u: Tensor, v: Tensor, above: list[Tensor], left: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Both streams, with what they held on the way down taken off the lists."""
        if self.grow is not None and self.grow_right is not None:
            u, v = self.grow(u, above[-1]), self.grow_right(v, left[-1])
        for block, block_right in zip(self.blocks, self.blocks_right, strict=True):
            u = block(u, above.pop())
            v = block_right(v, torch.cat([u, left.pop()], dim=1))
        return u, v


class Streams(nn.Module):
    """The network: a stream that sees all rows above, and one that also sees the row's pixels to the left.

    On the way down the resolution is halved between the levels; on the way up every block sees beside it what stood
    there on the way down.

    Args:
        channels: of the image.
        outputs: numbers per pixel.
        blocks: per stream and level; one more on the way up, save at the lowest level.
        filters: channels of both streams.
        dropout: in every block.
        levels: how often the resolution is halved.
    """

    def __init__(self, channels: int, outputs: int, *, blocks: int, filters: int, dropout: float, levels: int) -> None:
        super().__init__()
        self.rows_above = Normed(channels + 1, filters, (2, 3), right=False)
        self.row_above = Normed(channels + 1, filters, (1, 3), right=False)
        self.left = Normed(channels + 1, filters, (2, 1))
        self.down = nn.ModuleList(Descent(filters, blocks, dropout, halves=level > 0) for level in range(levels + 1))
        self.up = nn.ModuleList(
            Ascent(filters, blocks + (level > 0), dropout, doubles=level > 0) for level in range(levels + 1)
        )
        self.last = Normed(filters, outputs, start=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) in [−1, 1] → (B, outputs, H, W), at every pixel from the pixels before it alone."""
        x = pad(x, (0, 0, 0, 0, 0, 1), value=1.0)  # a channel of ones tells the image from the border
        above = [shifted_down(self.rows_above(x))]
        left = [shifted_down(self.row_above(x)) + shifted_right(self.left(x))]
        for level in self.down:
            level(above, left)
        u, v = above.pop(), left.pop()
        for level in self.up:
            u, v = level(u, v, above, left)
        # A mean that is rounded to bfloat16 would be half a grey level off.
        with torch.autocast(x.device.type, enabled=False):
            output: Tensor = self.last(elu(v.to(self.last.bias.dtype)))
        return output


def shifted_down(x: Tensor) -> Tensor:
    """Every row one lower, the first of zeros."""
    return pad(x, (0, 0, 1, -1))


def shifted_right(x: Tensor) -> Tensor:
    """Every column one to the right, the first of zeros."""
    return pad(x, (1, -1, 0, 0))
