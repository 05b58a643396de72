"""Detectors with a density of their own, which `fit` trains by the one fit loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from gatecrash.densities import DENSITIES, Density, load_density, save_density, train_density
from gatecrash.densities.options import mapping, names_of
from gatecrash.detectors.base import Detector
from gatecrash.detectors.density import together
from gatecrash.detectors.distance import listed, tapped
from gatecrash.features import Reader
from gatecrash.fitting import History, Recipe, seeded
from gatecrash.protocols import Latent, leaves


def pixels(x: Tensor) -> Tensor:
    """The images themselves, as a reader that all detectors of pixels share."""
    return x


class Learned(Detector):
    """A detector whose score comes from a density that it trains itself.

    Where the card reads "pixels", the density is one of images, and the encoder only says on which device; otherwise of
    the encoder's features, several layers as one vector.

    Args:
        encoder: taps the features; may be None for a density of pixels.
        layers: tap these instead; for densities of features.
        model: the density's own options.
        training: fields of the fit loop's `Recipe` that are other than the detector's own.
        bundle: a folder with a trained density, which is then not trained again.
        checkpoints: a folder for checkpoints and logs; a `fit` that was killed goes on from there.
        shape: of a sample; filled in by `fit`.
    """

    density_name: ClassVar[str]
    """What is trained, by its name in `DENSITIES`."""
    recipe: ClassVar[dict[str, Any]] = {"epochs": 20, "optimiser": "adamw", "lr": 1e-3, "weight_decay": 0.0}
    """How it is trained where `training` says nothing."""

    losses: Tensor  # (E,), of every epoch

    def __init__(
        self,
        encoder: nn.Module | None = None,
        *,
        layers: str | Sequence[str] | None = None,
        model: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        bundle: str | None = None,
        checkpoints: str | None = None,
        shape: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        if self.card.reads == "pixels":
            if layers is not None:
                raise ValueError(f"{type(self).__name__} reads pixels and taps no layers")
            super().__init__(encoder, **options)
        elif encoder is None:
            raise ValueError(f"{type(self).__name__} reads features and needs an encoder")
        else:
            taps = tapped(encoder, layers)
            super().__init__(taps, layers=listed(taps.layer), **options)
        if checkpoints is not None and not isinstance(checkpoints, str | Path):
            raise ValueError(f"checkpoints must be the name of a folder, got {checkpoints!r}")
        self.checkpoints = checkpoints
        self.density: Density | None = None
        self.history: History = []
        self.options["model"] = mapping("model", model, names_of(DENSITIES[self.density_name]))
        self.options["training"] = mapping("training", training, [field.name for field in fields(Recipe)])
        try:
            self.plan = Recipe(**{**self.recipe, **self.options["training"]})
        except ValueError as error:
            raise ValueError(f"training: {error}") from error
        if bundle is not None:
            if not isinstance(bundle, str | Path):
                raise ValueError(f"bundle must be the name of a folder, got {bundle!r}")
            if model:
                raise ValueError("a bundle knows its density's options; give bundle or model, not both")
            self._take(load_density(bundle).to(self.device))
            self.losses = torch.zeros(0, device=self.device)
        elif shape is not None:
            self._take(self._made(shape))

    def _made(self, shape: Sequence[int]) -> Density:
        """A density with fresh weights that the seed determines."""
        with seeded(self.plan.seed):
            return DENSITIES[self.density_name](shape, **self.options["model"])

    def _take(self, density: Density) -> None:
        if density.name != self.density_name:
            raise ValueError(
                f"{type(self).__name__} needs the density {self.density_name!r}, and this is {density.name!r}"
            )
        self.density = density.eval().requires_grad_(False)
        self.options |= {"model": density.options, "shape": list(density.shape)}

    @classmethod
    def rebuild(cls, spec: dict[str, Any], encoder: nn.Module | Sequence[nn.Module] | None) -> Detector:
        """As for any detector, but layers beside one of pixels are refused: nothing would tap them."""
        if cls.card.reads == "pixels" and "layers" in spec["options"]:
            raise ValueError(f"{cls.__name__} reads pixels and taps no layers")
        return super().rebuild(spec, encoder)

    @property
    def trained(self) -> Density:
        """The density, once there is one."""
        self.require_fitted()
        assert self.density is not None
        return self.density

    def train(self, mode: bool = True) -> Self:
        """As for any module, but the density stays in eval mode: a score is the same in both."""
        super().train(mode)
        if self.density is not None:
            self.density.eval()
        return self

    def to_fit(self) -> list[Detector]:
        """Itself, where no bundle gave it a density."""
        return [] if self.density is not None and self.fitted and not len(self.losses) else [self]

    def forget(self) -> None:
        """The density too."""
        super().forget()
        self.density, self.history = None, []
        self.options.pop("shape", None)

    @property
    def reader(self) -> Reader:
        """The images themselves, or the encoder."""
        return pixels if self.encoder is None or self.card.reads == "pixels" else self.encoder

    def encode(self, x: Tensor) -> Latent:
        """The images themselves, or the encoder's features as one vector."""
        return x if self.card.reads == "pixels" else super().encode(x)

    def samples(self, z: Latent) -> Tensor:
        """What the density is a density of, in its precision: images (B, C, H, W) or features (B, D)."""
        samples = leaves(z)[0] if self.card.reads == "pixels" else together(leaves(z))
        return samples if self.density is None else samples.to(next(self.density.parameters()).dtype)

    def fit_latents(self, z: Latent, y: Tensor | None) -> None:
        """Train the density."""
        samples = self.samples(z)
        density = self._made(samples.shape[1:]).to(samples)
        self.history = self.learn(density, samples, y)
        self._take(density)
        self.losses = samples.new_tensor([row["loss"] for row in self.history])

    def learn(self, density: Density, samples: Tensor, y: Tensor | None) -> History:
        """Train a density on samples; a subclass may learn otherwise."""
        return train_density(density, samples, self.plan, folder=self.checkpoints)

    def save_bundle(self, folder: str | Path) -> None:
        """Write the density as a bundle, which `bundle` takes."""
        save_density(self.trained, folder, self.history)

    def judge(self, z: Latent) -> Tensor:
        """Bits per dimension of every sample, (B,)."""
        return self.trained.bits_per_dimension(self.samples(z))
