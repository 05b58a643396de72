"""The outputs of a network at the pace of the block: from the network itself, or from a prepared copy of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gatecrash.preparation import current_preparation
from gatecrash.prepared.make import Unfit, prepare
from gatecrash.prepared.network import Plain, PreparedNetwork
from gatecrash.prepared.stamp import Stamp
from gatecrash.prepared.tapped import Outputs
from gatecrash.speed import current_block, current_pace, is_transformed

KEPT = 8
"""Copies of one network that are kept; there is one per pace, image shape and set of layers."""
SETTLED = 50
"""Calls with the same weights after which a network whose weights changed is prepared again: it may be in training."""


def run(
    model: nn.Module, taps: Mapping[str, nn.Module], names: tuple[str | None, ...], x: Tensor, plain: Plain
) -> Outputs:
    """The outputs of some layers of a network in eval mode, one row per image.

    At the pace "plain" they are `plain(x)`. At another they come from a prepared copy of the network where there can be
    one, and while it has the network's weights.

    Args:
        model: the network.
        taps: modules of the network by name.
        names: whose outputs are wanted, in this order; None is the network itself.
        x: what the network takes, (B, ...).
        plain: the same outputs from the network itself.
    """
    if current_pace() == "plain":
        if _records and model in _records:
            _records[model].doubted = True
        return plain(x)
    network = _network_for(model, taps, names, x, plain) if _is_ordinary(x) else None
    return plain(x) if network is None else network(x, plain)


def facts(model: nn.Module) -> list[dict[str, Any]]:
    """How the copies of a network run, one after the other; empty where there is none."""
    record = _records.get(model)
    if record is None:
        return []
    return [
        {"pace": pace, "layers": list(names), **({"runs": "as it is"} if network is None else network.facts)}
        for (names, pace, *_), network in record.networks.items()
    ]


@dataclass
class Record:
    """The copies of one network, and what tells whether they still are.

    A stamp cannot see what is written through `.data`. So after a plain pass, as there is one between two searches,
    the copies are in doubt, and the weights are compared once.
    """

    stamp: Stamp
    wait: int
    """Calls before it may be copied, outside of `unchanged` blocks. In one it is copied at once: a search that began
    with the network and went on with a copy of it would compare the values of two paces."""
    weights: list[Tensor] = field(default_factory=list)
    networks: dict[Any, PreparedNetwork | None] = field(default_factory=dict)
    doubted: bool = False
    block: object = None
    """The `unchanged` block in which it was looked at."""

    def holds(self, stamp: Stamp) -> bool:
        """Whether the network with this stamp is the one that was copied."""
        doubted, self.doubted = self.doubted and bool(self.networks), False
        return self.stamp == stamp and (not doubted or stamp.same_weights(self.weights))


_records: WeakKeyDictionary[nn.Module, Record] = WeakKeyDictionary()


def _is_ordinary(x: Tensor) -> bool:
    """Whether images are such as copies are made for: float32, on a fast device, outside torch's transforms."""
    inside = is_transformed() or torch.is_inference_mode_enabled() or x.is_inference()
    return not inside and x.dtype == torch.float32 and x.device.type in current_preparation().devices and len(x) > 0


def _network_for(
    model: nn.Module, taps: Mapping[str, nn.Module], names: tuple[str | None, ...], x: Tensor, plain: Plain
) -> PreparedNetwork | None:
    """The prepared copy for such images, made where it is not there yet; None where the network itself is to run."""
    record, now = _records.get(model), current_block()
    if record is None or now is None or record.block is not now:
        try:
            stamp = Stamp(model)
        except (
            RuntimeError,
            ValueError,
        ):  # tensors without a place in memory: weights that are still to be made, sparse ones
            return None
        if record is None or not record.holds(stamp):
            record = _records[model] = Record(stamp, wait=0 if record is None else SETTLED)
        record.block = now
    if record.wait > 0 and now is None:
        record.wait -= 1
        return None
    stamp = record.stamp
    pace, preparation = current_pace(), current_preparation()
    key = names, pace, x.shape[1:], preparation
    if key not in record.networks:
        for old in list(record.networks)[: 1 - KEPT]:
            del record.networks[old]
        try:
            record.weights = record.weights or stamp.weights()
            record.networks[key] = prepare(model, taps, names, x, pace, plain, preparation)
        except (Unfit, torch.OutOfMemoryError) as error:
            if not isinstance(error, Unfit) and len(x) > 1:  # a batch half as large may leave room for a copy
                raise
            reason = error if isinstance(error, Unfit) else "there is no memory for a copy of it"
            record.networks[key] = None
            message = f"{type(model).__name__} runs as it is, without being prepared for speed: {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    return record.networks[key]
