"""The state of a run in its folder: written whole after every epoch, read back after a kill."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from gatecrash.files import replacing, write_text

History = list[dict[str, float]]


def optimiser_tensors(optimiser: Optimizer) -> dict[str, Tensor]:
    """What an optimiser remembers, by the place of the parameter and a name."""
    return {
        f"{index}/{name}": value if isinstance(value, Tensor) else torch.tensor(float(value))
        for index, state in optimiser.state_dict()["state"].items()
        for name, value in state.items()
        if value is not None
    }


def restore_optimiser(optimiser: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimiser back what it remembered."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition("/")
        state.setdefault(int(index), {})[name] = tensor
    whole = optimiser.state_dict()
    optimiser.load_state_dict({"state": state, "param_groups": whole["param_groups"]})


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], state: dict[str, Any], history: History) -> None:
    """`checkpoint-EPOCH.safetensors`, then `checkpoint.json`, which names it and has its hash, then the log.

    A kill leaves the old checkpoint or the new one: what stands in `checkpoint.json` is complete.
    """
    held = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    name = f"checkpoint-{state['epoch']}.safetensors"
    with replacing(folder / name) as draft:
        save_file(held, draft)
        about = {**state, "file": name, "sha256": sha256(draft), "history": history}
    write_text(folder / "checkpoint.json", json.dumps(about, indent=1) + "\n")
    for pattern in ("checkpoint-*.safetensors", ".checkpoint-*.safetensors"):  # the second: drafts that a kill left
        for other in folder.glob(pattern):
            if other.name != name:
                other.unlink(missing_ok=True)
    write_log(folder / "epochs.csv", history)


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and state of the last finished epoch; None where there is none.

    Raises:
        ValueError: a file is missing or damaged.
    """
    about = folder / "checkpoint.json"
    if not about.is_file():
        return None
    try:
        state: dict[str, Any] = json.loads(about.read_text(encoding="utf-8"))
        path = folder / state["file"]
        if state["sha256"] != sha256(path):
            raise ValueError(f"{path.name} is not what was written")
        needed = {name: state[name] for name in ("epoch", "settings", "history")}
        return load_file(path), needed
    except (ValueError, KeyError, TypeError, SafetensorError, OSError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"the checkpoint in {folder} is damaged: {reason}") from error


def sha256(path: Path) -> str:
    """The hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_log(path: Path, history: History) -> None:
    """The epochs as CSV, a column for every number that any of them has."""
    columns = list(dict.fromkeys(name for row in history for name in row))
    with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(history)
