/** Tab "Generate": the streamed answer, and the cache hits of the prompt. */

import { errorIn, post } from "./api.js";
import { setUpCurl } from "./curl.js";
import { bar, byId, counted, element, fillList, seconds, setText, whileBusy } from "./dom.js";
import { Earlier } from "./earlier.js";
import { ErrorBox } from "./errors.js";
import { focusField, showChoice } from "./focus.js";
import { partKind } from "./parts.js";
import { readEvents } from "./sse.js";
import { TokenText, tokensIn } from "./tokens.js";

const RUNS_KEPT = 8;
const MOST_OTHERS = 3; // likely tokens that are shown beside the token of the answer
const RATE_TOKENS = 8; // fewer tokens after the first arrive at the chance times of a few network packets

let runs = 0;

export function setUpGenerate(editor) {
  const [start, stop] = [byId("generate"), byId("stop")];
  const fields = { max_tokens: byId("max-tokens"), temperature: byId("temperature"), focus: byId("focus") };
  const errors = new ErrorBox(byId("generate-errors"), fields);
  const answer = new TokenText(byId("output"), byId("token-readout"));
  const earlier = new Earlier("earlier-answers");
  let abort = null;

  setUpCurl(
    "curl-generate",
    () => requestOf(editor),
    (error) => errors.show(error),
  );

  stop.addEventListener("click", () => abort?.abort());
  byId("generate-form").addEventListener("submit", (event) => {
    event.preventDefault();
    whileBusy(start, async () => {
      errors.clear();
      editor.errors.clear();
      abort = new AbortController();
      stop.disabled = false;
      try {
        await run(editor, answer, earlier, abort.signal);
      } catch (error) {
        setText(byId("generate-status"), "failed");
        if (!editor.claims(error)) errors.show(error);
      } finally {
        if (document.activeElement === stop) start.focus(); // a disabled button loses the focus
        stop.disabled = true;
      }
    });
  });
}

/** Return path and body of the request, without the fields of a stream. */
function requestOf(editor) {
  const chat = byId("chat").checked;
  const body = {
    ...(chat ? editor.chat : editor.request),
    max_tokens: byId("max-tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
    ...focusField(),
  };
  return [chat ? "v1/chat/completions" : "v1/completions", body];
}

/** Return the request fields for log-probabilities, as many as the server gives. */
function logprobFields(chat, most) {
  const count = Math.min(MOST_OTHERS, most);
  return chat ? { logprobs: true, top_logprobs: count } : { logprobs: count };
}

/** Run one request to its last event, or until the signal aborts it. */
async function run(editor, answer, earlier, signal) {
  const [output, status] = [byId("output"), byId("generate-status")];
  const { documents, question } = editor.parts;
  const [path, asked] = requestOf(editor);
  const chat = path.includes("chat");
  const body = {
    ...asked,
    ...logprobFields(chat, editor.maxLogprobs),
    stream: true,
    // Request the usage in every event, so the page shows cache hits with the first token.
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_chunk_usage: true,
  };
  earlier.leave();
  answer.clear();
  output.setAttribute("aria-busy", "true"); // screen readers announce the whole answer, not each token
  byId("hits").replaceChildren();
  showChoice(null, []);
  fillList(byId("statistics"), []);
  setText(status, "waiting");

  const clock = new Clock();
  let usage = null;
  let ended = null;
  try {
    for await (const event of completionEvents(path, body, signal)) {
      if (event.usage) {
        if (!usage) {
          showChoice(event.usage.prompt_tokens_details.focus, documents);
          showHits(event.usage, documents);
        }
        usage = event.usage;
      }
      const [choice] = event.choices;
      if (!choice) continue;
      const piece = chat ? (choice.delta.content ?? "") : choice.text;
      if (piece || choice.finish_reason) clock.note(usage?.completion_tokens ?? 0); // a chat begins with an empty event
      answer.append(piece, tokensIn(choice));
      ended = choice.finish_reason ?? ended;
      setText(status, "generating");
      if (usage) showStatistics(usage, clock, ended);
    }
    setText(status, ended === "length" ? "ended at max tokens" : "ended");
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    setText(status, "stopped");
  } finally {
    output.setAttribute("aria-busy", "false");
    answer.end();
    if (usage) earlier.show(question, () => [output, byId("statistics")]);
  }
  if (!usage) return;
  showHits(usage, documents);
  showStatistics(usage, clock, ended);
  noteRun(usage, clock);
}

/**
 * Yield the objects of the stream of a completion or a chat.
 * @throws {ApiError} the request was refused, failed, or broke off
 */
async function* completionEvents(path, body, signal) {
  const response = await post(path, body, signal);
  try {
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw errorIn(event, "The request failed.");
      yield event;
    }
  } catch (error) {
    if (error instanceof TypeError) throw errorIn(null, "The connection broke."); // fetch: broken connection
    throw error;
  }
  throw errorIn(null, "The answer broke off.");
}

