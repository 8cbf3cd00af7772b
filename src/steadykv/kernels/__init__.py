"""Triton kernels: the same modules as `reference`, the same results within the bounds that the
contracts in `ops` state. The only folder that imports triton.

Kernels are written for CUDA devices from compute capability 8.0; `TRITON_INTERPRET=1` runs them on
a CPU, for tests. Token counts and strides are runtime values, so that a new length compiles
nothing; geometry and format are compiled in. E4M3 is read and written by integer arithmetic, which
needs no FP8 unit.
"""
