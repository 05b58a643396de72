"""The devices and processes of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def make_fabric(precision: Literal["float32", "bf16"] = "float32", device: torch.device | None = None) -> Fabric:
    """The devices of this run: all processes where torchrun started several, else the one device."""
    from lightning.fabric import Fabric  # slow to import, and needed only where something is trained

    kind = "auto" if device is None else "gpu" if device.type == "cuda" else device.type
    exact: Literal["bf16-mixed", "32-true"] = "bf16-mixed" if precision == "bf16" else "32-true"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        chosen: Any = [device.index or 0] if device is not None and device.type == "cuda" else 1
        fabric = Fabric(accelerator=kind, devices=chosen, precision=exact)
    else:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        fabric = Fabric(accelerator=kind, devices=local, num_nodes=world // local, strategy="ddp", precision=exact)
    fabric.launch()
    return fabric


def several() -> bool:
    """Whether this is one of several processes."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def disband(fabric: Fabric) -> None:
    """Wait for every process, then end their group: one that exits while the group stands may abort on its way out."""
    if several():
        fabric.barrier()
        torch.distributed.destroy_process_group()


def agree(tensors: Iterable[Tensor]) -> None:
    """Every process gets the first one's tensors: batch statistics are each process's own."""
    if several():
        for tensor in tensors:
            torch.distributed.broadcast(tensor, 0)
