/** Tab "Inspect": the prompt's parts as token chips, and its mask. */

import { postJson } from "./api.js";
import { setUpCurl } from "./curl.js";
import { byId, counted, element, setText, whileBusy } from "./dom.js";
import { ErrorBox } from "./errors.js";
import { Mask } from "./mask.js";
import { partKind, visibleText } from "./parts.js";

const CHIPS_AT_ONCE = 400; // per part; browsers are slow with tens of thousands of elements

export function setUpInspect(editor) {
  const button = byId("inspect");
  const stale = byId("inspect-stale");
  const errors = new ErrorBox(byId("inspect-errors"));
  const mask = new Mask(byId("mask"), byId("mask-readout"));
  let changes = 0;
  let shown = -1; // value of the change counter when the shown inspection was requested

  editor.onchange = () => {
    changes += 1;
    stale.hidden = shown < 0;
  };

  setUpCurl(
    "curl-inspect",
    () => ["inspect", editor.request],
    (error) => errors.show(error),
  );
  button.addEventListener("click", () =>
    whileBusy(button, async () => {
      errors.clear();
      editor.errors.clear();
      const asked = changes;
      try {
        const prompt = await postJson("inspect", editor.request);
        show(prompt, mask);
        shown = asked;
        stale.hidden = shown === changes;
      } catch (error) {
        if (!editor.claims(error)) errors.show(error);
      }
    }),
  );
}

function show(prompt, mask) {
  // A plain prompt has one part, which the API names the question.
  const parts = prompt.parts.map((part) => ({ ...part, title: prompt.chunked ? part.name : "prompt", kind: partKind(part.name) }));
  const chunks = parts.filter((part) => part.name.startsWith("chunk ")).length;
  const kind = prompt.chunked ? `${counted(parts.length, "part")} (${counted(chunks, "document")})` : "1 part, a plain prompt";
  const summary = `${counted(prompt.num_tokens, "token")} in ${kind}; highest position id ${prompt.max_position}`;
  setText(byId("inspect-summary"), summary);
  byId("parts").replaceChildren(...parts.map(block));
  byId("inspection").hidden = false; // before drawing the mask: a hidden canvas has no size
  mask.show({ size: prompt.num_tokens, prefixLen: prompt.prefix_len, rowStart: prompt.row_start, parts });
}

/** Return the block of one part: its name, and a chip per token. */
function block(part) {
  const { tokens } = part;
  const span = tokens.length ? `, positions ${tokens[0].position} to ${tokens.at(-1).position}` : "";
  const chips = element("div", { class: "chips" });
  const made = element(
    "section",
    { class: "part", "data-part": part.kind, "data-testid": "part", "data-name": part.title },
    element("h3", {}, part.title, element("span", { class: "muted" }, ` ${counted(tokens.length, "token")}${span}`)),
    chips,
  );
  const more = element("button", { type: "button", class: "small" });
  let count = 0;
  const extend = () => {
    const next = tokens.slice(count, count + CHIPS_AT_ONCE);
    chips.append(...next.map((token, index) => chip(token, part.first + count + index)));
    count += next.length;
    if (count === tokens.length) more.remove();
    else more.textContent = `Show more, ${tokens.length - count} are left`;
  };
  made.append(more);
  more.addEventListener("click", extend);
  extend();
  return made;
}

function chip(token, index) {
  const title = `token ${index}, id ${token.id}, position ${token.position}, text ${JSON.stringify(token.text)}`;
  return element(
    "span",
    { class: "chip", title, "data-testid": "chip" },
    element("span", { class: "text" }, visibleText(token.text)),
    element("span", { class: "position" }, String(token.position)),
  );
}
