/** Drawing: the pictures of one press of the button, each a stream of its own. */

import { draw } from "./api.js";
import { randomSeed, requestBody } from "./form.js";

/**
 * A picture in the making: status is waiting, drawing, done or stopped; `blob` the last picture
 * seen of it; `cost` what the server says it cost; `request` the id under which it was drawn.
 */
function shot(wanted, seed, dense) {
  const body = requestBody(wanted, seed, dense);
  const { policy, sparsity = 0 } = body;
  const label = sparsity ? `${policy}\u00a0${Math.round(100 * sparsity)}\u00a0%` : policy;
  return { body, seed, policy, label, status: "waiting", done: 0, total: 1, blob: null, cost: null };
}

/** The pictures that `wanted` asks for: n seeds, or dense and the policy with one seed. */
export function planned(wanted) {
  const seed = wanted.seed === "" ? randomSeed() : Number(wanted.seed);
  const settings = { ...wanted, seed: String(seed) };
  const shots = wanted.compare
    ? [shot(wanted, seed, true), shot(wanted, seed, false)]
    : Array.from({ length: wanted.n }, (_, k) => shot(wanted, seed + k, false));
  return { settings, shots, when: Date.now() };
}

/**
 * Draw all shots of an entry and tell `changed(shot)` of each step. Pictures that are compared are
 * drawn one after the other, so that their times compare; others share the server's batch.
 */
export async function drawAll(entry, signal, changed) {
  const one = (shot) => drawShot(shot, signal, changed);
  if (!entry.settings.compare) return Promise.all(entry.shots.map(one));
  for (const shot of entry.shots) await one(shot);
}

async function drawShot(shot, signal, changed) {
  try {
    for await (const event of draw(shot.body, signal)) {
      take(shot, event);
      changed(shot);
    }
  } finally {
    if (shot.status !== "done") shot.status = "stopped";
    changed(shot);
  }
}

function take(shot, event) {
  shot.status = "drawing";
  if (event.type === "started") shot.request = event.id;
  if (event.blob) shot.blob = event.blob;
  if (event.type === "bishop.progress") Object.assign(shot, { done: event.done, total: event.total });
  if (event.type === "image_generation.partial_image") shot.partials = event.partial_image_index + 1;
  if (event.type === "image_generation.completed")
    Object.assign(shot, { status: "done", cost: event.bishop, done: shot.total });
}
