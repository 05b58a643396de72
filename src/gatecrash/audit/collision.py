"""Colliding images from a network and two sources: the pictures, a histogram of MAPE, and the latents side by side."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from gatecrash.attacks import collide
from gatecrash.audit.job import load_images
from gatecrash.audit.manifest import pick_device
from gatecrash.audit.models import completed, load_model
from gatecrash.audit.plan import BallPlan, ModelPlan, SourcePlan
from gatecrash.ball import distance
from gatecrash.encoder import Encoder
from gatecrash.files import replacing, write_text
from gatecrash.protocols import as_vectors

if TYPE_CHECKING:
    import altair as alt

BLUE, RED = "#1f77b4", "#d62728"


@dataclass(frozen=True)
class Collision:
    """One image that was made to collide with another."""

    index: int
    mape: float
    distance: float
    """From start to found, in the ball's norm."""
    target_distance: float
    """From start to target, in the ball's norm."""
    files: dict[str, str]
    """The pictures by what they show, relative to the output folder."""


def collide_sources(
    model: ModelPlan,
    start: SourcePlan,
    target: SourcePlan,
    ball: BallPlan,
    *,
    out: str | Path,
    steps: int = 300,
    restarts: int = 1,
    seed: int = 0,
    device: str = "auto",
    trust: bool = False,
    folder: str | Path = ".",
) -> list[Collision]:
    """Make every image of one source collide with its partner in another, and write what came of it.

    Images are paired in order; a single start serves all targets. `out` gets `NNN_target.png`, `NNN_start.png`,
    `NNN_found.png` per pair, `mape.png`, `latents.png` and `collisions.json`.

    Raises:
        ValueError: in one line, whatever is missing or does not fit, or a folder that is not empty.
    """
    out, base, chosen = Path(out), Path(folder), pick_device(device)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder; choose another --out")
    about = completed(model, base)
    network = load_model(about, base, trust=trust).to(chosen)
    encoder = Encoder(network, about.layer, about.mean, about.std, about.resize, checkpointing=about.checkpointing)
    starts, targets = (
        load_images(part, base, channels=about.channels, size=about.size, seed=seed).x.to(chosen)
        for part in (start, target)
    )
    count = len(targets) if len(starts) == 1 else min(len(starts), len(targets))
    starts, targets = starts.expand(count, -1, -1, -1) if len(starts) == 1 else starts[:count], targets[:count]
    found = collide(
        encoder, starts, targets, ball.ball(), steps=steps, restarts=restarts, generator=seed, batch_size=100
    )
    images = {"target": targets, "start": starts, "found": found.x}
    moved, apart = distance(found.x, starts, ball.norm), distance(starts, targets, ball.norm)
    mape = torch.zeros(count) if found.mape is None else found.mape
    pairs = [
        Collision(i, float(mape[i]), float(moved[i]), float(apart[i]), write_pictures(out, i, images))
        for i in range(count)
    ]
    write_chart(out / "mape.png", mape_chart([pair.mape for pair in pairs]))
    with torch.no_grad():
        latents = [as_vectors(encoder(x[:1]))[0] for x in (targets, found.x)]
    write_chart(out / "latents.png", latents_chart(latents[0], latents[1], pairs[0].mape))
    write_text(out / "collisions.json", json.dumps([asdict(pair) for pair in pairs], indent=1) + "\n")
    return pairs


def write_pictures(out: Path, index: int, images: dict[str, Tensor]) -> dict[str, str]:
    """One pair's pictures as PNG files; their names by what they show."""
    files = {}
    for name, batch in images.items():
        files[name] = f"{index:03d}_{name}.png"
        pixels = (batch[index].detach().cpu() * 255).round().byte()
        picture = Image.fromarray(pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).numpy())
        with replacing(out / files[name]) as draft:
            picture.save(draft, format="PNG")
    return files


def mape_chart(values: list[float]) -> alt.Chart:
    """A histogram of the MAPE, in percent."""
    import altair as alt

    data = alt.Data(values=[{"mape": 100 * value} for value in values])
    chart: alt.Chart = (
        alt.Chart(
            data, width=420, height=240, title=f"MAPE of {len(values)} collisions, median {100 * median(values):.3g} %"
        )
        .mark_bar(color=BLUE)
        .encode(x=alt.X("mape:Q", bin=alt.Bin(maxbins=30), title="MAPE, %"), y=alt.Y("count()", title="images"))
    )
    return chart


def latents_chart(target: Tensor, found: Tensor, mape: float) -> alt.LayerChart | alt.FacetChart:
    """The coordinates of two latents, blue dots for the inlier's and red circles for the outlier's."""
    import altair as alt

    rows = [
        {"coordinate": i, "target": a, "found": b}
        for i, (a, b) in enumerate(zip(target.tolist(), found.tolist(), strict=True))
    ]
    base = alt.Chart(alt.Data(values=rows), width=560, height=240, title=f"the first pair, MAPE {100 * mape:.3g} %")
    x = alt.X("coordinate:Q", title="latent coordinate")
    dots = base.mark_circle(color=BLUE, size=28).encode(
        x=x, y=alt.Y("target:Q", title="value (blue: target, red: found)")
    )
    rings = base.mark_point(color=RED, size=70).encode(x=x, y="found:Q")
    return alt.layer(dots, rings)


def write_chart(path: Path, chart: alt.Chart | alt.LayerChart | alt.FacetChart) -> None:
    """A chart as a PNG file."""
    import vl_convert

    png: bytes = vl_convert.vegalite_to_png(chart.to_dict(), scale=2)
    with replacing(path) as draft:
        draft.write_bytes(png)


def median(values: list[float]) -> float:
    """The middle value."""
    return float(torch.tensor(values).quantile(0.5))
