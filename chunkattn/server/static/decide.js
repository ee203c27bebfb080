/** Tab "Decide": typed questions about one state, each with bars of its probabilities. */

import { postJson } from "./api.js";
import { setUpCurl } from "./curl.js";
import { DocumentList, documentAtFault } from "./documents.js";
import { byId, counted, element, fillList, seconds, setText, whileBusy } from "./dom.js";
import { Earlier } from "./earlier.js";
import { ErrorBox } from "./errors.js";
import { DECIDE_EXAMPLES } from "./examples.js";
import { QuestionEditor, fieldAtFault } from "./questions.js";
import { stateOf } from "./state.js";

const PROMISE = "Each question is answered as if it had been asked alone.";

export function setUpDecide() {
  const [form, state, method, calibrate] = ["decide-form", "state", "method", "calibrate"].map(byId);
  const errors = new ErrorBox(byId("decide-errors"), { input: state, method, calibrate });
  const editor = new QuestionEditor();
  const documents = new DocumentList(byId("decide-documents"), byId("add-decide-document"));
  const earlier = new Earlier("earlier-decisions");
  let changes = 0;
  let shown = -1; // value of the change counter when the shown answers were requested

  const showStale = () => {
    byId("decide-stale").hidden = shown < 0 || shown === changes;
  };
  editor.onchange = () => {
    changes += 1;
    showStale();
  };
  form.addEventListener("input", editor.onchange);
  documents.onchange = editor.onchange;
  const load = ({ json, text, documents: texts = [], questions }) => {
    errors.clear();
    earlier.leave();
    byId(json ? "state-json" : "state-text").checked = true;
    state.value = text;
    shown = -1;
    setText(byId("decide-status"), PROMISE);
    fillList(byId("decide-usage"), []);
    documents.load(texts);
    editor.load(questions);
  };
  setUpExamples(load);
  load(DECIDE_EXAMPLES[0]);

  const requestOf = (questions) => {
    const body = { input: stateText(), questions: questions.map((question) => question.request) };
    if (documents.texts.length) body.documents = documents.texts;
    return ["v1/decisions", { ...body, method: method.value, calibrate: calibrate.checked }];
  };
  setUpCurl(
    "curl-decide",
    () => requestOf(editor.questions),
    (error) => errors.show(error),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    whileBusy(byId("decide"), async () => {
      errors.clear();
      const asked = changes;
      const { questions } = editor;
      try {
        await decide(...requestOf(questions), questions, earlier);
        shown = asked;
        showStale();
      } catch (error) {
        setText(byId("decide-status"), "failed");
        errors.show(error, fieldAtFault(error, questions) ?? documentAtFault(error, documents.areas));
      }
    });
  });

  function stateText() {
    if (byId("state-text").checked) return state.value;
    try {
      return stateOf(state.value);
    } catch (error) {
      throw Object.assign(error, { param: "input" });
    }
  }
}

function setUpExamples(load) {
  const select = byId("decide-example");
  DECIDE_EXAMPLES.forEach(({ title }, index) => select.append(element("option", { value: index }, title)));
  select.addEventListener("input", (event) => event.stopPropagation()); // no change of the questions by itself
  select.addEventListener("change", () => {
    if (select.value) load(DECIDE_EXAMPLES[Number(select.value)]);
    select.value = ""; // allows the same choice again
  });
}

async function decide(path, body, questions, earlier) {
  const began = performance.now();
  const { answers, usage } = await postJson(path, body);
  const took = performance.now() - began;

  earlier.leave();
  questions.forEach((question, index) => question.show(answers[index]));
  setText(byId("decide-status"), `${counted(answers.length, "question")} answered in ${seconds(took)}`);
  fillList(byId("decide-usage"), [
    ["tokens", String(usage.input_tokens)],
    ["computed", String(usage.computed_tokens)],
    ["cached", String(usage.input_tokens_details.cached_tokens)],
  ]);
  const texts = body.questions.map(({ instructions }) => instructions);
  const shown = questions.map((question) => question.answer);
  earlier.show(body.input, () => shown.flatMap((answer, index) => [element("h3", {}, texts[index]), answer]));
}
