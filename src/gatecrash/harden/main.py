"""The door to hardening: a plan file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from gatecrash.audit.manifest import code_hash, pick_device
from gatecrash.audit.plan import plan_text, read_plan
from gatecrash.data import fingerprint
from gatecrash.encoder import Encoder
from gatecrash.files import write_text
from gatecrash.fitting import disband, make_fabric, several
from gatecrash.harden.evaluate import HardenRow, evaluated
from gatecrash.harden.methods import METHODS
from gatecrash.harden.plan import GIVEN, HardenPlan, MethodPlan
from gatecrash.harden.rehearsal import rehearse
from gatecrash.harden.run import HardenJob, job_of_harden, train_method
from gatecrash.networks import hash_of

if TYPE_CHECKING:
    from lightning.fabric import Fabric

EXAMPLES = ("demo", "jem", "ccu", "confident", "cifar10")


class AttackFacts(TypedDict):
    """How strong an attack of the table is, L∞."""

    eps: float
    steps: int


class HardenResults(TypedDict):
    """The content of hardening's `results.json`."""

    schema: int
    kind: str
    rows: list[HardenRow]
    attacks: dict[str, AttackFacts]
    """What the columns under attack are of: "pgd" the accuracy's, "softmax" the detectors'."""
    plain: str | None
    """The row that shows what hardening bought and cost: of the model as it was given, or of plain cross-entropy."""
    bundles: dict[str, str]
    """The model bundle of every method, relative to the folder."""


def example_text(name: str) -> str:
    """The text of an example plan."""
    if name not in EXAMPLES:
        raise ValueError(f"there is no example {name!r}; there are {', '.join(EXAMPLES)}")
    return (files("gatecrash.harden") / "examples" / f"{name}.yaml").read_text(encoding="utf-8")


def harden_plan(
    plan: str | Path | HardenPlan,
    *,
    out: str | Path,
    resume: bool = False,
    device: str = "auto",
    trust: bool = False,
    folder: str | Path | None = None,
) -> HardenResults:
    """Train the networks of a plan, one per method, and compare them clean and attacked.

    `out` gets a model bundle per method, which `audit` and `triage` take as `model: bundle:DIR`, `plan.yaml` and
    `results.json`. Where torchrun started several processes they share the training, and the first one writes.

    Args:
        plan: a YAML file, or a plan that was read from one.
        out: a new or empty folder.
        resume: go on with a run that was interrupted, from the last finished epoch.
        device: "auto", "cpu", "cuda" or "mps".
        trust: let a model named `module:function` run its code.
        folder: what paths in the plan are relative to; the plan file's own folder by default.

    Raises:
        ValueError: in one line, whatever is wrong with the plan, the network, the data or the folder; a loss that is
            not finite; a disk that is full once an epoch is finished.
        OSError: a file cannot be written.
    """
    chosen, out = pick_device(device), Path(out)
    if isinstance(plan, HardenPlan):
        read, base = plan, Path(folder or ".")
    else:
        read, base = read_plan(plan, HardenPlan), Path(folder or Path(plan).parent)
    refuse_other_runs(out, resume=resume)
    refuse_another_plan(out, read)
    fabric = make_fabric(read.training.precision, chosen)
    job = job_of_harden(read, base, fabric.device if several() else chosen, trust=trust)
    finished = (out / "results.json").is_file()
    begin(job, out, fabric)
    if not finished:
        compute(job, out, fabric)
    results: HardenResults = json.loads((out / "results.json").read_text(encoding="utf-8"))
    disband(fabric)
    return results


