/** State of tab "Decide" as the text that the model reads. */

const PIECES = /"(?:[^"\\]|\\.)*"|[[\]{},]|[^"[\]{},\s]+/g;

/**
 * Return a JSON text as `LLM.decide` reads the JSON: compact, and messages as one line each.
 * The text is rewritten piece by piece, because `JSON.parse` would round long numbers and sort keys that are numbers.
 * @throws {Error} the text is no JSON object or array
 */
export function stateOf(json) {
  let value;
  try {
    value = JSON.parse(json);
  } catch (error) {
    throw new Error(`The state is no JSON: ${error.message}`);
  }
  if (typeof value !== "object" || value === null) throw new Error("The state must be a JSON object or array.");
  const isMessages = Array.isArray(value) && value.length > 0 && value.every(isMessage);
  let depth = 0;
  const pieces = json.match(PIECES).map((piece) => {
    if (piece === "]" || piece === "}") depth -= 1;
    const isBetween = isMessages && piece === "," && depth === 1;
    if (piece === "[" || piece === "{") depth += 1;
    if (isBetween) return "\n";
    return piece.startsWith('"') ? JSON.stringify(JSON.parse(piece)) : piece; // with as few escapes as possible
  });
  return (isMessages ? pieces.slice(1, -1) : pieces).join("");
}

function isMessage(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value) && "role" in value && "content" in value;
}
