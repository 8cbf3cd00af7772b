"""Contracts of the ops: shapes, dtypes and dispatch. The maths is in `steadykv.reference`."""

from .attention import attend, attend_nbytes
from .decode import (
    Decoder,
    clustered_decoder,
    decode_clustered,
    decode_grouped,
    decode_nonuniform,
    grouped_decoder,
)
from .dispatch import BACKENDS, OPS, backend_of, explain, use_backend
from .finite import copy_finite, count_nonfinite, head_rows
from .group_quantize import (
    group_dequantize,
    group_quantize,
    quantize_clustered,
    refine_clustered,
)
from .hadamard import hadamard
from .kmeans import (
    assign_centroids,
    centroid_values,
    cluster_means,
    gather_centroids,
    kmeans,
    quantize_centroids,
    refit_centroids,
    subtract_centroids,
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
from .psac import compensate, compensate_clustered, query_subspace
from .qsac import query_metric, select_centroids
from .query_moment import accumulate_moment, channel_weight, merge_moment

__all__ = [
    "BACKENDS",
    "OPS",
    "Decoder",
    "accumulate_moment",
    "assign_centroids",
    "attend",
    "attend_nbytes",
    "backend_of",
    "centroid_values",
    "channel_weight",
    "cluster_means",
    "clustered_decoder",
    "compensate",
    "compensate_clustered",
    "copy_finite",
    "count_nonfinite",
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
    "grouped_decoder",
    "hadamard",
    "head_rows",
    "inlier_range",
    "kmeans",
    "merge_moment",
    "nonuniform_codes",
    "nonuniform_dequantize",
    "pack",
    "packed_length",
    "quantize_centroids",
    "quantize_clustered",
    "query_metric",
    "query_subspace",
    "refine_clustered",
    "refit_centroids",
    "select_centroids",
    "subtract_centroids",
    "unpack",
    "use_backend",
]
