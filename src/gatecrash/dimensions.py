"""The dimension analysis of a network: how much smaller each layer's output space is than the space it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import exp, expm1, inf, log, log1p
from typing import Any

import torch
from torch import Tensor, nn

from gatecrash.encoder import Encoder, as_encoder, first_tensor
from gatecrash.errors import first_line
from gatecrash.protocols import Latent, leaves
from gatecrash.taps import require_python

PIXEL_BITS = 8
"""What a pixel of an image can hold."""

FLOAT_BITS = 32
"""What a value of a latent can hold, roughly: a float32."""


@dataclass(frozen=True)
class LayerDimensions:
    """The spaces that one layer maps from and to, for one image.

    The spaces are discrete, as in Section 2.2 of Liang et al.: 256 values per pixel of the image, 2³² per value of a
    latent.
    """

    name: str
    """As in `model.named_modules()`; empty for a network that is one layer."""
    kind: str
    """The layer's class."""
    inputs: int
    outputs: int
    input_bits: int
    """log₂ of the number of different inputs."""
    output_bits: int
    """log₂ of the number of different outputs."""

    @property
    def ratio_bits(self) -> int:
        """log₂ of outputs per input; below zero, the layer must send different inputs to one output."""
        return self.output_bits - self.input_bits

    @property
    def reduces(self) -> bool:
        """Whether there are fewer dimensions after the layer than before."""
        return self.outputs < self.inputs

    @property
    def log_covering(self) -> float:
        """The natural logarithm of `covering`."""
        return log_covering(self.input_bits, self.output_bits)

    @property
    def covering(self) -> float:
        """The probability that the inputs, sent to outputs at random, reach every output."""
        return exp(self.log_covering)


def dimension_table(model: nn.Module, input_shape: Sequence[int]) -> list[LayerDimensions]:
    """The dimensions of every layer that runs on an image, in the order of their calls.

    A layer is a module that calls no other; one that runs several times is listed as often. The first of them reads
    the image, and so does every layer that reads the same memory; all the others read latents. What reads whole
    numbers, as an embedding of positions, reads neither, and is left out.

    Args:
        model: any network or `Encoder`; it runs once, on a black image, and is left as it is.
        input_shape: (C, H, W).

    Raises:
        ValueError: the shape is not (C, H, W), or the network does not take it.
    """
    encoder = as_encoder(model)
    require_python(encoder.model)
    image = _image(encoder, input_shape)
    table: list[LayerDimensions] = []
    pixels = {image.untyped_storage().data_ptr(): image}

    def bits(tensor: Tensor) -> int:
        return PIXEL_BITS if tensor.untyped_storage().data_ptr() in pixels else FLOAT_BITS

    def add(name: str, module: nn.Module, source: Tensor, output: Tensor) -> None:
        if source.dtype in (torch.int32, torch.int64):
            return
        if not table:
            pixels[source.untyped_storage().data_ptr()] = source
        inputs, outputs = source.numel(), output.numel()
        kind = type(module).__name__
        table.append(LayerDimensions(name, kind, inputs, outputs, bits(source) * inputs, bits(output) * outputs))

    with _visiting(encoder.model, add):
        _run(encoder, image)
    return table


def network_dimensions(
    model: nn.Module, input_shape: Sequence[int], layer: str | Sequence[str] | None = None
) -> LayerDimensions:
    """The dimensions of a whole network: from the image to the latent of a layer, its output for None.

    Maps are pooled as by an `Encoder`: a bare network's to their mean over places.

    Raises:
        ValueError: the shape is not (C, H, W), the network does not take it, or it has no such layer.
    """
    encoder = as_encoder(model)
    if layer is not None:
        encoder = encoder.at(layer)
    image = _image(encoder, input_shape)
    outputs = sum(leaf.numel() for leaf in leaves(_run(encoder, image)))
    name = ", ".join(name or "output" for name in encoder.layers) or "output"
    kind = type(encoder.model).__name__
    return LayerDimensions(name, kind, image.numel(), outputs, PIXEL_BITS * image.numel(), FLOAT_BITS * outputs)


