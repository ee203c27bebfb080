/** Text of an answer whose tokens tell their log-probabilities: under the pointer, or chosen by the arrow keys. */

import { element, setText } from "./dom.js";
import { visibleText } from "./parts.js";

const HINT = "Point at a token, or use the arrow keys here, for its probability and the other likely tokens.";

/** Return the tokens of an event of a completion or a chat: `{text, logprob, others}`, the others as `[text, logprob]`. */
export function tokensIn(choice) {
  const found = choice.logprobs;
  if (!found) return [];
  if (found.content) {
    return found.content.map(({ token, logprob, top_logprobs: top }) => ({
      text: token,
      logprob,
      others: top.map((other) => [other.token, other.logprob]),
    }));
  }
  return found.tokens.map((text, index) => ({
    text,
    logprob: found.token_logprobs[index],
    others: Object.entries(found.top_logprobs?.[index] ?? {}),
  }));
}

export class TokenText {
  #tokens = [];
  #queue = []; // tokens whose text has not come yet
  #rest = document.createTextNode(""); // text whose tokens have not come yet
  #chosen = null;

  /**
   * @param {HTMLElement} output region of the answer, which can have the focus
   * @param {HTMLElement} readout line for the token that is pointed at
   */
  constructor(output, readout) {
    this.output = output;
    this.readout = readout;
    output.addEventListener("pointerover", (event) => {
      const at = this.#tokens.findIndex(({ span }) => span === event.target);
      if (at >= 0) this.#choose(at);
    });
    output.addEventListener("keydown", (event) => {
      const last = this.#tokens.length - 1;
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || last < 0) return;
      event.preventDefault();
      this.#choose(Math.min(Math.max((this.#chosen ?? (step > 0 ? -1 : last + 1)) + step, 0), last));
    });
  }

  clear() {
    this.#tokens = [];
    this.#queue = [];
    this.#rest = document.createTextNode("");
    this.#chosen = null;
    this.output.replaceChildren(this.#rest);
    setText(this.readout, "");
  }

  /** Add a piece of the answer, and tokens. Either may come before the other. */
  append(piece, tokens) {
    this.#rest.appendData(piece);
    this.#queue.push(...tokens);
    while (this.#queue.length && this.#rest.data) {
      const [first] = this.#queue;
      const { data } = this.#rest;
      if (first.text && data.startsWith(first.text)) {
        this.#add(this.#queue.shift());
      } else if (first.text.startsWith(data)) {
        return; // the text is not complete
      } else {
        // Tokens of bytes: together they spell a character.
        const count = this.#queue.length;
        this.#add({ ...this.#queue.at(-1), text: data, count });
        this.#queue = [];
      }
    }
  }

  /** Note that nothing follows. A stop string may have cut the last token. */
  end() {
    if (this.#rest.data && this.#queue.length) this.#add({ ...this.#queue.shift(), text: this.#rest.data });
  }

  #add(token) {
    const span = element("span", { class: "token", "data-testid": "token", "data-logprob": token.logprob }, token.text);
    span.title = describe(token);
    this.#rest.before(span);
    this.#rest.deleteData(0, token.text.length);
    this.#tokens.push({ ...token, span });
    if (!this.readout.textContent) setText(this.readout, HINT);
  }

  #choose(at) {
    this.#tokens[this.#chosen]?.span.classList.remove("chosen");
    this.#chosen = at;
    const token = this.#tokens[at];
    token.span.classList.add("chosen");
    setText(this.readout, `token ${at + 1} of ${this.#tokens.length}: ${describe(token)}`);
  }
}

function describe({ text, logprob, others, count = 1 }) {
  const shown = (own, value) => `“${visibleText(own)}” ${value.toFixed(4)} (${(100 * Math.exp(value)).toFixed(1)}%)`;
  if (logprob == null) return `“${visibleText(text)}”`;
  const rest = others.filter(([other]) => other !== text).map(([other, value]) => shown(other, value));
  const own = count === 1 ? shown(text, logprob) : `“${visibleText(text)}”, ${count} tokens, the last with ${logprob.toFixed(4)}`;
  return rest.length && count === 1 ? `${own}; others: ${rest.join(", ")}` : own;
}
