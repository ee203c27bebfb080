/** Requests to the server, and its errors. */

export class ApiError extends Error {
  /**
   * @param {string} message for people
   * @param {{param?: ?string, code?: ?string}} about the field it is about, and a code for programs
   */
  constructor(message, { param = null, code = null } = {}) {
    super(message);
    this.param = param;
    this.code = code;
  }
}

/** The error in an answer's body, `{"error": {"message", "param", "code"}}`. */
export function errorIn(body, otherwise) {
  const told = body?.error;
  return new ApiError(told?.message ?? otherwise, told ?? {});
}

/**
 * POST a body as JSON.
 * @returns {Promise<Response>} of a success
 * @throws {ApiError} of anything else; an aborted request throws its AbortError
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
  // A proxy in between may answer with something else than JSON.
  const told = await response.json().catch(() => null);
  throw errorIn(told, `The server answered with status ${response.status}.`);
}

export async function postJson(path, body) {
  const response = await post(path, body);
  return response.json().catch(() => {
    throw new ApiError("The answer broke off.", { code: "unreachable" });
  });
}
