"""Checks of images as audits have them: of any size, flat, black or alone; and of latents of any shape."""

from __future__ import annotations

import pytest
import torch
from small_audit import BOTH, BRIGHT, DARK, EPS, Brightness, Noisy, evidence_for, finished, levels
from torch import Tensor
from torch.nn.functional import dropout

from gatecrash import portions
from gatecrash.audit.checks import CHECKS, ORDER, Evidence, run_checks, verdicts
from gatecrash.audit.checks import run as checks_run
from gatecrash.audit.checks.exact import draws_in
from gatecrash.audit.checks.followed import Recorded
from gatecrash.bundle import Check
from gatecrash.detectors import Detector, Expected, ScoreEnsemble
from gatecrash.protocols import Latent, leaves
from small_models import one_thread

__all__ = ["one_thread"]

PIXELS = 36


class Endless(Noisy):
    """A score without end where an image is bright, and random elsewhere or not."""

    def judge(self, z: Latent) -> Tensor:
        score = super().judge(z)
        return torch.where(score > 0.75, torch.inf, score)


class OtherwiseWhereDark(Brightness):
    """What is deployed looks at the negative of all but the brightest images."""

    def forward(self, x: Tensor) -> Tensor:
        score = super().forward(x)
        return torch.where(score < 0.6, -score, score)


def cut_into(monkeypatch: pytest.MonkeyPatch, first: int, later: int) -> None:
    """Let a CPU evaluate so many small images at once, at first and later."""
    monkeypatch.setattr(portions, "FIRST", first * PIXELS)
    monkeypatch.setattr(portions, "NUMBERS", later * PIXELS)


@pytest.mark.parametrize("kind", [Brightness, OtherwiseWhereDark, Noisy])
@pytest.mark.parametrize("sizes", [(2, 4), (2, 2), (2, 3)])
def test_a_score_follows_its_objective_however_images_are_cut_into_portions(
    monkeypatch: pytest.MonkeyPatch, kind: type[Brightness], sizes: tuple[int, int]
) -> None:
    evidence = evidence_for(kind())
    whole = CHECKS["score_is_attacked"](evidence)
    assert whole["sentence"].count("over 4 trajectories") == 1, whole["sentence"]
    cut_into(monkeypatch, *sizes)
    found = CHECKS["score_is_attacked"](evidence)
    assert found["status"] == whole["status"] == ("fail" if kind is OtherwiseWhereDark else "pass")
    if kind is not Noisy:  # which moves another way with other random numbers
        assert found == whole


def test_images_of_224_pixels_are_followed_on_a_cpu() -> None:
    dark, bright = (torch.full((4, 3, 224, 224), level) for level in (0.3, 0.6))
    check = CHECKS["score_is_attacked"](evidence_for(Brightness(), BOTH | {"steps": 3}, inliers=dark, outliers=bright))
    assert check["status"] == "pass", check["sentence"]
    assert "over 4 trajectories" in check["sentence"]


def test_what_is_evaluated_twice_is_one_point_of_its_way() -> None:
    recorded = Recorded(lambda x, rows: x.sum(dim=1), 0)
    for level in (3.0, 2.0, 2.0, 1.0):
        recorded(torch.tensor([[level]]), torch.tensor([7]))
    for level in (3.0, 1.0):
        recorded(torch.tensor([[level], [5.0]]), torch.tensor([2, 4]))
    assert recorded.ways(lambda x: 3 - x[:, 0]).follows.tolist() == pytest.approx([-1, -1])


class Beside(Brightness):
    """What is deployed adds something that differs from image to image, and that no shift of all pixels moves."""

    def __init__(self, much: float) -> None:
        super().__init__()
        self.much = much

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.much * (x[:, 0, 0, 0] - x[:, 0, 0, 1])


