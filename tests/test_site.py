"""The site builds without a warning, needs no network, and a browser draws its formulas."""

import re
from pathlib import Path

import pytest
from browser import Page, serious_findings, start_browser

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow
FORMULAS = {"gates": 11, "local_search": 2, "mixtures": 2, "monitor": 1, "parallel": 1, "hf": 1}
"""Pages of the API, and how many formulas each has at least."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    from sphinx.cmd.build import main

    folder = tmp_path_factory.mktemp("site")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-b", "html", "-d", str(folder / "doctrees")]
    assert main([*options, str(ROOT / "docs"), str(folder / "html")]) == 0
    return folder / "html"


def test_no_page_loads_a_script_a_style_a_font_or_a_picture_from_elsewhere(site):
    loads = re.compile(
        r"<(?:script|img|source|iframe)[^>]*\ssrc(?:set)?=\"([^\"]+)|<link[^>]*\shref=\"([^\"]+)"
    )
    for page in site.rglob("*.html"):
        for found in loads.finditer(page.read_text(encoding="utf-8")):
            target = found[1] or found[2]
            assert "//" not in target or target.startswith("data:"), f"{page.name}: {target}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:", style.read_text(encoding="utf-8")), style.name


def test_links_between_pages_lead_somewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"<a [^>]*href=\"([^\"#:]+\.html)(?:#[^\"]*)?\"", text):
            assert (page.parent / target).exists(), f"{page.relative_to(site)}: {target}"


def test_formulas_are_drawn_offline_and_pages_are_accessible(site):
    driver = start_browser()
    try:
        page = Page(driver)
        for name, formulas in FORMULAS.items():
            page.open(site / "api" / f"{name}.html", width=360 if name == "local_search" else 1280)
            heights = page.run(
                "return [...document.querySelectorAll('div.math math')]"
                ".map((formula) => formula.getBoundingClientRect().height)"
            )
            assert len(heights) >= formulas, name
            assert all(height > 20 for height in heights), (
                heights
            )  # fractions and sums are taller than a line
            assert serious_findings(page) == [], name
        page.open(site / "api" / "gates.html")
        assert [url for url in page.requests() if not url.startswith("file:")] == []
        assert serious_findings(page) == []
        for dark in (False, True):
            page.open(site / "index.html", width=360, dark=dark)
            assert page.run("return document.documentElement.scrollWidth") == 360
            assert serious_findings(page) == []
        assert page.console_messages() == []
    finally:
        driver.quit()


def test_every_study_has_the_page_of_its_report(site):
    results = ROOT / "docs" / "results"
    studies = {path.relative_to(results).parts[0] for path in results.rglob("study.json")}
    assert studies
    for name in studies:
        page = (site / "results" / name / "README.html").read_text(encoding="utf-8")
        assert 'href="report.html"' in page
        assert "plotly" in (site / "results" / name / "report.html").read_text(encoding="utf-8")


def test_every_audit_has_its_page(site):
    folder = site / "results" / "audit"
    page = (folder / "README.html").read_text(encoding="utf-8")
    names = [path.stem for path in (ROOT / "docs" / "results" / "audit").glob("*.json")]
    assert names
    for name in names:
        assert f'href="{name}.html"' in page
        assert "What the routes are worth" in (folder / f"{name}.html").read_text(encoding="utf-8")
