"""The page as people use it: in Chromium, wide and narrow, on a real server and with no other host in reach."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from chunkattn.focus import MODES
from chunkattn.models.loader import DEMO_FOLDER, load_tokenizer
from chunkattn.parsers import PromptParser
from tests.server.browser.page import BARS, opened
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

KEEP_ANSWER = """
const { fetch } = window;
window.fetch = async (...request) => {
  const response = await fetch(...request);
  if (response.url.endsWith("/v1/completions")) window.answer = response.clone().text();
  return response;
};
"""


@pytest.fixture(scope="module")
def instruct(programs):
    """The demo model as a checkpoint of a folder, which the page takes for an instruct model."""
    made = ServerProcess(str(DEMO_FOLDER), *SMALL, "--root-path=/llm", CHUNKATTN_API_KEY="the-key")
    yield made
    assert made.close() == 0


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


CHOICES = """
return [...document.querySelectorAll("[data-testid=choice]")].map((row) => ({
  ...row.dataset,
  caption: row.querySelector(".caption").textContent,
  score: row.querySelector(".number").textContent,
  share: row.querySelector(".filled").getBoundingClientRect().width / row.querySelector(".track").clientWidth,
}));
"""


@pytest.mark.parametrize("mode", MODES)
def test_focus(page, server, mode):
    """The page shows which documents were chosen, and every document's score; the hits are those of the documents shown."""
    documents, question = [*STORIES[page.width][0], "", "Rumi is a poet.\nShe likes <b>tea</b>."], STORIES[page.width][1]
    chunks = {"prefix": "Read the documents and answer the question.", "documents": documents, "question": question}
    asked = {"chunks": chunks, "max_tokens": 32, "temperature": 0, "focus": {"top_n": 2, "mode": mode}}
    with server.client() as http:
        done = http.post("/v1/completions", json={**asked, "return_chunk_usage": True}).json()
    details = done["usage"]["prompt_tokens_details"]

    page.get("tab-generate").click()
    page.get("prompt-text").clear()
    page.get("prompt-text").send_keys(SEPARATOR.join([chunks["prefix"], *documents, question]))
    page.generate()
    assert not page.get("choice").is_displayed()
    page.get("focus").send_keys("2")
    page.driver.find_element(By.CSS_SELECTOR, f"#focus-mode option[value={mode}]").click()
    text, hits = page.generate()
    page.keep(f"focus-{mode}")
    assert text == done["choices"][0]["text"]
    assert hits == [(chunk["tokens"], chunk["tokens"]) for chunk in details["chunks"]]
    names = [bar["data"]["name"] for bar in page.run(BARS, "#hits > li")][:-1]
    assert names == [str(chunk.get("document", place)) for place, chunk in enumerate(details["chunks"])]

    shown, focus = page.run(CHOICES), details["focus"]
    assert [row["number"] for row in shown] == [str(number) for number in range(len(documents))]
    chosen = sorted((row for row in shown if "rank" in row), key=lambda row: int(row["rank"]))
    assert [int(row["number"]) for row in chosen] == focus["documents"]
    for row, document, score in zip(shown, documents, focus["scores"], strict=True):
        mark = "chosen " if "rank" in row else ""
        assert row["caption"] == f"{mark}{row['number']} {document}"
        assert row["score"] == ("empty" if score is None else f"{score:.4f}")
        assert row["share"] == pytest.approx(0 if score is None else np.exp(score), abs=0.02)

    page.get("focus").clear()
    page.generate()
    assert not page.get("choice").is_displayed()


PLACES = """
return [...document.querySelectorAll("#generate-form > *")].map((field) => {
  const { x, y, width, height } = field.getBoundingClientRect();
  return [x, y - document.getElementById("generate-form").getBoundingClientRect().y, width, height];
});
"""


