/** Error messages beside the fields that caused them. A message goes when its field is changed to a valid value. */

import { element } from "./dom.js";

export class ErrorBox {
  /**
   * @param {HTMLElement} home element for errors without a field
   * @param {Object<string, HTMLElement>} fields controls by the API's field names
   */
  constructor(home, fields = {}) {
    this.home = home;
    this.fields = fields;
    this.box = null;
    this.field = null;
  }

  /**
   * @param {Error & {param?: ?string, code?: ?string}} error
   * @param {?HTMLElement} field control at fault; by default the one of the error's `param`
   */
  show(error, field = undefined) {
    this.clear();
    field ??= this.fields[error.param];
    const about = [error.param, error.code].filter(Boolean).join(" · ");
    const id = `${this.home.id}-message`;
    this.box = element("div", { id, class: "error", role: "alert", "data-testid": "error" }, element("p", {}, error.message));
    if (about) this.box.append(element("p", { class: "about" }, about));
    if (field?.offsetParent) {
      this.field = field;
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-errormessage", id);
      // In a toolbar, a message would push the other fields aside.
      (field.closest(".toolbar") ?? field).after(this.box);
      for (const kind of ["input", "change"]) field.addEventListener(kind, this.#changed);
    } else {
      this.home.append(this.box);
    }
    this.box.closest("details")?.setAttribute("open", "");
    this.box.scrollIntoView({ block: "nearest" });
  }

  #changed = () => {
    if (this.field.checkValidity()) this.clear();
  };

  clear() {
    this.box?.remove();
    this.field?.removeAttribute("aria-invalid");
    this.field?.removeAttribute("aria-errormessage");
    for (const kind of ["input", "change"]) this.field?.removeEventListener(kind, this.#changed);
    this.field = null;
  }
}
