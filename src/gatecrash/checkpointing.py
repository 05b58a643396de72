"""Less memory for a gradient: blocks of a network forget what they computed, and compute it again on the way back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from gatecrash.taps import evaluating


def blocks_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """The longest chain of blocks of one class, as transformers have them: a sequence or list of modules in the model.

    Raises:
        ValueError: there is no such chain of two blocks or more.
    """
    chains = [tuple(part.children()) for part in model.modules() if isinstance(part, nn.Sequential | nn.ModuleList)]
    alike = [chain for chain in chains if len(chain) > 1 and len({type(block) for block in chain}) == 1]
    if not alike:
        raise ValueError(
            f"checkpointing needs a chain of blocks of one class, as transformers have; {type(model).__name__} has none"
        )
    return max(alike, key=len)


@contextmanager
def checkpointed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block these modules, in eval mode, store their inputs only; the modules are the same afterwards."""
    own = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        vars(block)["forward"] = _forgetful(block)
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del vars(block)["forward"]
            if forward is not None:
                vars(block)["forward"] = forward


def _forgetful(block: nn.Module) -> Any:
    """The block's forward, computed again when a gradient asks for what it did not store."""
    forward = block.forward

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        # On the way back its owner may have the block in training mode again.
        return nullcontext(), evaluating(block)

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run
