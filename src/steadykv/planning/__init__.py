"""Will it fit: bytes of a model's cache with each method, and of the rest, against a GPU's memory.

`hosts.json` says how models hold their caches, `gpus.json` what GPUs have; each number with where
it comes from.
"""

from steadykv.planning.planner import MethodPlan, Plan, plan

__all__ = ["MethodPlan", "Plan", "plan"]
