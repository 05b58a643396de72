"""Joint energy-based models: a classifier taught to be a density by its own samples (Grathwohl et al., ICLR 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gatecrash.ball import Linf
from gatecrash.data import drawn
from gatecrash.encoder import Encoder
from gatecrash.fitting import Batch, Outcome, several
from gatecrash.found import Found
from gatecrash.networks.registry import at_least_one
from gatecrash.objective import single
from gatecrash.registry import unknown
from gatecrash.search import search
from gatecrash.stepper import Langevin

SPAN = 2.0
"""The paper's pixels go from −1 to 1 and ours from 0 to 1: a length of its counts half here, a gradient twice."""

ANYWHERE = Linf(1.0)
"""The whole box [0, 1], from wherever a sample starts."""

HUGE = 1e4
"""A gap between log-densities from which training does not come back; the loss is then infinite, which ends it."""

STARTS = {"noise": drawn.noise, "spiral": drawn.spiral}


@dataclass(frozen=True)
class FreeEnergy:
    """−logsumexp(z): minus the log-density of a joint energy-based model, up to a constant."""

    logits: Encoder

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """The value of every sample, (B,)."""
        return -single(self.logits(x)).logsumexp(dim=1)


def langevin(
    encoder: Encoder,
    start: Tensor,
    *,
    steps: int = 20,
    step: float = 1.0,
    noise: float = 0.01,
    generator: torch.Generator | int | None = None,
    batch_size: int | None = None,
) -> Found:
    """Samples (B, C, H, W) in [0, 1] moved by Langevin dynamics towards where the network's density is high.

    Args:
        encoder: the network's logits.
        start: where the samples begin.
        steps: how many.
        step: α, in the paper's pixels from −1 to 1: x + α·∇ logsumexp + σ·n.
        noise: σ, likewise.
        generator: a generator or a seed.
        batch_size: move so many at a time.
    """
    return search(
        FreeEnergy(encoder),
        start,
        ANYWHERE,
        stepper=Langevin(step / SPAN**2, noise / SPAN),
        steps=steps,
        keep="last",
        generator=generator,
        batch_size=batch_size,
        precision="float32",  # what is prepared for speed would be of weights that have changed since
    )


def sample_jem(
    encoder: Encoder,
    start: Tensor | Literal["noise", "spiral"] = "noise",
    count: int = 16,
    *,
    channels: int = 3,
    size: int = 32,
    steps: int = 20,
    step: float = 1.0,
    noise: float = 0.01,
    seed: int = 0,
    batch_size: int | None = None,
) -> Found:
    """Samples of a trained model: `found.x` from `found.start`, with minus their log-densities in `found.value`.

    Args:
        encoder: the network's logits, its normalisation inside.
        start: images to begin at, or "noise" or "spiral" (in colour, where there are three channels) for drawn ones.
        count: how many are drawn.
        channels: of drawn images.
        size: side of drawn images.
        steps: of Langevin dynamics; more than in training leads further.
        step: as in `langevin`.
        noise: likewise.
        seed: determines the drawn images and the noise.
        batch_size: move so many at a time.

    Raises:
        ValueError: there is no such start, or the network's output is NaN.
    """
    if isinstance(start, str):
        if start not in STARTS:
            raise ValueError(unknown("start", start, list(STARTS)))
        at_least_one(count=count, channels=channels, size=size)
        start = STARTS[start](count, channels, size, torch.Generator().manual_seed(seed))
    start = start.to(encoder.device)
    return langevin(encoder, start, steps=steps, step=step, noise=noise, generator=seed, batch_size=batch_size)


