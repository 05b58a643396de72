"""The sources that need no file: what the package carries, what it draws, and scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor

from gatecrash.data import drawn, embedded
from gatecrash.data.sources import Opened, Part, Request, source

DRAWN_COUNT, DRAWN_CHANNELS, DRAWN_SIZE = 1000, 3, 32
"""What a drawn source gives when it is not told."""

_NO_LICENCE = "none needed"


@source(
    "fashion",
    takes="train|val|test",
    what="Fashion-MNIST, 6,000 + 1,000 + 1,000 images, balanced, 28×28 grey",
    licence="MIT, © Zalando SE",
)
def _fashion(asked: Request) -> Opened:
    x, y = embedded.fashion(asked.split(embedded.FASHION_SPLITS))
    return _chosen(asked, x, y, list(embedded.FASHION_CLASSES))


@source("fundus", what="one photograph of a healthy retina, 224×224", licence="CC0")
def _fundus(asked: Request) -> Opened:
    return _chosen(asked, embedded.fundus())


@source("digits", what="scikit-learn's handwritten digits, 1,797 images, 8×8 grey", licence="CC BY 4.0, UCI")
def _digits(asked: Request) -> Opened:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    return _chosen(asked, x, torch.from_numpy(bunch.target).long(), [str(name) for name in bunch.target_names])


@source("noise", what="uniform noise", licence=_NO_LICENCE)
def _noise(asked: Request) -> Opened:
    return _drawn(asked, drawn.noise)


@source("gaussian", what="normal noise around 0.5, variance 1, clipped", licence=_NO_LICENCE)
def _gaussian(asked: Request) -> Opened:
    return _drawn(asked, drawn.gaussian)


@source("spiral", what="spirals, in colour with 3 channels, grey with 1", licence=_NO_LICENCE)
def _spiral(asked: Request) -> Opened:
    return _drawn(asked, drawn.spiral)


@source("checkerboard", takes="N", what="checkerboards of N×N fields, of 2 to 16 without N", licence=_NO_LICENCE)
def _checkerboard(asked: Request) -> Opened:
    if asked.argument is None:
        return _drawn(asked, drawn.checkerboard)
    if not asked.argument.isdecimal():
        raise ValueError(f"checkerboard takes a number of fields a side, got {asked.argument!r}")
    return _drawn(asked, partial(drawn.checkerboard, fields=int(asked.argument)))


@source("constant", what="images of one colour", licence=_NO_LICENCE)
def _constant(asked: Request) -> Opened:
    return _drawn(asked, drawn.constant)


@source("blobs", what="blurred and thresholded coin flips", licence=_NO_LICENCE)
def _blobs(asked: Request) -> Opened:
    return _drawn(asked, drawn.blobs)


def _drawn(asked: Request, family: Callable[[int, int, int, Generator], Tensor]) -> Opened:
    count, channels, size = asked.limit or DRAWN_COUNT, asked.channels or DRAWN_CHANNELS, asked.size or DRAWN_SIZE
    return Opened([Part(family(count, channels, size, asked.generator()), None, asked.spec)], count)


def _chosen(asked: Request, x: Tensor, y: Tensor | None = None, classes: list[str] | None = None) -> Opened:
    rows = asked.rows(len(x))
    return Opened([Part(x[rows], None if y is None else y[rows], asked.spec)], len(rows), classes)
