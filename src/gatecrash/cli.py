"""The command line: parse, call, print."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from pydantic import ValidationError
from rich.table import Table

from gatecrash.attacks import ATTACKS
from gatecrash.audit import (
    EXAMPLES,
    BallPlan,
    ModelPlan,
    SourcePlan,
    audit_plan,
    collide_sources,
    examine,
    example_plan,
    example_text,
    run_demo,
)
from gatecrash.audit.manifest import versions
from gatecrash.audit.models import WITH_WEIGHTS, load_model
from gatecrash.audit.plan import sentence
from gatecrash.bundle import Bundle, Check
from gatecrash.data import describe_sources
from gatecrash.detectors import DETECTORS
from gatecrash.dimensions import dims_rows
from gatecrash.harden import EXAMPLES as HARDENINGS
from gatecrash.harden import example_text as example_hardening
from gatecrash.harden import first_process, harden_plan, listed_methods
from gatecrash.memory import keep_freed_memory
from gatecrash.printing import (
    print_hardening,
    print_line,
    print_listing,
    print_results,
    print_triage,
    strict_objection,
    wide_console,
)
from gatecrash.triage import EXAMPLES as TRIAGES
from gatecrash.triage import example_text as example_triage
from gatecrash.triage import triage_plan

app = typer.Typer(
    help="Attack out-of-distribution detectors and measure how far they break.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

UsageMistake: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What the parser raises; typer brings a copy of click along, or uses the installed one, depending on its version."""

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Trust = Annotated[bool, typer.Option("--trust", help="Let a model named module:function run its code.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 when a check fails or could not be run.")]
Seed = Annotated[int, typer.Option(min=0, max=2**62, help="Determines every random number.")]


def main() -> None:
    """Run a command; a user's mistake is one line on standard error and exit code 2."""
    keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that has no ± must not cost a finished run its table
            stream.reconfigure(errors="replace")
    try:
        status = app(standalone_mode=False)
    except UsageMistake as error:
        text = cast(Any, error).format_message()
        print_line(text if "\n" in text else f"gatecrash: {text}", sys.stderr)
        status = 2
    except ValueError as error:
        print_line(f"gatecrash: {' '.join(str(error).split())}", sys.stderr)
        status = 2
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print_line(f"gatecrash: {error.strerror or error}{where}", sys.stderr)
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    if status == INTERRUPTED:  # which typer may also say by itself
        print_line("gatecrash: interrupted; what was finished is kept, and --resume goes on from there", sys.stderr)
    sys.exit(status or 0)


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Attack out-of-distribution detectors and measure how far they break."""
    if show_version:
        print_line(f"gatecrash {versions()['gatecrash']}")
        raise typer.Exit


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Where the bundle goes.")] = Path("runs/demo"),
    seed: Seed = 0,
    device: Device = "auto",
    train: Annotated[bool, typer.Option("--train", help="Train the network on the spot first.")] = False,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Audit a small classifier of clothes on embedded data: the whole product in a few minutes."""
    results = run_demo(out, seed=seed, device=device, train=train, resume=resume)
    print_results(results, Bundle(out), as_json)


@app.command("audit")
def audit_command(
    plan: Annotated[Path | None, typer.Argument(help="The plan, a YAML file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the bundle goes; runs/NAME OF THE PLAN by default.")] = None,
    resume: Resume = False,
    device: Device = "auto",
    trust: Trust = False,
    strict: Strict = False,
    example: Annotated[str | None, typer.Option(help=f"Print an example plan: {', '.join(EXAMPLES)}.")] = None,
    as_json: Json = False,
) -> None:
    """Attack the detectors of a plan, measure how far they break, and write a bundle with a report."""
    if example is not None:
        print_line(example_text(example).rstrip("\n"))
        return
    if plan is None:
        raise ValueError(
            "which plan? gatecrash audit PLAN.yaml; gatecrash audit --example demo prints one to start from"
        )
    folder = out or Path("runs") / plan.stem
    results = audit_plan(plan, out=folder, resume=resume, device=device, trust=trust)
    print_results(results, Bundle(folder), as_json)
    insist(strict, results["checks"])