def test_an_error_leaves_the_toolbar_as_it_is_and_goes_with_its_cause(page):
    page.get("tab-generate").click()
    field = page.get("focus")
    field.send_keys("1")
    page.get("prompt-text").clear()
    page.get("prompt-text").send_keys("Read")
    before = page.run(PLACES)
    page.get("generate").click()
    WebDriverWait(page.driver, 60).until(lambda _: page.find("error"))
    page.keep("toolbar-error")
    page.driver.get_log("browser")  # the status 400, which Chromium logs
    (error,) = page.find("error")
    assert "focus chooses among documents" in error.text
    assert error.size["width"] > 0.9 * page.get("generate-form").size["width"]
    assert page.run(PLACES)[:-1] == before[:-1]  # all but the status
    assert field.get_attribute("aria-invalid") == "true"
    assert field.get_attribute("aria-errormessage") == error.get_attribute("id")
    field.send_keys(Keys.HOME, "-")  # below the least value
    assert page.find("error") == [error]
    field.send_keys(Keys.BACKSPACE)
    assert page.find("error") == []
    assert field.get_attribute("aria-invalid") is field.get_attribute("aria-errormessage") is None


def test_tokens_tell_their_log_probabilities(page, server):
    documents, question = STORIES[page.width]
    text = SEPARATOR.join(["Read the documents and answer the question.", *documents, question])
    asked = {"prompt": text, "chunk_aware": True, "max_tokens": 32, "temperature": 0, "logprobs": 3}
    with server.client() as http:
        told = http.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]
    page.get("tab-generate").click()
    page.get("prompt-text").clear()
    page.get("prompt-text").send_keys(text)
    answer, _ = page.generate()
    tokens = page.find("token")
    assert "".join(token.get_property("textContent") for token in tokens) == answer
    known = [(t, v) for t, v in zip(told["tokens"], told["token_logprobs"], strict=True)][: len(tokens)]
    shown = [(token.get_property("textContent"), float(token.get_attribute("data-logprob"))) for token in tokens]
    assert [text for text, _ in shown] == [text for text, _ in known]
    assert [value for _, value in shown] == pytest.approx([value for _, value in known], abs=1e-4)
    titles = [token.get_attribute("title") for token in tokens]
    for title, (_, value), others in zip(titles, shown, told["top_logprobs"]):
        assert f" {value:.4f} ({100 * np.exp(value):.1f}%)" in title
        assert title.count("%)") == len(others)

    ActionChains(page.driver).move_to_element(tokens[1]).perform()
    readout = page.get("token-readout")
    assert readout.text == f"token 2 of {len(tokens)}: {titles[1]}"
    page.get("output").send_keys(Keys.ARROW_LEFT)
    assert readout.text == f"token 1 of {len(tokens)}: {titles[0]}"
    page.get("output").send_keys(Keys.ARROW_LEFT, Keys.ARROW_RIGHT * 99)
    assert readout.text.startswith(f"token {len(tokens)} of ")
    page.keep("tokens")


APART = """
const [events, done] = arguments;
import("/static/tokens.js").then(({ TokenText }) => {
  const [output, readout] = [document.createElement("div"), document.createElement("p")];
  const shown = new TokenText(output, readout);
  shown.clear();
  for (const [piece, texts] of events) {
    shown.append(piece, texts.map((text) => ({ text, logprob: -1, others: [] })));
  }
  shown.end();
  done([[...output.querySelectorAll("span")].map((span) => span.textContent), output.textContent]);
});
"""


def test_tokens_and_text_may_come_apart(page):
    """Events with tokens before their text, text before its tokens, a character of several tokens, an end and a cut token."""
    for events, tokens in (
        ([["a", ["a", "b"]], ["b", []]], ["a", "b"]),
        ([["ab", ["a"]], ["c", ["b", "c"]]], ["a", "b", "c"]),
        ([["", ["\ufffd"]], ["\u00e9", ["\ufffd"]], ["b", ["b"]]], ["\u00e9", "b"]),
        ([["ab", ["a", "b", "</s>"]]], ["a", "b"]),
        ([["a", ["a"]], ["b", ["b STOP"]]], ["a", "b"]),
    ):
        assert page.driver.execute_async_script(APART, events) == [tokens, "".join(piece for piece, _ in events)]


