/** Header of the page: the served model, and whether the server accepts requests. */

import { byId, setText } from "./dom.js";

const INTERVAL_MS = 5000;
const PATIENCE_MS = 4000;

let timer = 0;
let lengthKnown = false;

async function getJson(path) {
  const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  return response.json(); // a server that is not ready answers 503 with the same JSON
}

async function showModel() {
  const model = (await getJson("/v1/models")).data?.[0];
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
    const health = await getJson("/health");
    state = text = health.status;
    if (health.warmup && !health.warm) text += `, warm-up ${health.warmup.done}/${health.warmup.total}`;
  } catch {
    // No answer in time: unreachable.
  }
  byId("health").dataset.state = state;
  setText(byId("health-text"), text);
  return state === "ready";
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return; // visibilitychange resumes the polling
  const ready = await showHealth();
  if (ready && !lengthKnown) await showModel().catch(() => {});
  clearTimeout(timer); // another poll may have started one meanwhile
  timer = setTimeout(poll, INTERVAL_MS);
}

export function setUpStatus() {
  document.addEventListener("visibilitychange", poll);
  showModel().catch(() => {});
  poll();
}
