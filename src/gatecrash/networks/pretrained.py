"""The weights that the package carries, with the images they were trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from gatecrash.networks.registry import NETWORKS
from gatecrash.networks.weights import load_weights
from gatecrash.registry import Registry

_FOLDER = Path(__file__).parent / "pretrained"


@dataclass(frozen=True)
class Pretrained:
    """A network as it was trained: what it is called, what it reads and where its weights are."""

    network: str
    """Its name among the networks; all options are at their defaults."""
    data: str
    """The source it was trained on."""
    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    epochs: int
    path: Path

    def load(self) -> nn.Module:
        """The network with its weights, in eval mode.

        Raises:
            ValueError: the file is missing or damaged.
        """
        return load_weights(NETWORKS[self.network](), self.path).eval()


PRETRAINED: Registry[Pretrained] = Registry("pretrained network")

PRETRAINED.register("fashion_small_cnn")(
    Pretrained(
        network="small_cnn",
        data="fashion:train",
        channels=1,
        size=56,
        mean=(0.2869,),
        std=(0.3377,),
        epochs=16,
        path=_FOLDER / "fashion_small_cnn.safetensors",
    )
)


def pretrained_path(name: str) -> Path:
    """The file with the weights of a pretrained network.

    Raises:
        ValueError: there is no such network.
    """
    return PRETRAINED[name].path
