/** Choice of documents by the question, in tab "Generate": its fields, and the documents with their scores. */

import { bar, byId, counted, element } from "./dom.js";
import { partKind } from "./parts.js";

/** Return the request field for the choice; no field without a number of documents. */
export function focusField() {
  const count = byId("focus").valueAsNumber;
  return Number.isNaN(count) ? {} : { focus: { top_n: count, mode: byId("focus-mode").value } };
}

/**
 * Show every document with its score, and mark the chosen ones.
 * @param {?{documents: number[], scores: ?number[], computed_tokens: number}} focus choice in the usage, if there is one
 * @param {string[]} documents texts of the documents
 */
export function showChoice(focus, documents) {
  byId("choice").hidden = !focus;
  if (!focus) return;
  const { documents: chosen, scores, computed_tokens: computed } = focus;
  const rows = scores.map((score, number) => choiceRow(score, number, chosen.indexOf(number), documents[number] ?? ""));
  byId("choice-scores").replaceChildren(...rows);
  byId("choice-cost").textContent = `${counted(computed, "token")} computed for the scores.`;
}

function choiceRow(score, number, rank, text) {
  const isChosen = rank >= 0;
  const caption = element("span", { class: "caption", title: text }, element("b", {}, String(number)), ` ${text}`);
  if (isChosen) caption.prepend(element("span", { class: "mark" }, "chosen"), " ");
  return element(
    "li",
    {
      class: isChosen && "best",
      "data-part": partKind(`chunk ${number}`),
      "data-testid": "choice",
      "data-number": number,
      "data-rank": isChosen && rank,
    },
    caption,
    bar(score === null ? 0 : Math.exp(score)),
    element("span", { class: "number" }, score === null ? "empty" : score.toFixed(4)),
  );
}
