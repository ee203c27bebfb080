/** Picture of the attention mask: row i is the query token, column k the key token. */

import { setText } from "./dom.js";
import { partColor, visibleText } from "./parts.js";

const MOST_CELLS = 600; // per side; in longer prompts a cell stands for several tokens
const MARGIN = 30; // CSS pixels at the left and at the top, for captions and part strips
const STRIP = 6;
const FAINTEST = 60; // of 255: keeps a cell with one visible pair recognisable
const GRID_FROM = 9; // CSS pixels that a cell must have for lines between cells
const LINE_FROM = 4; // CSS pixels that a part must have for a line at its end

/**
 * @typedef {object} View prompt to draw
 * @property {number} size tokens of the prompt
 * @property {number} prefixLen tokens of the prefix
 * @property {number[]} rowStart first visible token after the prefix, for each token
 * @property {{title: string, kind: string, first: number, tokens: {text: string, position: number}[]}[]} parts
 */

/** Return whether token i sees token k. @param {View} view */
function sees(view, i, k) {
  return k <= i && (k < view.prefixLen || k >= view.rowStart[i]);
}

/** Return the tokens that token i sees, as two disjoint ranges `[from, to)`; the second may be empty. @param {View} view */
function rangesOf({ prefixLen, rowStart }, i) {
  const from = Math.max(prefixLen, rowStart[i]);
  return [
    [0, Math.min(prefixLen, i + 1)],
    [from, Math.max(from, i + 1)],
  ];
}

/** Return the share of visible pairs for every cell of a `cells` by `cells` grid. @param {View} view */
function visibleShares(view, cells) {
  const { size } = view;
  const shares = new Float32Array(cells * cells);
  const starts = Array.from({ length: cells + 1 }, (_, cell) => Math.ceil((cell * size) / cells));
  const cellOf = (token) => Math.floor((token * cells) / size);
  const add = (row, from, to) => {
    for (let cell = cellOf(from), at = from; at < to; cell += 1) {
      const end = Math.min(to, starts[cell + 1]);
      shares[row * cells + cell] += end - at;
      at = end;
    }
  };
  for (let i = 0; i < size; i += 1) {
    for (const [from, to] of rangesOf(view, i)) add(cellOf(i), from, to);
  }
  for (let row = 0; row < cells; row += 1) {
    for (let column = 0; column < cells; column += 1) {
      shares[row * cells + column] /= (starts[row + 1] - starts[row]) * (starts[column + 1] - starts[column]);
    }
  }
  return shares;
}

