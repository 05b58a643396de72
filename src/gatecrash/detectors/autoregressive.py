"""The detector that measures how likely an image is, pixel by pixel: PixelCNN++."""

from __future__ import annotations

from typing import Any, ClassVar

from gatecrash.detectors.base import Card, register
from gatecrash.detectors.learned import Learned


@register("pixelcnn")
class PixelCNNLikelihood(Learned):
    """Bits per dimension of the image under a PixelCNN++, trained on the inliers; no classifier is involved.

    τ = −log₂ p(x) / D. Shao, Song & Ermon (2020) find that it prefers images of other kinds: against Fashion-MNIST a
    model of CIFAR-10 has an AUROC of 0.6 %, against SVHN 19.7 %.

    The score jumps where a pixel leaves black or white (within 0.0005 of 0 or 1), whose bins have no outer end; between
    the jumps the gradient is exact. On images with black ground an attack by gradient that leaves black loses more by
    the jump than it gains: `worst_case` also begins at flattened images, in which dark pixels are black again.

    Args:
        encoder: only says on which device; may be None.
        model: `preset` "small" (the default) or "paper" (5 blocks, 160 filters, 10 mixtures, dropout 0.5), and
            `blocks`, `filters`, `mixtures`, `dropout`, `levels` where they are other than the preset's.
        training: fields of `Recipe`; the paper trains for 5,000 epochs at a learning rate of 1e-4.
        bundle: a folder with a trained density.
        checkpoints: a folder in which a killed `fit` goes on.
        shape: of an image; filled in by `fit`.
    """

    card = Card(
        paper="Salimans et al., ICLR 2017", year=2017, reads="pixels", fit="inliers", gradient="exact between jumps"
    )
    density_name = "pixelcnn"
    recipe: ClassVar[dict[str, Any]] = {
        "epochs": 1,
        "batch_size": 32,
        "optimiser": "adamw",
        "lr": 3e-3,
        "weight_decay": 0.0,
        "clip": 1.0,
    }
