/** Kinds of parts, and their colours in the style sheet as numbers, for drawing. */

const CHUNK_COLORS = 6;

/** Return the kind by which the style sheet colours a part: "prefix", "question", or the number of a chunk's colour. */
export function partKind(name) {
  const number = /^chunk (\d+)$/.exec(name)?.[1];
  return number === undefined ? name : String(Number(number) % CHUNK_COLORS);
}

/** Return the colour of a kind as `[red, green, blue]`, in the present scheme (light or dark). */
export function partColor(kind) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(`--part-${kind}`).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** Return a text with visible white space and control characters. */
export function visibleText(text) {
  if (text === "") return "∅";
  return text
    .replaceAll(" ", "·")
    .replaceAll("\n", "↵")
    .replaceAll("\t", "⇥")
    .replace(/[\u0000-\u001f]/g, (sign) => String.fromCodePoint(0x2400 + sign.codePointAt(0)));
}
