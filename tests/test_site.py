"""The site of the documents is built without a warning, and its pages open in a browser without a network."""

from pathlib import Path
from typing import Any

import pytest
from processes import python

pytest.importorskip("selenium", reason='needs Selenium: pip install "quorem[dev]"')


ROOT = Path(__file__).parents[1]
REFERENCE = ("schemes", "pipeline", "integrations", "commands")
PAGES = ("index", "tutorial", "results", "benchmarks", "kernels", "ids", *(f"reference/{name}" for name in REFERENCE))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; a link or an anchor that leads nowhere, or a name without a docstring, fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = ("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder)
    python(*command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    return folder


def test_every_public_name_has_an_entry(site: Path) -> None:
    import quorem

    pages = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    names = {f"quorem.{name}" for name in (*quorem.__all__, "Path")}
    names |= {f"quorem.optim.{name}" for name in quorem.optim.__all__}
    missing = sorted(name for name in names if f'id="{name}"' not in pages)
    assert missing == ["quorem.hashing", "quorem.models", "quorem.optim", "quorem.schemes"]  # modules, by their parts


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_open_without_a_network(site: Path, browser: Any, width: int) -> None:
    """Nothing goes over the edge of the page, and the console stays silent."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("browser")
    for page in PAGES:
        browser.get((site / f"{page}.html").as_uri())
        root, body = "document.documentElement", "document.body"
        over = f"return Math.max({root}.scrollWidth, {body}.scrollWidth) - {root}.clientWidth"
        assert (browser.execute_script(over), browser.get_log("browser")) == (0, []), page
