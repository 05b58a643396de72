"""All checks of a finished audit, at a bounded cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from gatecrash.audit.checks.cost import Meter, counting, networks_of, passes_of, spent_by
from gatecrash.audit.checks.evidence import Evidence, Shared
from gatecrash.audit.checks.registry import CHECKS, ORDER, Doubt, sentence, undone
from gatecrash.audit.job import Job
from gatecrash.audit.run import Measured
from gatecrash.bundle import Check, Row
from gatecrash.progress import progress
from gatecrash.speed import plainly

NOT_RUN = "Not run"
"""How the sentence of a check begins that was not made."""

TOO_SMALL = "too costly beside this small audit"
"""Why not, where the check does apply."""


class Size(NamedTuple):
    """How much the checks look at."""

    images: int
    """Inliers, and outliers."""
    planted: int
    """Images that points are planted for."""
    every_ball: bool
    """Whether every ball of an attack that says something is looked at, or the most telling one."""


SIZES = (
    Size(32, 32, True),
    Size(24, 32, True),
    Size(16, 32, True),
    Size(16, 32, False),
    Size(12, 32, False),
    Size(10, 32, False),
    Size(10, 16, False),
    Size(8, 8, False),
)
"""What the checks may look at, the most first."""


def run_checks(job: Job, measured: Measured, rows: Sequence[Row], *, share: float = 0.25) -> list[Check]:
    """Every doubt about a finished audit, and how it came out, in the order of the evaluation page.

    The checks attack a few of the audit's images again, with the networks as they are. They look at as many as keep
    their cost, in images passed through the network, within `share` of what the audit took. Where even the fewest would
    take more, the cheapest checks are made, and the others warn that they were not.

    Args:
        job: what was audited; its detectors fitted.
        measured: what came of it.
        rows: the rows of its results.
        share: the share of the audit's cost that the checks may take.

    Returns:
        A verdict per check; an error inside a check is a failure of it, and is not raised.
    """
    try:
        with counting(networks_of(job.detectors.values(), first_of(job))) as meter, plainly():
            return verdicts(evidence_of(job, measured, rows, share=share, meter=meter))
    except Exception as error:
        return [undone(name, error) for name in ORDER]


def first_of(job: Job) -> Tensor:
    """Two images to see what a score runs, since some networks take one image for no batch."""
    return job.inliers.x[:2].to(job.device)


def evidence_of(
    job: Job, measured: Measured, rows: Sequence[Row], *, share: float = 0.25, meter: Meter | None = None
) -> Evidence:
    """What the checks look at: as many images as they can pay for with a share of the audit's cost."""
    seen = {title: passes_of(detector, first_of(job)) for title, detector in job.detectors.items()}
    passes = {title: max(1, count) for title, count in seen.items()}
    allowance = share * spent_by(job, measured, passes)
    meter = meter or Meter()
    meter.blind = not all(seen.values())
    sizes = [Evidence(job, measured, rows, *size[:2], passes, allowance, size.every_ball, meter) for size in SIZES]
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
    price, before = price_of(evidence, [doubt.name]), evidence.meter.passes
    reason = None
    if doubt.attack != "none" and not evidence.job.attacks:
        reason = "the plan has no attack"
    elif price > evidence.left:
        reason = (
            f"{TOO_SMALL}: it may take {price} network passes, and {max(0, int(evidence.left))} are left of the "
            f"{int(evidence.allowance)} that the checks may take"
        )
    seen = doubt.free(evidence) if reason is not None else None
    if seen is not None:
        return {"name": doubt.name, "status": seen.status, "sentence": sentence(seen.words)}
    if reason is not None:
        return {"name": doubt.name, "status": "warn", "sentence": f"{NOT_RUN}, {reason}."}
    check = doubt(evidence)
    if evidence.meter.blind:
        evidence.meter.passes = before + price
    return check


def not_run(check: Check) -> str | None:
    """Why a check was not made, in a few words; None where it was."""
    start, comma, reason = check["sentence"].partition(", ")
    return reason.partition(":")[0].rstrip(".") if comma and start == NOT_RUN else None


def price_of(evidence: Evidence, names: Sequence[str]) -> int:
    """The most passes that some checks may take together, the attacks that they share counted once."""
    doubts = [CHECKS[name] for name in names]
    if not evidence.job.attacks:
        doubts = [doubt for doubt in doubts if doubt.attack == "none"]
    shared = {doubt.attack for doubt in doubts}
    attacks = sum(evidence.attack_price(kind) for kind in get_args(Shared) if kind in shared)
    return attacks + sum(doubt.price(evidence) for doubt in doubts)
