/** "Copy as curl": the request of a form as a command for a shell. */

import { urlOf } from "./api.js";
import { byId, element, setText } from "./dom.js";

const SHOWN_MS = 4000;

/** Return the command that sends a request; a POSIX shell reads its words as they are. */
export function curlOf(path, body) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  return `curl -s ${quoted(urlOf(path).href)} \\\n  -H 'Content-Type: application/json' \\\n  -d ${quoted(JSON.stringify(body))}`;
}

/**
 * Let a button copy the request that its form would send.
 * @param {string} id id of the button
 * @param {() => [string, object]} request returns path and body; its error is given to `onerror`
 * @param {(error: Error) => void} onerror
 */
export function setUpCurl(id, request, onerror) {
  const button = byId(id);
  const name = button.textContent;
  let timer = 0;
  button.addEventListener("click", async () => {
    let command;
    try {
      command = curlOf(...request());
    } catch (error) {
      onerror(error);
      return;
    }
    setText(button, (await copied(command)) ? "Copied" : "Cannot copy");
    clearTimeout(timer);
    timer = setTimeout(() => setText(button, name), SHOWN_MS);
  });
}

/** Put a text on the clipboard, and return whether it is there. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Plain HTTP from another machine has no clipboard; browsers copy a selection there.
  }
  const focused = document.activeElement;
  const area = element("textarea", { class: "visually-hidden", readonly: true, "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}
