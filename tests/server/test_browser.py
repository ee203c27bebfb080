"""The page as people use it: in Chromium, wide and narrow, on a real server and with no other host in reach."""

import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from chunkattn.models.loader import DEMO_FOLDER, load_tokenizer
from chunkattn.parsers import PromptParser
from chunkattn.server.protocol.decide import state_text
from tests.server_helpers import SMALL, ServerProcess

pytestmark = pytest.mark.browser

SEPARATOR = " # # "
NO_RATE = "\N{EN DASH}"
MARGIN = 30  # CSS pixels that the picture of the mask leaves to captions, at the left and at the top

# Each width has its own people, so that neither finds documents of the other in the cache.
STORIES = {
    1400: (
        ["Zenuso works as a baker. Zenuso lives in Kirora.", "Lezudo has a house in Pegelu. Lezudo likes honey."],
        "Where does Lezudo live? Answer:",
    ),
    390: (["Nila lives in Tunise. Nila likes figs.", "Rumi is a poet. Rumi likes tea."], "Where does Nila live? Answer:"),
}

PARTS = """
return [...document.querySelectorAll("[data-testid=part]")].map((part) => ({
  name: part.dataset.name,
  color: getComputedStyle(part).borderLeftColor,
  chips: [...part.querySelectorAll("[data-testid=chip]")].map((chip) => ({
    title: chip.title,
    text: chip.querySelector(".text").textContent,
    position: chip.querySelector(".position").textContent,
  })),
}));
"""

# Of a copy that is made to be read: Chromium complains about reading the page's own canvas.
CELLS = """
const mask = document.getElementById("mask"), copy = document.createElement("canvas");
const side = (copy.width = copy.height = mask.width);
const context = copy.getContext("2d", { willReadFrequently: true });
context.drawImage(mask, 0, 0);
const { data } = context.getImageData(0, 0, side, side);
const [size, margin] = arguments, plot = side / devicePixelRatio - margin;
const middle = (index) => Math.floor((margin + ((index + 0.5) / size) * plot) * devicePixelRatio);
const pixel = (row, column) => [...data.slice(4 * (row * side + column), 4 * (row * side + column) + 4)];
const all = [...Array(size).keys()];
return all.map((i) => all.map((k) => pixel(middle(i), middle(k))));
"""

BARS = """
return [...document.querySelectorAll(arguments[0])].map((row) => ({
  data: { ...row.dataset },
  caption: row.querySelector(".caption").textContent,
  number: row.querySelector(".number").textContent,
  share: row.querySelector(".filled").getBoundingClientRect().width / row.querySelector(".track").clientWidth,
}));
"""

KEEP_ANSWER = """
const { fetch } = window;
window.fetch = async (...request) => {
  const response = await fetch(...request);
  if (response.url.endsWith("/v1/completions")) window.answer = response.clone().text();
  return response;
};
"""