class Squashed(Brightness):
    """What is deployed is a probability, in the same order."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


@pytest.mark.parametrize(
    ("detector", "status"),
    [(Beside(5.0), "fail"), (Beside(0.3), "warn"), (Squashed(), "pass")],
    ids=["another order", "another order of a few", "the same order"],
)
def test_a_deployed_score_that_ranks_images_otherwise_is_told(detector: Detector, status: str) -> None:
    check = CHECKS["score_is_attacked"](evidence_for(detector))
    assert check["status"] == status, check["sentence"]
    assert ("is another number than judge(encode(x))" in check["sentence"]) == (status != "pass")


class Dropping(Brightness):
    """Pixels are left out at random, and nothing is averaged."""

    def judge(self, z: Latent) -> Tensor:
        return super().judge(tuple(dropout(leaf, 0.5, training=True) for leaf in leaves(z)))


def test_a_score_that_is_drawn_anew_is_not_said_to_be_rounded() -> None:
    evidence = evidence_for(Dropping())
    assert "averaged over draws" in CHECKS["deterministic"](evidence)["sentence"]
    flows, drift = CHECKS["gradient_flows"](evidence), CHECKS["precision_drift"](evidence)
    assert flows["status"] == "pass" and "rounding" not in flows["sentence"], flows["sentence"]
    assert drift["status"] == "warn" and "its score is random" in drift["sentence"]


class Powers(Brightness):
    """Brightness of pixels to a power: its gradient is infinite at a black pixel."""

    def encode(self, x: Tensor) -> Latent:
        return super().encode(x.pow(1 / 2.2))


class Variation(Brightness):
    """Brightness less the mean length of the image's slope, a root whose gradient is NaN where the image is flat."""

    def encode(self, x: Tensor) -> Latent:
        across, down = x[..., :-1, 1:] - x[..., :-1, :-1], x[..., 1:, :-1] - x[..., :-1, :-1]
        slope = (across.square() + down.square()).sqrt().mean(dim=(1, 2, 3))
        return super().encode(x), slope

    def judge(self, z: Latent) -> Tensor:
        pixels, slope = leaves(z)
        return super().judge(pixels) - slope


class Pooled(Brightness):
    """A small network with max-pooling."""

    def encode(self, x: Tensor) -> Latent:
        return super().encode(x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4).amax(dim=4).contiguous())


class Valley(Brightness):
    """How far pixels are from one grey: level at that grey itself, and nowhere else."""

    def judge(self, z: Latent) -> Tensor:
        return (leaves(z)[0] - 0.3).square().mean(dim=1)


class SharpBeside(Brightness):
    """A root at zero wherever a pixel is no whole tenth."""

    def judge(self, z: Latent) -> Tensor:
        score, tenths = super().judge(z), 10 * leaves(z)[0].detach()
        beside = ((tenths - tenths.round()).abs() > 1e-5).any(dim=1)
        return torch.where(beside, score - score.detach(), 1 + score).sqrt()


class InBatches(Brightness):
    """A score that wants at least so many images at once."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least

    def judge(self, z: Latent) -> Tensor:
        pixels = leaves(z)[0]
        if len(pixels) < self.least:
            raise ValueError("too few images for a batch")
        return super().judge(z)


class ValleyInBatches(InBatches, Valley):
    """The same of a valley."""


def letterboxed(count: int = 16) -> tuple[Tensor, Tensor]:
    """Inliers and outliers with two black rows above and below, and flat in between."""
    sets = (levels(0.2, 0.5, count), levels(0.55, 0.8, count, seed=1))
    boxed = []
    for images in sets:
        images = images.mean(dim=(1, 2, 3), keepdim=True).expand(-1, 1, 6, 6).clone()
        images[:, :, :2] = images[:, :, 4:] = 0
        boxed.append(images)
    return boxed[0], boxed[1]


def gradients_of(detector: Brightness, inliers: Tensor, outliers: Tensor) -> Check:
    """Whether a detector's gradient flows; the audit attacks with what it has."""
    return CHECKS["gradient_flows"](evidence_for(detector, inliers=inliers, outliers=outliers))


@pytest.mark.parametrize("kind", [Powers, Variation])
def test_a_gradient_that_is_not_finite_where_attacks_start_is_no_gradient(kind: type[Brightness]) -> None:
    check = gradients_of(kind(), *letterboxed())
    assert check["status"] == "fail"
    assert "100% one that is NaN or infinite at the image itself, where attacks start" in check["sentence"]
    assert check["sentence"].endswith("(a root, a power, a logarithm or a division at zero).")
    assert gradients_of(kind(), DARK, BRIGHT)["status"] == "pass"


def test_one_such_image_among_many_is_a_warning() -> None:
    inliers = DARK.clone()
    inliers[3, 0, 0, 0] = 0
    check = gradients_of(Powers(), inliers, BRIGHT)
    assert check["status"] == "warn"
    assert "0% of 32 images have no gradient, 3% one that is NaN or infinite at the image itself" in check["sentence"]
    assert "0% of 16 have one that finite differences in float64 contradict" in check["sentence"]


def test_max_pooling_of_letterboxed_images_has_its_gradient() -> None:
    check = gradients_of(Pooled(), *letterboxed())
    assert check["status"] == "pass", check["sentence"]


