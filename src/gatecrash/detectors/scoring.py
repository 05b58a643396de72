"""Scoring: one pass over the data for however many detectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gatecrash.features import Reader, reader_key, shared_pass
from gatecrash.images import Images, batches_on
from gatecrash.portions import Portions
from gatecrash.progress import tracked
from gatecrash.protocols import Latent, joined
from gatecrash.speed import full_float32

if TYPE_CHECKING:
    from gatecrash.detectors.base import Detector


def scores_all(detectors: Sequence[Detector], data: Images, batch_size: int = 256) -> list[Tensor]:
    """The scores (N,) of every detector, from one pass; all on one device.

    A network runs once per batch for all detectors that only read its layers. Detectors that encode in a way of their
    own, such as ODIN and ensembles, run theirs.

    Raises:
        ValueError: a detector is not fitted, there are no images, or a score is NaN; it names the first such batch.
    """
    parts = [scores for scores, _ in score_batches(detectors, data, batch_size)]
    if not parts:
        raise ValueError("there are no images to score")
    return [torch.cat(scores) for scores in zip(*parts, strict=True)]


def score_batches(
    detectors: Sequence[Detector], data: Images, batch_size: int = 256, also: Sequence[Reader] = ()
) -> Iterator[tuple[list[Tensor], list[Latent]]]:
    """Batch by batch, every detector's scores (B,), and what further readers make of the images in the same pass.

    Raises:
        ValueError: there is no detector, one is not fitted, or a score is NaN; it names the first such batch.
    """
    from gatecrash.detectors.base import check_scores

    if not detectors:
        raise ValueError("there is no detector to score with")
    for detector in detectors:
        detector.require_fitted()
    wanted = [*(detector.reader for detector in detectors), *also]
    readers: dict[Any, Reader] = {}
    for reader in wanted:
        readers.setdefault(reader_key(reader), reader)
    keys, run = [reader_key(reader) for reader in wanted], shared_pass(list(readers.values()))

    def scored(x: Tensor) -> tuple[list[Tensor], list[Latent]]:
        read = dict(zip(readers, run(x), strict=True))
        latents = [read[key] for key in keys]
        scores = [d.judge(z).to(x.dtype) for d, z in zip(detectors, latents, strict=False)]
        return scores, latents[len(detectors) :]

    portions = Portions(detectors[0].device, batch_size, gradient=False)
    for index, (x, _) in enumerate(tracked(batches_on(detectors[0].device, data, batch_size), "scoring")):
        with torch.no_grad(), full_float32():
            found, further = zip(*portions.run(scored, x), strict=True)
        for portion in found:
            for detector, scores in zip(detectors, portion, strict=True):
                check_scores(scores, detector, f", first in batch {index}")
        yield (
            [torch.cat(parts) for parts in zip(*found, strict=True)],
            [joined(list(parts)) for parts in zip(*further, strict=True)],
        )
