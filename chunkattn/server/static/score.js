/** Tab "Score": items against a query, as bars. */

import { postJson } from "./api.js";
import { setUpCurl } from "./curl.js";
import { bar, byId, counted, element, fillList, listed, seconds, setText, whileBusy } from "./dom.js";
import { Earlier } from "./earlier.js";
import { ErrorBox } from "./errors.js";
import { SCORE_EXAMPLE } from "./examples.js";

/** The shown result `{items, labels, scores}`, or null; kept for sorting. */
let shown = null;

export function setUpScore() {
  const [query, items, labels] = ["query", "items", "labels"].map(byId);
  query.value = SCORE_EXAMPLE.query;
  items.value = SCORE_EXAMPLE.items.join("\n");
  labels.value = SCORE_EXAMPLE.labels.join(", ");
  const errors = new ErrorBox(byId("score-errors"), { query, items, labels, label_token_ids: labels });

  const earlier = new Earlier("earlier-scores");

  const requestOf = () => {
    const body = { query: query.value, items: listed(items.value, "\n"), apply_softmax: true };
    const given = listed(labels.value, ",");
    if (given.length) body.labels = given; // a classifier accepts no labels
    return ["v1/score", body];
  };
  setUpCurl("curl-score", requestOf, (error) => errors.show(error));
  byId("sort-scores").addEventListener("change", showBars);
  byId("score-form").addEventListener("submit", (event) => {
    event.preventDefault();
    whileBusy(byId("score"), async () => {
      errors.clear();
      try {
        await score(...requestOf(), earlier);
      } catch (error) {
        errors.show(error);
      }
    });
  });
}

async function score(path, body, earlier) {
  const { query, items, labels = [] } = body;
  const began = performance.now();
  const result = await postJson(path, body);
  const took = performance.now() - began;

  earlier.leave();
  shown = { items, labels, scores: result.scores };
  showBars();
  setText(byId("score-status"), `${counted(items.length, "item")} scored in ${seconds(took)}`);
  fillList(byId("score-usage"), [
    ["algorithm", result.algorithm],
    ["tokens", String(result.usage.prompt_tokens)],
    ["computed", String(result.usage.computed_tokens)],
    ["cached", String(result.usage.prompt_tokens_details.cached_tokens)],
  ]);
  earlier.show(query, () => [byId("bars")]);
}

function showBars() {
  if (!shown) return;
  const { items, labels, scores } = shown;
  const order = items.map((_, index) => index);
  if (byId("sort-scores").checked) order.sort((a, b) => scores[b][0] - scores[a][0]);
  const nameOf = (label) => labels[label] ?? `class ${label}`;
  byId("bars").replaceChildren(
    ...order.map((index) => {
      const each = scores[index].map((value, label) =>
        element("span", { "data-testid": "label", title: String(value) }, `${nameOf(label)} `, element("b", {}, value.toFixed(4))),
      );
      return element(
        "li",
        { "data-testid": "bar", "data-index": index, "data-score": scores[index][0] },
        element("span", { class: "caption" }, element("b", {}, String(index)), ` ${items[index]}`),
        bar(scores[index][0]),
        element("span", { class: "number" }, scores[index][0].toFixed(4)),
        element("span", { class: "labels" }, ...each),
      );
    }),
  );
}