def dims_rows(
    model: nn.Module, input_shape: Sequence[int], layer: str | Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """The dimension analysis as rows of a listing: every layer, then the image against the latent of `layer`.

    Raises:
        ValueError: as for `dimension_table` and `network_dimensions`.
    """
    whole = network_dimensions(model, input_shape, layer)
    return [
        *(_row(part.name, part) for part in dimension_table(model, input_shape)),
        _row(f"image → {whole.name}", whole),
    ]


def log_covering(input_bits: float, output_bits: float) -> float:
    """The log-probability that N = 2^input_bits balls, thrown at random into F = 2^output_bits boxes, leave none empty.

    Section 2.2 of Liang et al. has it as F!·S(N, F) / F^N with the Stirling number of the second kind. A box stays
    empty with probability q = (1 − 1/F)^N; were the boxes independent, none would with (1 − q)^F. For large F that is
    the coupon collector's limit exp(−F·exp(−N/F)). It is never below the truth, since one box's ball is lost to the
    others, and above it by no more than 0.01 from F = 100 on. All of it is computed in logarithms, since neither N nor
    F fits into a float.
    """
    if input_bits < output_bits:
        return -inf
    if output_bits == 0:
        return 0.0
    boxes = output_bits * log(2)
    # log of −log q = N · (−log(1 − 1/F)); the second factor is 1/F to within rounding once F is large
    log_exponent = input_bits * log(2) + (log(-log1p(-(2.0**-output_bits))) if output_bits < 50 else -boxes)
    exponent = exp(log_exponent) if log_exponent < 700 else inf
    # log of −log(1 − q), which is log q to within rounding once q is small
    log_empty = log(-log(-expm1(-exponent))) if exponent < 30 else -exponent
    log_loss = boxes + log_empty
    return -exp(log_loss) if log_loss < 700 else -inf


def _row(name: str, part: LayerDimensions) -> dict[str, Any]:
    return {
        "layer": name,
        "kind": part.kind,
        "inputs": part.inputs,
        "outputs": part.outputs,
        "log2_inputs": part.input_bits,
        "log2_outputs": part.output_bits,
        "log2_ratio": part.ratio_bits,
        "reduces": part.reduces,
        "covering": part.covering,
    }


def _image(encoder: Encoder, input_shape: Sequence[int]) -> Tensor:
    """A black image of that shape where the network is, as a batch of one."""
    shape = tuple(input_shape)
    if len(shape) != 3 or not all(isinstance(side, int) and side > 0 for side in shape):
        raise ValueError(f"input_shape must be (C, H, W), got {shape}")
    try:
        return torch.zeros(1, *shape, device=encoder.device)
    except (RuntimeError, TypeError) as error:  # more than the memory, or than a number can hold
        raise ValueError(f"images of shape {shape} are too large: {first_line(error)}") from error


def _run(encoder: Encoder, image: Tensor) -> Latent:
    """The network's latent of one image; what it says of a wrong shape, or of a lonely image, becomes a ValueError."""
    try:
        with torch.no_grad():
            latent: Latent = encoder(image)
    except ValueError:
        raise
    except Exception as error:  # a network may raise anything
        raise ValueError(
            f"{type(encoder.model).__name__} does not take images of shape {tuple(image.shape[1:])}: "
            f"{first_line(error)}"
        ) from error
    return latent


Visit = Callable[[str, nn.Module, Tensor, Tensor], None]


@contextmanager
def _visiting(model: nn.Module, visit: Visit) -> Iterator[None]:
    """While the block runs, `visit` sees name, module, input and output of every module that calls no other."""
    callers: list[bool] = []  # for every module now running, whether it has called another

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        callers[:] = [True] * len(callers)
        callers.append(False)

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if callers.pop():
            return
        source = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if source is not None:
            visit(name, module, source, first_tensor(output, name))

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(partial(after, name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
