"""One pass for all detectors gives what each would give alone, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_audit import Counted
from torch import Tensor, nn

from gatecrash.detectors import (
    GMM,
    MSP,
    ODIN,
    DeepEnsemble,
    Detector,
    Energy,
    Gram,
    Mahalanobis,
    MaxLogit,
    RelativeMahalanobis,
    ScoreEnsemble,
    Temperature,
    ZhengHong,
    fit_all,
    scores_all,
)
from gatecrash.detectors.scoring import score_batches
from gatecrash.encoder import Encoder
from small_models import blank, fragile_net, one_thread, squares, trained_net  # noqa: F401


def many(network: nn.Module, prefix: str = "") -> dict[str, Detector]:
    """Detectors of one network that read logits, features, maps, several of them, or change the images first."""
    features = Encoder(network, f"{prefix}hidden")
    detectors: dict[str, Detector] = {
        "msp": MSP(features),
        "maxlogit": MaxLogit(Encoder(network, mean=[0.1], std=[0.5])),
        "energy": Energy(features, temperature=2.0),
        "temperature": Temperature(features),
        "odin": ODIN(features, temperature=10.0, magnitude=0.01),
        "gmm": GMM(features, components=3, steps=3),
        "other gmm": GMM(features, components=3, steps=3, seed=5),
        "zheng_hong": ZhengHong(features, components=2, steps=3),
        "mahalanobis": Mahalanobis(features, layers=[f"{prefix}maps", f"{prefix}hidden"]),
        "stepping": Mahalanobis(features, magnitude=0.01),
        "rmd": RelativeMahalanobis(features),
        "gram": Gram(Encoder(network, f"{prefix}maps")),
        "deep": DeepEnsemble([features, trained_net(seed=1)]),
    }
    detectors["ensemble"] = ScoreEnsemble([MSP(features), ODIN(features), GMM(features, components=2, steps=3)])
    fit_all(list(detectors.values()), squares(90, seed=2))
    return detectors


def alone(detector: Detector, x: Tensor, batch_size: int) -> Tensor:
    """The scores from the contract alone: judge what was encoded, batch by batch."""
    return torch.cat([detector(part).detach() for part in x.split(batch_size)])


@pytest.mark.parametrize(("dtype", "batch_size"), [(torch.float32, 16), (torch.float32, 1000), (torch.float64, 7)])
def test_the_scores_are_those_of_every_detector_alone(dtype: torch.dtype, batch_size: int) -> None:
    detectors = many(trained_net())
    x = torch.cat([squares(30, seed=4)[0], blank(20)]).to(dtype)
    found = scores_all(list(detectors.values()), x, batch_size)
    for (title, detector), scores in zip(detectors.items(), found, strict=True):
        assert scores.dtype == dtype and scores.shape == (50,) and not scores.requires_grad
        assert torch.equal(scores, alone(detector, x, batch_size)), title
        assert torch.equal(scores, detector.scores(x, batch_size)), title
        assert len(scores.unique()) > 10


def test_order_and_repetition_do_not_matter() -> None:
    detectors = list(many(trained_net()).values())
    x = blank(12)
    forwards, backwards = scores_all(detectors, x), scores_all([*detectors[::-1], *detectors], x)
    for index, scores in enumerate(forwards):
        assert torch.equal(scores, backwards[len(detectors) - 1 - index])
        assert torch.equal(scores, backwards[len(detectors) + index])


def test_a_network_runs_once_per_image_for_all_that_only_read_it() -> None:
    detectors = many(Counted(trained_net()), "network.")
    readers = [detectors[title] for title in ("msp", "energy", "temperature", "gmm", "other gmm", "zheng_hong", "rmd")]
    Counted.seen = 0
    scores_all(readers, blank(40), 16)
    assert Counted.seen == 40
    Counted.seen = 0
    list(score_batches(readers, blank(40), 16, also=[Encoder(readers[0].encoder.model)]))
    assert Counted.seen == 40


def test_further_readers_see_the_same_images_in_order() -> None:
    network = trained_net()
    features = Encoder(network, "hidden")
    x = torch.cat([squares(30, seed=4)[0], blank(20)])
    both: list[Any] = [Encoder(network), features]
    parts = list(score_batches([MSP(features), Energy(features)], x, 16, also=both))
    assert [len(scores[0]) for scores, _ in parts] == [16, 16, 16, 2]
    with torch.no_grad():
        for place, encoder in enumerate(both):
            expected = torch.cat([encoder(part) for part in x.split(16)])
            assert torch.equal(torch.cat([latents[place] for _, latents in parts]), expected)
    assert all(len(scores) == len(latents) == 2 for scores, latents in parts)


def test_what_cannot_be_scored_is_refused() -> None:
    features = Encoder(trained_net(), "hidden")
    with pytest.raises(ValueError, match="GMM is not fitted"):
        scores_all([MSP(features), GMM(features)], blank(3))
    with pytest.raises(ValueError, match="there are no images to score"):
        scores_all([MSP(features)], [])
    with pytest.raises(ValueError, match="there is no detector to score with"):
        scores_all([], blank(3))
    images = blank(20)
    images[13] = 1.0  # white, which the network does not survive
    with pytest.raises(ValueError, match="the score of Energy is NaN, first in batch 2"):
        scores_all([Energy(fragile_net())], images, 6)
