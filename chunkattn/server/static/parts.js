/** Kinds of parts, and their colours: those of the style sheet, which pictures need as numbers. */

const CHUNK_COLORS = 6;

/** What the style sheet colours by: "prefix", "question", or the number of a chunk's colour. */
export function partKind(name) {
  const number = /^chunk (\d+)$/.exec(name)?.[1];
  return number === undefined ? name : String(Number(number) % CHUNK_COLORS);
}

/** Of a part's kind, `[red, green, blue]` in the scheme, light or dark, that is shown. */
export function partColor(kind) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(`--part-${kind}`).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** A text with its white space and control characters visible. */
export function visibleText(text) {
  if (text === "") return "∅";
  return text
    .replaceAll(" ", "·")
    .replaceAll("\n", "↵")
    .replaceAll("\t", "⇥")
    .replace(/[\u0000-\u001f]/g, (sign) => String.fromCodePoint(0x2400 + sign.codePointAt(0)));
}
