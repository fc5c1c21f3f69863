/** Two pictures of one seed: figures side by side, a slider between them, their difference. */

import { el } from "./dom.js";
import { bytes, percent, rate, ratio, seconds } from "./format.js";
import { urlOf } from "./shot.js";

const ROWS = [
  ["Time", (c) => c.seconds, seconds, ["faster", "slower"]],
  ["Tokens/s", (c) => 1 / c.tokens_per_second, (v) => rate(1 / v), ["more", "less"]],
  ["Keys read", (c) => c.density, percent, ["fewer", "more"]],
  ["KV read", (c) => c.kv_read_bytes, bytes, ["less", "more"]],
  ["KV resident", (c) => c.kv_resident_bytes, bytes, ["less", "more"]],
];

/** What both pictures cost, as a table. */
export function costTable([dense, sparse]) {
  const head = ["", dense.label, sparse.label, ""].map((text, i) =>
    i === 0 || i === 3 ? el("td", {}, text) : el("th", { scope: "col" }, text));
  const rows = ROWS.map(([name, value, format, words]) => costRow(name, value, format, words, dense, sparse));
  return el("table", { className: "costs" },
    el("caption", { className: "hidden" }, "What both pictures cost"),
    el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
}

function costRow(name, value, format, words, dense, sparse) {
  const [a, b] = [dense, sparse].map((shot) => (shot.cost ? value(shot.cost) : null));
  const cells = [a, b].map((v) => el("td", {}, v === null ? "…" : format(v)));
  const gain = a !== null && b !== null ? ratio(b, a, words) : "";
  return el("tr", {}, el("th", { scope: "row" }, name), ...cells, el("td", { className: "gain" }, gain));
}

/** Both pictures in one frame with a slider between them. */
export function sliderView([dense, sparse]) {
  const frame = framed(dense, picture(dense), picture(sparse, "over"));
  frame.append(el("span", { className: "tag left" }, dense.label),
    el("span", { className: "tag right" }, sparse.label), el("span", { className: "split" }));
  const range = el("input", { type: "range", id: "split", min: 0, max: 100, value: 50 });
  const set = () => frame.style.setProperty("--split", `${range.value}%`);
  range.addEventListener("input", set);
  followPointer(frame, range, set);
  set();
  const label = el("label", { htmlFor: "split" }, `${dense.label} left, ${sparse.label} right`);
  return el("div", { className: "single" }, frame, el("div", { className: "field" }, label, range));
}

function followPointer(frame, range, set) {
  const move = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    const box = frame.getBoundingClientRect();
    range.value = Math.round((100 * (event.clientX - box.left)) / box.width);
    set();
  };
  frame.addEventListener("pointerdown", move);
  frame.addEventListener("pointermove", move);
}

function framed(shot, ...children) {
  const frame = el("div", { className: "frame" }, ...children);
  const [width, height] = shot.body.size.split("x").map(Number);
  frame.style.setProperty("--shape", `${width} / ${height}`);
  return frame;
}

function picture(shot, className = "") {
  return el("img", { src: urlOf(shot.blob), alt: shot.label, className, draggable: false });
}

/** The absolute difference of both pictures, brightened, with its mean in words. */
export function differenceView(shots) {
  const canvas = el("canvas", { role: "img", "aria-label": "Absolute difference" });
  const gain = el("input", { type: "range", id: "gain", min: 1, max: 16, value: 4 });
  const value = el("output", { htmlFor: "gain" });
  const words = el("p", { className: "hint", role: "status" });
  const pixels = Promise.all(shots.map((shot) => pixelsOf(shot.blob)));
  const paint = async () => {
    value.textContent = `${gain.value}×`;
    words.textContent = differenceWords(paintDifference(canvas, await pixels, Number(gain.value)));
  };
  gain.addEventListener("input", paint);
  paint();
  const label = el("label", { htmlFor: "gain" }, "Brightened ", value);
  const field = el("div", { className: "field" }, label, gain);
  return el("div", { className: "single" }, framed(shots[0], canvas), field, words);
}

async function pixelsOf(blob) {
  const bitmap = await createImageBitmap(blob);
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d");
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, bitmap.width, bitmap.height);
}

/** Paints |a - b| times `gain`; returns its mean per channel (of 255) and the share that differs. */
export function paintDifference(canvas, [a, b], gain) {
  const result = new ImageData(a.width, a.height);
  let [sum, differing] = [0, 0];
  for (let i = 0; i < a.data.length; i += 4) {
    let most = 0;
    for (let c = 0; c < 3; c++) {
      const gap = Math.abs(a.data[i + c] - b.data[i + c]);
      result.data[i + c] = gap * gain;
      sum += gap;
      most = Math.max(most, gap);
    }
    result.data[i + 3] = 255;
    differing += most > 0;
  }
  Object.assign(canvas, { width: a.width, height: a.height });
  canvas.getContext("2d").putImageData(result, 0, 0);
  const count = a.width * a.height;
  return { mean: sum / (3 * count), share: differing / count };
}

function differenceWords({ mean, share }) {
  if (share === 0) return "Both pictures are the same, pixel for pixel.";
  return `${percent(share)} of the pixels differ, by ${mean.toFixed(1)} of 255 on average.`;
}