def compute(job: HardenJob, out: Path, fabric: Fabric) -> None:
    """Train and evaluate every method's network, or what is left of it, and write `results.json`."""
    plan = job.plan
    with no_trace_of_nothing(out, plan, fabric):
        rows = given_rows(job, out, fabric) if job.has_weights else []
        rows += [row for method in plan.methods for row in rows_of(job, method, out / method.title, fabric)]
    results: HardenResults = {
        "schema": 1,
        "kind": "harden",
        "rows": rows,
        "attacks": {
            "pgd": {"eps": plan.evaluation.pgd_eps, "steps": plan.evaluation.pgd_steps},
            "softmax": {"eps": plan.evaluation.eps, "steps": plan.evaluation.steps},
        },
        "plain": GIVEN if job.has_weights else next((m.title for m in plan.methods if m.name == "ce"), None),
        "bundles": {method.title: method.title for method in plan.methods},
    }
    if fabric.is_global_zero:
        write_text(out / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    fabric.barrier()


def given_rows(job: HardenJob, out: Path, fabric: Fabric) -> list[HardenRow]:
    """The lines of the model that training begins with."""
    return kept_rows(job, GIVEN, job.network(), out / "given.json", fabric)


def rows_of(job: HardenJob, method: MethodPlan, folder: Path, fabric: Fabric) -> list[HardenRow]:
    """Train a method's network and compute its lines of the table, or read what of it is finished."""
    encoder = train_method(job, method, folder, fabric)
    return kept_rows(job, method.title, encoder, folder / "evaluation.json", fabric)


def kept_rows(job: HardenJob, title: str, encoder: Encoder, kept: Path, fabric: Fabric) -> list[HardenRow]:
    """The lines of a network, computed once and kept in a file."""
    if kept.is_file():
        rows: list[HardenRow] = json.loads(kept.read_text(encoding="utf-8"))
        return rows
    plan, features = job.plan, None if job.about.layer is None else encoder.at(job.about.layer)
    rows = evaluated(
        title,
        encoder,
        features,
        plan.evaluation,
        job.train,
        job.test,
        job.test_outliers,
        plan.seed,
        exposed=job.outliers,
        folder=job.folder,
    )
    if fabric.is_global_zero:
        write_text(kept, json.dumps(rows, indent=1, allow_nan=False) + "\n")
    return rows


def first_process() -> bool:
    """Whether this process is the only one, or the first of those that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1 or int(os.environ.get("RANK", "0")) == 0


def begin(job: HardenJob, out: Path, fabric: Fabric) -> None:
    """Rehearse, then write the plan and what it was begun with; or refuse to go on with another beginning.

    Raises:
        ValueError: the rehearsal fails, or the run that is to go on had other images, weights or another version.
    """
    facts: dict[str, Any] = {
        "code_sha256": code_hash(),
        "network": hash_of(job.network().model),
        "data": {name: fingerprint(images) for name, images in job.sets.items()},
    }
    if (out / "plan.yaml").is_file():
        refuse_another_beginning(out, facts)
        fabric.barrier()
        return
    rehearse(job)
    fabric.barrier()  # every process has seen by now that there was no plan
    if fabric.is_global_zero:
        write_text(out / "begun.json", json.dumps(facts, indent=1) + "\n")
        write_text(out / "plan.yaml", plan_text(job.plan))  # last: a run has begun once its plan stands there
    fabric.barrier()


@contextmanager
def no_trace_of_nothing(out: Path, plan: HardenPlan, fabric: Fabric) -> Iterator[None]:
    """A mistake or a full disk in this block leaves nothing behind when not even an epoch was finished.

    Raises:
        ValueError: a file could not be written, and there is something to go on with.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        done = [path for name in ("checkpoint.json", "model.json") for path in out.glob(f"*/{name}")]
        if fabric.is_global_zero and not done:
            for method in plan.methods:
                shutil.rmtree(out / method.title, ignore_errors=True)
            for name in ("plan.yaml", "begun.json", "given.json"):
                (out / name).unlink(missing_ok=True)
            with suppress(OSError):
                out.rmdir()
        if done and isinstance(error, OSError):
            where = f" ({error.filename})" if error.filename else ""
            raise ValueError(
                f"{error.strerror or error}{where}; what is finished is kept, the last checkpoint too, and --resume "
                "goes on from there"
            ) from error
        raise


def refuse_other_runs(out: Path, *, resume: bool) -> None:
    """Raises a ValueError when the folder holds something that must not be mixed with this run."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out must name a folder")
    if (out / "plan.yaml").is_file():
        if not resume:
            raise ValueError(f"{out} holds another run; choose another --out, or go on with it: --resume")
    elif out.is_dir() and any(not leftover(path) for path in out.iterdir()):
        raise ValueError(f"{out} holds other files and no run; choose an empty or new folder")


def leftover(path: Path) -> bool:
    """Whether a file is what a run that was killed at its very beginning leaves."""
    return path.name == "begun.json" or path.name.startswith((".begun.", ".plan."))


def refuse_another_plan(out: Path, plan: HardenPlan) -> None:
    """Raises a ValueError when the run that is to go on had another plan."""
    path = out / "plan.yaml"
    if path.is_file() and path.read_text(encoding="utf-8") != plan_text(plan):
        raise ValueError(f"{out} was begun with another plan, see its plan.yaml; choose another --out")


def refuse_another_beginning(out: Path, facts: dict[str, Any]) -> None:
    """Raises a ValueError when the run that is to go on had other images, other weights or another version."""
    try:
        before = json.loads((out / "begun.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{out / 'begun.json'} cannot be read ({error}); choose another --out") from error
    for key, noun in (
        ("network", "other weights"),
        ("data", "other images"),
        ("code_sha256", "another version of gatecrash"),
    ):
        if not isinstance(before, dict) or before.get(key) != facts[key]:
            raise ValueError(f"{out} was begun with {noun}; choose another --out")


def listed_methods() -> list[dict[str, str]]:
    """The methods with what they take, for a listing."""
    return [
        {
            "name": name,
            "what": METHODS[name].what,
            "takes": ", ".join(METHODS[name].options) or "nothing",
            "outliers": "needed" if METHODS[name].exposes else "no",
            "paper": METHODS[name].paper,
        }
        for name in METHODS
    ]
