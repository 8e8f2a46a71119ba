from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_info, threadpool_limits

from cclis.engine.records import Epoch
from cclis.evaluation.accuracy import Accuracies
from cclis.report.figures import losses
from cclis.report.page import render
from cclis.report.pictures import COLUMNS, sheet
from cclis.report.table import result_tables
from cclis.report.tsne import flattened
from cclis.runs.records import Record, Result, Seconds, summarise
from tests.report import made
from tests.report.pages import Page

HOSTILE = "</script><script>alert('class')</script>"


@pytest.fixture
def result() -> Result:
    rows = [
        {"linear": Accuracies([91.25], [97.5]), "prototype": Accuracies([88.125], [96.0])},
        {
            "linear": Accuracies([71.5, 83.75], [94.0, 95.5]),
            "prototype": Accuracies([76.5, 81.0], [93.25, 94.75]),
        },
    ]
    return made.result(
        benchmark="npz",
        memory=20,
        main_head="prototype",
        class_il=summarise(rows, "class_il"),
        task_il=summarise(rows, "task_il"),
        changed={"epochs": 3},
        task_sizes=[1, 2],
        class_names=[HOSTILE, "cat", "dog & co"],
        seconds=Seconds(12.3, 15.0),
        images_per_second=5000.0,
        peak_memory_bytes=2**30,
        device=HOSTILE,
        versions={"torch": "2"},
        date="2024-01-01T00:00:00Z",
        config={"data": HOSTILE, "epochs": 3},
    )


@pytest.fixture
def records() -> list[Record]:
    def choice(classes: int) -> dict[str, Any]:
        errors = dict.fromkeys(("weighted", "unweighted", "random"), [0.1] * classes)
        spread = [[0.2, 0.5, 1.0, 1.5, 3.0]] * classes
        numbers = {"visible": [9] * classes, "kept": [2] * classes, "effective": [1.5] * classes}
        return {**numbers, "spread": spread, "errors": errors}

    return [
        made.epoch(0, 0, contrast=2.0),
        made.epoch(0, 1, contrast=1.5),
        made.evaluation(0, choice(1)),
        made.epoch(1, 0, contrast=1.0, distill=0.5),
        made.evaluation(1, choice(3)),
    ]


@pytest.fixture
def analysis() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(12) % 3
    embeddings = torch.randn(12, 8, generator=rng)
    images = torch.randint(256, (12, 8, 8, 3), generator=rng, dtype=torch.uint8)
    return {
        "confusion.linear": torch.tensor([[3, 1, 0], [0, 4, 0], [2, 0, 2]]),
        "confusion.prototype": torch.eye(3, dtype=torch.int64) * 4,
        **{"test.images": images, "test.labels": labels, "test.predicted": labels.flip(0)},
        **{"test.embeddings": embeddings, "memory.images": images[:5], "memory.labels": labels[:5]},
        "memory.proposal": torch.tensor([0.1, 0.2, 0.3, 0.9, 0.5]),
        **{"memory.embeddings": embeddings[:5], "prototypes": embeddings[:3]},
    }


def test_the_page_holds_every_number(result: Result) -> None:
    page = Page(render(result))
    shown = {
        (f["choice"]["scenario"], f["choice"]["head"]): f["data"][0]["z"]
        for f in page.figures["matrix"]
    }
    for scenario, title in (("class_il", "Class-IL"), ("task_il", "Task-IL")):
        for name, head in result.scores(scenario).items():
            assert shown[title, name] == head.matrix
            for key in ("accuracy", "forgetting", "backward_transfer"):
                assert f"{getattr(head, key):.2f}" in page.words


def test_every_panel_is_there_with_what_it_shows(
    result: Result, records: list[Record], analysis: dict[str, torch.Tensor]
) -> None:
    figures = Page(render(result, records, analysis)).figures
    assert list(figures) == [
        *("matrix", "curves", "forgetting", "confusion", "losses", "importance", "map")
    ]
    bars = {f["choice"]["head"]: f["data"][0]["y"] for f in figures["forgetting"][:2]}
    assert bars == {"prototype": [88.125 - 76.5], "linear": [91.25 - 71.5]}
    linear = next(f for f in figures["confusion"] if f["choice"]["head"] == "linear")
    assert linear["data"][0]["z"] == [[75, 25, 0], [0, 100, 0], [50, 0, 50]]
    places = figures["map"][0]["data"]
    assert [len(trace["x"]) for trace in places] == [4, 4, 4, 5, 3]
    assert sorted(n for trace in places[:3] for n in trace["customdata"]) == list(range(12))
    names = [figure["choice"]["name"] for figure in figures["importance"]]
    assert names == ["effective sample size", "spread of g", "error of the denominator"]
    assert figures["importance"][0]["data"][0]["z"] == [[0.75, None, None], [0.75] * 3]