@app.command("triage")
def triage_command(
    plan: Annotated[Path | None, typer.Argument(help="The plan, a YAML file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the bundle goes; runs/NAME OF THE PLAN by default.")] = None,
    resume: Resume = False,
    device: Device = "auto",
    trust: Trust = False,
    strict: Strict = False,
    example: Annotated[str | None, typer.Option(help=f"Print an example plan: {', '.join(TRIAGES)}.")] = None,
    as_json: Json = False,
) -> None:
    """Ask how well detectors find a classifier's own mistakes, adversarial images and outliers."""
    if example is not None:
        print_line(example_triage(example).rstrip("\n"))
        return
    if plan is None:
        raise ValueError(
            "which plan? gatecrash triage PLAN.yaml; gatecrash triage --example demo prints one to start from"
        )
    folder = out or Path("runs") / plan.stem
    results = triage_plan(plan, out=folder, resume=resume, device=device, trust=trust)
    print_triage(results, Bundle(folder), as_json)
    insist(strict, results["checks"])


@app.command("harden")
def harden_command(
    plan: Annotated[Path | None, typer.Argument(help="The plan, a YAML file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the models go; runs/NAME OF THE PLAN by default.")] = None,
    resume: Resume = False,
    device: Device = "auto",
    trust: Trust = False,
    list_methods: Annotated[bool, typer.Option("--list", help="List the methods.")] = False,
    example: Annotated[str | None, typer.Option(help=f"Print an example plan: {', '.join(HARDENINGS)}.")] = None,
    as_json: Json = False,
) -> None:
    """Train networks whose detectors hold, and show what that buys and costs."""
    if list_methods:
        print_listing([dict(entry) for entry in listed_methods()], as_json)
        return
    if example is not None:
        print_line(example_hardening(example).rstrip("\n"))
        return
    if plan is None:
        raise ValueError(
            "which plan? gatecrash harden PLAN.yaml; gatecrash harden --example demo prints one to start from"
        )
    folder = out or Path("runs") / plan.stem
    results = harden_plan(plan, out=folder, resume=resume, device=device, trust=trust)
    if first_process():
        print_hardening(results, folder, as_json)


