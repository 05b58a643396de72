"""All checks of a finished audit, at a bounded cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gatecrash.audit.checks.cost import Meter, counting, networks_of, passes_of, spent_by
from gatecrash.audit.checks.evidence import Evidence
from gatecrash.audit.checks.registry import CHECKS, ORDER, Doubt
from gatecrash.audit.job import Job
from gatecrash.audit.run import Measured
from gatecrash.bundle import Check, Row
from gatecrash.progress import progress

SIZES = ((32, 32), (24, 32), (16, 32), (12, 32), (8, 32), (8, 16), (8, 8))
"""Inliers, and outliers, that the checks may look at, and images that points are planted for."""


def run_checks(job: Job, measured: Measured, rows: Sequence[Row], *, share: float = 0.25) -> list[Check]:
    """Every doubt about a finished audit, and how it came out, in the order of the evaluation page.

    The checks attack a few of the audit's images again. They look at as many as keep their cost, in images passed
    through the network, within `share` of what the audit took. Where even the fewest would take more, the cheapest
    checks are made, and the others warn that they were not.

    Args:
        job: what was audited; its detectors fitted.
        measured: what came of it.
        rows: the rows of its results.
        share: the share of the audit's cost that the checks may take.

    Returns:
        A verdict per check; an error inside a check is a failure of it, and is not raised.
    """
    with counting(networks_of(job.detectors.values())) as meter:
        return verdicts(evidence_of(job, measured, rows, share=share, meter=meter))


def evidence_of(
    job: Job, measured: Measured, rows: Sequence[Row], *, share: float = 0.25, meter: Meter | None = None
) -> Evidence:
    """What the checks look at: as many images as they can pay for with a share of the audit's cost."""
    image = job.inliers.x[:1].to(job.device)
    passes = {title: passes_of(detector, image) for title, detector in job.detectors.items()}
    allowance = share * spent_by(job, measured, passes)
    meter = meter or Meter()
    sizes = [Evidence(job, measured, rows, size, planted, passes, allowance, meter) for size, planted in SIZES]
    return next((evidence for evidence in sizes if price_of(evidence, list(CHECKS)) <= evidence.left), sizes[-1])


def verdicts(evidence: Evidence) -> list[Check]:
    """The verdict of every check, the cheapest made first while there is something left to pay with."""
    made: dict[str, Check] = {}
    waiting = list(CHECKS)
    cuda = [evidence.job.device] if evidence.job.device.type == "cuda" else []
    with progress("checking", len(CHECKS)) as bar, torch.random.fork_rng(devices=cuda):
        while waiting:
            name = min(waiting, key=lambda name: price_of(evidence, [name]))
            waiting.remove(name)
            made[name] = verdict(evidence, CHECKS[name])
            bar.advance(note=name)
    return [made[name] for name in ORDER]


def verdict(evidence: Evidence, doubt: Doubt) -> Check:
    """The verdict of one check, or a warning that it was not made."""
    reason = None
    if doubt.attack != "none" and not evidence.job.attacks:
        reason = "the plan has no attack"
    elif price_of(evidence, [doubt.name]) > evidence.left:
        reason = (
            f"too costly beside this small audit: it may take {price_of(evidence, [doubt.name])} network passes, and "
            f"{max(0, int(evidence.left))} are left of the {int(evidence.allowance)} that the checks may take"
        )
    if reason is not None:
        return {"name": doubt.name, "status": "warn", "sentence": f"Not run, {reason}."}
    return doubt(evidence)


def price_of(evidence: Evidence, names: Sequence[str]) -> int:
    """The most passes that some checks may take together, the attack that they share counted once."""
    doubts = [CHECKS[name] for name in names]
    if not evidence.job.attacks:
        doubts = [doubt for doubt in doubts if doubt.attack == "none"]
    shared = evidence.attack_price if any(doubt.attack == "shared" for doubt in doubts) else 0
    return shared + sum(doubt.price(evidence) for doubt in doubts)
