"""The two doors to an audit: a plan file, and detectors at hand in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from gatecrash.audit.arguments import (
    attack_plans,
    check_encoder,
    check_folder,
    check_set_names,
    check_switches,
    checked_attacks,
    checked_balls,
    checked_detectors,
    checked_outliers,
    whole_numbers,
)
from gatecrash.audit.checks import run_checks
from gatecrash.audit.job import Job, as_set, encoders_in, job_of_plan
from gatecrash.audit.manifest import manifest_of, pick_device, with_copies
from gatecrash.audit.plan import Plan, SearchPrecision, check_starts, read_plan
from gatecrash.audit.rows import rows_of, sample_rows
from gatecrash.audit.run import measure, rehearse
from gatecrash.audit.running import carry_out, refuse_other_runs, with_earlier
from gatecrash.ball import Ball
from gatecrash.bundle import Bundle, Results
from gatecrash.data import ImageSet
from gatecrash.detectors import Detector
from gatecrash.encoder import Encoder
from gatecrash.images import Images
from gatecrash.networks import hash_of
from gatecrash.speed import plainly


def audit(
    detectors: Detector | Sequence[Detector] | Mapping[str, Detector],
    inliers: Images | ImageSet,
    outliers: Mapping[str, Images | ImageSet],
    *,
    out: str | Path,
    balls: Sequence[Ball] = (),
    attacks: Sequence[Mapping[str, Any]] = (),
    steps: int = 100,
    features: Encoder | None = None,
    seed: int = 0,
    batch_size: int = 100,
    precision: SearchPrecision = "auto",
    resume: bool = False,
) -> Results:
    """Attack fitted detectors, measure how far they break, and write a bundle with a report.

    Args:
        detectors: one, several, or several by name; fitted.
        inliers: test images that belong.
        outliers: sets of test images that do not, by name.
        out: the bundle's folder; it must not hold another run.
        balls: every detector's score is attacked on both sides inside each of these.
        attacks: further attacks as in a plan: `{"name": "collide", "of": "logits", "ball": {"norm": "l2", "eps": 5}}`.
        steps: steps of the attacks that `balls` asks for.
        features: what `of: features` means.
        seed: determines every random number.
        batch_size: images that are attacked together, and saved together.
        precision: of the searches: "auto" takes networks prepared for speed, in bf16 far from the end, where that pays;
            "float32" the networks as they are.
        resume: go on with a run that was killed.

    Returns:
        The content of `results.json`.

    Raises:
        ValueError: an argument is no such thing, a detector is not fitted, images do not fit, a ball is none that a
            plan can express, or the folder holds another run.
    """
    named = checked_detectors(detectors)
    check_folder(out)
    steps, seed, batch_size = whole_numbers(steps=steps, seed=seed, batch_size=batch_size)
    check_switches(resume=resume)
    check_encoder("features", features)
    if precision not in get_args(SearchPrecision):
        raise ValueError(f"precision must be 'auto' or 'float32', got {precision!r}")
    wanted = [
        {"name": "admit", "side": "both", "ball": {"norm": b.norm, "eps": list(b.ladder)}, "steps": steps}
        for b in checked_balls(balls)
    ]
    plans = attack_plans([*wanted, *checked_attacks(attacks)])
    named_outliers = checked_outliers(outliers)
    check_set_names(list(named_outliers))
    check_starts(plans, list(named_outliers))
    for detector in named.values():
        detector.require_fitted()
    first = next((part for detector in named.values() for part in encoders_in(detector)), features)
    for plan in plans:
        if plan.reads_network and first is None:
            raise ValueError(
                f"{plan.title} reads a network, and no detector has an Encoder; admit, evict, worst_case and collide "
                "of: detector need none"
            )
    device = next(iter(named.values())).device
    sets = {name: as_set(data, name) for name, data in named_outliers.items()}
    job = Job(
        plan=yaml.safe_dump(
            {
                "detectors": {title: detector.spec for title, detector in named.items()},
                "attacks": [plan.model_dump(mode="json") for plan in plans],
                "seed": seed,
                "batch_size": batch_size,
                "precision": precision,
            },
            sort_keys=False,
        ),
        detectors=named,
        encoder=None if first is None else first.at(None),
        features=features,
        inliers=as_set(inliers, "inliers"),
        outliers=sets,
        attacks=plans,
        device=device,
        seed=seed,
        batch_size=batch_size,
        precision=precision,
    )
    return run_job(job, Path(out), resume=resume)


def audit_plan(
    plan: str | Path | Plan,
    *,
    out: str | Path,
    resume: bool = False,
    device: str = "auto",
    trust: bool = False,
    folder: str | Path | None = None,
) -> Results:
    """Run the audit that a plan describes and write a bundle with a report.

    Args:
        plan: a YAML file, or a plan that was read from one.
        out: the bundle's folder; it must not hold another run.
        resume: go on with a run that was killed.
        device: "auto", "cpu", "cuda" or "mps".
        trust: let a model named `module:function` run its code.
        folder: what paths in the plan are relative to; the plan file's own folder by default.

    Raises:
        ValueError: in one line, whatever is wrong with the plan, the model, the data or the folder.
    """
    chosen = pick_device(device)
    if isinstance(plan, Plan):
        read, base = plan, Path(folder or ".")
    else:
        read, base = read_plan(plan), Path(folder or Path(plan).parent)
    refuse_other_runs(Bundle(out), resume=resume)
    return run_job(job_of_plan(read, base, chosen, trust=trust), Path(out), resume=resume)


def run_job(job: Job, out: Path, *, resume: bool) -> Results:
    """Measure what the job asks for and write the bundle."""
    with plainly(really=job.precision == "float32"):
        return measure_and_write(job, Bundle(out), resume=resume)


def measure_and_write(job: Job, bundle: Bundle, *, resume: bool) -> Results:
    """The same at the pace of the block."""
    manifest = with_earlier(
        bundle,
        manifest_of(
            seed=job.seed,
            device=job.device,
            networks={name: hash_of(network) for name, network in job.networks.items()},
            sets=job.sets,
            attacks=job.attacks,
            precision=job.precision,
            prepares=job.prepares,
        ),
    )
    done = carry_out(
        bundle, job.plan, manifest, job.seed, lambda: rehearse(job), lambda work: measure(job, work), resume=resume
    )
    if done is None:
        return bundle.results()
    measured, work = done
    bundle.write_samples(list(sample_rows(job, measured)))
    bundle.write_pictures(measured.pictures)
    rows = rows_of(job, measured)
    bundle.write_results(rows, run_checks(job, measured, rows), with_copies(manifest, job.networks))
    from gatecrash.report import write_report  # slow to import, and needed only here

    write_report(bundle)
    work.clear()
    return bundle.results()
