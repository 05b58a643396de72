"""The figure of docs/results/generative.md from what `benchmarks/glow.py` wrote.

    python benchmarks/figures.py OUT docs/results/glow.webp

OUT holds glow.json and images.npz. Above: scores of inliers, of the colour spirals, and of the spirals once each has
the score of an inlier. Below: four spirals and what they became, then one image brought to scores across the range.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import vl_convert
from PIL import Image

SIDE = 64
WIDTH, HEIGHT = 300, 120
COLOURS = {"inliers": "#4c78a8", "spirals": "#bab0ac", "attacked": "#e45756"}


def histogram(row: dict[str, Any]) -> alt.LayerChart:
    """The three histograms of one row; scores beyond the last bin are counted in the title."""
    counts, edges = row["histograms"]["counts"], row["histograms"]["edges"]
    bars = [
        {"kind": kind, "low": low, "high": high, "count": count}
        for kind in COLOURS
        for low, high, count in zip(edges, edges[1:], counts[kind], strict=False)
    ]
    beyond = row["histograms"]["beyond"]["spirals"]
    title = f"{row['detector']}, {row['start']}: AUROC {row['auroc_clean']:.3f} → {row['auroc_attacked']:.3f}"
    scale = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    layers = [
        alt.Chart(alt.Data(values=[bar for bar in bars if bar["kind"] == kind]))
        .mark_bar(opacity=0.5)
        .encode(
            alt.X("low:Q", title="score", scale=alt.Scale(zero=False, nice=False)),
            alt.X2("high:Q"),
            alt.Y("count:Q", title="images", stack=None),
            alt.Y2(datum=0),
            alt.Color("kind:N", scale=scale, title=None),
        )
        for kind in COLOURS
        if kind != "spirals" or row["start"] != "one spiral"  # which has one score only
    ]
    note = f"{beyond} of the {row['count']} spirals are further to the right" if beyond else " "
    return alt.layer(*layers, title={"text": title, "subtitle": note}).properties(width=WIDTH, height=HEIGHT)


def strip(images: np.ndarray[Any, Any]) -> Image.Image:
    """Images in a row, enlarged without smoothing."""
    picture = Image.new("RGB", (SIDE * len(images), SIDE), "white")
    for place, image in enumerate(images):
        picture.paste(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.NEAREST), (SIDE * place, 0))
    return picture


def main() -> None:
    """Draw, stack, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    rows = json.loads((options.out / "glow.json").read_text())["matched"]
    charts = alt.concat(*[histogram(row) for row in rows], columns=2)
    png = vl_convert.vegalite_to_png(charts.to_dict(), scale=1.5)
    parts = [Image.open(io.BytesIO(png)).convert("RGB")]
    with np.load(options.out / "images.npz") as kept:
        for name in kept.files:
            if name.endswith("each"):  # eight that began, then the eight they became
                parts.append(strip(np.concatenate([kept[name][:4], kept[name][8:12]])))
            elif name.endswith("range"):
                parts.append(strip(kept[name]))
    page = Image.new("RGB", (max(part.width for part in parts), sum(part.height + 8 for part in parts)), "white")
    top = 0
    for part in parts:
        page.paste(part, (0, top))
        top += part.height + 8
    page.save(options.file, quality=80)


if __name__ == "__main__":
    main()
