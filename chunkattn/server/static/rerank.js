/** Tab "Rerank": documents in the order of their relevance to a query. */

import { postJson } from "./api.js";
import { setUpCurl } from "./curl.js";
import { bar, byId, counted, element, fillList, listed, seconds, setText, whileBusy } from "./dom.js";
import { Earlier } from "./earlier.js";
import { ErrorBox } from "./errors.js";
import { RERANK_EXAMPLE } from "./examples.js";

export function setUpRerank() {
  const [query, documents, instruction, count] = ["rerank-query", "rerank-documents", "instruction", "top-n"].map(byId);
  query.value = RERANK_EXAMPLE.query;
  documents.value = RERANK_EXAMPLE.documents.join("\n");
  const errors = new ErrorBox(byId("rerank-errors"), { query, documents, instruction, top_n: count });
  const earlier = new Earlier("earlier-rankings");

  const requestOf = () => {
    const body = { query: query.value, documents: listed(documents.value, "\n") };
    if (instruction.value.trim()) body.instruction = instruction.value;
    if (!Number.isNaN(count.valueAsNumber)) body.top_n = count.valueAsNumber;
    return ["v1/rerank", body];
  };
  setUpCurl("curl-rerank", requestOf, (error) => errors.show(error));
  byId("rerank-form").addEventListener("submit", (event) => {
    event.preventDefault();
    whileBusy(byId("rerank"), async () => {
      errors.clear();
      try {
        await rerank(...requestOf(), earlier);
      } catch (error) {
        setText(byId("rerank-status"), "failed");
        errors.show(error);
      }
    });
  });
}

async function rerank(path, body, earlier) {
  const began = performance.now();
  const { results, usage, template } = await postJson(path, body);
  const took = performance.now() - began;

  earlier.leave();
  byId("ranking").replaceChildren(...results.map((result, rank) => row(result, rank, body.documents)));
  setText(byId("rerank-status"), `${counted(body.documents.length, "document")} ranked in ${seconds(took)}`);
  fillList(byId("rerank-usage"), [
    ["template", template],
    ["tokens", String(usage.prompt_tokens)],
    ["computed", String(usage.computed_tokens)],
    ["cached", String(usage.prompt_tokens_details.cached_tokens)],
  ]);
  earlier.show(body.query, () => [byId("ranking")]);
}

function row({ index, relevance_score: score }, rank, documents) {
  return element(
    "li",
    { "data-testid": "ranked", "data-index": index, "data-score": score, class: rank === 0 && "best" },
    element("span", { class: "caption" }, element("b", {}, String(index)), ` ${documents[index]}`),
    bar(score),
    element("span", { class: "number", title: String(score) }, score.toFixed(4)),
  );
}
