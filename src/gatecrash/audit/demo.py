"""The demo: the packaged plan on embedded data, with the shipped network or one trained on the spot."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from gatecrash.audit.main import audit_plan
from gatecrash.audit.manifest import pick_device
from gatecrash.audit.plan import Plan, parse_plan
from gatecrash.audit.running import refuse_other_runs
from gatecrash.bundle import Bundle, Results
from gatecrash.data import load_source
from gatecrash.fitting import seeded
from gatecrash.networks import NETWORKS, PRETRAINED, save_weights
from gatecrash.training import train_classifier

EXAMPLES = ("demo", "generative", "imagenet", "timm_vit", "clip")


def example_text(name: str) -> str:
    """The text of an example plan."""
    if name not in EXAMPLES:
        raise ValueError(f"there is no example {name!r}; there are {', '.join(EXAMPLES)}")
    return (files("gatecrash.audit") / "examples" / f"{name}.yaml").read_text(encoding="utf-8")


def example_plan(name: str) -> Plan:
    """An example plan, read."""
    return parse_plan(example_text(name), f"example {name}")


def run_demo(
    out: str | Path,
    *,
    seed: int = 0,
    device: str = "auto",
    train: bool = False,
    resume: bool = False,
    plan: Plan | None = None,
) -> Results:
    """Audit the demo's network and write the bundle to `out`; with `train`, train it first.

    A network trained on the spot is kept beside the bundle, as `NAME-network.safetensors`.
    """
    pick_device(device)
    out = Path(out)
    plan = (plan or example_plan("demo")).model_copy(update={"seed": seed})
    if train:
        refuse_other_runs(Bundle(out), resume=resume)
        weights = out.parent / f"{out.name}-network.safetensors"
        if not (resume and weights.is_file()):
            train_network(plan, weights, seed, device)
        plan = plan.model_copy(update={"model": plan.model.model_copy(update={"weights": weights.name})})
    return audit_plan(plan, out=out, resume=resume, device=device, folder=out.parent)


def train_network(plan: Plan, weights: Path, seed: int, device: str) -> None:
    """Train the plan's network on its own fit images and save it."""
    with seeded(seed):
        model = NETWORKS[plan.model.name.partition(":")[2]](**plan.model.options)
    source = plan.data.fit
    if source is None:
        raise ValueError("the plan has no data.fit to train on")
    images = load_source(source.source, limit=source.limit, channels=plan.model.channels, size=plan.model.size)
    if images.y is None:
        raise ValueError(f"{images.name} has no labels to train on")
    train_classifier(
        model,
        images.x,
        images.y,
        epochs=PRETRAINED["fashion_small_cnn"].epochs,
        seed=seed,
        mean=plan.model.mean,
        std=plan.model.std,
        device=pick_device(device),
    )
    save_weights(model, weights)
