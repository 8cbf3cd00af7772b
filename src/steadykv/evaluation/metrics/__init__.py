"""Metrics of one video against another, on raw uint8 frames (never on a compressed file)."""

from steadykv.evaluation.metrics.psnr import frame_mse, psnr, psnr_by_frame, psnr_from_mse
from steadykv.evaluation.metrics.selection import token_shift
from steadykv.evaluation.metrics.ssim import ssim_by_frame
from steadykv.evaluation.metrics.temporal import flicker_by_step, flicker_error, window_flicker

__all__ = [
    "flicker_by_step",
    "flicker_error",
    "frame_mse",
    "psnr",
    "psnr_by_frame",
    "psnr_from_mse",
    "ssim_by_frame",
    "token_shift",
    "window_flicker",
]
