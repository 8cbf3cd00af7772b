"""Contracts of the ops: shapes, dtypes and dispatch. The maths is in `steadykv.reference`."""

from .decode import decode_clustered, decode_grouped
from .dispatch import BACKENDS, OPS, explain, use_backend
from .feedback_rounding import feedback_factor, feedback_quantize
from .finite import replace_nonfinite
from .group_quantize import group_dequantize, group_quantize
from .kmeans import cluster_means, gather_centroids, kmeans, refit_centroids, subtract_centroids
from .pack import pack, packed_length, unpack
from .precision import full_precision
from .psac import compensate, query_subspace
from .qsac import query_metric, select_centroids
from .query_moment import accumulate_moment, channel_weight, merge_moment

__all__ = [
    "BACKENDS",
    "OPS",
    "accumulate_moment",
    "channel_weight",
    "cluster_means",
    "compensate",
    "decode_clustered",
    "decode_grouped",
    "explain",
    "feedback_factor",
    "feedback_quantize",
    "full_precision",
    "gather_centroids",
    "group_dequantize",
    "group_quantize",
    "kmeans",
    "merge_moment",
    "pack",
    "packed_length",
    "query_metric",
    "query_subspace",
    "refit_centroids",
    "replace_nonfinite",
    "select_centroids",
    "subtract_centroids",
    "unpack",
    "use_backend",
]