def test_a_gradient_that_is_zero_at_the_image_only_is_told_apart_from_a_constant_score() -> None:
    flat = torch.full((16, 1, 6, 6), 0.3)
    held = gradients_of(Valley(), flat, BRIGHT)
    assert held["status"] == "warn"
    assert held["sentence"].startswith("it: 0% of 32 images have no gradient, 50% one that is zero at the image itself")

    class Clipped(Valley):
        def judge(self, z: Latent) -> Tensor:
            return super().judge(z).clamp_min(0.02)

    constant = gradients_of(Clipped(), flat, BRIGHT)
    assert constant["status"] == "fail"
    assert constant["sentence"] == "it: 50% of 32 images have no gradient (a saturated or constant score)."


def test_one_image_with_a_zero_gradient_is_not_looked_at_alone() -> None:
    inliers = DARK.clone()
    inliers[3] = 0.3
    check = gradients_of(ValleyInBatches(2), inliers, BRIGHT)
    assert check["sentence"].startswith("it: 0% of 32 images have no gradient, 3% one that is zero at the image itself")


def test_a_gradient_that_is_not_finite_beside_the_images_fails_too() -> None:
    tenths = torch.full((16, 1, 6, 6), 0.3)
    evidence = evidence_for(Brightness(), inliers=tenths, outliers=tenths + 0.4)
    evidence.job.detectors["it"] = SharpBeside()
    check = CHECKS["gradient_flows"](evidence)
    assert (check["status"], check["sentence"]) == (
        "fail", "it: 0% of 32 images have no gradient, 100% of 16 one that is NaN or infinite beside the image."
    )  # fmt: skip


def checked(detector: Brightness) -> dict[str, Check]:
    """The checks of a small audit of a detector, as the audit makes them."""
    job, measured, rows = finished({"it": detector}, [BOTH | {"ball": {"norm": "linf", "eps": EPS}}])
    return {check["name"]: check for check in run_checks(job, measured, rows, share=100)}


def test_a_detector_that_takes_no_single_image_is_checked_like_any_other() -> None:
    checks = checked(InBatches(2))
    assert list(checks) == list(ORDER)
    assert {check["status"] for check in checks.values()} == {"pass"}, checks
    assert "differences in float64" in checks["gradient_flows"]["sentence"]


def test_an_error_in_a_score_of_two_images_is_found_by_the_checks_and_not_raised() -> None:
    checks = checked(InBatches(3))
    assert list(checks) == list(ORDER)
    assert checks["leakage"]["status"] == checks["deterministic"]["status"] == "pass"


def test_no_error_leaves_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> Evidence:
        raise RuntimeError("the disk\nis full")

    monkeypatch.setattr(checks_run, "spent_by", broken)
    checks = checked(Brightness())
    assert list(checks) == list(ORDER)
    assert {(check["status"], check["sentence"]) for check in checks.values()} == {
        ("fail", "The check could not be done: the disk is full.")
    }


class WithMean(Brightness):
    """A latent with a vector and a single number per image, (B,)."""

    def encode(self, x: Tensor) -> Latent:
        return super().encode(x), x.mean(dim=(1, 2, 3))

    def judge(self, z: Latent) -> Tensor:
        pixels, mean = leaves(z)
        return (super().judge(pixels) + mean) / 2


def test_a_latent_may_hold_one_number_per_image() -> None:
    checks = {check["name"]: check for check in verdicts(evidence_for(WithMean()))}
    assert {check["status"] for check in checks.values()} == {"pass"}, checks
    assert "for 100% of 32 images" in checks["planted"]["sentence"]


def test_an_infinite_score_does_not_hide_a_random_one() -> None:
    outliers = levels(0.6, 0.9, seed=1)
    check = CHECKS["deterministic"](evidence_for(Endless(noise=0.01), outliers=outliers))
    assert check["status"] == "fail", check["sentence"]
    check = CHECKS["deterministic"](evidence_for(Endless(noise=0.0), outliers=outliers))
    assert (check["status"], "differ by 0." in check["sentence"]) == ("pass", True), check["sentence"]


def test_an_ensemble_of_averages_over_draws_is_one() -> None:
    ensemble = ScoreEnsemble([Expected(Noisy(), draws=4, seed=seed) for seed in (0, 1)])
    follows = CHECKS["score_is_attacked"](evidence_for(ensemble))
    assert follows["status"] == "pass", follows["sentence"]
    calm = ScoreEnsemble([Expected(Noisy(1e-3), draws=draws) for draws in (16, 8)])
    steady = CHECKS["deterministic"](evidence_for(calm))
    assert steady["status"] == "pass", steady["sentence"]
    assert "averaged over 8 draws" in steady["sentence"]
    assert draws_in(ScoreEnsemble([Brightness(), Brightness()])) is None
