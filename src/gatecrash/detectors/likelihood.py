"""Detectors of images that are unlikely under a flow: Glow's likelihood, and the same less what the file takes."""

from __future__ import annotations

from io import BytesIO
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor

from gatecrash.detectors.base import Card, register
from gatecrash.detectors.learned import Learned
from gatecrash.protocols import Latent


@register("glow")
class GlowLikelihood(Learned):
    """Bits per dimension of an image under a Glow of the inliers.

    τ = −log₂ p(x) / D; `densities.Glow` says where between two grey levels an image is scored: the gradient is exact
    unless `midpoints` is set. It has no encoder of its own; one that is given only says on which device. Options as in
    `Learned`; `model` takes those of `densities.Glow`.
    """

    card = Card(paper="Kingma & Dhariwal, NeurIPS 2018", year=2018, reads="pixels", fit="inliers")
    density_name = "glow"
    recipe: ClassVar[dict[str, Any]] = {
        "epochs": 6,
        "batch_size": 64,
        "optimiser": "adamw",
        "lr": 3e-3,
        "weight_decay": 0.0,
        "warm_up": 0.05,
        "clip": 1.0,
    }


@register("complexity")
class InputComplexity(GlowLikelihood):
    """Bits per dimension under a Glow of the inliers less those of the image as a PNG file.

    τ = −log₂ p(x) / D − L, Appendix I of Liang et al., with L the bits per dimension of the 8-bit image compressed. L
    is a staircase: the gradient is that of the likelihood alone, and attacks by gradient do not see what a simpler file
    would do. `worst_case` also begins at flattened and blurred versions of every image, which make L small. Options as
    in `GlowLikelihood`.
    """

    card = Card(paper="Serrà et al., ICLR 2020", year=2020, reads="pixels", fit="inliers", gradient="omitted")

    def fit_latents(self, z: Latent, y: Tensor | None) -> None:
        """Train the density, once it is clear that the images can be compressed."""
        check_png(self.samples(z))
        super().fit_latents(z, y)

    def judge(self, z: Latent) -> Tensor:
        """Bits per dimension under the flow less those of the file, (B,)."""
        return super().judge(z) - png_bits(self.samples(z))


def png_bits(x: Tensor) -> Tensor:
    """The bits per dimension of images (B, C, H, W) in [0, 1] as PNG files of 8 bits, (B,); a constant to autograd.

    Raises:
        ValueError: the images are neither grey nor RGB.
    """
    check_png(x)
    # Always from 32 bits: half a grey level, where searches like to stop, would round up in one precision and not in
    # another, and the same image would be two files.
    images = (255 * x.detach().float()).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    sizes = []
    for image in images:
        file = BytesIO()
        Image.fromarray(image.squeeze(axis=2) if image.shape[2] == 1 else image).save(file, "PNG", compress_level=9)
        sizes.append(8 * file.tell() / image.size)
    return x.new_tensor(sizes)


def check_png(x: Tensor) -> None:
    """Raises a ValueError unless the images are grey or RGB."""
    if x.shape[1] not in (1, 3):
        raise ValueError(f"only images with 1 or 3 channels are written as PNG, got {x.shape[1]}")
