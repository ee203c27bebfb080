/** Earlier answers of a tab: closed blocks with copies of what was shown, the newest first, until the page is reloaded. */

import { byId, element } from "./dom.js";

const KEPT = 10;

export class Earlier {
  #home;
  #shown = null;

  /** @param {string} id id of a hidden section with a heading */
  constructor(id) {
    this.#home = byId(id);
  }

  /**
   * Note a new answer. It moves to the earlier ones when the next one comes.
   * @param {string} title what was asked
   * @param {() => Node[]} nodes returns the nodes that show the answer at that time
   */
  show(title, nodes) {
    this.leave();
    this.#shown = { title, nodes, time: new Date().toLocaleTimeString() };
  }

  /** Move the shown answer to the earlier ones. */
  leave() {
    if (!this.#shown) return;
    const { title, nodes, time } = this.#shown;
    this.#shown = null;
    const summary = element("summary", {}, element("span", { class: "muted" }, time), ` ${title}`);
    const block = element("details", { "data-testid": "earlier" }, summary, ...nodes().map(copyOf));
    this.#home.querySelector("h2").after(block);
    this.#home.hidden = false;
    const blocks = this.#home.querySelectorAll("details");
    if (blocks.length > KEPT) [...blocks].at(-1).remove();
  }
}

/** Return a copy of a node that no program takes for the original. */
function copyOf(node) {
  const copy = node.cloneNode(true);
  for (const each of [copy, ...copy.querySelectorAll("*")]) {
    for (const name of ["id", "data-testid", "aria-live", "aria-labelledby", "aria-describedby", "role", "tabindex"]) {
      each.removeAttribute(name);
    }
  }
  copy.hidden = false;
  return copy;
}
