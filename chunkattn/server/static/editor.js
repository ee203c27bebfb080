/** Editor of the prompt, as one text with separators or as parts. */

import { DocumentList, documentAtFault } from "./documents.js";
import { byId, element } from "./dom.js";
import { ErrorBox } from "./errors.js";
import { EXAMPLES, SEPARATOR } from "./examples.js";

/** Split a text into parts as the server does. */
function partsOf(text, separator) {
  const found = text.split(separator);
  if (found.length < 3) return { prefix: "", documents: [], question: text };
  return { prefix: found[0], documents: found.slice(1, -1), question: found.at(-1) };
}

/** Join parts into a text. Without documents the result is a plain prompt. */
function textOf({ prefix, documents, question }, separator) {
  return documents.length ? [prefix, ...documents, question].join(separator) : prefix + question;
}

export class PromptEditor {
  #text = byId("prompt-text");
  #prefix = byId("prefix");
  #question = byId("question");
  #documents = new DocumentList(byId("documents"), byId("add-document"));

  /** The server's separator; assign it before a change of mode. */
  separator = SEPARATOR;

  /** The most log-probabilities that the server gives for each token. */
  maxLogprobs = 0;

  /** Callback after every change. */
  onchange = () => {};

  constructor() {
    const errors = new ErrorBox(byId("prompt-errors"), { prompt: this.#text });
    /** Error box of requests that carry the prompt. */
    this.errors = errors;

    byId("editor").addEventListener("input", () => this.onchange());
    for (const mode of ["text", "parts"]) byId(`mode-${mode}`).addEventListener("change", () => this.#switchTo(mode));
    this.#documents.onchange = () => this.onchange();
    this.#setUpExamples();
    byId("prompt-file").addEventListener("change", (event) => this.#readFiles(event.target));

    byId("mode-text").checked = true; // some browsers restore the other mode on reload
    this.load(EXAMPLES[0].parts);
  }

  get inParts() {
    return byId("mode-parts").checked;
  }

  /** The prompt in parts, in either mode. */
  get parts() {
    return this.inParts ? this.#partsEdited() : partsOf(this.#text.value, this.separator);
  }

  /** Request fields that hold the prompt. */
  get request() {
    return this.inParts ? { chunks: this.parts } : { prompt: this.#text.value, chunk_aware: true };
  }

  /** Request fields of a chat: the prefix is the system message, the question the user's. */
  get chat() {
    const { prefix, documents, question } = this.parts;
    const messages = [{ role: "user", content: question }];
    if (prefix.trim()) messages.unshift({ role: "system", content: prefix });
    return documents.length ? { messages, documents } : { messages };
  }

  load(parts) {
    if (this.inParts) {
      this.#prefix.value = parts.prefix;
      this.#question.value = parts.question;
      this.#documents.load(parts.documents);
    } else {
      this.#text.value = textOf(parts, this.separator);
      this.onchange();
    }
  }

  /** Show an error beside the prompt and return true, if the prompt caused the error. */
  claims(error) {
    const own = ["prompt", "chunks", "documents", "prefix", "messages"].includes(error.param);
    if (own) this.errors.show(error, this.inParts ? documentAtFault(error, this.#documents.areas) : undefined);
    return own;
  }

  #switchTo(mode) {
    // The radio buttons have changed already, so `this.parts` would read the new mode's editor.
    const old = mode === "parts" ? partsOf(this.#text.value, this.separator) : this.#partsEdited();
    byId("text-editor").hidden = mode !== "text";
    byId("parts-editor").hidden = mode !== "parts";
    const texts = [old.prefix, ...old.documents, old.question];
    byId("forged").hidden = mode === "parts" || !texts.some((text) => text.includes(this.separator));
    this.errors.clear();
    this.load(old);
  }

  #partsEdited() {
    return { prefix: this.#prefix.value, documents: this.#documents.texts, question: this.#question.value };
  }

  #setUpExamples() {
    const select = byId("example");
    EXAMPLES.forEach(({ title }, index) => select.append(element("option", { value: index }, title)));
    select.addEventListener("change", () => {
      if (select.value) this.load(EXAMPLES[Number(select.value)].parts);
      byId("forged").hidden = true;
      select.value = ""; // allows the same choice again
    });
  }

  /** Load files: as text, joined by separators; as parts, one document per file. */
  async #readFiles(input) {
    this.errors.clear();
    try {
      const texts = await Promise.all([...input.files].map((file) => file.text()));
      if (this.inParts) {
        for (const text of texts) this.#documents.append(text);
        this.#documents.renumber();
      } else if (texts.length) {
        this.#text.value = texts.join(this.separator);
        this.onchange();
      }
    } catch (error) {
      this.errors.show(new Error(`The file cannot be read: ${error.message}`));
    }
    input.value = "";
  }
}
