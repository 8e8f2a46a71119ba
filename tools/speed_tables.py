"""Tables of what was measured of speed, from the summaries that the benchmarks write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cclis.report.formats import markdown

Summary = Mapping[str, Any]
SPEEDS = (
    *("images", "batch", "first task", "of the matrix rate"),
    *("with teacher", "of the matrix rate", "memory"),
)


def speed_table(machines: Sequence[Summary]) -> str:
    """Images a second of training, and what it is made of."""
    lines = []
    for machine in machines:
        lines += [
            f"{machine['device']}, torch {machine['versions']['torch']}, "
            f"{machine['matmul_tflops']:.0f} TFLOP/s in a bf16 matrix product:",
            "",
        ]
        rows = [_speed(f"{row['side']}×{row['side']}", row) for row in machine["training"]]
        on_host = machine.get("images_on_host")
        if on_host:
            rows.append(_speed(f"{on_host['side']}×{on_host['side']}, on the host", on_host))
        lines.append(markdown(SPEEDS, rows).rstrip("\n"))
        if "baseline" in machine:
            plain, ratio = machine["baseline"], machine["ratio_to_baseline"]
            lines += [
                "",
                f"A plain loop on the same machine: {plain['first_task']:,.0f} and "
                f"{plain['with_teacher']:,.0f} images/s; ours is {ratio['first_task']:.1f} and "
                f"{ratio['with_teacher']:.1f} times as fast. Inference: "
                f"{machine['inference']['plain']:,.0f} images/s as they are, "
                f"{machine['inference']['augmented']:,.0f} augmented.",
            ]
        parts = [f"{name} {1e3 * s:.2f} ms" for name, s in machine["parts_seconds"].items()]
        lines += ["", f"Parts of a step alone: {', '.join(parts)}."]
        if "kernels" in machine:
            kinds = machine["kernels"]["milliseconds_by_kind"]
            total = sum(kinds.values())
            shares = sorted(kinds.items(), key=lambda item: -item[1])
            said = [f"{name} {ms:.2f} ms ({100 * ms / total:.0f} %)" for name, ms in shares]
            lines += ["", f"Kernels of a step with the teacher: {'; '.join(said)}."]
        lines.append("")
    return "\n".join(lines)


def compiling_table(machines: Sequence[Summary]) -> str:
    """What ways to compile pointwise kernels cost and give."""
    rows = [
        [
            way["method"],
            way["pointwise"],
            f"{way['first_epoch_seconds']:.1f} s",
            f"{way['images_per_second']:,.0f}",
            machine["device"],
        ]
        for machine in machines
        for way in machine["ways"]
    ]
    header = ("method", "pointwise kernels", "first epoch over after", "images/s then", "device")
    return markdown(header, rows)


def methods_table(machines: Sequence[Summary]) -> str:
    """What learning Seq-CIFAR-10 costs by each method."""
    rows = [
        [
            method,
            f"{cost['run_seconds']:,.0f} s",
            f"{cost['times_er']:.2f}",
            f"{cost['task_seconds'][-1]:,.0f} s",
            f"{cost['task_seconds'][-1] / machine['methods']['er']['task_seconds'][-1]:.2f}",
            f"{cost['images_per_second']:,.0f}",
            machine["device"],
        ]
        for machine in machines
        for method, cost in machine["methods"].items()
    ]
    columns = ("method", "a run", "× ER", "its last task", "× ER", "images/s then", "device")
    return markdown(columns, rows)


def parts_table(machines: Sequence[Summary]) -> str:
    """Batches replayed apart: in one pass through the network, and one after another."""
    rows = [
        [
            f"{machine['parts']} of {machine['batch']} images",
            f"{1e3 * machine['several_seconds']:.2f} ms",
            f"{1e3 * machine['one_pass_seconds']:.2f} ms",
            f"{machine['ratio']:.2f}",
            machine["device"],
        ]
        for machine in machines
    ]
    return markdown(("batches", "one by one", "in one pass", "ratio", "device"), rows)


def sharing_table(machines: Sequence[Summary]) -> str:
    """What several runs make of one GPU together."""
    rows = [
        [
            machine["method"],
            "side by side" if machine["mps"] else "in turns",
            str(row["runs"]),
            f"{row['images_per_second']:,.0f}",
            f"{row['images_per_second'] / machine['rows'][0]['images_per_second']:.2f}",
            machine["device"],
        ]
        for machine in machines
        for row in machine["rows"]
    ]
    columns = ("method", "kernels", "runs", "images/s together", "× the first", "device")
    return markdown(columns, rows)


def _speed(name: str, row: Summary) -> list[str]:
    cells = [name, str(row["batch"])]
    for kind in ("first_task", "with_teacher"):
        share = row.get(f"{kind}_share_of_matmul")
        cells += [f"{row[kind]:,.0f}", "–" if share is None else f"{100 * share:.0f} %"]
    peak = row.get("peak_memory_gib")
    return [*cells, "–" if peak is None else f"{peak:.1f} GiB"]
