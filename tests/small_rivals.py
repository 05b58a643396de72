"""Every detector, small and quickly made, and a plain PGD to compare the suite with."""

from collections.abc import Callable

import torch
from torch import Tensor

from gatecrash import Ball, Encoder, worst_case
from gatecrash.detectors import (
    CCU,
    GMM,
    JEM,
    MCM,
    MSP,
    ODIN,
    CLIPZeroShot,
    CollisionResidual,
    Confident,
    DeepEnsemble,
    Detector,
    Energy,
    Expected,
    FeatureMAF,
    FeatureVAE,
    GlowLikelihood,
    Gram,
    InputComplexity,
    Mahalanobis,
    MaxLogit,
    OutlierExposureScore,
    PixelCNNLikelihood,
    Reconstruction,
    RelativeMahalanobis,
    ScoreEnsemble,
    Temperature,
    ZhengHong,
)
from small_clip import WordedNet
from small_models import blank, one_thread, squares, trained_net

assert one_thread


def logits() -> Encoder:
    return Encoder(trained_net())


def features() -> Encoder:
    return Encoder(trained_net(), layer="hidden")


MAKERS: dict[str, Callable[[], Detector]] = {
    "msp": lambda: MSP(logits()),
    "maxlogit": lambda: MaxLogit(logits()),
    "energy": lambda: Energy(logits()),
    "oe": lambda: OutlierExposureScore(logits()),
    "odin": lambda: ODIN(logits(), temperature=10.0, magnitude=0.01),
    "mahalanobis": lambda: Mahalanobis(features(), layers=["maps", "hidden"], magnitude=0.01),
    "rmd": lambda: RelativeMahalanobis(features()),
    "ensemble": lambda: ScoreEnsemble([MSP(logits()), Energy(Encoder(trained_net(1)))]),
    "deep_ensemble": lambda: DeepEnsemble([trained_net(0), trained_net(1)]),
    "expected": lambda: Expected(MSP(logits()), draws=2),
    "temperature": lambda: Temperature(logits()),
    "gmm": lambda: GMM(features(), components=4),
    "zheng_hong": lambda: ZhengHong(features(), components=2),
    "gram": lambda: Gram(features(), layers=["maps", "hidden"]),
    "autoencoder": lambda: Reconstruction(
        model={"width": 4, "latent": 3}, training={"epochs": 15, "lr": 0.01, "batch_size": 20}
    ),
    "collision_residual": lambda: CollisionResidual(
        features(), model={"width": 4}, training={"epochs": 15, "lr": 0.01, "batch_size": 20}
    ),
    "glow": lambda: GlowLikelihood(model={"steps": 1, "hidden": 8}, training={"epochs": 20, "lr": 0.02}),
    "complexity": lambda: InputComplexity(model={"steps": 1, "hidden": 16}, training={"epochs": 40, "lr": 0.02}),
    "pixelcnn": lambda: PixelCNNLikelihood(
        model={"blocks": 0, "filters": 8, "mixtures": 2, "levels": 0},
        training={"epochs": 40, "lr": 0.05, "batch_size": 60},
    ),
    "vae": lambda: FeatureVAE(
        features(),
        model={"hidden": 16, "latent": 2, "draws": 4},
        training={"epochs": 60, "lr": 0.03, "batch_size": 60},
    ),
    "maf": lambda: FeatureMAF(
        features(), model={"transforms": 2, "hidden": [8]}, training={"epochs": 60, "lr": 0.03, "batch_size": 60}
    ),
    "jem": lambda: JEM(logits()),
    "confident": lambda: Confident(logits()),
    "ccu": lambda: CCU(logits(), components=3),
    "clip": lambda: CLIPZeroShot(WordedNet(trained_net()), inside=WordedNet.corners, outside=["nothing"], prompt="{}"),
    "mcm": lambda: MCM(WordedNet(trained_net()), inside=WordedNet.corners, prompt="{}"),
}


def plain_pgd(detector: Detector, x: Tensor, ball: Ball, sign: float, steps: int = 200, restarts: int = 5) -> Tensor:
    """The best score of signed (L∞) or normalised (L2) gradient steps from random points, and from the image itself."""
    generator = torch.Generator().manual_seed(11)
    best = sign * detector(x).detach()
    size = 2.5 * ball.eps / steps
    for restart in range(restarts):
        noise = torch.rand(x.shape, generator=generator)
        at = x if restart == 0 else ball.random_start(x, noise)
        for _ in range(steps):
            at = at.detach().requires_grad_()
            score = sign * detector.judge(detector.encode(at))
            best = torch.minimum(best, score.detach())
            (gradient,) = torch.autograd.grad(score.sum(), at)
            at = ball.project(at - size * ball.direction(gradient), x)
        with torch.no_grad():
            best = torch.minimum(best, sign * detector.judge(detector.encode(at)))
    return sign * best


def weaker_than_plain_pgd(name: str, ball: Ball, blanks: Tensor, inliers: Tensor) -> float:
    """The share of images, on both sides, for which the plain PGD finds more against a detector of the small network."""
    detector = MAKERS[name]()
    detector.fit(squares(60), outliers=blank(30, seed=2))
    return share_weaker(detector, ball, blanks, inliers)


def share_weaker(detector: Detector, ball: Ball, outliers: Tensor, inliers: Tensor) -> float:
    """The same of any detector, fitted; finding more is by a thousandth of the PGD's usual reach."""
    weaker, total = 0, 0
    for side, images, others in (("out", outliers, inliers), ("in", inliers, outliers)):
        sign = 1.0 if side == "out" else -1.0
        found = worst_case(detector, images, ball, side, "standard", others=others)
        rival = plain_pgd(detector, images, ball, sign)
        assert found.score is not None
        reach = (rival - detector(images).detach()).abs().median()
        weaker += int((sign * found.score > sign * rival + 1e-3 * reach).sum())
        total += len(images)
        assert ball.contains(found.x, images).all()
        torch.testing.assert_close(found.score, detector(found.x).detach(), rtol=1e-4, atol=1e-5)
    return weaker / total
