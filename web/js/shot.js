/** One picture on the stage: frame, progress, caption. */

import { el, icon } from "./dom.js";
import { bytes, percent, rate, seconds } from "./format.js";

const urls = new WeakMap();

/** The object URL of a blob, made once; it goes when the blob does with the page. */
export function urlOf(blob) {
  if (!urls.has(blob)) urls.set(blob, URL.createObjectURL(blob));
  return urls.get(blob);
}

export class ShotView {
  /** `alone`: no comparison below tells what this picture cost. */
  constructor(shot, prompt, alone) {
    this.shot = shot;
    this.alone = alone;
    this.image = el("img", { alt: "", hidden: true, draggable: false });
    this.overlay = el("canvas", { className: "overlay", hidden: true, "aria-hidden": "true" });
    this.scan = el("div", { className: "scan", hidden: true });
    this.frame = el("div", { className: "frame" }, this.image, this.scan, this.overlay);
    this.progress = el("progress", { max: 1, value: 0, "aria-label": `Progress of ${shot.label}` });
    this.caption = el("figcaption");
    this.node = el("figure", { className: "shot" }, this.frame, this.progress, this.caption);
    this.prompt = prompt;
    this.setShape(shot.body.size);
    this.show();
  }

  setShape(size) {
    const [width, height] = size.split("x").map(Number);
    this.frame.style.setProperty("--shape", `${width} / ${height}`);
  }

  show() {
    const { status, done, total, blob } = this.shot;
    this.node.dataset.status = status;
    this.progress.value = done / total;
    this.progress.hidden = status === "done" || status === "stopped";
    this.scan.hidden = status !== "drawing";
    this.scan.style.setProperty("--at", `${(100 * done) / total}%`);
    if (blob) this.showPicture(blob);
    this.caption.replaceChildren(...this.words());
  }

  showPicture(blob) {
    const url = urlOf(blob);
    if (this.image.src === url) return;
    this.image.src = url;
    this.image.hidden = false;
    const state = this.shot.status === "done" ? "" : "unfinished picture, ";
    this.image.alt = `${state}${this.prompt}, seed ${this.shot.seed}, ${this.shot.label}`;
  }

  words() {
    const { label, seed, status } = this.shot;
    const state = el("span", { className: "state" }, stateWords(this.shot));
    const head = el(
      "div", { className: "caption-head" },
      el("strong", {}, label),
      el("span", { className: "seed" }, `seed ${seed}`),
      status === "done" ? this.saveLink() : state,
    );
    return [head, this.alone && this.shot.cost ? costLine(this.shot.cost) : null].filter(Boolean);
  }

  saveLink() {
    const { blob, seed, policy } = this.shot;
    const link = el("a", { className: "quiet icon save", href: urlOf(blob) }, icon("save"));
    link.download = fileName(this.prompt, seed, policy);
    link.append(el("span", { className: "hidden" }, `Download seed ${seed}, ${this.shot.label}`));
    return link;
  }
}

function fileName(prompt, seed, policy) {
  const words = prompt.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
  return `${words.replace(/^-|-$/g, "") || "picture"}-${seed}-${policy}.png`;
}

function stateWords({ status, done, total }) {
  if (status === "waiting") return "waiting";
  if (status === "stopped") return "stopped";
  return done ? percent(done / total) : "starting";
}

function costLine(cost) {
  const parts = [
    seconds(cost.seconds),
    `${rate(cost.tokens_per_second)} tokens/s`,
    `${bytes(cost.kv_read_bytes)} of KV read`,
    `${bytes(cost.kv_resident_bytes)} kept`,
  ];
  return el("p", { className: "cost" }, parts.join(" · "));
}
