"""How every benchmark writes down what it found."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from cclis.experiment.versions import versions


def write_summary(folder: Path, device: str, found: dict[str, Any], suffix: str = "") -> None:
    """A JSON named after the device, with the versions of what ran there and the date."""
    about = {
        "device": device,
        "versions": versions("cclis"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = "-".join(device.lower().replace(",", "").split())
    (folder / f"{name}{suffix}.json").write_text(json.dumps({**about, **found}, indent=2) + "\n")