REFUSE = """
document.querySelectorAll("[data-testid=remove-question]")[2].click();
const answers = [
  { type: "refusal", name: null, label_mass: 0.00123 },
  { type: "predicate", name: null, probability: 0.5, label_mass: 0.1 },
];
const usage = { input_tokens: 9, computed_tokens: 9, input_tokens_details: { cached_tokens: 0 } };
window.fetch = async () => new Response(JSON.stringify({ model: "demo", method: "letters", answers, usage }));
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
        """What stands in a field."""
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
            assert bar["share"] == pytest.approx(cached / tokens, abs=0.02)
            assert bar["number"].startswith(f"{cached} of {tokens} token")
            if bar["data"]["name"].isdecimal():
                hits.append((cached, tokens))
        return self.get("output").get_property("textContent"), hits

    def network(self, method):
        """All events of one kind since the browser was started."""
        self._events += [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"] for event in self._events if event["method"] == method]


@pytest.fixture(scope="module")
def programs():
    """Chromium and its driver."""
    found = []
    for name, variable in (("chromium", "CHROMIUM"), ("chromedriver", "CHROMEDRIVER")):
        path = shutil.which(os.environ.get(variable) or name)
        if path is None:
            text = f"{name} is missing: install Debian's packages chromium and chromium-driver, or set {variable} to its path"
            pytest.fail(text, pytrace=False)
        found.append(path)
    return found


@pytest.fixture(scope="module")
def server(programs):
    made = ServerProcess(*SMALL)
    yield made
    assert made.close() == 0


@pytest.fixture(scope="module")
def instruct(programs):
    """The demo model as a checkpoint of a folder, which the page takes for an instruct model."""
    made = ServerProcess(str(DEMO_FOLDER), *SMALL, "--root-path=/llm", CHUNKATTN_API_KEY="the-key")
    yield made
    assert made.close() == 0


@pytest.fixture(params=[1400, 390], ids="{}px".format)
def page(request, programs, server, tmp_path):
    with opened(programs, server.url, server.url, request.param, tmp_path) as made:
        yield made


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


def test_inspect(page, server):
    text = page.value("prompt-text")
    page.get("inspect").send_keys(Keys.ENTER)  # a mouse might come to rest on the picture, and point at a cell
    page.wait(lambda: page.find("part"))
    page.keep("inspect")
    shown = page.run(PARTS)
    chips = [chip for part in shown for chip in part["chips"]]
    titles = [re.fullmatch(r"token (\d+), id (\d+), position (\d+), text (.*)", chip["title"]).groups() for chip in chips]
    tokens = [{"id": int(i), "text": json.loads(t), "position": int(p)} for _, i, p, t in titles]

    with server.client() as http:
        told = http.post("/inspect", json={"prompt": text, "chunk_aware": True}).json()
    assert [part["name"] for part in shown] == [part["name"] for part in told["parts"]]
    assert tokens == [token for part in told["parts"] for token in part["tokens"]]
    assert [chip["text"].replace("·", " ") for chip in chips] == [token["text"] for token in tokens]
    assert [chip["position"] for chip in chips] == [str(token["position"]) for token in tokens]

    parser = PromptParser(load_tokenizer(str(DEMO_FOLDER)), separator=SEPARATOR, strategy="shared", chunk_aware=True)
    layout = parser.parse(text).layout
    assert layout.num_chunks > 1
    assert [part["name"] for part in shown] == [segment.name for segment in layout.segments]
    assert [int(index) for index, *_ in titles] == [*range(len(layout))]
    assert [token["id"] for token in tokens] == layout.token_ids.tolist()
    assert [token["position"] for token in tokens] == layout.positions.tolist()
    for segment, words in zip(layout.segments, text.split(SEPARATOR), strict=True):
        assert "".join(token["text"] for token in tokens[segment.start : segment.end]).strip() == words.strip()
    summary = f"{len(layout)} tokens in {len(shown)} parts ({layout.num_chunks} documents)"
    assert page.get("inspect-summary").text == f"{summary}; highest position id {layout.max_position}"

    # The picture, at the middle of every cell: what is seen has the colour of its part, what is not is left out.
    cells = np.array(page.run(CELLS, len(layout), MARGIN))
    assert ((cells[..., 3] > 128) == layout.visible()).all()
    colors = [[int(number) for number in re.findall(r"\d+", part["color"])] for part in shown]
    assert len({*map(tuple, colors)}) == len(shown)
    for segment, color in zip(layout.segments, colors, strict=True):
        assert (cells[-1, segment.start : segment.end, :3] == color).all()

    # The arrow keys start at the last token's row and the first one's column.
    first, second = layout.segments[1].start, layout.segments[2].start
    mask, readout = page.get("mask"), page.get("mask-readout")
    mask.send_keys(Keys.ARROW_UP * (len(layout) - 1 - second) + Keys.ARROW_RIGHT * first)
    assert re.fullmatch(rf"token {second} \(.*, chunk 1\) sees token {first} \(.*, chunk 0\): no", readout.text)
    mask.send_keys(Keys.ARROW_LEFT)
    assert re.fullmatch(rf"token {second} \(.*, chunk 1\) sees token {first - 1} \(.*, prefix\): yes", readout.text)


def test_generate(page, server):
    documents, question = STORIES[page.width]
    text = SEPARATOR.join(["Read the documents and answer the question.", *documents, question])
    asked = {"prompt": text, "chunk_aware": True, "max_tokens": int(page.value("max-tokens")), "temperature": 0}
    with server.client() as http:  # under a salt of its own, so that the page finds nothing of it in the cache
        done = http.post("/v1/completions", json={**asked, "return_chunk_usage": True, "cache_salt": "apart"}).json()
    expected = done["choices"][0]["text"]
    sizes = [chunk["tokens"] for chunk in done["usage"]["prompt_tokens_details"]["chunks"]]
    assert expected.strip()
    assert len(sizes) == len(documents)

    page.get("tab-generate").click()
    page.get("prompt-text").clear()
    page.get("prompt-text").send_keys(text)
    assert page.generate() == (expected, [(0, size) for size in sizes])
    page.keep("generate-cold")
    assert page.generate() == (expected, [(size, size) for size in sizes])
    page.keep("generate-warm")

    # In parts, and in another order.
    page.get("mode-parts").click()
    page.find("lower-document")[0].click()
    assert [area.get_property("value") for area in page.find("document")] == documents[::-1]
    assert page.generate() == (expected, [(size, size) for size in sizes[::-1]])
    page.keep("generate-reordered")

    # The clock moves 0.1 s each time that it is read: once at the start, and once for each piece of the answer.
    page.run("performance.now = () => 100 * (window.reads = (window.reads ?? 0) + 1)")
    page.run(KEEP_ANSWER)
    page.get("mode-text").click()
    page.get("prompt-text").clear()
    page.get("prompt-text").send_keys("Read")
    page.generate()
    pieces, generated = page.run("return window.reads") - 1, int(page.get("max-tokens").get_property("value"))
    shown = dict(
        zip(
            *(
                page.run(f"return [...document.querySelectorAll('#statistics {tag}')].map((e) => e.textContent)")
                for tag in ("dt", "dd")
            )
        )
    )
    events = [json.loads(line[6:]) for line in page.run("return window.answer").splitlines() if line.startswith("data: {")]
    first = events[0]["usage"]["completion_tokens"]  # more than one where the client reads slowly
    assert pieces > 1
    assert shown["generated"] == str(generated)
    assert shown["first token"] == "100 ms"
    assert shown["tokens/s"] == f"{(generated - first) / (0.1 * (pieces - 1)):.1f}"

    answers = [event["response"] for event in page.network("Network.responseReceived")]
    kinds = [answer["mimeType"] for answer in answers if answer["url"] == f"{server.url}/v1/completions"]
    assert kinds == ["text/event-stream"] * 4


def test_score(page, server):
    page.get("tab-score").click()
    query, items, labels = page.value("query"), page.value("items").splitlines(), page.value("labels").split(", ")
    page.get("score").click()
    page.wait(lambda: page.find("bar"))
    page.keep("score")
    with server.client() as http:
        asked = {"query": query, "items": items, "labels": labels, "apply_softmax": True}
        scores = [row[0] for row in http.post("/v1/score", json=asked).json()["scores"]]

    bars = page.run(BARS, "#bars > li")
    shown = [float(bar["data"]["score"]) for bar in bars]
    order = [int(bar["data"]["index"]) for bar in bars]
    assert shown == sorted(shown, reverse=True)
    assert sorted(order) == [*range(len(items))]
    assert order[0] == scores.index(max(scores))
    assert shown == pytest.approx([scores[index] for index in order], abs=1e-6)
    for bar, index, score in zip(bars, order, shown, strict=True):
        assert bar["caption"] == f"{index} {items[index]}"
        assert bar["number"] == f"{score:.4f}"
        each = page.find("bar")[order.index(index)].find_elements(By.CSS_SELECTOR, "[data-testid=label]")
        assert [label.text for label in each] == [f"yes {score:.4f}", f"no {1 - score:.4f}"]
        assert bar["share"] == pytest.approx(score, abs=0.02)

    page.get("sort-scores").click()
    assert [bar.get_attribute("data-index") for bar in page.find("bar")] == [str(index) for index in range(len(items))]


def decided(page, asked):
    """Press the button, and check the answers beside the questions against those of the same questions over HTTP.

    Args:
        page: page with the tab open.
        asked: number of presses before.

    Returns:
        The answers over HTTP, and the numbers of the usage on the page.
    """

    def sent():
        requests = [event["request"] for event in page.network("Network.requestWillBeSent")]
        return [json.loads(one["postData"]) for one in requests if one["url"].endswith("/v1/decisions")]

    page.get("decide").send_keys(Keys.ENTER)
    page.wait(lambda: len(sent()) == asked + 1 and page.get("decide").get_attribute("aria-disabled") is None)
    body = sent()[-1]
    with httpx.Client(base_url=page.url, timeout=60) as http:  # under a salt of its own, so that neither helps the other
        told = http.post("/v1/decisions", json={**body, "cache_salt": "apart"}).json()
    assert page.get("decide-status").text.startswith(f"{len(body['questions'])} question")
    assert len(page.find("asked")) == len(body["questions"]) == len(told["answers"])
    for row, question, answer in zip(page.find("asked"), body["questions"], told["answers"], strict=True):
        assert row.find_element(By.CSS_SELECTOR, "[data-testid=asked-text]").get_property("value") == question["instructions"]
        facts = [[e.text for e in row.find_elements(By.CSS_SELECTOR, f".answer {tag}")] for tag in ("dt", "dd")]
        facts = dict(zip(*facts, strict=True))
        chosen = row.find_element(By.CSS_SELECTOR, "[data-testid=chosen]").get_property("textContent").removeprefix("Answer: ")
        assert float(facts.pop("label mass")) == pytest.approx(answer["label_mass"], rel=0.05)
        if answer["type"] == "predicate":
            expected = [("yes", answer["probability"]), ("no", 1 - answer["probability"])]
            assert facts == {"probability of yes": f"{answer['probability']:.4f}"}
        elif answer["type"] == "choice":
            expected = [(share["value"], share["probability"]) for share in answer["probabilities"]]
            assert facts == {"confidence": f"{answer['confidence']:.4f}"}
        else:
            expected = [(f"{share['value']} {share['label']}", share["probability"]) for share in answer["probabilities"]]
            score = f"{answer['score']:.2f} of {len(expected) - 1}"
            assert facts == {"score": score, "confidence": f"{answer['confidence']:.4f}"}
        bars = page.run(BARS.replace("document.querySelectorAll", "arguments[1].querySelectorAll"), ".bars > li", row)
        assert [(bar["caption"], float(bar["data"]["probability"])) for bar in bars] == expected
        assert [bar["number"] for bar in bars] == [f"{share:.4f}" for _, share in expected]
        assert [bar["share"] for bar in bars] == pytest.approx([share for _, share in expected], abs=0.02)
        best = row.find_element(By.CSS_SELECTOR, ".best .caption").text
        assert best == max(expected, key=lambda own: own[1])[0]
        assert chosen == (best.partition(" ")[2] if answer["type"] == "score" else best)
        assert answer.get("choice", chosen) == chosen
        is_small = answer["label_mass"] < 0.1 and (answer["type"] == "predicate" or body["method"] != "likelihood")
        assert len(row.find_elements(By.CSS_SELECTOR, "[data-testid=small-mass]")) == is_small
    usage = [int(e.text) for e in page.driver.find_elements(By.CSS_SELECTOR, "#decide-usage dd")]
    assert usage[0] == told["usage"]["input_tokens"] == usage[1] + usage[2]
    return body, usage


def refused(page, field):
    """Press the button, and return the text of the error that appears right after a field."""
    page.get("decide").send_keys(Keys.ENTER)
    WebDriverWait(page.driver, 60, 0.05).until(lambda _: page.find("error"))
    (error,) = page.find("error")
    assert page.run("return arguments[0].nextElementSibling === arguments[1]", field, error)
    assert field.get_attribute("aria-invalid") == "true"
    assert field.get_attribute("aria-errormessage") == error.get_attribute("id")
    return error.text


def test_decide(page):
    page.get("tab-decide").click()
    body, (_, computed, cached) = decided(page, 0)
    page.keep("decide")
    assert [question["type"] for question in body["questions"]] == ["predicate", "choice", "score"]
    assert body["input"] == page.value("state")
    assert not page.get("decide-stale").is_displayed()
    first = (computed, cached)

    # Another method, a question more and one less.
    page.get("method").send_keys(Keys.ARROW_DOWN)
    assert page.get("decide-stale").is_displayed()
    page.get("calibrate").click()
    page.get("add-question").click()
    page.driver.switch_to.active_element.send_keys("The writer is Nila.")
    page.find("remove-question")[1].click()
    assert [kind.get_property("value") for kind in page.find("asked-kind")] == ["predicate", "score", "predicate"]
    body, (_, computed, cached) = decided(page, 1)
    assert (body["method"], body["calibrate"]) == ("likelihood", True)
    texts = [question["instructions"] for question in body["questions"]]
    assert texts[1:] == ["How angry is the writer?", "The writer is Nila."]
    assert cached > first[1]
    assert not page.get("decide-stale").is_displayed()

    # Messages in JSON are the state that `LLM.decide` makes of them.
    Select(page.get("decide-example")).select_by_index(2)
    assert page.find("chosen") == []
    odd = {"content": "a, ]\n\u00e9", "role": "user", "10": 12345678901234567890, "2": [1.0, {}]}
    messages = [*json.loads(page.value("state")), odd]
    page.run("document.getElementById('state').value = arguments[0]", json.dumps(messages, indent=2))
    body, _ = decided(page, 2)
    assert body["input"] == state_text(messages)
    page.run("document.getElementById('state').value = arguments[0]", json.dumps({"messages": messages[:1]}, indent=2))
    body, _ = decided(page, 3)
    assert body["input"] == state_text({"messages": messages[:1]})


def test_decide_refuses_at_the_field(page):
    page.get("tab-decide").click()
    options = page.find("asked-options")
    options[1].clear()
    options[1].send_keys("billing")
    assert "question 1 must have a list of 2 to 255 options" in refused(page, options[1])
    page.keep("decide-refused")
    options[1].send_keys("\ndelivery")
    text = page.find("asked-text")[2]
    text.clear()
    assert "question 2: text must be a string that is not empty" in refused(page, text)
    assert options[1].get_attribute("aria-invalid") is None
    text.send_keys("How angry?")
    page.get("state").clear()
    assert "state is empty" in refused(page, page.get("state"))
    page.get("state-json").click()
    page.get("state").send_keys('{"text": ')
    assert "The state is no JSON" in refused(page, page.get("state"))
    page.get("state").send_keys('"Give it back."}')
    for button in page.find("remove-question"):
        button.click()
    page.get("decide").send_keys(Keys.ENTER)
    WebDriverWait(page.driver, 60, 0.05).until(lambda _: page.find("error"))
    (error,) = page.driver.find_elements(By.CSS_SELECTOR, "#decide-errors [data-testid=error]")
    assert "questions: List should have at least 1 item" in error.text
    entries = [entry["message"] for entry in page.driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in entries if "/v1/decisions" not in message or "status of 400" not in message] == []
    assert len(entries) == 4


def test_decide_shows_texts_as_text(page):
    forged = "</textarea><img src=x onerror='window.wasForged = true'><b data-testid=error>"
    page.get("tab-decide").click()
    page.get("state").send_keys(forged)
    for text in page.find("asked-text"):
        text.send_keys(forged)
    for options in (text for text in page.find("asked-options") if text.is_displayed()):
        options.clear()
        options.send_keys(f"{forged}\n<script>window.wasForged = true</script>")
    body, _ = decided(page, 0)
    assert body["questions"][1]["choices"] == [{"value": forged}, {"value": "<script>window.wasForged = true</script>"}]
    assert page.run("return [document.querySelectorAll('#panel-decide :is(img, script)').length, window.wasForged]") == [
        0,
        None,
    ]


def test_decide_shows_refusals(page):
    """A server with `min_label_mass` refuses single questions; here the browser is told so by a stub."""
    page.get("tab-decide").click()
    page.run(REFUSE)
    page.get("decide").send_keys(Keys.ENTER)
    page.wait(lambda: page.find("answer")[0].text)
    assert [answer.text for answer in page.find("answer")] == [
        "Answer:\nrefused\nThe label mass 0.0012 is below this server's limit.",
        "Answer:\nyes\nprobability of yes\n0.5000\nlabel mass\n0.10\nyes\n0.5000\nno\n0.5000",
    ]


def shown_rate(page):
    """The rate on the page, and the generated tokens."""
    rate, tokens = page.run("return [1, 4].map((n) => document.querySelectorAll('#statistics dd')[n].textContent)")
    return rate, int(tokens)


@pytest.mark.parametrize("width", [1400, 390], ids="{}px".format)
def test_an_instruct_model_below_a_path_behind_credentials(programs, instruct, width, tmp_path):
    """The page sends messages, and no address of its own has the credentials, which `fetch` refuses."""
    documents, question = STORIES[width][0], STORIES[width][1].removesuffix(" Answer:")
    prefix = "Read the documents and answer the question."
    messages = [{"role": "system", "content": prefix}, {"role": "user", "content": question}]
    asked = {"messages": messages, "documents": documents, "max_tokens": 32, "temperature": 0, "cache_salt": "apart"}
    with instruct.client(headers={"Authorization": "Bearer the-key"}) as http:
        expected = http.post("/llm/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    assert expected.strip()

    address = instruct.url.replace("//", "//me:the-key@") + "/llm/"
    with opened(programs, address, f"{instruct.url}/llm", width, tmp_path) as page:
        page.get("tab-generate").click()
        page.wait(lambda: page.get("chat").is_displayed())
        assert page.get("chat").is_selected()
        page.get("prompt-text").clear()
        page.get("prompt-text").send_keys(SEPARATOR.join([prefix, *documents, question]))
        text, hits = page.generate()
        assert text == expected
        assert len(hits) == len(documents)
        page.keep("chat")
        assert shown_rate(page) == (NO_RATE, 4)
        for name, value in (("max-tokens", "64"), ("temperature", "9")):  # long and random answers
            page.get(name).clear()
            page.get(name).send_keys(value)
        rates = []
        while max((tokens for _, tokens in rates), default=0) < 30:
            assert len(rates) < 30
            page.generate()
            rates.append(shown_rate(page))
        assert all((rate == NO_RATE) or tokens > 8 for rate, tokens in rates)
        assert re.fullmatch(r"\d+\.\d", max(rates, key=lambda found: found[1])[0])
        runs = len(rates) + 1
        page.get("temperature").clear()
        page.get("temperature").send_keys("0")
        page.get("chat").click()
        page.get("prompt-text").send_keys(" Answer:")
        page.generate()
        page.get("tab-score").click()
        page.get("score").click()
        page.wait(lambda: page.find("bar"))
        page.get("tab-prompt").click()
        page.get("inspect").send_keys(Keys.ENTER)
        page.wait(lambda: page.find("part"))
        answers = [event["response"] for event in page.network("Network.responseReceived")]
        kinds = [a["url"].removeprefix(f"{instruct.url}/llm/v1/") for a in answers if a["mimeType"] == "text/event-stream"]
        assert kinds == ["chat/completions"] * runs + ["completions"]
