"""Numbers and tables as text: Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence

Table = list[list[str]]


def spread(values: Sequence[float], *, digits: int = 2, sign: bool = False) -> str:
    """Mean ± standard deviation, or the one number there is."""
    mean = f"{statistics.mean(values):{'+' if sign else ''}z.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def number_columns(scores: Sequence[tuple[str, str]]) -> list[str]:
    """What `numbers` gives for each score."""
    parts = ("", "_deviation", "_paper")
    return [f"{scenario}_{key}{part}" for scenario, key in scores for part in parts]


def numbers(values: Sequence[float], paper: Sequence[float] | None) -> list[str]:
    """Mean, standard deviation and the paper's mean; empty where there is none."""
    return [
        str(statistics.mean(values)) if values else "",
        str(statistics.stdev(values)) if len(values) > 1 else "",
        "" if paper is None else str(paper[0]),
    ]


def markdown(header: Sequence[str], rows: Table) -> str:
    """A Markdown table."""
    lines = [list(header), ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(_md, row))} |\n" for row in lines)


def _md(text: str) -> str:
    """Text that stays in its cell and is no tag."""
    return text.replace("|", r"\|").replace("<", "&lt;")


def comma_separated(header: Sequence[str], rows: Table) -> str:
    """A CSV table."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()


def latex(header: Sequence[str], rows: Table) -> str:
    """A LaTeX table, for the package booktabs."""
    lines = [" & ".join(map(_tex, row)) + r" \\" for row in (header, *rows)]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{'l' * len(header)}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


TEX = {
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"±": r"$\pm$", "–": "--", "λ": r"$\lambda$", "×": r"$\times$"},
}


def _tex(text: str) -> str:
    return "".join(TEX.get(sign, sign) for sign in text)