export class Mask {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {HTMLElement} readout element that describes the selected cell
   */
  constructor(canvas, readout) {
    this.canvas = canvas;
    this.readout = readout;
    this.view = null;
    this.summary = ""; // text of the readout without a selection
    this.at = null; // selected pair {i, k}
    this.picture = null; // one pixel per cell, kept until the number or the colours of the cells change

    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.picture = null;
      this.draw();
    });
    for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, (event) => this.#pointed(event));
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.point(null); // keep the selection of a finger, which leaves when it is lifted
    });
    canvas.addEventListener("keydown", (event) => this.#keyed(event));
  }

  /** @param {View} view */
  show(view) {
    this.view = view;
    this.picture = null;
    let visible = 0;
    for (let i = 0; i < view.size; i += 1) {
      for (const [from, to] of rangesOf(view, i)) visible += to - from;
    }
    const share = Math.round((200 * visible) / (view.size * (view.size + 1)));
    this.summary = `${share} % of the pairs that causal attention has are visible`;
    this.canvas.setAttribute("aria-label", `Attention mask of ${view.size} tokens: ${this.summary}`);
    this.point(null);
  }

  /** Select a pair of tokens, or none. @param {?{i: number, k: number}} at */
  point(at) {
    this.at = at;
    this.draw();
    if (!at) {
      setText(this.readout, this.summary);
      return;
    }
    const { i, k } = at;
    setText(this.readout, `${this.#named(i)} sees ${this.#named(k)}: ${sees(this.view, i, k) ? "yes" : "no"}`);
  }

  #partAt(index) {
    return this.view.parts.find((part) => index < part.first + part.tokens.length);
  }

  #named(index) {
    const part = this.#partAt(index);
    return `token ${index} (${visibleText(part.tokens[index - part.first].text)}, ${part.title})`;
  }

  #pointed(event) {
    if (!this.view) return;
    const { size } = this.view;
    const plot = this.canvas.clientWidth - MARGIN;
    const k = Math.floor(((event.offsetX - MARGIN) / plot) * size);
    const i = Math.floor(((event.offsetY - MARGIN) / plot) * size);
    const inside = i >= 0 && k >= 0 && i < size && k < size;
    this.point(inside ? { i, k } : null);
  }

  #keyed(event) {
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [0, 0];
    if (!this.view || !(down || right)) return;
    event.preventDefault(); // prevents scrolling
    const step = event.shiftKey ? 10 : 1;
    const bounded = (index) => Math.min(Math.max(index, 0), this.view.size - 1);
    const { i, k } = this.at ?? { i: this.view.size - 1, k: 0 };
    this.point({ i: bounded(i + down * step), k: bounded(k + right * step) });
  }

  draw() {
    const side = this.canvas.clientWidth;
    const plot = side - MARGIN;
    if (!this.view?.size || plot <= 0) return; // hidden canvases have no width
    const ratio = devicePixelRatio || 1;
    const pixels = Math.round(side * ratio);
    if (this.canvas.height !== pixels) this.canvas.width = this.canvas.height = pixels;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, side, side);

    const cells = Math.min(this.view.size, MOST_CELLS, Math.floor(plot * ratio));
    if (this.picture?.width !== cells) this.picture = this.#paint(cells);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.picture, MARGIN, MARGIN, plot, plot);

    const styles = getComputedStyle(this.canvas);
    this.#drawFrame(context, plot, styles);
    this.#drawCaptions(context, plot, styles);
    if (this.at) this.#drawPointer(context, plot, styles);
  }

  /** Paint the cells in the colour of the key token's part. */
  #paint(cells) {
    const shares = visibleShares(this.view, cells);
    const image = new ImageData(cells, cells);
    for (let column = 0; column < cells; column += 1) {
      const middle = Math.floor(((column + 0.5) * this.view.size) / cells);
      const color = partColor(this.#partAt(middle).kind);
      for (let row = 0; row < cells; row += 1) {
        const cell = row * cells + column;
        if (shares[cell]) image.data.set([...color, Math.max(FAINTEST, 255 * shares[cell])], 4 * cell);
      }
    }
    const picture = document.createElement("canvas");
    picture.width = picture.height = cells;
    picture.getContext("2d").putImageData(image, 0, 0);
    return picture;
  }

  /** Draw strips in the parts' colours along both axes, and lines at the ends of parts. */
  #drawFrame(context, plot, styles) {
    const { size, parts } = this.view;
    if (plot / size >= GRID_FROM) {
      context.fillStyle = styles.getPropertyValue("--surface");
      for (let index = 1; index < size; index += 1) {
        const at = MARGIN + (index / size) * plot - 0.5;
        context.fillRect(at, MARGIN, 1, plot);
        context.fillRect(MARGIN, at, plot, 1);
      }
    }
    for (const { kind, first, tokens } of parts) {
      const from = MARGIN + (first / size) * plot;
      const length = (tokens.length / size) * plot;
      context.fillStyle = styles.getPropertyValue(`--part-${kind}`);
      context.fillRect(from, MARGIN - STRIP - 2, length, STRIP);
      context.fillRect(MARGIN - STRIP - 2, from, STRIP, length);
      if (length < LINE_FROM) continue;
      context.fillStyle = styles.getPropertyValue("--border");
      context.fillRect(from + length - 0.5, MARGIN, 1, plot);
      context.fillRect(MARGIN, from + length - 0.5, plot, 1);
    }
    context.strokeStyle = styles.getPropertyValue("--border");
    context.lineWidth = 1;
    context.strokeRect(MARGIN + 0.5, MARGIN + 0.5, plot - 1, plot - 1);
  }

  #drawCaptions(context, plot, styles) {
    const last = this.view.size - 1;
    context.fillStyle = styles.getPropertyValue("--muted");
    context.font = `12px ${styles.fontFamily}`;
    context.textBaseline = "middle";
    context.textAlign = "center";
    const middle = MARGIN + plot / 2;
    context.fillText(`token k that is seen, 0 to ${last} →`, middle, 10, plot);
    context.save();
    context.translate(10, middle);
    context.rotate(-Math.PI / 2); // the text reads upwards, so its first arrow points down
    context.fillText(`← token i that sees, 0 to ${last}`, 0, 0, plot);
    context.restore();
  }

  /** Draw the selected row and column. */
  #drawPointer(context, plot, styles) {
    const cell = plot / this.view.size;
    const thick = Math.max(cell, 2);
    const [x, y] = [this.at.k, this.at.i].map((index) => MARGIN + (index + 0.5) * cell - thick / 2);
    context.fillStyle = context.strokeStyle = styles.getPropertyValue("--text");
    context.globalAlpha = 0.18;
    context.fillRect(MARGIN, y, plot, thick);
    context.fillRect(x, MARGIN, thick, plot);
    context.globalAlpha = 1;
    context.lineWidth = 1.5;
    context.strokeRect(x - 1, y - 1, thick + 2, thick + 2);
  }
}
