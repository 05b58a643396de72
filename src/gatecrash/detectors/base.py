"""The contract of a detector: everything that is not mathematics, once."""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gatecrash.detectors.fit import Learner, fit_all
from gatecrash.detectors.scoring import scores_all
from gatecrash.encoder import Encoder, as_encoder
from gatecrash.features import Keeper, Reader, all_or_none, encoded
from gatecrash.files import replacing
from gatecrash.images import Images, check_images
from gatecrash.metrics import threshold_at_tpr
from gatecrash.protocols import Latent, leaves
from gatecrash.registry import Registry


@dataclass(frozen=True)
class Card:
    """What one should know of a detector before using it."""

    paper: str
    year: int
    reads: Literal["pixels", "logits", "features", "maps", "scores"]
    fit: Literal["nothing", "inliers", "inliers and outliers", "labelled inliers"] = "nothing"
    """What `fit` needs; an option may ask for held-out inliers and outliers besides, and then says so."""
    gradient: Literal["exact", "exact between jumps", "omitted"] = "exact"
    """Whether the gradient is that of the score, misses jumps of it, or leaves out a term that has no useful one.

    Where it is not exact, `worst_case` also begins at flattened and blurred versions of every image.
    """


DETECTORS: Registry[type[Detector]] = Registry("detector")

D = TypeVar("D", bound="Detector")


def register(name: str) -> Callable[[type[D]], type[D]]:
    """A decorator that enters a detector under its name in plans, listings and saved files."""

    def enter(detector: type[D]) -> type[D]:
        DETECTORS.register(name)(detector)
        detector.name = name
        return detector

    return enter


