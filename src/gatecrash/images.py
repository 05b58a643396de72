"""What a batch of images is: float, N×C×H×W, in [0, 1]; the one place that checks it, and conversions between kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import interpolate

Images: TypeAlias = Tensor | tuple[Tensor, Tensor] | Iterable[Any]
"""Images wherever data is taken: a tensor, a pair (images, labels), a DataLoader, any iterable of batches of either."""

_LUMA = (0.299, 0.587, 0.114)


def check_form(x: object, name: str = "images") -> Tensor:
    """`x`, when it has the dtype and rank of a batch of images; looks at no value.

    Raises:
        ValueError: `x` is not a tensor, not float32 or float64, or not of rank 4.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor of shape (N, C, H, W), got {type(x).__name__}")
    if x.dtype == torch.uint8:
        raise ValueError(f"{name} must be float in [0, 1], got uint8; divide by 255: images.float() / 255")
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} must be float32 or float64, got {str(x.dtype).removeprefix('torch.')}")
    if x.ndim != 4:
        hint = "; one image needs a batch dimension: image[None]" if x.ndim == 3 else ""
        raise ValueError(f"{name} must have shape (N, C, H, W), got {tuple(x.shape)}{hint}")
    return x


def check_images(x: object, name: str = "images") -> Tensor:
    """`x`, when it is a batch of images.

    Raises:
        ValueError: also when a value is NaN or outside [0, 1], or when there is no image at all.
    """
    x = check_form(x, name)
    if x.numel() == 0:
        raise ValueError(f"{name} must hold at least one image, got shape {tuple(x.shape)}")
    low, high = extremes(x)
    if low != low or high != high:
        bad = x.detach().isnan().flatten(1).any(dim=1).nonzero().flatten().tolist()
        raise ValueError(f"{name} must not hold NaN; found in {len(bad)} of {len(x)} images, first at index {bad[0]}")
    if low < 0 or high > 1:
        digits = 4
        if max(-low, high - 1) < 1e-3:
            hint, digits = "; clamp what rounding left: images.clamp(0, 1)", 8
        else:
            hint = "; divide by 255" if high > 2 and low >= 0 else "; undo the normalisation" if low < 0 else ""
        raise ValueError(f"{name} must lie in [0, 1], got values from {low:.{digits}g} to {high:.{digits}g}{hint}")
    return x


def extremes(x: Tensor) -> tuple[float, float]:
    """The least and the largest number, NaN where there is one; on a CPU two reductions are faster than one of both."""
    x = x.detach()
    low, high = torch.aminmax(x) if x.device.type != "cpu" else (x.amin(), x.amax())
    return float(low), float(high)


def check_pair(start: Tensor, target: Tensor) -> None:
    """Raises a ValueError unless the two batches have one shape."""
    if start.shape != target.shape:
        raise ValueError(
            f"start and target must have the same shape, got {tuple(start.shape)} and {tuple(target.shape)}"
        )


def batches(data: Images, batch_size: int = 256, name: str = "images") -> Iterator[tuple[Tensor, Tensor | None]]:
    """Images and labels (None where there are none) batch by batch, from any of the forms that `Images` names.

    Raises:
        ValueError: an item is neither images nor (images, labels), or the two differ in length; it names the batch. Or
            the size of a batch is none.
    """
    check_batch_size(batch_size)
    if isinstance(data, Tensor):
        data = data.split(batch_size) if data.ndim else [data]
    elif isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data
        check_labels(y, len(x), name)
        data = zip(x.split(batch_size), y.split(batch_size), strict=True)
    elif not isinstance(data, Iterable):
        raise ValueError(
            f"{name} must be a tensor, a pair (images, labels) or an iterable of batches, got {type(data).__name__}"
        )
    for index, item in enumerate(data):
        where = f"{name}, batch {index}"
        parts = tuple(item) if isinstance(item, tuple | list) else (item,)
        if len(parts) not in (1, 2):
            raise ValueError(f"{where}: expected images or (images, labels), got {len(parts)} items")
        x, y = parts if len(parts) == 2 else (parts[0], None)
        x = check_images(x, where)
        if y is not None:
            check_labels(y, len(x), where)
        yield x, y


def batches_on(device: torch.device, data: Images, batch_size: int = 256) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The same on a device. Where that is not the CPU, the next batch is read and moved while one is worked on.

    Raises:
        ValueError: as `batches`.
    """
    source = batches(data, batch_size)
    if device.type == "cpu":
        yield from ((x.to(device), None if y is None else y.to(device)) for x, y in source)
        return

    def fetch() -> tuple[Tensor, Tensor | None] | None:
        found = next(source, None)
        return None if found is None else (moved(found[0], device), None if found[1] is None else found[1].to(device))

    with ThreadPoolExecutor(max_workers=1) as pool:
        coming = pool.submit(fetch)
        while (batch := coming.result()) is not None:
            coming = pool.submit(fetch)
            yield batch


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Images on a device; to a GPU through pinned memory, so that nobody waits for the copy."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def check_batch_size(batch_size: object) -> None:
    """Raises a ValueError unless a batch can have this many images."""
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")


def check_labels(y: object, count: int, name: str = "images") -> None:
    """Raises a ValueError unless `y` holds one whole number per image."""
    if not isinstance(y, Tensor) or y.ndim != 1 or len(y) != count or y.is_floating_point() or y.is_complex():
        came = f"{tuple(y.shape)} {str(y.dtype).removeprefix('torch.')}" if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"{name}: labels must be whole numbers of shape ({count},), got {came}")


def to_channels(x: Tensor, channels: int) -> Tensor:
    """The images with 1 or 3 channels: grey is repeated, colour becomes its luma."""
    if x.shape[1] == channels:
        return x
    if (x.shape[1], channels) == (1, 3):
        return x.expand(-1, 3, -1, -1).contiguous()
    if (x.shape[1], channels) == (3, 1):
        weights = torch.tensor(_LUMA, dtype=x.dtype, device=x.device).view(1, 3, 1, 1)
        luma = (x * weights).sum(dim=1, keepdim=True)
        # White comes to 1 + 1e-7; a plain clamp would bring its gradient to 0 as well.
        return luma + (luma.clamp(0, 1) - luma).detach()
    raise ValueError(f"images with {x.shape[1]} channels cannot be made into images with {channels}")


def resized(x: Tensor, size: int | tuple[int, int]) -> Tensor:
    """The images at another size, bilinear with antialiasing; differentiable, and still in [0, 1] where they were."""
    height, width = (size, size) if isinstance(size, int) else size
    if x.shape[-2:] == (height, width):
        return x
    return interpolate(x, size=(height, width), mode="bilinear", align_corners=False, antialias=True)
