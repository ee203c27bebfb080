/** Small helpers around the DOM. Text goes in as text, never as markup. */

export const byId = (id) => document.getElementById(id);

/** A new element. Attributes that are true are set empty, those that are false or null are left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children); // strings become text nodes
  return made;
}

/** Set a text that is read aloud when it changes, and only then. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Fill a `<dl>` with names and values. */
export function fillList(list, entries) {
  list.replaceChildren(...entries.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

/**
 * A bar: a track, and a filled share of it.
 * @param {number} share from 0 to 1, of the track
 * @param {number} width from 0 to 1, of the room there is
 */
export function bar(share, width = 1) {
  const filled = element("span", { class: "filled" });
  const track = element("span", { class: "track", "aria-hidden": "true" }, filled);
  // CSSOM, as the content security policy allows no style attributes.
  filled.style.width = `${100 * share}%`;
  track.style.width = `${100 * width}%`;
  return track;
}

/**
 * Do something unless it is being done; meanwhile the button says so.
 * It is not `disabled`, which would take the keyboard's focus away from it.
 */
export async function whileBusy(button, work) {
  if (button.getAttribute("aria-disabled") === "true") return;
  button.setAttribute("aria-disabled", "true");
  try {
    await work();
  } finally {
    button.removeAttribute("aria-disabled");
  }
}

export const seconds = (milliseconds) =>
  milliseconds < 1000 ? `${milliseconds.toFixed(0)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;

export const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
