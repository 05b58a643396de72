"""The two doors to a triage: a plan file, and detectors at hand in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from gatecrash.audit.job import as_set, encoders_in
from gatecrash.audit.manifest import manifest_of, pick_device
from gatecrash.audit.plan import read_plan
from gatecrash.audit.running import carry_out, refuse_other_runs, with_earlier
from gatecrash.bundle import Bundle, TriageResults
from gatecrash.data import ImageSet
from gatecrash.detectors import Detector
from gatecrash.detectors.base import own_state
from gatecrash.encoder import Encoder
from gatecrash.features import hash_of_all, network_key
from gatecrash.images import Images
from gatecrash.triage.arguments import (
    check_classifier,
    check_folder,
    check_switches,
    checked_attacks,
    checked_detectors,
    checked_grid,
    checked_outliers,
    whole_numbers,
)
from gatecrash.triage.checks import run_checks
from gatecrash.triage.job import TriageJob, job_of_triage
from gatecrash.triage.plan import Adversary, TriagePlan, check_sets
from gatecrash.triage.rows import Sorted, purified_rows, rows_of, sample_table
from gatecrash.triage.run import measure, rehearse

EXAMPLES = ("demo", "cifar10")


def example_text(name: str) -> str:
    """The text of an example plan."""
    if name not in EXAMPLES:
        raise ValueError(f"there is no example {name!r}; there are {', '.join(EXAMPLES)}")
    return (files("gatecrash.triage") / "examples" / f"{name}.yaml").read_text(encoding="utf-8")


def triage(
    detectors: Detector | Sequence[Detector] | Mapping[str, Detector],
    inliers: Images | ImageSet,
    *,
    out: str | Path,
    classifier: Encoder | None = None,
    outliers: Mapping[str, Images | ImageSet] | None = None,
    held_out: Images | ImageSet | None = None,
    fit: Images | ImageSet | None = None,
    fit_outliers: Images | ImageSet | None = None,
    adversarial: Sequence[Mapping[str, Any]] = (),
    fooled_only: bool = False,
    purify: Mapping[str, Any] | bool | None = None,
    repeats: int = 1,
    folds: int = 5,
    seed: int = 0,
    batch_size: int = 100,
    resume: bool = False,
) -> TriageResults:
    """Ask how well detectors find a classifier's own mistakes, adversarial images and outliers; write a bundle.

    Args:
        detectors: one, several, or several by name; fitted unless `fit` is given.
        inliers: labelled test images.
        out: the bundle's folder; it must not hold another run.
        classifier: whose mistakes are to be found; the network that the detectors read when not given.
        outliers: sets of images that do not belong, by name.
        held_out: labelled validation images: the threshold is chosen on them.
        fit: labelled training images; with them every detector is fitted here, once per repeat where it has a seed.
        fit_outliers: known outliers for detectors with an option that needs them.
        adversarial: attacks on the classifier as in a plan: `{"name": "fgsm", "eps": [2/255, 8/255]}`.
        fooled_only: count only adversarial images that the classifier gets wrong and whose originals it got right.
        purify: the grid of purification as in a plan; True is the paper's.
        repeats: how often detectors with a seed are fitted.
        folds: of the cross-validation that chooses the threshold.
        seed: determines every random number.
        batch_size: images that are attacked together, and saved together.
        resume: go on with a run that was killed.

    Returns:
        The content of `results.json`.

    Raises:
        ValueError: an argument is no such thing, a detector is not fitted, labels are missing, images do not fit, or
            the folder holds another run.
    """
    named = checked_detectors(detectors)
    check_folder(out)
    repeats, folds, seed, batch_size = whole_numbers(repeats=repeats, folds=folds, seed=seed, batch_size=batch_size)
    check_switches(fooled_only=fooled_only, resume=resume)
    check_classifier(classifier)
    attacks, grid, named_outliers = checked_attacks(adversarial), checked_grid(purify), checked_outliers(outliers)
    if repeats > 1 and fit is None:
        raise ValueError("repeats fit the detectors again: give fit, the labelled images they learn from")
    network = (classifier or only_network(named)).at(None)
    check_sets(named_outliers, attacks)
    sets = {name: set_of(data, name) for name, data in named_outliers.items()}
    optional = {"fit": fit, "held_out": held_out, "fit_outliers": fit_outliers}
    known = {name: None if data is None else set_of(data, name) for name, data in optional.items()}
    purified = [] if grid is None else grid.detectors or [title for title, d in named.items() if d.name == "gmm"]
    for title in purified:
        if title not in named:
            raise ValueError(f"purify.detectors: {title!r} is none of {', '.join(named)}")
    if grid is not None and not purified:
        raise ValueError("purify needs a detector of features: name one, or add a GMM to the detectors")
    about = {
        "detectors": {title: detector.spec for title, detector in named.items()},
        "fitted": None if fit is not None else {title: state_hash(detector) for title, detector in named.items()},
        "adversarial": [attack.model_dump(mode="json") for attack in attacks],
        "purify": None if grid is None else grid.model_dump(mode="json"),
        "fooled_only": fooled_only,
        "repeats": repeats,
        "folds": folds,
        "seed": seed,
        "batch_size": batch_size,
    }
    job = TriageJob(
        plan=yaml.safe_dump(about, sort_keys=False),
        detectors=named,
        encoder=network,
        features=None,
        inliers=set_of(inliers, "inliers"),
        outliers=sets,
        adversarial=attacks,
        device=network.device or next(iter(named.values())).device,
        fooled_only=fooled_only,
        purify=grid,
        purified=purified,
        repeats=repeats,
        folds=folds,
        seed=seed,
        batch_size=batch_size,
        **known,
    )
    return run_triage(job, Path(out), resume=resume)


def only_network(detectors: Mapping[str, Detector]) -> Encoder:
    """The one network that detectors read, with its normalisation.

    Raises:
        ValueError: they read none, or several.
    """
    networks = {network_key(part): part for detector in detectors.values() for part in encoders_in(detector)}
    if not networks:
        raise ValueError("no detector has an Encoder, so there is no classifier; give classifier=Encoder(network)")
    if len(networks) > 1:
        raise ValueError(
            f"the detectors read {len(networks)} networks, or one with different mean, std or size; "
            "say which is the classifier: classifier=Encoder(network)"
        )
    return next(iter(networks.values()))


def set_of(data: Images | ImageSet, name: str) -> ImageSet:
    """Any data as one set of images in main memory, where results are kept too."""
    images = as_set(data, name)
    return replace(images, x=images.x.cpu(), y=None if images.y is None else images.y.cpu())


def state_hash(detector: Detector) -> str:
    """The SHA-256 of what a detector was fitted to."""
    return hash_of_all(list(own_state(detector).values()))


def threat_model(adversaries: Sequence[Adversary]) -> dict[str, str]:
    """Goal, knowledge and capability of the attacker, in the words of NIST AI 100-2."""
    balls = list(dict.fromkeys(f"{adversary.ball!r}" for adversary in adversaries))
    return {
        "goal": "integrity: images are classified wrongly",
        "knowledge": "white box: the network is known; the detectors are not looked at",
        "capability": f"query access with pixel changes inside {', '.join(balls)}"
        if balls
        else "none: no attack was run",
    }


def triage_plan(
    plan: str | Path | TriagePlan,
    *,
    out: str | Path,
    resume: bool = False,
    device: str = "auto",
    trust: bool = False,
    folder: str | Path | None = None,
) -> TriageResults:
    """Run the triage that a plan describes and write a bundle with a report.

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
    if isinstance(plan, TriagePlan):
        read, base = plan, Path(folder or ".")
    else:
        read, base = read_plan(plan, TriagePlan), Path(folder or Path(plan).parent)
    refuse_other_runs(Bundle(out), resume=resume)
    return run_triage(job_of_triage(read, base, chosen, trust=trust), Path(out), resume=resume)


def run_triage(job: TriageJob, out: Path, *, resume: bool) -> TriageResults:
    """Measure what the job asks for and write the bundle."""
    bundle = Bundle(out)
    manifest = manifest_of(
        seed=job.seed, device=job.device, networks=job.networks, sets=job.sets, attacks=(), precision="float32"
    )
    manifest = with_earlier(bundle, manifest | {"threat_model": threat_model(job.adversaries)})
    done = carry_out(
        bundle, job.plan, manifest, job.seed, lambda: rehearse(job), lambda work: measure(job, work), resume=resume
    )
    if done is None:
        return bundle.triage()
    findings, work = done
    groups = Sorted(job, findings)
    bundle.write_samples(sample_table(job, findings))
    bundle.write_triage(
        {
            "schema": 1,
            "kind": "triage",
            "accuracy": {name: groups.accuracy(name) for name in findings.predictions if name not in job.outliers},
            "rows": rows_of(job, findings),
            "purified": purified_rows(job, findings),
            "checks": run_checks(job, findings),
            "manifest": manifest,
        }
    )
    from gatecrash.report import write_triage_report  # slow to import, and needed only at the end

    write_triage_report(bundle)
    work.clear()
    return bundle.triage()
