/** What the engine is busy with, asked every now and then while the page is looked at. */

import { getJson } from "./api.js";
import { $ } from "./dom.js";
import { bytes, percent } from "./format.js";

const BUSY = 1000;
const IDLE = 10_000;

let timer = 0;

/** Ask now and then: often while something is drawn, seldom else, as a key may have a limit. */
export async function watchQueue() {
  await askQueue();
  clearTimeout(timer);
  const busy = $("queue").dataset.state === "busy" || "drawing" in document.body.dataset;
  timer = setTimeout(() => whenLookedAt(watchQueue), busy ? BUSY : IDLE);
}

function whenLookedAt(work) {
  if (!document.hidden) return work();
  document.addEventListener("visibilitychange", () => whenLookedAt(work), { once: true });
}

async function askQueue() {
  try {
    show(await getJson("v1/bishop/queue"));
  } catch (error) {
    lost(error);
  }
}

function show(queue) {
  const { images_running: running, images_waiting: waiting } = queue;
  const used = queue.cache_bytes_total ? queue.cache_bytes_used / queue.cache_bytes_total : 0;
  $("queue").hidden = false;
  $("queue").dataset.state = running ? "busy" : "idle";
  $("queue-text").textContent = waiting ? `${running} drawing, ${waiting} waiting`
    : running ? `${running} drawing` : "idle";
  const meter = $("cache-meter");
  meter.setAttribute("aria-valuenow", String(Math.round(100 * used)));
  meter.title = `KV cache: ${bytes(queue.cache_bytes_used)} of ${bytes(queue.cache_bytes_total)} `
    + `reserved (${percent(used)})`;
  meter.firstElementChild.style.setProperty("--share", String(used));
}

function lost(error) {
  $("queue").hidden = false;
  $("queue").dataset.state = "lost";
  $("queue-text").textContent = error.status === 401 ? "key needed" : "no answer";
}
