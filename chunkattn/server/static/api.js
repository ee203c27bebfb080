/** Requests to the server, and errors from it. */

/**
 * Return the URL of one of the server's routes, which lie beside the page, at any path that a proxy gives it.
 * The URL has no credentials: `fetch` refuses those, and the browser sends the page's own anyway.
 */
export function urlOf(path) {
  const url = new URL(`../${path}`, import.meta.url);
  url.username = url.password = "";
  return url;
}

export class ApiError extends Error {
  /**
   * @param {string} message text for people
   * @param {{param?: ?string, code?: ?string}} about name of the request field at fault, and an identifier for programs
   */
  constructor(message, { param = null, code = null } = {}) {
    super(message);
    this.param = param;
    this.code = code;
  }
}

/** Return the error in an answer's body, `{"error": {"message", "param", "code"}}`. */
export function errorIn(body, otherwise) {
  const error = body?.error;
  return new ApiError(error?.message ?? otherwise, error ?? {});
}

/**
 * POST a body as JSON to a route, such as `v1/score`.
 * @returns {Promise<Response>} the answer, if its status is a success
 * @throws {ApiError} any other outcome; an aborted request throws its AbortError
 */
export async function post(path, body, signal) {
  let response;
  try {
    response = await fetch(urlOf(path), {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", { code: "unreachable" });
  }
  if (response.ok) return response;
  // A proxy may answer with other content than JSON.
  const answer = await response.json().catch(() => null);
  throw errorIn(answer, `The server answered with status ${response.status}.`);
}

/** GET a route's JSON, whatever the status: a server that is not ready answers 503 with JSON. */
export async function getJson(path, patienceMs) {
  const response = await fetch(urlOf(path), { cache: "no-store", signal: AbortSignal.timeout(patienceMs) });
  return response.json();
}

export async function postJson(path, body) {
  const response = await post(path, body);
  return response.json().catch(() => {
    throw new ApiError("The answer broke off.", { code: "unreachable" });
  });
}