@app.command("collide")
def collide_command(
    start: Annotated[str, typer.Option(help="The source of the images to move, e.g. noise or folder:DIR.")],
    target: Annotated[str, typer.Option(help="The source of the images to collide with, e.g. fashion:test.")],
    out: Annotated[Path, typer.Option(help="An empty or new folder for the pictures.")] = Path("runs/collide"),
    model: Annotated[str | None, typer.Option(help="torchvision:NAME, timm:NAME, …; the demo's by default.")] = None,
    weights: Annotated[str | None, typer.Option(help="A .safetensors or .pth file, default, or random.")] = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="The layer to match; the output by default. Repeatable.")
    ] = None,
    mean: Annotated[str | None, typer.Option(help="Per channel, e.g. 0.485,0.456,0.406.")] = None,
    std: Annotated[str | None, typer.Option(help="Per channel, e.g. 0.229,0.224,0.225.")] = None,
    channels: Annotated[int | None, typer.Option(help="1 or 3: what images are converted to.")] = None,
    size: Annotated[int | None, typer.Option(help="The side that images are converted to.")] = None,
    norm: Annotated[str, typer.Option(help="l2 or linf.")] = "l2",
    eps: Annotated[str, typer.Option(help="How far an image may move, e.g. 5 or 8/255.")] = "5",
    steps: Annotated[int, typer.Option(min=1)] = 300,
    restarts: Annotated[int, typer.Option(min=1)] = 1,
    limit: Annotated[int, typer.Option(min=1, help="At most so many pairs.")] = 8,
    root_folder: Annotated[str | None, typer.Option("--root", help="Where published data sets lie.")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Make images collide with others in a network's latent space: pictures, MAPE histogram, latents."""
    try:
        network = network_of(model, weights, layer, mean, std, channels, size)
        starts, targets = (SourcePlan(source=spec, limit=limit, root=root_folder) for spec in (start, target))
        ball = BallPlan.model_validate({"norm": norm, "eps": eps})
    except ValidationError as error:
        raise ValueError(sentence(error, ModelPlan)) from None
    pairs = collide_sources(
        network, starts, targets, ball, out=out, steps=steps, restarts=restarts, seed=seed, device=device, trust=trust
    )
    if as_json:
        print_line((out / "collisions.json").read_text(encoding="utf-8").rstrip("\n"))
        return
    table = Table(title=f"{start} → {target}, {norm} {eps}")
    for column in ("pair", "MAPE", "moved", "target was away"):
        table.add_column(column, justify="right")
    for pair in pairs:
        table.add_row(str(pair.index), f"{pair.mape:.4%}", f"{pair.distance:.3f}", f"{pair.target_distance:.3f}")
    wide_console().print(table)
    print_line(f"pictures, mape.png and latents.png are in {out}")


@app.command("dims")
def dims_command(
    model: Annotated[
        str, typer.Argument(help="torchvision:NAME, timm:NAME, builtin:NAME, clip:DIR, bundle:DIR, module:function.")
    ],
    shape: Annotated[str, typer.Option("--input", help="Channels, height and width of an image.")] = "3,224,224",
    layer: Annotated[str | None, typer.Option(help="The latent of the last row; the output by default.")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Show how every layer of a network shrinks its input, and how surely outliers cover its latent space."""
    if not all(part.strip().isdecimal() for part in shape.split(",")):
        raise ValueError(f"--input must be channels,height,width, got {shape!r}")
    known_weights = None if model.partition(":")[0] in ("bundle", *WITH_WEIGHTS) else "random"
    network = load_model(ModelPlan(name=model, weights=known_weights), Path(), trust=trust)
    rows = dims_rows(network, [int(part) for part in shape.split(",")], layer)
    shown = [row | {"covering": f"{row['covering']:.3g}", "reduces": "yes" if row["reduces"] else "no"} for row in rows]
    print_listing(rows if as_json else shown, as_json)


@app.command("detectors")
def detectors_command(as_json: Json = False) -> None:
    """List the detectors: paper, what they read, what fit needs, whether the gradient is exact, and what they are."""
    print_listing([detector_entry(name) for name in DETECTORS], as_json)


@app.command("attacks")
def attacks_command(as_json: Json = False) -> None:
    """List the attacks."""
    entries = [(name, ATTACKS[name]) for name in ATTACKS]
    print_listing([{"name": n, "aim": a.aim, "paper": a.paper, "what": a.summary} for n, a in entries], as_json)


@app.command("data")
def data_command(as_json: Json = False) -> None:
    """List the sources of images."""
    print_listing([dict(entry) for entry in describe_sources()], as_json, hidden={"name"})


@app.command("doctor")
def doctor_command(as_json: Json = False) -> None:
    """Say what this machine has: device, versions, data, and what is missing."""
    findings = examine()
    if as_json:
        print_line(json.dumps(findings, indent=1))
        return
    print_line(f"device    {findings['device']}")
    print_line(f"python    {findings['python']}")
    print_line("versions  " + ", ".join(f"{name} {number}" for name, number in findings["versions"].items()))
    print_line("data      " + ", ".join(f"{name} ({count})" for name, count in findings["data"].items()))
    print_line("by path   " + ", ".join(findings["needs_files"]))
    print_line("missing   " + ("; ".join(findings["missing"]) or "nothing"))


def insist(strict: bool, checks: Sequence[Check]) -> None:
    """Exit with 1, and a line on standard error, where a strict user must not take the result for checked."""
    objection = strict_objection(checks) if strict else None
    if objection is not None:
        print_line(f"gatecrash: --strict: {objection}", sys.stderr)
        raise typer.Exit(1)


def detector_entry(name: str) -> dict[str, Any]:
    """What a listing says of a detector: its card, and the first paragraph of its class's docstring."""
    what = " ".join((inspect.getdoc(DETECTORS[name]) or "").partition("\n\n")[0].split())
    return {"name": name, **asdict(DETECTORS[name].card), "what": what}


def network_of(
    model: str | None,
    weights: str | None,
    layer: list[str] | None,
    mean: str | None,
    std: str | None,
    channels: int | None,
    size: int | None,
) -> ModelPlan:
    """The network that the options describe; without --model the demo's, where other options are not given."""
    said: dict[str, Any] = {
        "name": model,
        "weights": weights,
        "layer": layer[0] if layer and len(layer) == 1 else layer or None,
        "mean": None if mean is None else mean.split(","),
        "std": None if std is None else std.split(","),
        "channels": channels,
        "size": size,
    }
    known = example_plan("demo").model.model_dump() if model is None else {}
    return ModelPlan.model_validate(known | {key: value for key, value in said.items() if value is not None})