/** Times of one run, measured in the browser. */
class Clock {
  #began = performance.now();
  #first = null;
  #last = null;

  /** Note the arrival of tokens. */
  note(tokens) {
    this.#last = { at: performance.now(), tokens };
    this.#first ??= this.#last;
  }

  /** Time to the first token, as text. */
  get wait() {
    return this.#first ? seconds(this.#first.at - this.#began) : "–";
  }

  /** Tokens per second after the first, as text; a dash for too few tokens. */
  get rate() {
    const tokens = this.#last ? this.#last.tokens - this.#first.tokens : 0;
    const time = this.#last ? this.#last.at - this.#first.at : 0;
    return tokens >= RATE_TOKENS && time > 0 ? ((1000 * tokens) / time).toFixed(1) : "–";
  }
}

function showStatistics(usage, clock, ended) {
  fillList(byId("statistics"), [
    ["first token", clock.wait],
    ["tokens/s", clock.rate],
    ["prompt tokens", String(usage.prompt_tokens)],
    ["of them cached", String(usage.prompt_tokens_details.cached_tokens)],
    ["generated", String(usage.completion_tokens)],
    ["finish reason", ended ?? "–"],
  ]);
}

/** Show a bar per document, as long as its tokens, and one for prefix and question together. */
function showHits(usage, documents) {
  const { cached_tokens: cached, chunks = [], focus } = usage.prompt_tokens_details;
  const sum = (name) => chunks.reduce((total, chunk) => total + chunk[name], 0);
  const count = focus ? focus.scores.length : chunks.length;
  const rows = chunks.map(({ document: number, ...chunk }, index) => ({
    ...chunk,
    kind: partKind(`chunk ${number ?? index}`),
    name: String(number ?? index),
    // The texts are unknown if the server's separator differs from the page's.
    text: documents.length === count ? documents[number ?? index] : "",
  }));
  const rest = focus?.mode === "reread" ? "prefix, chosen documents and question" : "prefix and question";
  rows.push({
    tokens: usage.prompt_tokens - sum("tokens"),
    cached_tokens: cached - sum("cached_tokens"),
    kind: chunks.length ? "prefix" : "question",
    name: chunks.length ? rest : "prompt",
    text: "",
  });
  const longest = Math.max(...rows.map((row) => row.tokens), 1);
  byId("hits").replaceChildren(...rows.map((row) => hit(row, longest)));
}

function hit({ tokens, cached_tokens: cached, kind, name, text }, longest) {
  return element(
    "li",
    { "data-part": kind, "data-testid": "hit", "data-name": name, "data-tokens": tokens, "data-cached": cached },
    element("span", { class: "caption", title: text }, element("b", {}, name), ` ${text}`),
    bar(tokens ? cached / tokens : 0, tokens / longest),
    element("span", { class: "number" }, `${cached} of ${counted(tokens, "token")}`),
  );
}

/** Add a row to the table of runs, newest first. */
function noteRun(usage, clock) {
  runs += 1;
  const values = [runs, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, clock.wait, clock.rate];
  const rows = byId("runs").tBodies[0];
  rows.prepend(element("tr", {}, ...values.map((value) => element("td", {}, String(value)))));
  if (rows.rows.length > RUNS_KEPT) rows.lastElementChild.remove();
  byId("runs").hidden = false;
}
