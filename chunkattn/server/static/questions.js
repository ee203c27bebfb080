/** Editor of the questions of tab "Decide", with the answer beside each question. */

import { answerParts } from "./answers.js";
import { byId, element, listed } from "./dom.js";

/** Kinds of questions by their `type`; `list` and `entry` are the request's names of the options and of an option's text. */
const KINDS = {
  predicate: { title: "yes or no", text: "Statement, true or not" },
  choice: { title: "choice", text: "Question", options: "Options, one a line", list: "choices", entry: "value" },
  score: { title: "rating", text: "Question", options: "Levels, one a line, the lowest first", list: "levels", entry: "label" },
};

let made = 0;

class Question {
  constructor({ type = "predicate", text = "", options = [] }, onremove) {
    const id = `asked-${made++}`;
    const area = (name, rows) =>
      element("textarea", { id: `${id}-${name}`, rows, spellcheck: "false", autocomplete: "off", "data-testid": `asked-${name}` });
    this.kind = element(
      "select",
      { id: `${id}-kind`, "data-testid": "asked-kind", autocomplete: "off" },
      ...Object.entries(KINDS).map(([value, { title }]) => element("option", { value }, title)),
    );
    this.text = area("text", 2);
    this.options = area("options", 3);
    this.remove = element("button", { type: "button", class: "small", "data-testid": "remove-question" }, "×");
    this.kindLabel = element("label", { for: this.kind.id });
    this.textLabel = element("label", { for: this.text.id });
    this.optionsLabel = element("label", { for: this.options.id });
    this.optionsField = element("div", { class: "field" }, this.optionsLabel, this.options);
    this.answer = element("div", { class: "answer", "data-testid": "answer" });
    this.group = element(
      "div",
      { class: "question", role: "group" },
      element("div", { class: "row-head" }, this.kindLabel, this.kind, this.remove),
      element("div", { class: "field" }, this.textLabel, this.text),
      this.optionsField,
    );
    this.row = element("li", { class: "asked", "data-testid": "asked" }, this.group, this.answer);
    this.kind.value = type;
    this.text.value = text;
    this.options.value = options.join("\n");
    this.kind.addEventListener("change", () => this.#showKind());
    this.remove.addEventListener("click", () => onremove(this));
    this.#showKind();
  }

  #showKind() {
    const kind = KINDS[this.kind.value];
    this.textLabel.textContent = kind.text;
    this.optionsLabel.textContent = kind.options ?? "";
    this.optionsField.hidden = !kind.list;
    this.answer.replaceChildren();
  }

  number(index) {
    this.group.setAttribute("aria-label", `Question ${index}`);
    this.kindLabel.textContent = `Question ${index}`;
    this.remove.setAttribute("aria-label", `Remove question ${index}`);
  }

  /** The question in the request. */
  get request() {
    const { list, entry } = KINDS[this.kind.value];
    const asked = { type: this.kind.value, instructions: this.text.value };
    if (list) asked[list] = listed(this.options.value, "\n").map((text) => ({ [entry]: text }));
    return asked;
  }

  show(answer) {
    this.answer.replaceChildren(...answerParts(answer));
  }

  /** Return the field that an error message is about. */
  fieldOf(message) {
    const { list } = KINDS[this.kind.value];
    return list && /\b(choices|options?|levels?)\b/.test(message) ? this.options : this.text;
  }
}

export class QuestionEditor {
  #list = byId("asked-questions");
  #questions = [];

  /** Callback after every change that no field's `input` event reports. */
  onchange = () => {};

  constructor() {
    byId("add-question").addEventListener("click", () => {
      this.#append({}).text.focus();
      this.#renumber();
    });
  }

  /** The present questions; a later change of the editor leaves the array as it is. */
  get questions() {
    return [...this.#questions];
  }

  load(questions) {
    this.#questions = [];
    this.#list.replaceChildren();
    questions.forEach((question) => this.#append(question));
    this.#renumber();
  }

  #append(question) {
    const added = new Question(question, (own) => this.#remove(own));
    this.#questions.push(added);
    this.#list.append(added.row);
    return added;
  }

  #remove(question) {
    const index = this.#questions.indexOf(question);
    this.#questions.splice(index, 1);
    question.row.remove();
    this.#renumber();
    const next = this.#questions[Math.min(index, this.#questions.length - 1)];
    (next?.text ?? byId("add-question")).focus();
  }

  #renumber() {
    this.#questions.forEach((question, index) => question.number(index));
    this.onchange();
  }
}

/** Return the field of the question that an error of the server names, or undefined. */
export function fieldAtFault(error, questions) {
  const number = /^questions?[ .](\d+)\b/.exec(error.message)?.[1];
  return error.param === "questions" && number !== undefined ? questions[Number(number)]?.fieldOf(error.message) : undefined;
}
