/** The read set of the current policy, drawn over the picture. */

import { readSet } from "./api.js";
import { $, el, settled } from "./dom.js";
import { policyBody, settings } from "./form.js";
import { percent } from "./format.js";

const CONTROLS = ["position", "layer", "head"];
const NOTES = {
  fixed: "These reads depend on the position alone.",
  learned: "This head learnt these reads while it drew this picture; shown are its last ones.",
  fresh: "These reads are learnt while a picture is drawn; shown is where every picture starts. "
    + "Draw with this policy to see what it learns.",
  picked: "This policy picks its reads anew for every query, by what the keys hold; "
    + "shown is what it picks from.",
};

export class Reads {
  /** `catalog`: GET /v1/bishop/policies. `stage`: where the pictures stand. */
  constructor(catalog, stage) {
    Object.assign(this, { catalog, stage, shown: false, answer: null, asking: null });
    this.blank = blankFrame();
    this.ask = settled(() => this.fetch(), 30);
    $("layer").max = catalog.layers - 1;
    $("head").max = catalog.kv_heads - 1;
    for (const id of CONTROLS) $(id).addEventListener("input", () => this.ask());
    $("reads-toggle").addEventListener("click", () => this.toggle());
    addEventListener("resize", () => this.paint());
    this.fit();
  }

  toggle() {
    this.shown = !this.shown;
    $("reads-toggle").setAttribute("aria-pressed", String(this.shown));
    $("reads").hidden = !this.shown;
    this.arranged();
  }

  /** Other pictures stand on the stage, or none, or the form says something else. */
  arranged() {
    this.fit();
    if (!this.stage.entry) {
      $("empty").hidden = this.shown;
      $("pictures").hidden = !this.shown;
      $("pictures").replaceChildren(...(this.shown ? [this.blank.node] : []));
    }
    if (this.shown) this.ask();
    this.paint();
  }

  /** Let the position slider span the grid, from the middle of the picture at first. */
  fit() {
    const grid = this.catalog.grids[$("size").value];
    const last = grid.height * (grid.width + grid.row_tokens) - 2;
    if (Number($("position").max) === last) return;
    $("position").max = last;
    $("position").value = Math.floor(last * 0.6) + Math.floor(grid.width / 3);
  }

  get target() {
    return this.stage.entry ? this.stage.subject : this.blank;
  }

  async fetch() {
    if (!this.shown) return;
    this.asking?.abort();
    this.asking = new AbortController();
    try {
      this.answer = await readSet(this.question(), this.asking.signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.answer = null;
      $("reads-note").textContent = `Not to be shown: ${error.message}`;
    }
    this.paint();
  }

  question() {
    const wanted = settings();
    const where = CONTROLS.map((id) => [id, Number($(id).value)]);
    const picture = this.target?.shot?.request;
    const learned = picture && this.target.shot.status === "done" ? { picture } : {};
    return { ...policyBody(wanted), size: wanted.size, ...Object.fromEntries(where), ...learned };
  }

  paint() {
    for (const view of [...this.stage.views, this.blank]) {
      view.overlay.hidden = !(this.shown && this.answer && view === this.target);
      listen(view.overlay, this);
    }
    for (const id of CONTROLS) $(`${id}-value`).textContent = this.valueWords(id);
    if (!this.answer) return ($("reads-sum").textContent = "");
    $("reads-note").textContent = NOTES[this.answer.source];
    $("reads-sum").textContent = sumWords(this.answer);
    if (this.target && !this.target.overlay.hidden) paintCells(this.target.overlay, this.answer);
  }

  valueWords(id) {
    const value = Number($(id).value);
    if (id !== "position" || !this.answer) return String(value);
    const stride = this.answer.grid.width + this.answer.grid.row_tokens;
    return `${value} (row ${Math.floor(value / stride)}, column ${value % stride})`;
  }

  /** Take the position under the pointer. */
  point(event) {
    const box = event.currentTarget.getBoundingClientRect();
    const { width, height, row_tokens: extra } = this.answer.grid;
    const column = clamp(Math.floor((width * (event.clientX - box.left)) / box.width), width - 1);
    const row = clamp(Math.floor((height * (event.clientY - box.top)) / box.height), height - 1);
    $("position").value = row * (width + extra) + column;
    this.ask();
  }
}

const clamp = (value, most) => Math.min(Math.max(value, 0), most);

/** A frame without a picture, for a look at the reads before anything is drawn. */
function blankFrame() {
  const overlay = el("canvas", { className: "overlay", hidden: true, "aria-hidden": "true" });
  const frame = el("div", { className: "frame" }, overlay);
  return { overlay, frame, node: el("figure", { className: "shot" }, frame) };
}

function listen(canvas, reads) {
  if (canvas.dataset.listening) return;
  canvas.dataset.listening = "yes";
  canvas.addEventListener("pointerdown", (event) => reads.point(event));
  canvas.addEventListener("pointermove", (event) => event.buttons && reads.point(event));
}

function sumWords({ position, reads, resident }) {
  const [read, kept] = [count(reads), count(resident)];
  const drawn = position + 1;
  const first = reads
    ? `Reads ${read} of ${drawn} visual keys (${percent(read / drawn)})`
    : "Which keys it reads depends on the picture";
  const second = resident ? `${kept} stored` : "so does what is stored";
  return `${first}, ${second}. The prompt is read besides.`;
}

const count = (runs) => (runs ?? []).reduce((sum, [first, last]) => sum + last - first + 1, 0);

const inside = (runs, position) =>
  (runs ?? []).some(([first, last]) => first <= position && position <= last);

/** Paint each token of the picture by what happens to its key. */
function paintCells(canvas, answer) {
  const { width, height, row_tokens: extra } = answer.grid;
  const sharp = devicePixelRatio || 1;
  const box = canvas.getBoundingClientRect();
  Object.assign(canvas, { width: box.width * sharp, height: box.height * sharp });
  const context = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const boxOf = (row, column) => cell(canvas, row / height, column / width, 1 / height, 1 / width);
  for (let row = 0; row < height; row++)
    for (let column = 0; column < width; column++)
      paintCell(context, kindOf(answer, row * (width + extra) + column), style, boxOf(row, column));
  const { position } = answer;
  const [row, column] = [Math.floor(position / (width + extra)), position % (width + extra)];
  if (column < width) outline(context, style, boxOf(row, column), sharp);
}

/** A cell in whole pixels, so that neighbours leave no seam. */
function cell({ width, height }, top, left, high, wide) {
  const [x, y] = [Math.round(left * width), Math.round(top * height)];
  return [x, y, Math.round((left + wide) * width) - x, Math.round((top + high) * height) - y];
}

function kindOf(answer, position) {
  if (position > answer.position) return "future";
  if (inside(answer.reads, position)) return "read";
  if (answer.resident && !inside(answer.resident, position)) return "gone";
  return "kept";
}

function paintCell(context, kind, style, [x, y, w, h]) {
  context.fillStyle = style.getPropertyValue(`--${kind}`);
  const gap = kind === "read" ? Math.max(0.5, Math.round(w * 0.04)) : 0;
  context.fillRect(x + gap, y + gap, w - 2 * gap, h - 2 * gap);
}

function outline(context, style, [x, y, w, h], sharp) {
  context.lineWidth = 2.5 * sharp;
  context.strokeStyle = style.getPropertyValue("--query-edge");
  context.strokeRect(x - sharp, y - sharp, w + 2 * sharp, h + 2 * sharp);
  context.fillStyle = style.getPropertyValue("--query");
  context.fillRect(x, y, w, h);
}
