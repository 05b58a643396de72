"""How many steps an attack of a plan takes, and in which precision it may take them."""

from __future__ import annotations

from gatecrash.attacks.worst_case import BUDGETS
from gatecrash.audit.plan import AttackPlan
from gatecrash.search import FINEST, MANY, change_per_pixel


def steps_and_restarts(attack: AttackPlan) -> tuple[int, int]:
    """Steps per run and runs per image; of a suite those of its attack on the score."""
    if attack.name == "worst_case":
        budget = BUDGETS[attack.budget or "standard"]
        return budget.steps, budget.restarts
    return attack.steps, attack.restarts


def is_long(attack: AttackPlan) -> bool:
    """Whether a search takes prepared copies of the networks for it, on a GPU and by default."""
    return steps_and_restarts(attack)[0] >= MANY


def is_wide(attack: AttackPlan, pixels: int) -> bool:
    """Whether half precision tells apart what the attack may do to an image of so many numbers."""
    return change_per_pixel(attack.ball.ball(), pixels) >= FINEST
