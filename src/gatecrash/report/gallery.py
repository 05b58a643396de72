"""The pictures with their facts, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gatecrash.bundle import Pictures
from gatecrash.report.charts import COORDINATES, Drawings, latents_drawing
from gatecrash.report.formats import ABSENT, NORMS, general, named, percent, radius
from gatecrash.report.pictures import LARGEST, Strip, factor_of, strips


@dataclass(frozen=True)
class Exhibit:
    """One collision: its images, its numbers, and the chart of its latents."""

    name: str
    """What the target shows; empty where that is not known."""
    strip: Strip
    mape: str
    moved: str
    target_distance: str
    chart: str
    description: str


@dataclass(frozen=True)
class Gallery:
    """A group of collisions."""

    title: str
    attack: str
    factor: str
    norm: str
    remarks: list[str]
    exhibits: list[Exhibit]


def galleries(groups: Sequence[Pictures], drawings: Drawings) -> list[Gallery]:
    """Every group with the pictures that fit on the page; their charts join `drawings`."""
    return [_gallery(group, shown, drawings) for group, shown in zip(groups, strips(groups), strict=True)]


def _gallery(group: Pictures, shown: Sequence[Strip], drawings: Drawings) -> Gallery:
    return Gallery(
        title=group.title,
        attack=named(group.attack, radius(group.norm, group.eps)),
        factor=general(factor_of(group)),
        norm=NORMS.get(group.norm, group.norm),
        remarks=_remarks(group, len(shown)),
        exhibits=[_exhibit(group, strip, drawings) for strip in shown],
    )


def _exhibit(group: Pictures, strip: Strip, drawings: Drawings) -> Exhibit:
    number = strip.number
    mape = group.mape[number] if number < len(group.mape) else None
    target, start, found = (latents[number].flatten() for latents in (group.z_target, group.z_start, group.z_found))
    drawing = latents_drawing(target, start, found, mape)
    return Exhibit(
        name=group.names[number] if number < len(group.names) else "",
        strip=strip,
        mape=percent(mape),
        moved=_distance(group.distance, number),
        target_distance=_distance(group.target_distance, number),
        chart=drawings.add(drawing),
        description=(
            f"Latents coordinate by coordinate: the inlier’s, the start’s and the collided image’s. "
            f"The mean absolute error between the collided image’s and the inlier’s is {percent(mape)} of the largest."
        ),
    )


def _remarks(group: Pictures, shown: int) -> list[str]:
    remarks = []
    size = max(group.found.shape[-2:])
    if size > LARGEST:
        remarks.append(f"Shown at {LARGEST} of {size} pixels.")
    coordinates = group.z_found[:1].numel()
    if coordinates > COORDINATES:
        remarks.append(f"The charts show {COORDINATES} of {coordinates} latent coordinates, evenly chosen.")
    if shown < len(group.found):
        remarks.append(f"{shown} of {len(group.found)} are shown; all are in images.safetensors.")
    return remarks


def _distance(distances: Sequence[float], number: int) -> str:
    return general(distances[number]) if number < len(distances) else ABSENT
