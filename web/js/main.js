/** The playground: wires the form, the stage, the reads, the queue and the history together. */

import { getJson, useKey } from "./api.js";
import { $, el, say, settled } from "./dom.js";
import { clearErrors, showError } from "./errors.js";
import { asCurl, checked, offerModel, restore, settings } from "./form.js";
import { percent } from "./format.js";
import { History } from "./history.js";
import { offerPolicies } from "./policies.js";
import { watchQueue } from "./queue.js";
import { Reads } from "./reads.js";
import { drawAll, planned } from "./run.js";
import { Stage } from "./stage.js";

const EXAMPLES = [
  "a big red apple cartoon style on a white background",
  "a cat face 3d style on a blue background",
  "a rocket vector style on a black background",
  "a red apple left of a banana 3d style on a white background",
  "three strawberries cartoon style on a pink background",
  "a crown above a frog 3d style on a purple background",
];

let reads = null;
let running = null;

const stage = new Stage(() => reads?.arranged());
const history = new History((entry) => {
  restore(entry.settings);
  clearErrors();
  stage.show(entry);
  showRequest();
  say(`Restored: ${entry.settings.prompt}`);
});

const showRequest = settled(() => {
  $("request").textContent = asCurl(settings());
  reads?.arranged();
}, 60);

async function start() {
  const [models, catalog] = await Promise.all([
    getJson("v1/models"), getJson("v1/bishop/policies"),
  ]);
  offerModel(models.data[0], showRequest);
  offerPolicies(catalog, showRequest);
  reads = new Reads(catalog, stage);
  showRequest();
  document.body.dataset.ready = "yes";
}

async function drawNow() {
  if (running || !reads) return;
  clearErrors();
  try {
    await follow(planned(checked(settings())));
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    busy(null);
  }
}

async function follow(entry) {
  const stop = new AbortController();
  const before = stage.entry;
  busy(stop);
  stage.show(entry);
  say("Drawing…");
  try {
    await drawAll(entry, stop.signal, (shot) => moved(entry, shot));
    say(doneWords(entry));
  } catch (error) {
    stop.abort();
    say(error.name === "AbortError" ? "Stopped." : "");
    if (error.name !== "AbortError" && !entry.shots.some((shot) => shot.request)) stage.show(before);
    throw error;
  } finally {
    if (entry.shots.some((shot) => shot.status === "done")) history.add(entry);
  }
}

function moved(entry, shot) {
  if (stage.entry === entry) stage.refresh(shot);
  const share = entry.shots.reduce((sum, s) => sum + s.done / s.total, 0) / entry.shots.length;
  if (running && share < 1) say(`Drawing… ${percent(Math.floor(4 * share) / 4)}`);
}

function doneWords({ shots }) {
  return shots.length === 1 ? `Drawn in ${shots[0].cost.seconds.toFixed(1)} s.`
    : `${shots.length} pictures drawn.`;
}

function busy(stop) {
  const stopped = running && !stop;
  const had = document.activeElement === $("stop") || document.activeElement === $("draw");
  running = stop;
  $("draw").hidden = Boolean(stop);
  $("stop").hidden = !stop;
  document.body.toggleAttribute("data-drawing", Boolean(stop));
  if (had) (stop ? $("stop") : $("draw")).focus();
  if (stopped || stop) watchQueue();
}

function onKey(event) {
  if (event.key === "Escape" && running) return running.abort();
  if (event.key !== "Enter" || event.isComposing) return;
  const inPrompt = event.target === $("prompt") && !event.shiftKey;
  if (!inPrompt && !event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  drawNow();
}

async function copyRequest() {
  try {
    await navigator.clipboard.writeText($("request").textContent);
    say("Copied.");
  } catch {
    say("The browser does not let this page copy: select the text instead.");
  }
}

function offerExamples() {
  const buttons = EXAMPLES.map((text) => {
    const button = el("button", { type: "button", className: "chip" }, text);
    button.addEventListener("click", () => {
      $("prompt").value = text;
      drawNow();
    });
    return el("li", {}, button);
  });
  $("examples").replaceChildren(...buttons);
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  drawNow();
});
$("stop").addEventListener("click", () => running?.abort());
$("api_key").addEventListener("change", () => {
  useKey($("api_key").value.trim());
  clearErrors();
  if (!reads) start().catch(showError);
});
$("copy").addEventListener("click", copyRequest);
document.addEventListener("keydown", onKey);
offerExamples();
watchQueue();
start().catch(showError);
