"""How far a cache's videos are from BF16's: metrics, token shift, statistics, the comparison.

Nothing is imported here: `metrics` works without the world model, and `comparison` brings it along.
"""
