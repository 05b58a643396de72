"""A network as z = f(x): resize and normalisation inside, taps by layer name, pooling, the linear head."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gatecrash import prepared
from gatecrash.checkpointing import blocks_of, checkpointed
from gatecrash.errors import first_line
from gatecrash.images import check_form, resized
from gatecrash.layout import laid_out_for
from gatecrash.protocols import Latent
from gatecrash.speed import is_laid_out
from gatecrash.taps import evaluating as evaluating
from gatecrash.taps import first_tensor as first_tensor
from gatecrash.taps import recording as recording
from gatecrash.taps import require_python

Pool = Literal["mean", "flatten"] | None


_ABOUT_SHAPES = re.compile("shape|size|channel|dimension", re.IGNORECASE)
"""What torch says when images do not fit a layer."""


class Head(NamedTuple):
    """The last linear layer of a network."""

    weight: Tensor
    bias: Tensor | None


class Encoder(nn.Module):
    """A network as z = f(x) for images x in [0, 1], differentiable.

    It never changes the network it wraps: the network runs in eval mode, and its mode, parameters, gradients and
    buffers are the same after a call as before. In a block of `speed.at_pace` a faster copy may run in its place.

    Args:
        model: any `nn.Module` that takes a batch of images.
        layer: the name of a module as in `model.named_modules()`, or several; None is the network's output (logits),
            also among several. Of a module that runs several times in one pass, the last output is taken.
        mean: per channel, subtracted from the image; None leaves it.
        std: per channel, divides the image; None leaves it.
        size: the side (or height and width) the network wants; images are resized, differentiably, inside.
        pool: what becomes of tapped maps (B, C, H, W) and tokens (B, T, D): "mean" over places, "flatten", or None.
            Maps with their channels last, as Swin has them inside, need "flatten" or None.
        checkpointing: a gradient needs less memory and a forward pass more: the blocks of a transformer store their
            inputs only, and compute the rest again on the way back. The network then runs as it is at every pace.

    Raises:
        ValueError: a layer does not exist; images do not fit the network, mean and std, or are not on its device;
            a network without a chain of equal blocks is to be checkpointed.
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        layer: str | Sequence[str | None] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        size: int | tuple[int, int] | None = None,
        pool: Pool = "mean",
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if pool not in ("mean", "flatten", None):
            raise ValueError(f"pool must be 'mean', 'flatten' or None, got {pool!r}")
        self.model = model
        if not (layer is None or isinstance(layer, str | Sequence)):
            raise ValueError(f"layer must be a name, several names, or None for the network's output, got {layer!r}")
        self.layer = layer if layer is None or isinstance(layer, str) else tuple(layer)
        if self.layer == () or not all(name is None or isinstance(name, str) for name in self.layers):
            raise ValueError(f"layer must be a name, several names, or None for the network's output, got {layer!r}")
        self.size = check_size(size)
        self.pool = pool
        self.checkpointing = checkpointing
        self._blocks = blocks_of(model) if checkpointing else ()
        self.register_buffer("mean", channels(mean, "mean"), persistent=False)
        self.register_buffer("std", channels(std, "std"), persistent=False)
        if std is not None and min(std) <= 0:
            raise ValueError(f"std must be positive in every channel, got {tuple(std)}")
        self._taps = self._find(self.layers)
        self._names = tuple(dict.fromkeys(self.layers or (None,)))
        self._spares_inputs = False
        """Whether the network was seen to leave what it reads alone, so that it may read the caller's images."""

    @property
    def layers(self) -> tuple[str | None, ...]:
        """The names of the tapped layers, None among them for the network's output; empty for the output alone."""
        return () if self.layer is None else (self.layer,) if isinstance(self.layer, str) else self.layer

    @property
    def device(self) -> torch.device | None:
        """Where the network is; None for one without parameters and buffers."""
        return next((tensor.device for tensor in chain(self.model.parameters(), self.model.buffers())), None)

    @property
    def head(self) -> Head | None:
        """Weight and bias of the last linear layer in the order of definition; None where there is none."""
        linear = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        return Head(linear[-1].weight, linear[-1].bias) if linear else None

    def at(self, layer: str | Sequence[str | None] | None, pool: Pool | Literal["same"] = "same") -> Encoder:
        """The same network, normalisation and size, tapped elsewhere; itself where it is tapped there already."""
        pool = self.pool if pool == "same" else pool
        if type(self) is Encoder and (layer, pool) == (self.layer, self.pool):
            return self
        return Encoder(self.model, layer, flat(self.mean), flat(self.std), self.size, pool, self.checkpointing)

    def train(self, mode: bool = True) -> Encoder:
        """Leaves the wrapped network's mode alone: that is its owner's to set."""
        self.training = mode
        return self

    def forward(self, x: Tensor) -> Latent:
        """The latent of a batch of images (B, C, H, W): one tensor, or a tuple with one per tapped layer."""
        inputs = self._inputs(check_form(x))
        if self.checkpointing:
            with checkpointed(self._blocks):
                outputs = self._outputs(inputs)
        else:
            outputs = prepared.run(self.model, self._taps, self._names, inputs, self._outputs)
        if len(outputs) == 1 and not isinstance(self.layer, tuple):
            return self._latent(self.layer, outputs[0])
        return self.pick(dict(zip(self._names, outputs, strict=True)).__getitem__)

    def _outputs(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the tapped layers, each once, as the network itself gives them."""
        model, version = self.model, version_of(inputs)
        with evaluating(model):
            output, outputs = self._recorded(inputs) if self._taps else (self._run(model, inputs), {})
        wrote = version_of(inputs) != version
        if wrote and self._spares_inputs:
            raise ValueError(
                f"{type(model).__name__} writes into its input in some passes and not in others, so that images "
                "were changed; let it compute x = x - m instead of x -= m"
            )
        spares = not wrote and version is not None
        if spares != self._spares_inputs:  # a module takes as long to set an attribute as a small layer to run
            self._spares_inputs = spares
        own = type(model).__name__
        return tuple(
            [first_tensor(output, own) if name is None else self._output_of(name, outputs) for name in self._names]
        )

    def pick(self, output_of: Callable[[str | None], Any]) -> Latent:
        """The latent from the outputs of the tapped layers, as `output_of` gives them by name, None for the network."""
        if isinstance(self.layer, tuple):
            return tuple(self._latent(name, output_of(name)) for name in self.layer)
        return self._latent(self.layer, output_of(self.layer))

    def _latent(self, name: str | None, output: Any) -> Tensor:
        z = upcast(output if isinstance(output, Tensor) else first_tensor(output, name or type(self.model).__name__))
        z = z if name is None else pooled(z, self.pool)
        return z.contiguous() if is_laid_out() else z

    def _inputs(self, images: Tensor) -> Tensor:
        model = self.model  # which a module looks up as slowly as a small layer runs
        parameter = first_floating(model)
        device = self.device if parameter is None else parameter.device
        if device is not None and device != images.device:
            where = f"the images are on {images.device}, the network on {device}"
            raise ValueError(f"{where}; move one: x.to({str(device)!r})")
        x = images if self.size is None else resized(images, self.size)
        if self._buffers["mean"] is not None:
            x = x - per_channel(self._near("mean", x.device), x, "mean")
        if self._buffers["std"] is not None:
            x = x / per_channel(self._near("std", x.device), x, "std")
        x = x if parameter is None or parameter.dtype == x.dtype else x.to(parameter.dtype)
        x = laid_out_for(model, x)
        # A network may write into its input (x -= 0.5), and the images are the caller's.
        return x.clone() if x is images and (x.is_inference() or not self._spares_inputs) else x

    def _near(self, name: str, device: torch.device) -> Tensor:
        """Mean or std, moved for good to where the images are: a copy in every pass would make the host wait."""
        values = self._buffers[name]
        assert values is not None
        if values.device != device:
            with torch.inference_mode(False):
                values = self._buffers[name] = values.to(device)
        return values

    def _recorded(self, inputs: Tensor) -> tuple[Any, dict[str, Tensor]]:
        with recording(self._taps) as outputs:
            return self._run(self.model, inputs), outputs

    @staticmethod
    def _run(model: nn.Module, inputs: Tensor) -> Any:
        try:
            return model(inputs)
        except RuntimeError as error:
            reason = first_line(error)
            if not _ABOUT_SHAPES.search(reason):
                raise
            raise ValueError(
                f"{type(model).__name__} does not take images of shape {tuple(inputs.shape[1:])}: {reason}"
            ) from error

    def _find(self, names: tuple[str | None, ...]) -> dict[str, nn.Module]:
        wanted = [name for name in names if name is not None]
        if not wanted:
            return {}
        known = dict(self.model.named_modules(remove_duplicate=False))
        for name in wanted:
            if name not in known or not name:
                raise ValueError(no_such_layer(name, [key for key in known if key], type(self.model).__name__))
        require_python(*(known[name] for name in wanted))
        return {name: known[name] for name in wanted}

    def _output_of(self, name: str, outputs: dict[str, Tensor]) -> Tensor:
        if name not in outputs:
            raise ValueError(f"layer {name!r} of {type(self.model).__name__} did not run in the forward pass")
        return outputs[name]


def first_floating(model: nn.Module) -> Tensor | None:
    """The first parameter in floating point, in the order of definition."""
    for parameter in model._parameters.values():
        if parameter is not None and parameter.is_floating_point():
            return parameter
    for child in model._modules.values():
        found = None if child is None else first_floating(child)
        if found is not None:
            return found
    return None


def version_of(x: Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count."""
    return None if x.is_inference() else x._version


def as_encoder(network: nn.Module) -> Encoder:
    """The encoder itself, or a bare network as one."""
    return network if isinstance(network, Encoder) else Encoder(network)


def pooled(z: Tensor, pool: Pool) -> Tensor:
    """Maps (B, C, H, W) as their mean over places or flattened; tokens (B, T, D) likewise; vectors as they are."""
    if pool is None or z.ndim <= 2:
        return z
    if pool == "flatten":
        return z.flatten(1)
    return z.mean(dim=1) if z.ndim == 3 else z.flatten(2).mean(dim=2)


def upcast(z: Tensor) -> Tensor:
    """Half precision as float32, anything else as it is."""
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z


def channels(values: Sequence[float] | None, name: str) -> Tensor | None:
    """One value per channel, shaped to meet a batch of images."""
    if values is None:
        return None
    with torch.inference_mode(False):  # a tensor made in inference mode could not be part of a gradient later
        tensor = torch.as_tensor(values, dtype=torch.float64)
    if tensor.ndim != 1 or not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} must be one finite number per channel, got {values!r}")
    with torch.inference_mode(False):
        return tensor.float().view(1, -1, 1, 1)


