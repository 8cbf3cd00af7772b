"""The README's picture, from a result folder of `steadykv demo`.

One frame of each cache, and below it what differs from BF16.

python docs/images/make_demo_image.py results/demo-... --frame 18
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from steadykv.report.video import decode_mp4

STRENGTH, WIDTH, GAP, CAPTION = 8, 340, 10, 34


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--frame", type=int, default=18)
    arguments = parser.parse_args()
    rows = [
        r
        for r in json.loads((arguments.folder / "metrics.json").read_text())
        if r["method"] != "floor"
    ]
    frames = [decode_mp4(arguments.folder / f"{r['method']}.mp4")[arguments.frame] for r in rows]
    height = round(WIDTH * frames[0].shape[0] / frames[0].shape[1])
    page = Image.new("RGB", (len(rows) * (WIDTH + GAP) - GAP, 2 * height + GAP + CAPTION), "white")
    draw = ImageDraw.Draw(page)
    for i, (row, frame) in enumerate(zip(rows, frames, strict=True)):
        left = i * (WIDTH + GAP)
        difference = np.abs(frame.astype(int) - frames[0].astype(int)) * STRENGTH
        pictures = (frame, difference.clip(0, 255).astype(np.uint8))
        for j, picture in enumerate(pictures):
            tile = Image.fromarray(picture).resize((WIDTH, height), Image.Resampling.LANCZOS)
            page.paste(tile, (left, CAPTION + j * (height + GAP)))
        decibels = "" if i == 0 else f", {row['psnr_by_frame'][arguments.frame]:.1f} dB"
        text = f"{row['method']}: {row['bits_per_element']:.2f} bits{decibels}"
        draw.text((left, 6), text, fill="black", font=ImageFont.load_default(20))
    page.save(Path(__file__).parent / "demo.png", optimize=True)


if __name__ == "__main__":
    main()
