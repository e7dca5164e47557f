"""A headless browser with the report in it: what the page shows, logs and requests."""

import json
import shutil
from pathlib import Path

import pytest

OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

COUNT_MARKS = """
return [...document.querySelectorAll('figure[data-plot]')].map((figure) => ({
  plot: figure.dataset.plot,
  marks: figure.querySelectorAll(
    '.scatterlayer path.point, .scatterlayer path.js-line, .heatmaplayer image, ' +
    '.trees svg path, .groups tbody td'
  ).length,
}))
"""


PATIENCE = 500
"""Seconds that the browser may take on a busy machine, less than a test may."""


def start_browser():
    """Start a browser that logs everything; skip the test where none is installed."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs Chromium and chromedriver on the path")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    browser.command_executor.client_config.timeout = PATIENCE
    return browser


def serious_findings(page):
    """What axe-core finds that hinders keyboards and screen readers, if it is serious or critical."""
    import axe_core_python

    page.run((Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    page.driver.set_script_timeout(PATIENCE)
    found = page.driver.execute_async_script(
        "const done = arguments[0]; axe.run().then((results) => done(results.violations))"
    )
    return [
        (rule["id"], node["html"][:200], node["failureSummary"])
        for rule in found
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


class Page:
    """The page that is open in the browser."""

    def __init__(self, driver):
        self.driver = driver
        self.file = None

    def open(self, file, width=1280, dark=False):
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
                     mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.log("browser"), self.log("performance")  # drops the entries of an earlier page
        self.file = file.resolve()
        self.driver.get(self.file.as_uri())
        return self

    def command(self, name, **arguments):
        return self.driver.execute_cdp_cmd(name, arguments)

    def log(self, kind):
        return self.driver.get_log(kind)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def texts(self, selector):
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
        )

    def scroll_to_all(self):
        """Scroll to each figure once, and wait until it is drawn."""
        return self.scroll_to(*self.run("return figures.map((figure) => figure.kind)"))

    def scroll_to(self, *kinds):
        """Scroll to the figures of these kinds, and wait until they are drawn."""
        self.driver.set_script_timeout(PATIENCE)
        script = """
            const [kinds, done] = arguments;
            (async () => {
              for (const figure of figures.filter(({ kind }) => kinds.includes(kind))) {
                figure.element.scrollIntoView();
                while (!figure.isDrawn) await new Promise(requestAnimationFrame);
              }
              done();
            })();
        """
        self.driver.execute_async_script(script, kinds)
        return self

    def wait_for(self, condition):
        """Wait until the JavaScript expression ``condition`` is true: some events are one frame late."""
        self.driver.set_script_timeout(PATIENCE)
        self.driver.execute_async_script(f"""
            const [done] = arguments;
            (async () => {{
              while (!({condition})) await new Promise((resolve) => setTimeout(resolve, 20));
              done();
            }})();
        """)
        return self

    def marks(self):
        """Name of each figure, and how many points, lines, images or branches it has."""
        return [(figure["plot"], figure["marks"]) for figure in self.run(COUNT_MARKS)]

    def console_messages(self):
        """Errors, warnings and other messages in the browser's console."""
        return [entry["message"] for entry in self.log("browser")]

    def requests(self):
        """URLs that the page requested, except for itself and data inside it."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        assert self.file.as_uri() in urls, "the log lacks the page itself"
        return [url for url in urls if url != self.file.as_uri() and not url.startswith("data:")]

    def choose(self, figure, name, value):
        """Set a control of a figure, with the event that a user's input has."""
        self.run(
            """
            const input = document.querySelector(
              `figure[data-plot="${arguments[0]}"] [data-name="${arguments[1]}"] :is(select, input)`
            );
            input.value = arguments[2];
            input.dispatchEvent(new Event('input', { bubbles: true }));
            """,
            figure, name, value,
        )  # fmt: skip
