"""The embedded world model.

Small enough to ship, built like the models whose caches this library packs.
"""

from steadykv.world.config import WorldConfig
from steadykv.world.episodes import Episodes, load_episodes
from steadykv.world.model import WorldModel
from steadykv.world.sampler import rollout
from steadykv.world.weights import load_world

__all__ = ["Episodes", "WorldConfig", "WorldModel", "load_episodes", "load_world", "rollout"]
