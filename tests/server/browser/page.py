"""The server's page in Chromium, as tests drive it."""

import json
import os
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

BARS = """
return [...document.querySelectorAll(arguments[0])].map((row) => ({
  data: { ...row.dataset },
  caption: row.querySelector(".caption").textContent,
  number: row.querySelector(".number").textContent,
  share: row.querySelector(".filled").getBoundingClientRect().width / row.querySelector(".track").clientWidth,
}));
"""


class Page:
    """The page in a browser.

    Attributes:
        width: of the viewport, in CSS pixels.
    """

    def __init__(self, driver, url, width, folder):
        self.driver, self.url, self.width, self.folder = driver, url, width, folder
        self._events = []
        driver.get(url)
        # A window of Chromium's is never narrower than 500 pixels, a viewport may be.
        size = {"width": width, "height": 1600 if width < 600 else 1100, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.wait(lambda: self.run("return innerWidth") == width)
        self.wait(lambda: self.get("health").get_attribute("data-state") == "ready")

    def get(self, name):
        """The element of that id."""
        return self.driver.find_element(By.ID, name)

    def find(self, test_id):
        """All elements of that data-testid."""
        return self.driver.find_elements(By.CSS_SELECTOR, f"[data-testid={test_id}]")

    def value(self, name):
        """Return the value of a field."""
        return self.get(name).get_property("value")

    def run(self, script, *arguments):
        """Run JavaScript."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition):
        """Wait for a condition; an error that the page shows ends it."""

        def holds(_):
            assert [error.text for error in self.find("error")] == []
            return condition()

        WebDriverWait(self.driver, 120, 0.05).until(holds)

    def keep(self, name):
        """Keep a picture of what is shown; nothing of it lies beyond the right edge."""
        assert self.driver.save_screenshot(str(self.folder / f"{name}-{self.width}.png"))
        wide, room = self.run("const root = document.documentElement; return [root.scrollWidth, root.clientWidth]")
        assert wide <= room, f"{name}: {wide} pixels wide, and there is room for {room}"

    def generate(self):
        """Press the button. Returns the answer and of every document the tokens cached, and all of them."""

        def runs():
            return len(self.driver.find_elements(By.CSS_SELECTOR, "#runs tbody tr"))

        before = runs()
        self.get("generate").click()
        self.wait(lambda: runs() == before + 1 and self.get("generate-status").text.startswith("ended"))
        hits = []
        for bar in self.run(BARS, "#hits > li"):
            cached, tokens = int(bar["data"]["cached"]), int(bar["data"]["tokens"])
            assert not tokens or bar["share"] == pytest.approx(cached / tokens, abs=0.02)
            assert bar["number"].startswith(f"{cached} of {tokens} token")
            if bar["data"]["name"].isdecimal():
                hits.append((cached, tokens))
        return self.get("output").get_property("textContent"), hits

    def sent(self, path):
        """The bodies of all requests to a path."""
        requests = [event["request"] for event in self.network("Network.requestWillBeSent")]
        return [json.loads(one["postData"]) for one in requests if one["url"].endswith(path)]

    def network(self, method):
        """All events of one kind since the browser was started."""
        self._events += [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"] for event in self._events if event["method"] == method]


@contextmanager
def opened(programs, address, url, width, tmp_path):
    """The page at an address, whose requests all go below `url`."""
    chromium, chromedriver = programs
    folder = Path(os.environ.get("CHUNKATTN_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "headless=new",
        "no-sandbox",  # which refuses to run as root, as in containers
        "disable-dev-shm-usage",  # small in containers
        "disable-gpu",
        "disable-quic",
        "disable-sync",
        "disable-background-networking",
        "disable-component-update",
        "no-first-run",
        "hide-scrollbars",  # as on phones, where they take no room
        "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(chromedriver))
    try:
        made = Page(driver, address, width, folder)
        yield made
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
        sent = [event["request"]["url"] for event in made.network("Network.requestWillBeSent")]
        assert [name for name in sent if "@" in name and re.search("/(v1|inspect|health|page.json)", name)] == []
        urls = [re.sub("//[^/]*@", "//", name) for name in sent]
        assert f"{url}/static/app.js" in urls
        # Others than these ask no host: data:, as the icon is.
        assert [name for name in urls if re.match("(http|ws)s?:", name) and not name.startswith(f"{url}/")] == []
    finally:
        driver.quit()
