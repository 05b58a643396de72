"""Scoring: one pass over the data for however many detectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gatecrash.features import Reader, reader_key, shared_pass
from gatecrash.images import Images, batches
from gatecrash.progress import tracked

if TYPE_CHECKING:
    from gatecrash.detectors.base import Detector


def scores_all(detectors: Sequence[Detector], data: Images, batch_size: int = 256) -> list[Tensor]:
    """The scores (N,) of every detector, from one pass in which every network runs once per batch; all on one device.

    Raises:
        ValueError: a detector is not fitted, there are no images, or a score is NaN; it names the first such batch.
    """
    from gatecrash.detectors.base import check_scores

    for detector in detectors:
        detector.require_fitted()
    readers: dict[Any, Reader] = {}
    for detector in detectors:
        readers.setdefault(reader_key(detector.reader), detector.reader)
    place = {key: index for index, key in enumerate(readers)}
    run = shared_pass(list(readers.values()))
    parts: list[list[Tensor]] = [[] for _ in detectors]
    for index, (x, _) in enumerate(tracked(batches(data, batch_size), "scoring")):
        with torch.no_grad():
            latents = run(x.to(detectors[0].device))
            for detector, scores in zip(detectors, parts, strict=True):
                scores.append(detector.judge(latents[place[reader_key(detector.reader)]]).to(x.dtype))
                check_scores(scores[-1], detector, f", first in batch {index}")
    if not all(parts):
        raise ValueError("there are no images to score")
    return [torch.cat(scores) for scores in parts]
