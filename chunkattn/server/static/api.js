/** Requests to the server, and errors from it. */

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
 * POST a body as JSON.
 * @returns {Promise<Response>} the answer, if its status is a success
 * @throws {ApiError} any other outcome; an aborted request throws its AbortError
 */
export async function post(path, body, signal) {
  let response;
  try {
    response = await fetch(path, {
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

export async function postJson(path, body) {
  const response = await post(path, body);
  return response.json().catch(() => {
    throw new ApiError("The answer broke off.", { code: "unreachable" });
  });
}
