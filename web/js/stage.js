/** The stage: the pictures of one entry, in one of the views. */

import { costTable, differenceView, sliderView } from "./compare.js";
import { $ } from "./dom.js";
import { ShotView } from "./shot.js";

export class Stage {
  /** `arranged` hears when other pictures stand on the stage. */
  constructor(arranged) {
    this.entry = null;
    this.views = [];
    this.view = "side";
    this.arranged = arranged;
    for (const button of $("views").children)
      button.addEventListener("click", () => this.setView(button.dataset.view));
  }

  /** Put an entry on the stage; null clears it. */
  show(entry) {
    this.entry = entry;
    this.view = "side";
    if (!entry) return this.clear();
    const { compare, prompt } = entry.settings;
    this.views = entry.shots.map((shot) => new ShotView(shot, prompt, !compare));
    $("empty").hidden = true;
    $("pictures").hidden = false;
    this.arrange();
  }

  clear() {
    this.views = [];
    $("pictures").hidden = true;
    $("pictures").replaceChildren();
    $("views").hidden = $("under").hidden = true;
    $("empty").hidden = false;
    this.arranged();
  }

  /** One shot of the entry has changed. */
  refresh(shot) {
    this.views.find((view) => view.shot === shot)?.show();
    if (shot.status === "done") this.arrange();
  }

  get comparable() {
    return this.entry?.settings.compare && this.entry.shots.every((shot) => shot.status === "done");
  }

  setView(view) {
    this.view = view;
    this.arrange();
  }

  arrange() {
    $("views").hidden = !this.comparable;
    for (const button of $("views").children)
      button.setAttribute("aria-pressed", String(button.dataset.view === this.view));
    $("pictures").dataset.count = this.view === "side" ? this.views.length : 1;
    $("pictures").replaceChildren(...this.content());
    const table = this.entry.settings.compare ? [costTable(this.entry.shots)] : [];
    $("under").replaceChildren(...table);
    $("under").hidden = !table.length;
    this.arranged();
  }

  content() {
    if (this.view === "slider") return [sliderView(this.entry.shots)];
    if (this.view === "difference") return [differenceView(this.entry.shots)];
    return this.views.map((view) => view.node);
  }

  /** The picture that reads are drawn over: the sparse one of two, else the first. */
  get subject() {
    return this.view === "side" ? this.views.at(this.entry?.settings.compare ? 1 : 0) : undefined;
  }
}