def test_beside_the_papers_numbers_stand_those_of_its_protocol(result: Result) -> None:
    def headline(found: Result) -> list[str]:
        cards = render(found).partition('<div class="cards">')[2].partition('<div class="choice">')
        heads = re.findall(r"head (\w+)", cards[0])
        assert len(heads) == 3
        first = re.findall(r"<button[^>]*>(\w+)</button>", cards[2])[0]
        return [*set(heads), *re.findall(r"<b>([\d.]+) %</b>", cards[0]), first]

    assert headline(result) == ["prototype", "78.8", "94.0", "prototype"]
    published = replace(result, benchmark="seq-cifar10", memory=200, changed={})
    assert headline(published) == ["linear", "77.6", "94.8", "linear"]
    words = Page(render(published)).words
    assert "the paper 74.95 (+2.67)" in words


def test_classes_on_the_map_are_told_apart(
    result: Result, analysis: dict[str, torch.Tensor]
) -> None:
    many = replace(result, class_names=[str(n) for n in range(12)], task_sizes=[6, 6])
    labels = torch.arange(12)
    shown = {**analysis, "test.labels": labels, "test.predicted": labels}
    (figure,) = Page(render(many, analysis=shown)).figures["map"]
    markers = [trace["marker"] for trace in figure["data"][:12]]
    colours = [
        torch.tensor([int(marker["color"][n : n + 2], 16) for n in (1, 3, 5)]) / 255
        for marker in markers[:10]
    ]
    assert torch.pdist(torch.stack(colours)).min() > 0.25
    assert len({(marker["color"], marker["symbol"]) for marker in markers}) == 12
    assert figure["layout"]["legend"]["itemsizing"] == "constant"
    assert not any("opacity" in marker for marker in markers)


def test_one_thread_makes_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    made, meanwhile = TSNE.fit_transform, []

    def watched(self: TSNE, points: object) -> object:
        meanwhile.append({library["num_threads"] for library in threadpool_info()})
        return made(self, points)

    monkeypatch.setattr(TSNE, "fit_transform", watched)
    with threadpool_limits(limits=2):
        places = flattened({"test.embeddings": torch.rand(20, 8)})
    assert len(places["test"]) == 20
    assert meanwhile == [{1}]


def test_steps_of_the_loss_go_on_from_task_to_task(records: list[Record]) -> None:
    (figure,) = losses(records)
    assert figure["data"][0]["x"] == [10, 20, 30]
    assert figure["data"][1] == {**figure["data"][1], "name": "distill", "y": [None, None, 0.5]}
    (end,) = figure["layout"]["shapes"]
    assert end["x0"] == 20
    rate = figure["data"][-1]
    assert end["line"].get("dash") != rate["line"]["dash"]


def test_an_epoch_alone_can_be_seen(records: list[Record]) -> None:
    def modes(epochs: list[Epoch]) -> set[str]:
        return {line["mode"] for line in losses(epochs)[0]["data"]}

    epochs = [record for record in records if isinstance(record, Epoch)]
    assert modes(epochs[:1]) == {"lines+markers"}
    assert modes(epochs * 10) == {"lines"}


def test_the_memory_is_shown_the_largest_proposal_first(
    result: Result, analysis: dict[str, torch.Tensor]
) -> None:
    text = render(result, analysis=analysis)
    first = text[text.index('class="kept"') :]
    assert re.findall(r'title="g ([\d.]+)"', first) == ["0.9", "0.1", "0.5", "0.2", "0.3"]


def test_the_map_and_the_memory_count_their_images_alike(
    result: Result, analysis: dict[str, torch.Tensor]
) -> None:
    text = render(result, analysis=analysis)
    kept = next(t for t in Page(text).figures["map"][0]["data"] if t["meta"] == "memory")
    said = [name.split(",")[0].strip("\u200b") for name in kept["text"]]
    # Samples 3 and 0 are of the first class, 4 and 1 of the second, 2 of the third, by proposal.
    assert kept["customdata"] == list(range(5))
    assert [name.startswith("&lt;") for name in said] == [True, True, False, False, False]
    assert said[2:] == ["cat", "cat", "dog &amp; co"]
    order = torch.tensor([3, 0, 4, 1, 2])
    assert sheet(analysis["memory.images"][order]).address in text


def test_names_are_shown_as_text(
    result: Result, records: list[Record], analysis: dict[str, torch.Tensor]
) -> None:
    page = Page(render(result, records, analysis))
    assert page.tags.count("script") == 3
    assert len(page.scripts) == 3
    assert page.words.count(HOSTILE) == 4
    assert "dog & co" in page.words
    assert page.figures["map"][0]["data"][0]["name"].startswith("\u200b&lt;/script&gt;")


@pytest.mark.parametrize("embeddings", [torch.ones(12, 8), torch.rand(12, 1), torch.zeros(12, 8)])
def test_a_representation_that_collapsed_has_a_page(
    result: Result, analysis: dict[str, torch.Tensor], embeddings: torch.Tensor
) -> None:
    parts = {"test": embeddings, "memory": embeddings[:5]}
    collapsed = {f"{kind}.embeddings": part.half() for kind, part in parts.items()}
    collapsed["prototypes"] = embeddings[:3].half()
    figures = Page(render(result, analysis={**analysis, **collapsed})).figures
    assert ("map" in figures) == (embeddings.shape[1] == 1)


