"""Images as one picture that a page carries inside itself."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

COLUMNS = 32
SIDE = 32
"""Largest side of a thumbnail, in pixels."""


@dataclass(frozen=True)
class Sheet:
    """Thumbnails side by side, `COLUMNS` in a row.

    Attributes:
        address: The picture itself, as a data address.
        rows: How many rows it has.
        ratio: Width of a thumbnail over its height.
    """

    address: str
    rows: int
    ratio: float
    columns: int = COLUMNS


def sheet(images: Tensor) -> Sheet:
    """All of some images, uint8 (N, H, W, C) with at least one of them, made smaller if large."""
    count, height, width, channels = images.shape
    scale = min(1.0, SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    rows = -(-count // COLUMNS)
    mode = "L" if channels == 1 else "RGB"
    whole = Image.new(mode, (COLUMNS * size[0], rows * size[1]))
    for number, pixels in enumerate(images.numpy()):
        image = Image.fromarray(np.ascontiguousarray(pixels[..., 0] if channels == 1 else pixels))
        place = (number % COLUMNS * size[0], number // COLUMNS * size[1])
        whole.paste(image if scale == 1 else image.resize(size, Image.Resampling.BOX), place)
    content = io.BytesIO()
    if channels == 1:
        whole.save(content, "PNG", optimize=True)
    else:
        whole.save(content, "JPEG", quality=85)
    kind = "png" if channels == 1 else "jpeg"
    encoded = base64.b64encode(content.getvalue()).decode()
    return Sheet(f"data:image/{kind};base64,{encoded}", rows, size[0] / size[1])
