"""Pages and figures: one file without script or network, what is from outside escaped, written whole or not at all."""

from __future__ import annotations

import base64
import os
import re
import stat
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidInput

pytest.importorskip("jinja2", reason="jinja2 is an extra")
pytest.importorskip("matplotlib", reason="matplotlib is an extra")

from octavo.bench import plots, report  # noqa: E402
from octavo.quality import page  # noqa: E402

HOSTILE = '<script>alert(1)</script> & "quotes" $x$ {{ 7 * 7 }} [bold red]'


def estimate(value: float, half: float | None = None) -> dict[str, float | None]:
    return {"value": value, "low": half and value - half, "high": half and value + half}


def results(**changes: Any) -> dict[str, Any]:
    """A demo's results with made-up numbers."""
    side = {
        "perplexity": estimate(12.0, 1.0),
        "change": estimate(0.0125, 0.003),
        "kl": estimate(0.013, 0.001),
        "kl_quantiles": {"p50": 0.007, "p90": 0.02, "p99": 0.1, "max": 1.3},
        "same_top": estimate(0.94, 0.01),
    }
    layer = {"k_rel_err": 0.026, "v_rel_err": 0.027, "k_saturated": 0, "v_saturated": 2, "tokens": 9}
    edges = [10.0 ** (power / 8) for power in range(-56, 9)]
    made = {
        "schema": 1,
        "time": "2026-11-30T00:00:00Z",
        "seconds": 61.2,
        "quick": False,
        "model": {"name": HOSTILE, "source": HOSTILE, "parameters": 134_515_008, "layers": 3, "dtype": "float32"},
        "cache": {
            "kv_dtype": "fp8_e4m3",
            "layout": "leaf",
            "page_size": 64,
            "scale_granularity": "tensor",
            "bytes_per_token": 11520,
            "bytes_per_token_16_bit": 23040,
            "tokens_per_gib": 93206,
            "tokens_per_gib_16_bit": 46603,
        },
        "plan": HOSTILE,
        "plans": [],
        "environment": {"device": "cpu", "octavo": "0.1.0", "cpu": HOSTILE},
        "answers": [
            {
                "prompt": HOSTILE,
                "text_16_bit": f"the same, then {HOSTILE}",
                "text_fp8": "the same, then something else",
                "tokens_16_bit": 9,
                "tokens_fp8": 8,
                "same_tokens": 4,
                "same_characters": len("the same, then "),
            }
        ],
        "text": {
            "source": HOSTILE,
            "names": [HOSTILE],
            "digest": "0" * 16,
            "windows": 8,
            "length": 1024,
            "chunk": 128,
            "tail": 32,
            "scored_tokens": 8184,
        },
        "quality": {
            "sides": {
                "16-bit": {"perplexity": side["perplexity"]},
                "fp8": side,
                "exact": side,
                "stock": {**side, "change": estimate(-0.0001), "perplexity": estimate(12.0)},
            },
            "exact_why_not": None,
            "kl_histogram": {"edges": edges, "counts": [i % 7 for i in range(64)]},
            "kl_by_position": {"tokens_per_mean": 64, "means": [0.01] * 16},
        },
        "layers": [{"layer": index, **layer} for index in range(3)],
        "checks": [
            {"name": "one", "change": 0.0125, "limit": 0.015, "passed": True},
            {"name": "two", "change": 0.002, "limit": 0.001, "passed": False},
            {"name": "three", "change": 0.0, "limit": 0.001, "passed": None},
        ],
    }
    return {**made, **changes}