def test_names_that_javascript_or_plotly_has_are_rows_of_their_own(
    result: Result, analysis: dict[str, torch.Tensor]
) -> None:
    names = ["__proto__", "%{x}" + "a" * 200, "%{x}" + "a" * 201]
    figures = Page(render(replace(result, class_names=names), analysis=analysis)).figures
    shown = figures["confusion"][0]["data"][0]["x"]
    assert len(set(shown)) == 3
    assert all(len(name) < 40 and name != "__proto__" and "%{" not in name for name in shown)


def test_a_large_memory_is_shown_in_part(result: Result, analysis: dict[str, torch.Tensor]) -> None:
    count = 6000
    rng = torch.Generator().manual_seed(0)
    large = {
        "memory.images": torch.randint(256, (count, 64, 40, 3), generator=rng, dtype=torch.uint8),
        "memory.labels": torch.arange(count) % 3,
        "memory.proposal": torch.rand(count, generator=rng),
        "confusion.linear": torch.randint(100, (3, 3), generator=rng),
    }
    text = render(result, analysis=large)
    assert text.count("<i title=") == 3 * (2000 // 3)
    assert f"and {count // 3 - 2000 // 3} more" in text
    assert len(text) < 10e6
    assert "--ratio: 0.625" in text


def test_a_confusion_of_many_classes_is_no_large_page(result: Result) -> None:
    names = [f"class {number}" for number in range(200)]
    rng = torch.Generator().manual_seed(0)
    counts = torch.randint(9, (200, 200), generator=rng)
    many = replace(result, class_names=names, task_sizes=[100, 100])
    confused = {"confusion.linear": counts, "confusion.prototype": counts}
    assert len(render(many, analysis=confused)) < 6.5e6


def test_what_was_tested_and_when_is_said(
    result: Result, records: list[Record], analysis: dict[str, torch.Tensor]
) -> None:
    validated = replace(result, config={"validation": 0.1})
    assert "10 % of the training samples" in Page(render(validated)).words
    assert "training samples" not in Page(render(result)).words
    at_once = Page(render(replace(result, method="joint", config={})))
    assert "learned at once" in at_once.words
    assert not {"curves", "forgetting"} & at_once.figures.keys()
    # A method that was added since, or is gone, has a page as any other.
    assert "learned at once" not in Page(render(replace(result, method="unheard of"))).words
    # By chance, a class of fewer samples has each with better odds.
    even = {**analysis, "memory.proposal": torch.tensor([0.5, 0.5, 1.0, 0.5, 0.5])}
    del even["prototypes"]
    words = [Page(render(result, analysis=given)).words for given in (analysis, even)]
    for said in ("proposal g", "the memory's samples and the prototypes, flattened"):
        assert [said in shown for shown in words] == [True, False]
    unweighted = replace(result, config={"importance_sampling": False})
    assert "did not do" in Page(render(unweighted, records)).words
    nothing = [made.evaluation(0, {**records[2].diagnosis, "kept": [0]})]
    assert "importance" not in Page(render(result, nothing)).figures


def test_the_page_needs_nothing_from_elsewhere(result: Result) -> None:
    page = Page(render(result))
    assert page.addresses == ["data:,"]
    assert "@import" not in render(result)
    # Beside plotly, which names addresses of maps that are never drawn.
    assert not [script for script in page.scripts if len(script) < 10**6 and "http" in script]


@pytest.mark.parametrize("shape", [(1, 8, 8, 1), (33, 32, 32, 3), (5, 64, 40, 3)])
def test_a_sheet_holds_every_image_in_its_place(shape: tuple[int, int, int, int]) -> None:
    import base64
    import io

    from PIL import Image

    images = torch.randint(256, (shape[0], 1, 1, shape[3])).expand(shape).to(torch.uint8)
    found = sheet(images)
    whole = Image.open(io.BytesIO(base64.b64decode(found.address.split(",")[1])))
    width, height = whole.width // COLUMNS, whole.height // found.rows
    assert max(width, height) <= 32
    for number, image in enumerate(images):
        middle = (number % COLUMNS * width + width // 2, number // COLUMNS * height + height // 2)
        seen = torch.tensor(whole.getpixel(middle)).float()
        assert torch.allclose(seen, image[0, 0].float().squeeze(), atol=24)


def test_the_tables_hold_the_main_heads_matrices(result: Result) -> None:
    out = StringIO()
    Console(file=out, width=120).print(result_tables(result))
    shown = out.getvalue()
    for value in ("88.1", "76.5", "81.0", "93.2", "94.8"):
        assert value in shown
    assert "91.2" not in shown
    assert "77.6" in shown


def test_what_rounds_to_zero_has_no_sign(result: Result) -> None:
    for head, scores in result.class_il.items():
        result.class_il[head] = replace(scores, forgetting=-0.004)
    out = StringIO()
    Console(file=out, width=120).print(result_tables(result))
    cards_and_averages = render(result).partition('<div class="cards">')[2].partition("Confusions")
    for shown in (out.getvalue(), cards_and_averages[0]):
        assert re.search(r"\b0\.0+\b", shown)
        assert not re.search(r"-0\.0+\b", shown)
