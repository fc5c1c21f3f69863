/** What was drawn in this page: thumbnails to go back to. */

import { $, el } from "./dom.js";
import { urlOf } from "./shot.js";

const MOST = 60;

export class History {
  /** `restore(entry)` is called for the entry that was chosen. */
  constructor(restore) {
    this.entries = [];
    this.restore = restore;
    $("history").addEventListener("keydown", (event) => this.key(event));
    $("clear-history").addEventListener("click", () => this.clear());
  }

  add(entry) {
    this.entries = [entry, ...this.entries].slice(0, MOST);
    this.render();
  }

  clear() {
    this.entries = [];
    this.render();
    $("prompt").focus();
  }

  remove(index) {
    this.entries.splice(index, 1);
    this.render();
    if (this.entries.length) this.focus(Math.min(index, this.entries.length - 1));
    else $("prompt").focus();
  }

  render() {
    $("history-section").hidden = !this.entries.length;
    const items = this.entries.map((entry, index) => el("li", {}, this.button(entry, index)));
    $("history").replaceChildren(...items);
  }

  button(entry, index) {
    const { settings, shots } = entry;
    const pictures = shots.filter((shot) => shot.status === "done").slice(0, 4);
    const thumbs = pictures.map((shot) => el("img", { src: urlOf(shot.blob), alt: "" }));
    const what = shots.map((shot) => shot.label).filter((v, i, all) => all.indexOf(v) === i);
    const button = el(
      "button", { type: "button", className: "thumb", tabIndex: index ? -1 : 0 },
      el("span", { className: settings.compare ? "thumbs halves" : "thumbs", "data-count": thumbs.length }, ...thumbs),
      el("span", { className: "thumb-prompt" }, settings.prompt),
      el("span", { className: "thumb-what" }, what.join(" and ")),
    );
    button.addEventListener("click", () => this.restore(entry));
    button.addEventListener("focus", () => this.rove(index));
    return button;
  }

  get buttons() {
    return [...$("history").querySelectorAll("button")];
  }

  rove(index) {
    this.buttons.forEach((button, i) => (button.tabIndex = i === index ? 0 : -1));
  }

  focus(index) {
    this.buttons[index]?.focus();
  }

  key(event) {
    const [at, last] = [this.buttons.indexOf(document.activeElement), this.buttons.length - 1];
    if (at < 0) return;
    if (event.key === "Delete") return this.remove(at);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last };
    if (!(event.key in to)) return;
    event.preventDefault();
    this.focus(Math.min(Math.max(to[event.key], 0), last));
  }
}
