"""A run in its folder: begun, gone on with after a kill, refused where it would mix with another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gatecrash.audit.work import Work
from gatecrash.bundle import Bundle

AT_WORK = "work"
"""The folder, inside a bundle, where pieces are kept until the run is finished."""

MAY_CHANGE = ("device", "precision", "versions")
"""What of a manifest may be another when a run goes on."""

M = TypeVar("M")


def carry_out(
    bundle: Bundle,
    plan: str,
    manifest: Mapping[str, Any],
    seed: int,
    rehearse: Callable[[], None],
    measure: Callable[[Work], M],
    *,
    resume: bool,
) -> tuple[M, Work] | None:
    """What a run measures, and its pieces, to be cleared once all is in the bundle; None where it is finished.

    Args:
        bundle: where it happens.
        plan: the resolved plan, as YAML.
        manifest: hashes and versions.
        seed: of the run.
        rehearse: passes a few images through everything, before anything is written.
        measure: does the work, piece by piece.
        resume: go on with a run that was killed.

    Raises:
        ValueError: the folder holds another run, or what `rehearse` and `measure` raise; then no trace is left unless
            an attack was finished.
    """
    refuse_other_runs(bundle, resume=resume)
    work = Work(bundle.folder / AT_WORK, seed)
    if bundle.exists():
        refuse_another_plan(bundle, plan, manifest)
        if (bundle.folder / "results.json").is_file() and not work.folder.exists():
            return None
        bundle.write_manifest(manifest)
        return measure(work), work
    rehearse()
    bundle.write_manifest(manifest)
    bundle.write_plan(plan)  # last: a run has begun once its plan stands there
    try:
        return measure(work), work
    except ValueError:
        if not work.attacked:  # the user's mistake; nothing is lost by leaving no trace of it
            work.clear()
            bundle.discard()
        raise


def with_earlier(bundle: Bundle, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a run, with the devices, precisions and versions of what was done before it went on with others.

    They stand under "earlier", numbered from "1".
    """
    if not bundle.exists():
        return dict(manifest)
    before = bundle.manifest()
    earlier, last = before.get("earlier", {}), {key: before.get(key) for key in MAY_CHANGE}
    if last != {key: manifest.get(key) for key in MAY_CHANGE}:
        earlier = earlier | {str(len(earlier) + 1): last}
    return dict(manifest) | ({"earlier": earlier} if earlier else {})


def refuse_other_runs(bundle: Bundle, *, resume: bool) -> None:
    """Raises a ValueError when the folder holds something that must not be mixed with this run."""
    folder = bundle.folder
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; --out must name a folder")
    if bundle.exists():
        if not resume:
            raise ValueError(f"{folder} holds another run; choose another --out, or go on with it: --resume")
    elif folder.is_dir() and any(not leftover(path) for path in folder.iterdir()):
        raise ValueError(f"{folder} holds other files and no run; choose an empty or new folder")


def leftover(path: Path) -> bool:
    """Whether a file is what a run that was killed at its very beginning leaves."""
    return path.name == "manifest.json" or path.name.startswith((".manifest.", ".plan."))


def refuse_another_plan(bundle: Bundle, plan: str, manifest: Mapping[str, Any]) -> None:
    """Raises a ValueError when the run that is to go on had another plan, network or data."""
    if bundle.plan_text() != plan:
        raise ValueError(f"{bundle.folder} was begun with another plan, see its plan.yaml; choose another --out")
    before = bundle.manifest()
    for key, noun in (
        ("networks", "other weights"),
        ("data", "other images"),
        ("code_sha256", "another version of gatecrash"),
    ):
        if before.get(key) != manifest[key]:
            raise ValueError(f"{bundle.folder} was begun with {noun}; choose another --out")