def test_earlier_answers_stay(page):
    """Two answers and a failure: both are kept, with their questions, as copies that no program takes for the answer."""
    documents, question = STORIES[page.width]
    page.get("tab-generate").click()
    answers = []
    for asked in (question, "What is <b>it</b>? Answer:"):
        page.get("prompt-text").clear()
        page.get("prompt-text").send_keys(SEPARATOR.join(["Read.", *documents, asked]))
        answers.append(page.generate()[0])
    assert len(page.find("earlier")) == 1
    page.get("max-tokens").send_keys("99999")
    page.get("generate").click()
    WebDriverWait(page.driver, 60).until(lambda _: page.find("error"))
    page.driver.get_log("browser")
    blocks = page.find("earlier")
    texts = [block.find_element(By.CSS_SELECTOR, ".output").get_property("textContent") for block in blocks]
    assert texts == answers[::-1]
    titles = [block.find_element(By.TAG_NAME, "summary").text for block in blocks]
    assert [title.partition("M ")[2] for title in titles] == ["What is <b>it</b>? Answer:", question]
    blocks[1].find_element(By.TAG_NAME, "summary").click()
    page.keep("earlier")
    ids = page.run("return [...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len({*ids})


def test_rerank(page, server):
    page.get("tab-rerank").click()
    query, documents = page.value("rerank-query"), page.value("rerank-documents").splitlines()
    page.get("rerank").click()
    page.wait(lambda: len(page.find("ranked")) == len(documents))
    page.keep("rerank")
    with server.client() as http:
        results = http.post("/v1/rerank", json={"query": query, "documents": documents}).json()["results"]
    bars = page.run(BARS, "#ranking > li")
    assert [int(bar["data"]["index"]) for bar in bars] == [result["index"] for result in results]
    for bar, result in zip(bars, results, strict=True):
        assert bar["caption"] == f"{result['index']} {documents[result['index']]}"
        assert bar["number"] == f"{result['relevance_score']:.4f}"
        assert bar["share"] == pytest.approx(result["relevance_score"], abs=0.02)
    page.get("top-n").send_keys("2")
    page.get("rerank").click()
    page.wait(lambda: len(page.find("ranked")) == 2)
    assert len(page.driver.find_elements(By.CSS_SELECTOR, "#earlier-rankings details")) == 1
    assert page.sent("/v1/rerank")[-1] == {"query": query, "documents": documents, "top_n": 2}

    page.get("instruction").send_keys("Judge kindly.")  # the demo model's template has no place for one
    page.get("rerank").click()
    WebDriverWait(page.driver, 60).until(lambda _: page.find("error"))
    page.driver.get_log("browser")
    assert page.sent("/v1/rerank")[-1]["instruction"] == "Judge kindly."
    assert page.get("instruction").get_attribute("aria-invalid") == "true"
    page.get("instruction").clear()
    assert page.find("error") == []


CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', { value: { writeText: async (text) => { window.copied = text; } } })"
WITHOUT_CLIPBOARD = """
Object.defineProperty(navigator, "clipboard", { value: undefined });
document.execCommand = (name) => { window.copied = document.activeElement.value; return name === "copy"; };
"""


@pytest.mark.parametrize("clipboard", [CLIPBOARD, WITHOUT_CLIPBOARD], ids=["clipboard", "selection"])
def test_copy_as_curl(page, server, clipboard):
    """Each command, run by a shell, has the answer of the page's own request."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is missing")
    page.run(clipboard)
    odd = 'It\'s "odd" $HOME `id` \\\\ \n{é}!'
    for tab, button, field in (
        ("prompt", "curl-inspect", "prompt-text"),
        ("generate", "curl-generate", "prompt-text"),
        ("score", "curl-score", "query"),
        ("rerank", "curl-rerank", "rerank-query"),
        ("decide", "curl-decide", "state"),
    ):
        page.get(f"tab-{tab}").click()
        page.run("const field = document.getElementById(arguments[0]); field.value = arguments[1]", field, odd)
        page.get(button).click()
        page.wait(lambda button=button: page.get(button).text == "Copied")
        assert page.driver.switch_to.active_element == page.get(button)
        command = page.run("return window.copied")
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout)
        assert "error" not in answer, answer
        body = json.loads(re.search(r"-d '(.*)'$", command, re.DOTALL)[1].replace("'\\''", "'"))
        assert odd in (body.get("prompt"), body.get("query"), body.get("input"))
        assert "stream" not in body


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
