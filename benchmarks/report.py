"""How large the report of the largest benchmark is, and how soon a browser shows it.

    python benchmarks/report.py [--chromium /usr/bin/chromium]

A made-up run of Seq-Tiny-ImageNet's size (10 tasks, 200 classes, five heads, a memory of 500, noise
for images) is rendered and opened, beside a page that plotly itself writes for an empty figure.
Prints JSON: bytes, seconds to render, seconds until loaded and until all is drawn, and the ratio to
plotly's own page.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from cclis.engine.records import Epoch
from cclis.evaluation.accuracy import Accuracies
from cclis.report.page import render
from cclis.runs.records import SCENARIOS, Evaluation, Record, Result, Seconds, summarise

TASKS, EACH, MEMORY, TEST, EPOCHS, SIDE = 10, 20, 500, 1000, 50, 64
HEADS = ("linear", "linear_paper", "discriminant", "means", "prototype")


def made_up() -> tuple[Result, list[Record], dict[str, torch.Tensor]]:
    classes, rng = TASKS * EACH, torch.Generator().manual_seed(0)

    def numbers(count: int) -> list[float]:
        return (100 * torch.rand(count, generator=rng)).tolist()

    rows = [{h: Accuracies(numbers(t), numbers(t)) for h in HEADS} for t in range(1, TASKS + 1)]
    result = Result(
        **{"benchmark": "seq-tinyimagenet", "method": "cclis", "memory": MEMORY, "seed": 0},
        **{"main_head": HEADS[-1], "recipe": None, "changed": {}},
        **{scenario: summarise(rows, scenario) for scenario in SCENARIOS},
        **{"task_sizes": [EACH] * TASKS, "class_names": [f"class {c}" for c in range(classes)]},
        **{"seconds": Seconds(1.0), "images_per_second": 1.0},
        **{"peak_memory_bytes": 0, "device": "none", "versions": {}, "date": "", "config": {}},
    )
    records: list[Record] = []
    for task in range(TASKS):
        for epoch in range(10 * EPOCHS if task == 0 else EPOCHS):
            losses = dict(zip(("contrast", "distill"), numbers(2), strict=True))
            loss = sum(losses.values())
            records.append(Epoch(task, epoch, 20 * (epoch + 1), loss, losses, 0.1, 1.0))
        seen = (task + 1) * EACH
        errors = {kind: numbers(seen) for kind in ("weighted", "unweighted", "random")}
        counts = {"visible": [500] * seen, "kept": [3] * seen, "effective": [2.5] * seen}
        spread = [sorted(numbers(5)) for _ in range(seen)]
        diagnosis = {**counts, "spread": spread, "errors": errors}
        records.append(Evaluation(task, {}, HEADS[-1], 1.0, diagnosis))
    analysis = {
        f"confusion.{head}": torch.randint(9, (classes, classes), generator=rng) for head in HEADS
    }
    for kind, count in (("test", TEST), ("memory", MEMORY)):
        shape = (count, SIDE, SIDE, 3)
        analysis[f"{kind}.images"] = torch.randint(256, shape, generator=rng, dtype=torch.uint8)
        analysis[f"{kind}.labels"] = torch.arange(count) % classes
        analysis[f"{kind}.embeddings"] = torch.randn(count, 128, generator=rng)
    analysis["test.predicted"] = torch.randint(classes, (TEST,), generator=rng)
    analysis["memory.proposal"] = torch.rand(MEMORY, generator=rng)
    analysis["prototypes"] = torch.randn(classes, 128, generator=rng)
    return result, records, analysis


def opened(page: Any, path: Path, drawn: str) -> tuple[float, float]:
    """Seconds until a page is loaded, and until something of it is there."""
    started = time.perf_counter()
    page.goto(path.as_uri())
    loaded = time.perf_counter() - started
    page.wait_for_selector(drawn, state="attached")
    return loaded, time.perf_counter() - started


def main() -> None:
    from playwright.sync_api import sync_playwright
    from plotly.graph_objects import Figure

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    arguments = parser.parse_args()
    started = time.perf_counter()
    text = render(*made_up())
    rendering = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        ours, plain = Path(folder) / "ours.html", Path(folder) / "plain.html"
        ours.write_text(text)
        Figure().write_html(plain, include_plotlyjs=True)
        browser = playwright.chromium.launch(
            executable_path=arguments.chromium, args=["--no-sandbox"]
        )
        times = {"ours": [], "plain": []}
        for _ in range(5):
            for name, path, drawn in (
                ("plain", plain, ".main-svg"),
                ("ours", ours, "body[data-drawn]"),
            ):
                times[name].append(opened(browser.new_page(), path, drawn))
        browser.close()
        sizes = {"ours": ours.stat().st_size, "plain": plain.stat().st_size}
    best = {
        name: [min(column) for column in zip(*found, strict=True)] for name, found in times.items()
    }
    print(
        json.dumps(
            {
                "bytes": sizes["ours"],
                "seconds_to_render": rendering,
                "seconds_until_loaded": best["ours"][0],
                "seconds_until_drawn": best["ours"][1],
                "plotly_alone": {"bytes": sizes["plain"], "seconds_until_loaded": best["plain"][0]},
                "ratio_until_loaded": best["ours"][0] / best["plain"][0],
            }
        )
    )


if __name__ == "__main__":
    main()