class Page(HTMLParser):
    """The tags of a page, its images and what it shows."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.images: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_models_words_are_text() -> None:
    html = page.demo_page(results())
    shown = Page(html)
    assert "script" not in shown.tags
    assert "<script" not in html and "onerror" not in html
    assert HOSTILE in shown.text  # as it is: neither run, nor dropped, nor filled in


def test_the_page_needs_nothing_from_elsewhere() -> None:
    shown = Page(page.demo_page(results()))
    assert not {"script", "link", "iframe", "object"} & set(shown.tags) - {"link"}
    links = [value for name, value in shown.attributes if name in ("src", "href")]
    assert links and all(value.startswith("data:") for value in links if value)
    policy = next(value for name, value in shown.attributes if name == "content" and value and "default-src" in value)
    assert "default-src 'none'" in policy


def test_every_figure_is_a_drawing_with_words_for_it() -> None:
    shown = Page(page.demo_page(results()))
    assert len(shown.images) == 6
    for image in shown.images:
        assert image["alt"]
        head, _, data = (image["src"] or "").partition(",")
        assert head == "data:image/svg+xml;base64"
        root = ET.fromstring(base64.b64decode(data))
        assert root.tag.endswith("svg")
    assert shown.text.count("95 %") >= 2  # the captions name their intervals


def test_where_the_answers_part_is_marked() -> None:
    html = page.demo_page(results())
    assert "the same, then <mark>something else</mark>" in html
    assert "the same first 4 of 8 tokens" in html


def test_checks_are_told_as_they_are() -> None:
    shown = Page(page.demo_page(results()))
    for word in ("holds", "does not hold", "too few tokens to judge"):
        assert word in shown.text


def test_a_page_without_exact_side_or_intervals() -> None:
    quality = results()["quality"]
    alone = {"perplexity": estimate(12.0), **{k: quality["sides"]["fp8"][k] for k in ("kl_quantiles",)}}
    alone |= {"change": estimate(0.01), "kl": estimate(0.01), "same_top": estimate(0.9)}
    sides = {"16-bit": {"perplexity": estimate(12.0)}, "fp8": alone}
    html = page.demo_page(
        results(quality={**quality, "sides": sides, "exact_why_not": "not measured here"}, checks=[], quick=True)
    )
    assert "not measured here" in html and "A quick run" in html and "None" not in Page(html).text


def test_a_name_that_is_not_given_is_an_error() -> None:
    import jinja2

    with pytest.raises(jinja2.UndefinedError):
        report.render("demo.html", results=results())


def test_figures_repeat_to_the_byte() -> None:
    rows = [plots.Row("a", 1.0, plots.BLUE, 0.5, 1.5)]
    assert plots.bars(rows, "x") == plots.bars(rows, "x")


@pytest.mark.parametrize("name", ["$\\frac{", "a < b & c", "x_1^2"])
def test_names_in_figures_are_never_read_as_mathematics(name: str) -> None:
    def glyphs(name: str) -> list[int]:
        row = plots.Row(name, 0.1, plots.BLUE)
        figures = (plots.bars([row], name), plots.changes([row], name, 0.2), plots.sizes([row], name))
        return [sum(e.tag.endswith("use") for e in ET.fromstring(svg).iter()) for svg in figures]

    assert glyphs(name) == glyphs("o" * len(name))


@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 5, 0], [1, 2, 3]])
def test_histogram_of_few(counts: list[int]) -> None:
    ET.fromstring(plots.histogram([0.001, 0.01, 0.1, 1.0], counts, plots.ORANGE, "x", {"median": 0.05}))


def test_powers_of_ten() -> None:
    assert [plots.power_of_ten(v) for v in (1e-7, 1.0, 10.0, 0.0)] == ["10⁻⁷", "10⁰", "10¹", ""]


def test_writing_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    report.write(path, "first")
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        report.write(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_is_as_readable_as_other_files(tmp_path: Path) -> None:
    report.write(tmp_path / "page.html", "words")
    (tmp_path / "other").touch()
    assert stat.S_IMODE(os.stat(tmp_path / "page.html").st_mode) == stat.S_IMODE(os.stat(tmp_path / "other").st_mode)


def test_a_place_that_cannot_be_written_is_said_before(tmp_path: Path) -> None:
    report.writable(tmp_path / "page.html")
    with pytest.raises(InvalidInput, match="is a folder"):
        report.writable(tmp_path)
    with pytest.raises(InvalidInput, match="does not"):
        report.writable(tmp_path / "none" / "page.html")


def test_words_for_numbers() -> None:
    assert report.percent(0.0125, sign=True) == "+1.25 %"
    assert report.percent(-0.00001, sign=True) == "0.00 %"
    assert report.count(46603) == "46,603"
    assert report.span(estimate(0.01, 0.005), 100, 1) == "0.5 to 1.5"
    assert report.span(estimate(0.01)) == "–"


def test_every_template_is_in_the_package() -> None:
    for template in report.TEMPLATES.glob("*.html"):
        for name in re.findall(r'{% (?:extends|from) "([^"]+)"', template.read_text()):
            assert (report.TEMPLATES / name).is_file()
