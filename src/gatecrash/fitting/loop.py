"""The fit loop: everything that trains a network runs here, on one device or many, and resumes where it was killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gatecrash.fitting.average import RunningMean
from gatecrash.fitting.batches import Batches
from gatecrash.fitting.checkpoint import (
    History,
    optimiser_tensors,
    read_checkpoint,
    restore_optimiser,
    write_checkpoint,
    write_log,
)
from gatecrash.fitting.devices import agree, make_fabric
from gatecrash.fitting.logs import event_log
from gatecrash.fitting.material import Material
from gatecrash.fitting.recipe import Recipe, optimiser_for
from gatecrash.fitting.seeds import seed_of, seeded
from gatecrash.fitting.step import Batch, Step, settings_of
from gatecrash.fitting.watch import NotFinite, Watch
from gatecrash.progress import progress
from gatecrash.taps import evaluating

if TYPE_CHECKING:
    from lightning.fabric import Fabric

LOOK_EVERY = 20
"""Batches from one look at the loss to the next where a look makes a device wait; a CPU looks at every batch."""


def fit(
    model: nn.Module,
    step: Step,
    material: Material,
    recipe: Recipe,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    fabric: Fabric | None = None,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    title: str = "training",
) -> History:
    """Train a network in place; what came of every epoch.

    On one CPU with one number of threads the seed determines every weight, bit for bit, also when the run was killed
    and resumed; no global random state changes. Several processes (torchrun) share every batch, and their gradients are
    averaged as those of one; batch norms, however, use the statistics of each process's own share, so that two
    processes make the network of one only where it has none. Every parameter must then have a part in the loss.

    Args:
        model: images in [0, 1] → logits, so with its normalisation inside. Trained in place, in training mode;
            afterwards in eval mode, with the running mean of its weights where the recipe asks for that.
        step: what is learnt from a batch.
        material: what is learnt from.
        recipe: how.
        folder: where checkpoint and logs go: `checkpoint.json`, the `checkpoint-EPOCH.safetensors` that it names,
            `epochs.csv`, and `events/` for TensorBoard.
        resume: go on from the checkpoint in the folder, where there is one.
        fabric: devices and processes; `make_fabric` by default. `disband` it when several processes are done.
        evaluate: called after every epoch, in every process, with the network in eval mode and with the weights that
            would be kept; its numbers join the log.
        title: what the progress bar calls the run.

    Raises:
        ValueError: the loss is not finite; it names epoch and batch, and the last good checkpoint is kept. The
            checkpoint is damaged, or of a run with other settings. The network has nothing to train.
    """
    optimiser = optimiser_for(model, recipe)
    fabric = fabric or make_fabric(recipe.precision, next(model.parameters()).device)
    trainer = _Trainer(
        model, optimiser, step, material, recipe, fabric, None if folder is None else Path(folder), title
    )
    if resume:
        trainer.resume()
    return trainer.run(evaluate)


class _Trainer:
    """One run of the loop."""

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        step: Step,
        material: Material,
        recipe: Recipe,
        fabric: Fabric,
        folder: Path | None,
        title: str,
    ) -> None:
        self.model, self.step, self.material, self.recipe, self.fabric = model, step, material, recipe, fabric
        self.folder, self.optimiser, self.title = folder, optimiser, title
        self.batches = Batches(material, recipe, fabric.device, fabric.global_rank, fabric.world_size)
        if fabric.device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # a step on a DenseNet in bf16 takes 94 instead of 161 ms
        self.wrapped, self.wrapped_optimiser = fabric.setup(model, optimiser)
        self.done = 0
        self.history: History = []
        self.mean = RunningMean(model, recipe.ema)
        self.finite = [name for name, buffer in model.named_buffers() if finite(buffer)]
        """The buffers that are to stay so; a mask may have −∞ in it."""

    def run(self, evaluate: Callable[[nn.Module], Mapping[str, float]] | None) -> History:
        """All epochs that are left."""
        recipe, total = self.recipe, self.recipe.epochs * self.batches.count
        events = self.folder / "events" if self.folder is not None and self.fabric.is_global_zero else None
        try:
            with progress(self.title, total) as bar, torch.enable_grad(), event_log(events, self.history) as log:
                bar.advance(self.done * self.batches.count)
                for epoch in range(self.done, recipe.epochs):
                    with seeded(seed_of(recipe.seed, "epoch", epoch, self.fabric.global_rank), self.fabric.device):
                        facts = self._epoch(epoch, total, bar.advance)
                    agree([*self.model.buffers(), *self.mean.tensors.values()])
                    facts |= self._evaluated(evaluate)
                    self.history.append({"epoch": epoch + 1, **facts})
                    self.done = epoch + 1
                    self._save()
                    log(self.history[-1])
        finally:
            self.optimiser.zero_grad()
            self.model.eval()
        self.mean.keep()
        return self.history

    def _epoch(self, epoch: int, total: int, advance: Callable[..., None]) -> dict[str, float]:
        self.model.train()
        self.step.begin_epoch(epoch, self.recipe.epochs)
        kept = f"; the checkpoint of epoch {epoch} is kept" if epoch and self.folder is not None else ""
        watch = Watch(epoch, 1 if self.fabric.device.type == "cpu" else LOOK_EVERY, kept)
        for number, batch in enumerate(self.batches.of(epoch)):
            for group in self.optimiser.param_groups:
                group["lr"] = self.recipe.rate(epoch * self.batches.count + number, total)
            try:
                self._learn(number, batch, watch)
            except NotFinite:
                raise
            except Exception:
                self._check(watch, number, batch)  # where an earlier batch broke the network, that is what must be said
                raise
            advance(note=f"{epoch + 1}/{self.recipe.epochs} {watch.note}")
        self._check(watch, self.batches.count, batch)
        return self._averaged(watch)

    def _learn(self, number: int, batch: Batch, watch: Watch) -> None:
        """One step; nothing in it waits for the device, save where the watch looks."""
        # Without the cache: it would hold weights that were cast without a gradient, or before a GAN's step.
        half = self.recipe.precision == "bf16"
        with torch.autocast(self.fabric.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            outcome = self.step(self.wrapped, batch)
        watch.add(number, len(batch.x), outcome)
        self.wrapped_optimiser.zero_grad()
        self.fabric.backward(outcome.loss * (len(batch.x) * self.fabric.world_size / self.batches.size(number)))
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        length = get_total_norm(gradients)
        watch.add_gradient(number, length)
        if self.recipe.clip is not None:
            clip_grads_with_norm_(self.model.parameters(), self.recipe.clip, length)
        self.wrapped_optimiser.step()
        self.mean.follow()

    def _check(self, watch: Watch, number: int, batch: Batch) -> None:
        """Raises NotFinite when a loss or gradient was not finite so far, or the network is not before batch `number`.

        What it gives is looked at in eval mode too: there it may overflow while every number of training is finite.
        """
        watch.look()
        buffers = dict(self.model.named_buffers())
        if not all(map(finite, [*self.model.parameters(), *(buffers[name] for name in self.finite)])):
            raise NotFinite(watch.after("a weight is no longer finite", number))
        if not self._is_sound(batch.x):
            raise NotFinite(watch.after("the network's output is no longer finite", number))

    def _is_sound(self, x: Tensor) -> bool:
        """Whether the network gives finite numbers in eval mode, or takes something else than the images."""
        try:
            with torch.no_grad(), evaluating(self.model):
                output = self.model(x)
        except Exception:
            return True
        return all(finite(part) for part in (output if isinstance(output, tuple) else (output,)))

    def _averaged(self, watch: Watch) -> dict[str, float]:
        """Means over all images of all processes; nothing where there was no image for one."""
        if self.fabric.world_size > 1:
            watch.sums, watch.counts = self.fabric.all_reduce((watch.sums, watch.counts), reduce_op="sum")
        return {name: float(value) for name, value in watch.means.items() if float(watch.counts[name])}

    def _evaluated(self, evaluate: Callable[[nn.Module], Mapping[str, float]] | None) -> dict[str, float]:
        if evaluate is None:
            return {}
        self.model.eval()
        with torch.no_grad(), self.mean.shown():
            return dict(evaluate(self.model))

    def _save(self) -> None:
        """Checkpoint and logs, written by the first process; the state stands last, so a kill leaves the old one."""
        if self.folder is not None:
            parts = {
                "model": self.model.state_dict(),
                "mean": self.mean.tensors,
                "step": self.step.state(),
                "optimiser": optimiser_tensors(self.optimiser),
            }
            tensors = {f"{part}/{name}": tensor for part, held in parts.items() for name, tensor in held.items()}
            if self.fabric.is_global_zero:
                state = {"epoch": self.done, "settings": self._settings()}
                write_checkpoint(self.folder, tensors, state, self.history)
        self.fabric.barrier()

    def _settings(self) -> dict[str, Any]:
        """What a run must have been begun with to be resumed by this one."""
        return {
            "recipe": asdict(self.recipe),
            "step": settings_of(self.step),
            "material": self.material.settings,
        }

    def resume(self) -> None:
        """Take the state back from the folder's checkpoint, where there is one.

        Raises:
            ValueError: it is damaged, or of other settings or another network.
        """
        found = None if self.folder is None else read_checkpoint(self.folder)
        if found is None:
            return
        tensors, state = found
        other = differences(state["settings"], json.loads(json.dumps(self._settings())))
        if other:
            raise ValueError(f"{self.folder} was begun with other settings, {other}; choose another folder")

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        try:
            self.model.load_state_dict(part("model/"))
            self.mean.restore(part("mean/"))
            self.step.restore(part("step/"))
            restore_optimiser(self.optimiser, part("optimiser/"))
        except (RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"the checkpoint in {self.folder} does not fit this network: {reason}") from error
        self.done, self.history = state["epoch"], state["history"]
        if self.folder is not None and self.fabric.is_global_zero:
            write_log(self.folder / "epochs.csv", self.history)  # the kill may have come before it was written


def finite(tensor: object) -> bool:
    """Whether there is no NaN and no infinity in a tensor; anything else is taken for it."""
    return not isinstance(tensor, Tensor) or bool(tensor.isfinite().all())


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The names of the settings that are not the same."""
    return ", ".join(
        f"{part}.{name}"
        for part in here
        for name in sorted({*here[part], *there.get(part, {})})
        if here[part].get(name) != there.get(part, {}).get(name)
    )
