"""Runs to compare: results that lie in folders, grouped by all but the seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cclis.errors import InputError, file_error
from cclis.files import read_json
from cclis.runs.records import Matrix, Result


@dataclass(frozen=True)
class Entry:
    """Runs that differ in nothing but the seed.

    Attributes:
        benchmark: The benchmark they learned.
        memory: How many samples they could keep.
        method: Their method.
        changed: Settings other than in the recipe, as text.
        runs: Their results.
    """

    benchmark: str
    memory: int
    method: str
    changed: str
    runs: list[Result]

    @property
    def name(self) -> str:
        """The method, and what was changed."""
        return f"{self.method} ({self.changed})" if self.changed else self.method

    @property
    def heads(self) -> list[str]:
        """The heads that all runs have, in the order of the first."""
        first, *others = self.runs
        return [head for head in first.class_il if all(head in run.class_il for run in others)]

    @property
    def main_head(self) -> str:
        """The head whose accuracies are drawn and tested."""
        return self.runs[0].main_head

    @property
    def curve(self) -> list[tuple[float, float]]:
        """After each task, the main head's Class-IL accuracy over the tasks so far.

        Mean and standard deviation over seeds.
        """
        so_far = [
            [statistics.mean(_known(row[: t + 1])) for t, row in enumerate(matrix)]
            for matrix in self._matrices
        ]
        return [
            (statistics.mean(v), statistics.stdev(v) if len(v) > 1 else 0.0)
            for v in zip(*so_far, strict=True)
        ]

    @property
    def matrix(self) -> Matrix:
        """Class-IL accuracies of the main head, the mean over seeds."""
        return [
            [
                statistics.mean(_known(values)) if k <= t else None
                for k, values in enumerate(zip(*rows, strict=True))
            ]
            for t, rows in enumerate(zip(*self._matrices, strict=True))
        ]

    @property
    def _matrices(self) -> list[Matrix]:
        return [run.class_il[self.main_head].matrix for run in self.runs]


def read_runs(
    paths: Sequence[Path], warn: Callable[[str], None] = lambda said: None
) -> list[Result]:
    """The results in run directories, in folders of them, in studies, and in summaries.

    Args:
        paths: Where they are.
        warn: Told what is left out, because it has not ended or cannot be read.
    """
    results: list[Result] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"there is no {path}")
        if path.is_file() and path.suffix != ".json" and len(paths) > 1:
            continue  # such as the logs beside the runs of a study
        if path.is_file():
            files = [path]
        elif (path / "result.json").is_file():
            files = [path / "result.json"]
        else:
            files = _results_below(path, warn)
        if not files:
            said = f"{path} holds no finished run: no result.json in it, nor below it"
            if len(paths) == 1:
                raise InputError(said)
            warn(said)
        results += [Result.from_json(read_json(file), file) for file in files]
    if not results:
        raise InputError("none of these holds a finished run: no result.json in them, nor below")
    return results


def _results_below(folder: Path, warn: Callable[[str], None]) -> list[Path]:
    """Summaries in a folder, and results of runs in it or in its folder `runs`."""
    files, runs = list(folder.glob("*.json")), folder / "runs"
    for run in (*folder.iterdir(), *(runs.iterdir() if runs.is_dir() else ())):
        try:
            files += [run / "result.json"] if (run / "result.json").is_file() else []
        except OSError as error:
            warn(f"{file_error(error)}; it is left out")
    return sorted(files)


def entries(results: Sequence[Result]) -> list[Entry]:
    """Runs grouped by all but the seed; the same run given twice counts once.

    Benchmarks of one name that have other classes or tasks are numbered.
    """
    streams: dict[str, list[object]] = {}
    grouped: dict[tuple[str, int, str, str], list[Result]] = {}
    for result in results:
        benchmark = result.benchmark
        stream = (result.class_names, result.task_sizes)
        known = streams.setdefault(benchmark, [])
        if stream not in known:
            known.append(stream)
        if number := known.index(stream):
            benchmark = f"{benchmark} ({number + 1})"
        key = (benchmark, result.memory, result.method, result.variation)
        runs = grouped.setdefault(key, [])
        if result not in runs:
            runs.append(result)
    return [Entry(*key, runs) for key, runs in sorted(grouped.items())]


def groups(compared: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Entries of the same stream and memory, by the name of these."""
    grouped: dict[str, list[Entry]] = {}
    for entry in compared:
        grouped.setdefault(f"{entry.benchmark}, memory {entry.memory}", []).append(entry)
    return grouped


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
