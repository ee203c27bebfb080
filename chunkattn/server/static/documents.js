/** List of documents, which can be added, moved and removed. */

import { element } from "./dom.js";
import { partKind } from "./parts.js";

export class DocumentList {
  #list;
  #add;
  #made = 0;

  /** Callback after every change that no field's `input` event reports. */
  onchange = () => {};

  /**
   * @param {HTMLElement} list element of the documents
   * @param {HTMLElement} add button that adds one
   */
  constructor(list, add) {
    this.#list = list;
    this.#add = add;
    add.addEventListener("click", () => {
      this.append("").querySelector("textarea").focus();
      this.renumber();
    });
  }

  get texts() {
    return this.areas.map((area) => area.value);
  }

  get areas() {
    return [...this.#list.querySelectorAll("textarea")];
  }

  load(texts) {
    this.#list.replaceChildren();
    for (const text of texts) this.append(text);
    this.renumber();
  }

  /** Add a document. Call `renumber` after the last one. */
  append(text) {
    const id = `${this.#list.id}-${this.#made++}`;
    const area = element("textarea", { id, rows: 2, spellcheck: "false", autocomplete: "off", "data-testid": "document" });
    area.value = text;
    const row = element("li", { class: "field" });
    const button = (name, sign, act) => {
      const made = element("button", { type: "button", class: "small", "data-testid": `${name}-document` }, sign);
      made.addEventListener("click", () => act(row, made));
      return made;
    };
    const buttons = [
      button("raise", "↑", (own, pressed) => this.#move(own, own.previousElementSibling, pressed)),
      button("lower", "↓", (own, pressed) => this.#move(own.nextElementSibling, own, pressed)),
      button("remove", "×", (own) => this.#remove(own)),
    ];
    row.append(element("div", { class: "row-head" }, element("label", { for: id }), ...buttons), area);
    this.#list.append(row);
    return row;
  }

  /** Swap two neighbours. */
  #move(row, before, pressed) {
    if (!row || !before) return;
    before.before(row);
    this.renumber();
    // A moved node loses the focus. At either end the pressed button is disabled, so its neighbour gets the focus.
    const own = pressed.closest("li");
    (pressed.disabled ? own.querySelector("button:not(:disabled)") : pressed).focus();
  }

  #remove(row) {
    const next = row.nextElementSibling ?? row.previousElementSibling;
    row.remove();
    this.renumber();
    (next?.querySelector("textarea") ?? this.#add).focus();
  }

  /** Name the documents by their places. */
  renumber() {
    const rows = [...this.#list.children];
    rows.forEach((row, index) => {
      const [up, down, remove] = row.querySelectorAll("button");
      row.dataset.part = partKind(`chunk ${index}`);
      row.querySelector("label").textContent = `Document ${index}`;
      up.setAttribute("aria-label", `Move document ${index} up`);
      down.setAttribute("aria-label", `Move document ${index} down`);
      remove.setAttribute("aria-label", `Remove document ${index}`);
      up.disabled = index === 0;
      down.disabled = index === rows.length - 1;
    });
    this.onchange();
  }
}

/** Return the field of the document that an error of the server names, or undefined. */
export function documentAtFault(error, areas) {
  const number = /^documents?[ .](\d+)\b/.exec(error.message)?.[1];
  return error.param === "documents" && number !== undefined ? areas[Number(number)] : undefined;
}
