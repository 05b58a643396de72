"""The main job: plan → run → bundle → report."""

from gatecrash.audit.collision import Collision, collide_sources
from gatecrash.audit.demo import EXAMPLES, example_plan, example_text, run_demo
from gatecrash.audit.doctor import examine
from gatecrash.audit.main import audit, audit_plan
from gatecrash.audit.plan import BallPlan, ModelPlan, Plan, SourcePlan, parse_plan, plan_text, read_plan

__all__ = [
    "BallPlan",
    "Collision",
    "EXAMPLES",
    "ModelPlan",
    "Plan",
    "SourcePlan",
    "audit",
    "audit_plan",
    "collide_sources",
    "examine",
    "example_plan",
    "example_text",
    "parse_plan",
    "plan_text",
    "read_plan",
    "run_demo",
]