class Stateful(nn.Module):
    """A module whose class-level annotations `name: Tensor` are buffers, empty until `fit` assigns them."""

    def __init__(self) -> None:
        super().__init__()
        for name in state_names(type(self)):
            self.register_buffer(name, None)

    @property
    def fitted(self) -> bool:
        """Whether every buffer, here and in the parts, has a value."""
        return all(
            part._buffers[name] is not None
            for part in self.modules()
            if isinstance(part, Stateful)
            for name in state_names(type(part))
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and convert as any module does, but never to half precision: what was fitted would be rounded away."""
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = before.to(after.device)
        return self

    def forget(self) -> None:
        """Empty every buffer, here and in the parts: a second `fit` then learns exactly what a first would."""
        for part in self.modules():
            if isinstance(part, Stateful):
                part._buffers.update(dict.fromkeys(state_names(type(part))))


class Detector(Stateful, ABC):
    """A detector τ = d(f(x)); higher τ means more out-of-distribution, always.

    A subclass says what it reads (`encode`, by default the encoder's latent), how it judges that (`judge`), and how it
    learns (`fit_latents`). Batching, devices, errors and saving are done here.

    Args:
        encoder: what turns images into latents; a bare network is taken as one.
        **options: the subclass's own options, as JSON can hold them; they are saved with the fitted state.
    """

    name: ClassVar[str] = ""
    card: Card
    threshold: Tensor | None

    def __init__(self, encoder: nn.Module | None, **options: Any) -> None:
        super().__init__()
        self.encoder = None if encoder is None else as_encoder(encoder)
        self.options = options
        self.register_buffer("threshold", None)

    def encode(self, x: Tensor) -> Latent:
        """The latent of a batch of images, everything `judge` needs to know of them."""
        if self.encoder is None:
            raise ValueError(f"{type(self).__name__} has no encoder of its own and must say how it encodes")
        latent: Latent = self.encoder(x)
        return latent

    @abstractmethod
    def judge(self, z: Latent) -> Tensor:
        """The score of a latent, shape (B,)."""

    def fit_latents(self, z: Latent, y: Tensor | None) -> None:
        """Learn from the latents (N, ...) of the inliers and, where the card asks for them, their labels (N,)."""

    def forward(self, x: Tensor) -> Tensor:
        """The score of every image, (B,), in x's dtype.

        Raises:
            ValueError: x is no batch of images, the detector is not fitted, or the score is NaN.
        """
        check_images(x)
        self.require_fitted()
        score = self.judge(self.encode(x)).to(x.dtype)
        check_scores(score, self)
        return score

    def fit(
        self,
        inliers: Images,
        *,
        held_out: Images | None = None,
        outliers: Images | None = None,
        cache: str | Path | None = None,
    ) -> Self:
        """Learn what the card says from inliers: a DataLoader, an iterable of batches, or tensors.

        Args:
            inliers: images, or (images, labels) where the card asks for labels.
            held_out: further inliers, for detectors with an option that needs them.
            outliers: known outliers, likewise.
            cache: a folder that remembers features by the hash of the weights, the data and the taps.

        Raises:
            ValueError: labels are missing, or the network's output is NaN; it names the first such batch.
        """
        fit_all([self], inliers, held_out=held_out, outliers=outliers, cache=cache)
        return self

    def to_fit(self) -> list[Detector]:
        """The detectors that must be fitted before this one can score: itself, or members of it."""
        return [] if self.card.fit == "nothing" else [self]

    @property
    def reader(self) -> Reader:
        """What makes the latents that `judge` takes: the encoder where that is all, so that detectors can share it."""
        if self.encoder is not None and type(self).encode is Detector.encode:
            return self.encoder
        return self.encode

    @property
    def fit_reader(self) -> Reader:
        """What makes the latents that `fit` learns from; detectors with the same encoder share one pass."""
        return self.reader

    def check_data(self, held_out: Images | None, outliers: Images | None) -> None:
        """Raises a ValueError when an option needs data that `fit` was not given."""

    def learner(self) -> Learner | None:
        """How to learn batch by batch; None where `fit_latents` wants all latents together."""
        return None

    def settle(self, held_out: Images | None, outliers: Images | None) -> None:
        """Learn what needs the rest of `fit` done: from held-out inliers and outliers, where an option asks for it."""

    def latents(self, data: Images, batch_size: int = 256) -> tuple[Latent, Tensor | None]:
        """The latents of all images, without their history, and the labels where every batch has them.

        Raises:
            ValueError: the network's output is NaN or infinite; it names the first such batch.
        """
        keeper, labels = Keeper(), []
        for (z,), y in encoded(lambda x: [self.encode(x)], data, self.device, batch_size):
            keeper.take(z)
            labels.append(y)
        return keeper.whole(), all_or_none(labels)

    def scores(self, data: Images, batch_size: int = 256) -> Tensor:
        """The scores of all images, (N,), without gradients, on the detector's device.

        Raises:
            ValueError: a score is NaN; it names the first such batch.
        """
        return scores_all([self], data, batch_size)[0]

    def calibrate(self, inliers: Images, tpr: float = 0.95) -> Self:
        """Store the smallest threshold that accepts at least a share `tpr` of the inliers."""
        scores = self.scores(inliers)
        self.threshold = scores.new_tensor(threshold_at_tpr(scores, tpr))
        return self

    def predict(self, x: Tensor) -> Tensor:
        """True where an image is rejected, (B,): its score is above the threshold.

        Raises:
            ValueError: the detector is not calibrated.
        """
        if self.threshold is None:
            raise ValueError(f"{type(self).__name__} has no threshold yet; call calibrate(inliers, tpr=0.95) first")
        with torch.no_grad():
            return self.forward(x) > self.threshold

    @property
    def device(self) -> torch.device:
        """Where the detector expects its images."""
        for part in self.modules():
            if isinstance(part, Encoder) and part.device is not None:
                return part.device
        return next((buffer.device for buffer in self.buffers()), torch.device("cpu"))

    def require_fitted(self) -> None:
        """Raises a ValueError when `fit` has not been called."""
        if not self.fitted:
            needs = self.card.fit.replace(" and outliers", ", outliers=outliers")
            raise ValueError(f"{type(self).__name__} is not fitted; call fit({needs}) before scoring")

    @property
    def preprocesses(self) -> bool:
        """Whether images are changed before the network sees them, so that the unprocessed score differs."""
        return False

    def logits_in(self, z: Latent) -> list[Tensor]:
        """The logits (B, K) among what a latent holds, which tell an attacker which classes to aim at."""
        return leaves(z) if self.card.reads == "logits" else []

    @property
    def spec(self) -> dict[str, Any]:
        """Name and options, enough to build the detector again beside an encoder."""
        return {"name": self.name, "options": self.options}

    @classmethod
    def rebuild(cls, spec: dict[str, Any], encoder: nn.Module | Sequence[nn.Module] | None) -> Detector:
        """The detector that `spec` describes, not fitted."""
        options = dict(spec["options"])
        if encoder is None or (isinstance(encoder, Sequence) and not encoder):
            if not needs_no_encoder(cls):
                raise ValueError(f"{cls.__name__} needs the encoder that it was saved with beside it")
            return cls(None, **options)
        if not isinstance(encoder, nn.Module):
            raise ValueError(f"{cls.__name__} takes one encoder, got a {type(encoder).__name__}")
        if "layers" in options:  # None is the network's output, whatever the encoder taps
            encoder = as_encoder(encoder).at(options.pop("layers"))
        return cls(encoder, **options)

    def save(self, path: str | Path) -> None:
        """Write the fitted state and the options as safetensors; the network's weights are not in it."""
        state = {key: tensor.detach().cpu().contiguous() for key, tensor in own_state(self).items()}
        if not state:
            state = {"empty": torch.zeros(1)}
        with replacing(path) as draft:
            save_file(state, draft, metadata={"gatecrash": json.dumps(self.spec)})

    @classmethod
    def load(cls, path: str | Path, encoder: nn.Module | Sequence[nn.Module] | None = None) -> Self:
        """The saved detector beside an encoder of the same network.

        Args:
            path: what `save` wrote.
            encoder: an ensemble takes one per member; a detector that reads pixels alone needs none.

        Raises:
            ValueError: the file is missing, damaged, no detector's, or another detector's than the class asked for; or
                the encoder is missing.
        """
        spec, state = read_saved(Path(path))
        try:
            detector = build(spec, encoder)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} holds a detector that this version cannot build: {error}") from error
        if not isinstance(detector, cls):
            raise ValueError(f"{path} holds a {type(detector).__name__}, not a {cls.__name__}")
        for key, tensor in state.items():
            assign(detector, key, tensor.to(detector.device))
        return detector


def build(spec: dict[str, Any], encoder: nn.Module | Sequence[nn.Module] | None) -> Detector:
    """The detector that a spec (`{"name": …, "options": {…}}`) describes, not fitted."""
    return DETECTORS[spec["name"]].rebuild(spec, encoder)


def needs_no_encoder(kind: type[Detector]) -> bool:
    """Whether a detector's encoder is None where none is given."""
    encoder = inspect.signature(kind.__init__).parameters.get("encoder")
    return encoder is not None and encoder.default is None


def state_names(kind: type) -> list[str]:
    """The names annotated as `Tensor` in a class and the classes above it, down from `Stateful`."""
    return [
        name
        for parent in reversed(kind.__mro__)
        if issubclass(parent, Stateful)
        for name, annotation in inspect.get_annotations(parent).items()
        if annotation in ("Tensor", "torch.Tensor", Tensor)
    ]


def own_state(detector: Detector) -> dict[str, Tensor]:
    """The detector's buffers and parameters without those of any network it reads."""
    networks = [
        f"{name}." for name, part in detector.named_modules(remove_duplicate=False) if isinstance(part, Encoder)
    ]
    state: dict[str, Tensor] = detector.state_dict()
    return {key: tensor for key, tensor in state.items() if not key.startswith(tuple(networks))}


def assign(detector: Detector, key: str, tensor: Tensor) -> None:
    """Set one entry of the saved state."""
    if key == "empty":
        return
    *path, name = key.split(".")
    part = detector.get_submodule(".".join(path))
    if name in part._parameters:
        part._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    elif name in part._buffers:
        part._buffers[name] = tensor
    else:
        raise ValueError(f"the saved state has {key!r}, which {type(detector).__name__} does not know")


def read_saved(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Spec and state of a saved detector."""
    if not path.is_file():
        raise ValueError(f"there is no saved detector at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {error}") from error
    if "gatecrash" not in metadata:
        raise ValueError(f"{path} holds tensors, but no saved detector")
    spec: dict[str, Any] = json.loads(metadata["gatecrash"])
    return spec, state


class NotANumberError(ValueError):
    """A score is NaN."""


def check_scores(scores: Tensor, detector: Detector, where: str = "") -> None:
    """Raises a ValueError when a score is NaN or the scores are not one per image."""
    if scores.ndim != 1:
        raise ValueError(f"{type(detector).__name__} must give one score per image, got shape {tuple(scores.shape)}")
    if bool(scores.isnan().any()):
        raise NotANumberError(
            f"the score of {type(detector).__name__} is NaN{where}; are the network's weights finite?"
        )