def per_channel(values: Tensor, x: Tensor, name: str) -> Tensor:
    """What `channels` made, in the images' dtype, when there is one value for each of their channels."""
    if values.shape[1] not in (1, x.shape[1]):
        raise ValueError(f"{name} has {values.shape[1]} channels, the images have {x.shape[1]}")
    return values.to(x)


def check_size(size: int | tuple[int, int] | None) -> int | tuple[int, int] | None:
    """The size, when it is a side, a height and a width, or None."""
    sides = size if isinstance(size, tuple | list) else (size, size)
    if size is not None and (len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides)):
        raise ValueError(f"size must be one positive whole number, or two, got {size!r}")
    return size


def flat(tensor: Tensor | None) -> list[float] | None:
    """The values of `channels` again."""
    return None if tensor is None else tensor.flatten().tolist()


def no_such_layer(name: str, known: list[str], model: str) -> str:
    """The sentence for a layer that is not there: near names, then the list, deep names counted when there are many."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    listed = known if len(known) <= 60 else [key for key in known if key.count(".") <= 1]
    deeper = f" and {len(known) - len(listed)} deeper ones" if len(listed) < len(known) else ""
    hint = f"; did you mean {' or '.join(repr(key) for key in near)}?" if near else "."
    return f"{model} has no layer {name!r}{hint} Its layers: {', '.join(listed)}{deeper}"
