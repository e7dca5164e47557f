"""A real browser on a page: what it shows, logs and asks for."""

import json
import shutil

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

POINTS = """
return [...document.querySelectorAll('figure[data-plot]')].map((figure) => ({
  plot: figure.dataset.plot,
  marks: figure.querySelectorAll(
    '.scatterlayer path.point, .scatterlayer path.js-line, .heatmaplayer image, .trees svg path'
  ).length,
  width: figure.querySelector('.canvas').getBoundingClientRect().width,
}))
"""


def start():
    """A browser that logs everything; the test is skipped where there is none."""
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
    return webdriver.Chrome(options=options, service=Service(driver))


class Page:
    """One page in the browser."""

    def __init__(self, driver):
        self.driver = driver
        self.file = None

    def open(self, file, width=1280, dark=False):
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
                     mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.log("browser"), self.log("performance")  # what an earlier page left
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

    def see_everything(self):
        """Bring each figure into view once, and wait until it is drawn."""
        return self.see(*self.run("return figures.map((figure) => figure.kind)"))

    def see(self, *kinds):
        """Bring the figures of these kinds into view, and wait until they are drawn."""
        self.driver.set_script_timeout(120)
        script = """
            const [kinds, done] = arguments;
            (async () => {
              for (const figure of figures.filter(({ kind }) => kinds.includes(kind))) {
                figure.element.scrollIntoView();
                while (!figure.drawn) await new Promise(requestAnimationFrame);
              }
              done();
            })();
        """
        self.driver.execute_async_script(script, kinds)
        return self

    def wait_for(self, condition):
        """Wait until ``condition``, a JavaScript expression, holds: some events come with the next frame."""
        self.driver.set_script_timeout(120)
        self.driver.execute_async_script(f"""
            const [done] = arguments;
            (async () => {{
              while (!({condition})) await new Promise((resolve) => setTimeout(resolve, 20));
              done();
            }})();
        """)
        return self

    def marks(self):
        """For each figure how many points, lines, images or branches it has."""
        return [(found["plot"], found["marks"]) for found in self.run(POINTS)]

    def complaints(self):
        """Everything that the console was told; there should be nothing."""
        return [entry["message"] for entry in self.log("browser")]

    def requests(self):
        """Addresses that the page asked for, itself and data inside it aside."""
        sent = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        asked = [e["params"]["request"]["url"] for e in sent if e["method"] == "Network.requestWillBeSent"]
        assert self.file.as_uri() in asked, "the log does not even have the page"
        return [url for url in asked if url != self.file.as_uri() and not url.startswith("data:")]

    def choose(self, figure, name, value):
        """Set a control of a figure as a reader does, by its events."""
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
