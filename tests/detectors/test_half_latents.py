"""Latents in half precision given straight to `judge`: the score of the same numbers in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gatecrash.detectors import GMM, Detector, Gram, Mahalanobis, RelativeMahalanobis, Temperature, ZhengHong
from gatecrash.protocols import Latent, detached
from small_models import blank, one_thread, squares, trained_net  # noqa: F401

MAKERS: dict[str, Callable[[nn.Module], Detector]] = {
    "mahalanobis": lambda network: Mahalanobis(network, layers=["maps", "hidden"]),
    "rmd": lambda network: RelativeMahalanobis(network, layers="hidden"),
    "gmm": lambda network: GMM(network, layers="hidden", components=3),
    "gmm, tied": lambda network: GMM(network, layers="hidden", components=3, covariance="tied"),
    "zheng_hong": lambda network: ZhengHong(network, layers="hidden", components=2),
    "zheng_hong, full": lambda network: ZhengHong(network, layers="hidden", components=2, covariance="full"),
    "temperature": Temperature,
    "gram": lambda network: Gram(network, layers=["maps"]),
}


def as_type(z: Latent, dtype: torch.dtype) -> Latent:
    return z.to(dtype) if isinstance(z, torch.Tensor) else tuple(as_type(part, dtype) for part in z)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_judged_as_the_same_numbers_in_float32(
    make: Callable[[nn.Module], Detector], dtype: torch.dtype
) -> None:
    detector = make(trained_net()).fit(squares(90))
    half = as_type(detached(detector.encode(torch.cat([squares(9, 1)[0], blank(9)]))), dtype)
    scores = detector.judge(half)
    assert scores.dtype == torch.float32 and bool(scores.isfinite().all())
    assert torch.equal(scores, detector.judge(as_type(half, torch.float32)))
