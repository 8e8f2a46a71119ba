"""Draw the rooms of the package and what imports what, as docs/house.svg.

    python tools/house.py docs/house.svg

Rooms stand on the rooms that they import. An arrow that follows from others is left out.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "cclis"
WIDTH, HEIGHT, GAP, FLOOR, LEFT = 132, 34, 18, 62, 20
TOTAL, COLUMNS = 1000, 3
ABOUT = 11.5

Graph = dict[str, set[str]]


def imports(source: Path = SOURCE) -> Graph:
    """Which room imports which; imports that wait until they are needed count as well."""
    graph: Graph = {}
    for path in sorted(source.rglob("*.py")):
        room = path.relative_to(source).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        found = graph.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module == "cclis":
                names = [f"cclis.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            found |= {name.split(".")[1] for name in names if name.startswith("cclis.")}
    return {room: found & graph.keys() - {room} for room, found in graph.items()}


def floors(graph: Graph) -> list[list[str]]:
    """The rooms, each above all that it imports, from the ground up."""
    level: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in level:
            level[room] = 1 + max((of(other) for other in graph[room]), default=-1)
        return level[room]

    found: list[list[str]] = [[] for _ in range(1 + max(map(of, graph)))]
    for room in sorted(graph):
        found[of(room)].append(room)
    return found


def needed(graph: Graph) -> Graph:
    """The imports that do not follow from others."""
    reached: Graph = {}

    def below(room: str) -> set[str]:
        if room not in reached:
            reached[room] = graph[room].union(*(below(other) for other in graph[room]))
        return reached[room]

    return {
        room: {o for o in others if not any(o in below(via) for via in others - {o})}
        for room, others in graph.items()
    }


def about(room: str, source: Path = SOURCE) -> str:
    """The first sentence of a room's docstring."""
    path = source / room / "__init__.py"
    path = path if path.is_file() else source / f"{room}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = " ".join(text.partition("\n\n")[0].split()).removesuffix(".")
    name, colon, rest = sentence.partition(": ")
    return rest if colon and " " not in name else sentence


def drawing(graph: Graph) -> str:
    """The picture, as SVG."""
    levels = floors(graph)
    height = FLOOR * len(levels) + 2 * GAP
    place = {}
    for number, rooms in enumerate(levels):
        for column, room in enumerate(rooms):
            x = LEFT + column * (WIDTH + GAP)
            place[room] = x, height - GAP - HEIGHT - number * FLOOR
    lines, boxes = [], []
    for room, others in needed(graph).items():
        x, y = place[room]
        for other in sorted(others):
            u, v = place[other]
            lines.append(
                f'<line x1="{x + WIDTH / 2:g}" y1="{y + HEIGHT}" x2="{u + WIDTH / 2:g}" y2="{v}" '
                'stroke="#868e96" marker-end="url(#arrow)"/>'
            )
    for number, rooms in enumerate(levels):
        y = height - GAP - HEIGHT - number * FLOOR
        for room in rooms:
            x = place[room][0]
            boxes.append(
                f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#e7f5ff" '
                'stroke="#1971c2"/>'
                f'<text x="{x + WIDTH / 2:g}" y="{y + 22}" text-anchor="middle" font-size="14" '
                f'font-weight="600">{room}</text>'
            )
        for line, room in enumerate(rooms):
            x = LEFT + COLUMNS * (WIDTH + GAP) + 10
            start = y + HEIGHT / 2 + 4 + 14 * (line - (len(rooms) - 1) / 2)
            name = f"{room}: " if len(rooms) > 1 else ""
            boxes.append(
                f'<text x="{x}" y="{start:g}" font-size="{ABOUT}" fill="#495057">'
                f"{escape(name + about(room))}</text>"
            )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {TOTAL} {height}" '
        'font-family="sans-serif"><defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" '
        'markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="#868e96"/>'
        f'</marker></defs><rect width="{TOTAL}" height="{height}" fill="white"/>'
    )
    return "\n".join([head, *lines, *boxes, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawing(imports()), encoding="utf-8")
