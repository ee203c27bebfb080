"""The page's tab "Decide" against the answers of the same server over HTTP."""

import json

import httpx
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from chunkattn.parsers.states import read_state
from tests.patience import PATIENCE_S
from tests.server.browser.page import BARS

pytestmark = pytest.mark.browser

REFUSE = """
document.querySelectorAll("[data-testid=remove-question]")[2].click();
const answers = [
  { type: "refusal", name: null, label_mass: 0.00123 },
  { type: "predicate", name: null, probability: 0.5, label_mass: 0.1 },
];
const usage = { input_tokens: 9, computed_tokens: 9, input_tokens_details: { cached_tokens: 0 } };
window.fetch = async () => new Response(JSON.stringify({ model: "demo", method: "letters", answers, usage }));
"""


def decided(page, asked):
    """Press the button, and check the answers beside the questions against those of the same questions over HTTP.

    Args:
        page: page with the tab open.
        asked: number of presses before.

    Returns:
        The answers over HTTP, and the numbers of the usage on the page.
    """
    page.get("decide").send_keys(Keys.ENTER)
    ended = lambda: page.get("decide").get_attribute("aria-disabled") is None  # noqa: E731
    page.wait(lambda: len(page.sent("/v1/decisions")) == asked + 1 and ended())
    body = page.sent("/v1/decisions")[-1]
    with httpx.Client(
        base_url=page.url, timeout=PATIENCE_S
    ) as http:  # under a salt of its own, so that neither helps the other
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
        is_small = answer["label_mass"] < 0.1 and answer.get("method") != "likelihood"
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
    body, _ = decided(page, 0)
    page.keep("decide")
    assert [question["type"] for question in body["questions"]] == ["predicate", "choice", "score"]
    assert body["input"] == page.value("state")
    assert not page.get("decide-stale").is_displayed()

    # Another method, a question more and one less.
    page.get("method").send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert page.get("decide-stale").is_displayed()
    page.get("calibrate").click()
    page.get("add-question").click()
    page.driver.switch_to.active_element.send_keys("The writer is Nila.")
    page.find("remove-question")[1].click()
    assert [kind.get_property("value") for kind in page.find("asked-kind")] == ["predicate", "score", "predicate"]
    body, (_, _, cached) = decided(page, 1)
    assert (body["method"], body["calibrate"]) == ("likelihood", True)
    texts = [question["instructions"] for question in body["questions"]]
    assert texts[1:] == ["How angry is the writer?", "The writer is Nila."]
    assert cached > 0  # the state
    assert not page.get("decide-stale").is_displayed()

    # Messages in JSON are the state that `LLM.decide` makes of them.
    Select(page.get("decide-example")).select_by_index(3)
    assert page.find("chosen") == []
    odd = {"content": "a, ]\n\u00e9", "role": "user", "10": 12345678901234567890, "2": [1.0, {}]}
    messages = [*json.loads(page.value("state")), odd]
    page.run("document.getElementById('state').value = arguments[0]", json.dumps(messages, indent=2))
    body, _ = decided(page, 2)
    assert body["input"] == read_state(messages)
    page.run("document.getElementById('state').value = arguments[0]", json.dumps({"messages": messages[:1]}, indent=2))
    body, _ = decided(page, 3)
    assert body["input"] == read_state({"messages": messages[:1]})


def test_decide_with_documents(page):
    """Documents are sent in their order, and come from the cache in another one. An error appears at its document."""
    page.get("tab-decide").click()
    body, _ = decided(page, 0)
    assert "documents" not in body
    Select(page.get("decide-example")).select_by_index(2)
    documents = page.get("decide-documents")
    areas = lambda: documents.find_elements(By.TAG_NAME, "textarea")  # noqa: E731
    assert len(areas()) == 2
    page.get("add-decide-document").click()
    page.driver.switch_to.active_element.send_keys(f"Nila bought figs at {page.width} coins.")
    texts = [area.get_property("value") for area in areas()]
    body, _ = decided(page, 1)
    assert body["documents"] == texts
    page.keep("decide-documents")
    documents.find_element(By.CSS_SELECTOR, "[data-testid=lower-document]").click()
    assert page.get("decide-stale").is_displayed()
    body, (tokens, computed, _) = decided(page, 2)
    assert body["documents"] == [texts[1], texts[0], texts[2]]
    assert computed < tokens / 2
    earlier = page.driver.find_elements(By.CSS_SELECTOR, "#earlier-decisions summary")
    assert ["From: Nila" in summary.text for summary in earlier] == [True, True]

    page.run("arguments[0].value = 'many words '.repeat(999)", areas()[1])
    assert "document 1" in refused(page, areas()[1])
    page.driver.get_log("browser")
    areas()[1].clear()
    assert page.find("error") == []
    for _ in range(3):
        documents.find_element(By.CSS_SELECTOR, "[data-testid=remove-document]").click()
    body, _ = decided(page, 4)
    assert "documents" not in body


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
    assert page.find("error") == []
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