class JointEnergy:
    """Cross-entropy, and the log-density of images above that of the network's own samples.

    loss = −(f(x) − f(x̂)) + CE(x, y) with f = logsumexp(z). The samples x̂ come from a buffer of earlier ones, a few of
    them anew from noise, moved on by Langevin dynamics and put back. The images have noise added. The dynamics see the
    network in eval mode; a network without batch norm is the same in both modes, and trains better so. Images and
    samples stay in [0, 1], so that leaving the box tells none from the other.

    Args:
        encoder: the network being trained, with its normalisation: what the dynamics see.
        steps: of Langevin dynamics per batch.
        step: α, in pixels from −1 to 1.
        noise: σ, likewise.
        buffer: how many samples are kept.
        anew: the share that begins anew.
        input_noise: the deviation of what is added to the images, in pixels from −1 to 1.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        steps: int = 20,
        step: float = 1.0,
        noise: float = 0.01,
        buffer: int = 10_000,
        anew: float = 0.05,
        input_noise: float = 0.03,
    ) -> None:
        at_least_one(steps=steps, buffer=buffer)
        if not 0 <= anew <= 1:
            raise ValueError(f"anew must be a share from 0 to 1, got {anew:g}")
        if not input_noise >= 0:
            raise ValueError(f"input_noise must not be negative, got {input_noise:g}")
        Langevin(step, noise)
        self.encoder, self.steps, self.step, self.noise = encoder, steps, step, noise
        self.size, self.anew, self.input_noise = buffer, anew, input_noise
        self.samples: Tensor | None = None

    @property
    def settings(self) -> dict[str, object]:
        """What a resumed run must have in common with this one."""
        names = ("steps", "step", "noise", "size", "anew", "input_noise")
        return {name: getattr(self, name) for name in names}

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Nothing to prepare."""

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
        """The loss of a batch; infinite once the samples' density has left that of the images far behind."""
        sampled = self.draw(batch)
        noisy = batch.x + self.input_noise / SPAN * torch.randn_like(batch.x)
        logits = single(model(torch.cat([noisy.clamp(0, 1), sampled])))
        inside = logits[: len(batch.x)]
        density, sampled_density = (part.logsumexp(dim=1).mean() for part in (inside, logits[len(batch.x) :]))
        gap = density - sampled_density
        loss = cross_entropy(inside, batch.y) - gap
        loss = torch.where(gap.detach().abs() > HUGE, torch.inf, loss)
        facts = {
            "accuracy": (inside.argmax(dim=1) == batch.y).float().mean(),
            "log-density": density.detach(),
            "log-density of samples": sampled_density.detach(),
        }
        return Outcome(loss, facts)

    def draw(self, batch: Batch) -> Tensor:
        """As many samples as a batch has images: from the buffer or anew, moved on, and put back."""
        samples, count = self._buffer(batch.x), len(batch.x)
        own = own_slots(len(samples))
        if count > len(own):
            raise ValueError(f"a buffer of {len(own)} samples is smaller than a batch of {count}; raise buffer")
        chosen = own[torch.randperm(len(own), generator=batch.generator)[:count]].to(samples.device)
        again = (torch.rand(count, 1, 1, 1, generator=batch.generator) < self.anew).to(samples.device)
        start = torch.where(again, torch.rand_like(batch.x), samples[chosen])
        seed = int(torch.randint(2**62, (), generator=batch.generator))
        found = langevin(self.encoder, start, steps=self.steps, step=self.step, noise=self.noise, generator=seed)
        samples[chosen] = found.x
        return found.x

    def _buffer(self, x: Tensor) -> Tensor:
        """The buffer, beside the images; noise at first."""
        if self.samples is None:
            self.samples = torch.rand(self.size, *x.shape[1:], dtype=x.dtype, device=x.device)
        if self.samples.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"the buffer has samples of shape {tuple(self.samples.shape[1:])}, the images have {tuple(x.shape[1:])}"
            )
        self.samples = self.samples.to(x.device)
        return self.samples

    def state(self) -> dict[str, Tensor]:
        """The buffer, every process's own part of it."""
        if self.samples is None:
            return {}
        if several():
            whole = torch.zeros_like(self.samples)
            own = own_slots(len(whole)).to(whole.device)
            whole[own] = self.samples[own]
            torch.distributed.all_reduce(whole)
            self.samples = whole
        return {"samples": self.samples}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""
        self.samples = state["samples"].clone() if "samples" in state else None


def own_slots(size: int) -> Tensor:
    """The places of a buffer that this process draws from; those of all processes together are the whole buffer."""
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if several() else (0, 1)
    return torch.arange(rank, size, world)
