"""Plain PyTorch definitions of the ops, one file an op, on any device.

FP32 throughout. Nothing here depends on how many batch rows or threads run: reductions over few
outputs are trees of elementwise additions, and no matrix product spans batch rows (a batched
product may pick its kernel by the batch size): k-means and PSAC multiply one head at a time, the
query moment and decoding all heads of one batch row. So a batch of two is two runs of one, bit for
bit.
"""
