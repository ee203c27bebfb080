/** Header of the page: the served model, and whether the server accepts requests. */

import { getJson } from "./api.js";
import { byId, setText } from "./dom.js";

const INTERVAL_MS = 5000;
const PATIENCE_MS = 4000;

let timer = 0;
let lengthKnown = false;
let settingsKnown = false;

async function showModel() {
  const model = (await getJson("v1/models", PATIENCE_MS)).data?.[0];
  if (!model) return;
  setText(byId("model-name"), model.id);
  document.title = `${model.id} · chunkattn`;
  lengthKnown = model.max_model_len != null; // unknown until the engine has started
  if (lengthKnown) setText(byId("model-length"), `${model.max_model_len.toLocaleString("en")} positions`);
}

async function showHealth() {
  let state = "unreachable";
  let text = state;
  try {
    const health = await getJson("health", PATIENCE_MS);
    state = text = health.status;
    if (health.warmup && !health.warm) text += `, warm-up ${health.warmup.done}/${health.warmup.total}`;
  } catch {
    // No answer in time: unreachable.
  }
  byId("health").dataset.state = state;
  setText(byId("health-text"), text);
  return state === "ready";
}

async function showSettings(onSettings) {
  const settings = await getJson("static/page.json", PATIENCE_MS);
  settingsKnown = settings.chat_template != null; // unknown until the engine has started
  if (settingsKnown) onSettings(settings);
}

async function poll(onSettings) {
  clearTimeout(timer);
  if (document.hidden) return; // visibilitychange resumes the polling
  const ready = await showHealth();
  if (ready && !lengthKnown) await showModel().catch(() => {});
  if (ready && !settingsKnown) await showSettings(onSettings).catch(() => {});
  clearTimeout(timer); // another poll may have started one meanwhile
  timer = setTimeout(poll, INTERVAL_MS, onSettings);
}

/** @param {function} onSettings called once with the server's settings for the page */
export function setUpStatus(onSettings) {
  document.addEventListener("visibilitychange", () => poll(onSettings));
  showModel().catch(() => {});
  poll(onSettings);
}
