"""Contracts of the ops: shapes, dtypes and dispatch. The maths is in `steadykv.reference`."""

from .decode import decode_clustered, decode_grouped, decode_nonuniform
from .dispatch import BACKENDS, OPS, explain, use_backend
from .finite import replace_nonfinite
from .group_quantize import group_dequantize, group_quantize
from .hadamard import hadamard
from .kmeans import (
    assign_centroids,
    centroid_values,
    gather_centroids,
    kmeans,
    quantize_centroids,
)
from .nonuniform import (
    find_outliers,
    fit_levels,
    inlier_range,
    nonuniform_codes,
    nonuniform_dequantize,
)
from .pack import pack, packed_length, unpack
from .precision import full_precision
from .psac import compensate, query_basis
from .qsac import select_centroids
from .query_moment import accumulate_moment, channel_weight, merge_moment

__all__ = [
    "BACKENDS",
    "OPS",
    "accumulate_moment",
    "assign_centroids",
    "centroid_values",
    "channel_weight",
    "compensate",
    "decode_clustered",
    "decode_grouped",
    "decode_nonuniform",
    "explain",
    "find_outliers",
    "fit_levels",
    "full_precision",
    "gather_centroids",
    "group_dequantize",
    "group_quantize",
    "hadamard",
    "inlier_range",
    "kmeans",
    "merge_moment",
    "nonuniform_codes",
    "nonuniform_dequantize",
    "pack",
    "packed_length",
    "quantize_centroids",
    "query_basis",
    "replace_nonfinite",
    "select_centroids",
    "unpack",
    "use_backend",
]
