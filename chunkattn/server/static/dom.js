/** DOM helpers. They insert text as text nodes, so a text cannot become markup. */

export const byId = (id) => document.getElementById(id);

/** Return a new element. A true attribute is set empty; a false or null one is left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children); // strings become text nodes
  return made;
}

/** Set a text if it differs: screen readers announce every assignment. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Fill a `<dl>` with names and values. */
export function fillList(list, entries) {
  list.replaceChildren(...entries.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

/**
 * Return a bar: a track with a filled share.
 * @param {number} share filled share of the track, 0 to 1
 * @param {number} width share of the available width, 0 to 1
 */
export function bar(share, width = 1) {
  const filled = element("span", { class: "filled" });
  const track = element("span", { class: "track", "aria-hidden": "true" }, filled);
  // Set through CSSOM: the content security policy forbids style attributes.
  filled.style.width = `${100 * share}%`;
  track.style.width = `${100 * width}%`;
  return track;
}

/**
 * Run `work` unless it runs already; mark the button as disabled meanwhile.
 * The mark is `aria-disabled`, because a `disabled` button loses the keyboard's focus.
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

/** Return the texts between separators, without empty texts. */
export const listed = (text, separator) => text.split(separator).map((part) => part.trim()).filter(Boolean);
