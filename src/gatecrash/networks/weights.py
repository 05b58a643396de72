"""The weights of a network as a file: every check on what a file holds, with its message."""

from __future__ import annotations

import hashlib
import json
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import IO, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gatecrash.files import replacing

M = TypeVar("M", bound=nn.Module)

# What a pickled state dict imports: an ordered dictionary, and what tensors are rebuilt from.
_HARMLESS = re.compile(
    r"collections\.OrderedDict|torch\._utils\.\w+|torch\._tensor\.\w+|torch\.storage\.\w+|torch\.\w*Storage"
    r"|torch\.(Size|device|bool|(b?float|u?int|complex)\w+)"
)
_SHOWN = 3


def load_weights(model: M, path: str | PathLike[str]) -> M:
    """`model`, with the weights of a file in it: safetensors, or a state dict in .pth, .pt or .th.

    A state dict may be wrapped in a dictionary as `state_dict` or `model`, its names may start with `module.`, and its
    precision may be another than the model's, which is kept. No code that a file holds is ever run, and the model is
    left alone unless all of the file fits.

    Raises:
        ValueError: there is no such file, it is damaged, it holds code, its weights do not fit the model (a missing,
            an unexpected or a differently shaped tensor), or one of them is NaN or infinite.
    """
    path = Path(path)
    model.load_state_dict(_fit(model, _read(path), path))
    return model


def save_weights(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write the weights of `model` as safetensors; a reader of `path` sees the old file or the whole new one.

    A tensor that has several names is written under each of them.

    Raises:
        ValueError: `path` does not end in .safetensors.
        OSError: it cannot be written.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"weights are saved as .safetensors, got {path.name!r}")
    # The format refuses two names for one piece of memory, so every name gets a piece of its own.
    tensors = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
    with replacing(path) as draft:
        save_file(tensors, draft, metadata={"format": "pt"})


def _read(path: Path) -> dict[str, Tensor]:
    """The state dict in a file, out of its wrapper."""
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise ValueError(f"weights must end in one of {', '.join(_READERS)}, got {path.name!r}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"cannot read weights {path}: {error.strerror}") from error
    content = read(path)
    for wrapper in ("model", "state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping):
        raise ValueError(f"weights {path} must hold a state dict, got {type(content).__name__}")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"weights {path} must hold named tensors only, got {type(tensor).__name__} as {name!r}")
    return dict(content)


def _read_safetensors(path: Path) -> object:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"weights {path} are truncated or not safetensors ({_one_line(error)}); fetch the file again"
        ) from error


def _read_pickled(path: Path) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    # Damaged bytes can fail anywhere inside the unpickler, with an error of any type.
    except Exception as error:
        code = next((name for name in _imports(path) if not _HARMLESS.fullmatch(name)), None)
        if code is not None:
            raise ValueError(
                f"weights {path} refused: the file holds code ({code}), which loading it would run; "
                "have its author save model.state_dict() as safetensors"
            ) from error
        raise ValueError(
            f"weights {path} are truncated or not a file of torch.save ({type(error).__name__}); fetch the file again"
        ) from error


_READERS: dict[str, Callable[[Path], object]] = {
    ".safetensors": _read_safetensors,
    ".pth": _read_pickled,
    ".pt": _read_pickled,
    ".th": _read_pickled,
}


def _imports(path: Path) -> Iterator[str]:
    """The names that unpickling a file would import, read off its opcodes up to where it is damaged: nothing is run."""
    try:
        with path.open("rb") as stream:
            if stream.read(2) != b"PK":
                stream.seek(0)
                # The format before torch 1.6: five pickles one after the other, then the bytes of the tensors.
                yield from _opcode_imports(stream, pickles=5)
                return
            with zipfile.ZipFile(stream) as archive:
                for record in archive.namelist():
                    if record.endswith("/data.pkl"):
                        yield from _opcode_imports(archive.open(record), pickles=1)
    # As in reading: damaged bytes can fail anywhere.
    except Exception:
        return


def _opcode_imports(stream: IO[bytes], pickles: int) -> Iterator[str]:
    strings: list[str] = []
    for _ in range(pickles):
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name in ("GLOBAL", "INST"):
                yield str(argument).replace(" ", ".")
            elif opcode.name == "STACK_GLOBAL":
                yield ".".join(strings[-2:])
            elif isinstance(argument, str):
                strings.append(argument)


def _fit(model: nn.Module, weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """`weights` under the names and in the dtypes of `model`."""
    own: dict[str, Tensor] = model.state_dict()
    if all(name.startswith("module.") for name in weights) and not any(name.startswith("module.") for name in own):
        weights = {name.removeprefix("module."): tensor for name, tensor in weights.items()}
    mismatches = list(_mismatches(own, weights))
    if mismatches:
        more = f"; and {len(mismatches) - _SHOWN} more" if len(mismatches) > _SHOWN else ""
        raise ValueError(f"weights {path} do not fit {type(model).__name__}: {'; '.join(mismatches[:_SHOWN])}{more}")
    weights = {name: tensor.to(own[name].dtype) for name, tensor in weights.items()}
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise ValueError(f"weights {path} must be finite, got NaN or inf in {name}")
    return own | weights


def _mismatches(own: dict[str, Tensor], weights: dict[str, Tensor]) -> Iterator[str]:
    for name in own:
        # Files from before torch 0.4.1 lack this counter, which no forward pass in eval mode reads.
        if name not in weights and not name.endswith("num_batches_tracked"):
            yield f"missing {name}"
    for name in weights:
        if name not in own:
            yield f"unexpected {name}"
    for name, tensor in weights.items():
        if name not in own:
            continue
        expected = own[name]
        if tensor.shape != expected.shape:
            yield f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected.shape)}"
        elif expected.is_floating_point() and not tensor.is_floating_point():
            yield f"{name} is {str(tensor.dtype).removeprefix('torch.')}, expected a float type"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def hash_of(model: nn.Module) -> str:
    """The SHA-256 of a network's weights, names and shapes included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_hash(model: nn.Module, folder: Path, *, required: bool) -> None:
    """Raises a ValueError where the weights in a bundle are not those that its manifest has the hash of.

    Args:
        model: the network as it was read.
        folder: the bundle.
        required: whether a manifest without a hash is damaged.
    """
    manifest = folder / "manifest.json"
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        known = content["weights_sha256"] if required else content.get("weights_sha256")
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{manifest} is damaged: {' '.join(str(error).split())}") from error
    if known is not None and known != hash_of(model):
        raise ValueError(f"{folder / 'model.safetensors'} was changed: its weights are not those of {manifest}")
