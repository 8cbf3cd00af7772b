"""Times of the kernels beside what this machine can do, measured in the same run."""

from .run import COLUMNS, METHODS, WORKS, Size, bench, default_size, machine_facts

__all__ = ["COLUMNS", "METHODS", "WORKS", "Size", "bench", "default_size", "machine_facts"]
