/** The form: settings in, settings out, and the request they make. */

import { ApiError } from "./api.js";
import { $ } from "./dom.js";
import { choosePolicy, chosenPolicy } from "./policies.js";

const NUMBERS = ["guidance_scale", "temperature", "top_p", "top_k"];
const RANGED = ["guidance_scale", "sparsity"];
const MOST = 10;

let model = null;

/** Offer what the model can do; `changed` hears of every change. */
export function offerModel(card, changed) {
  model = card;
  $("model").replaceChildren(new Option(card.id, card.id));
  $("size").replaceChildren(...card.sizes.map((size) => new Option(size.replace("x", " × "), size)));
  $("prompt-limit").textContent = `Up to ${card.prompt_limit}.`;
  for (const name of NUMBERS) $(name).value = card.sampling[name];
  RANGED.forEach(linkRange);
  $("dice").addEventListener("click", () => {
    $("seed").value = randomSeed();
    changed();
  });
  $("form").addEventListener("input", changed);
  for (const input of document.querySelectorAll("[name=mode]"))
    input.addEventListener("change", showMode);
}

function linkRange(name) {
  const [number, range] = [$(name), $(`${name}-range`)];
  range.value = number.value;
  range.addEventListener("input", () => (number.value = range.value));
  number.addEventListener("input", () => (range.value = number.value));
}

export const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;

const comparing = () => document.querySelector("[name=mode]:checked").value === "compare";

function showMode() {
  $("draw").textContent = comparing() ? "Compare" : "Draw";
  $("n").disabled = comparing();
}

/** What the form says, as one plain object; history keeps these. */
export function settings() {
  const numbers = NUMBERS.map((name) => [name, $(name).value === "" ? null : Number($(name).value)]);
  return {
    prompt: $("prompt").value,
    negative_prompt: $("negative_prompt").value,
    model: $("model").value,
    size: $("size").value,
    seed: $("seed").value.trim(),
    n: comparing() ? 1 : Number($("n").value),
    ...Object.fromEntries(numbers),
    ...chosenPolicy(),
    compare: comparing(),
  };
}

export function restore(saved) {
  for (const name of ["prompt", "negative_prompt", "size", "seed", "n", ...NUMBERS])
    $(name).value = saved[name] ?? "";
  $("guidance_scale-range").value = saved.guidance_scale;
  const mode = saved.compare ? "compare" : "draw";
  document.querySelector(`[name=mode][value=${mode}]`).checked = true;
  choosePolicy(saved);
  showMode();
}

/** Raises ApiError for what this page can tell by itself. */
export function checked(wanted) {
  const refuse = (param, message) => {
    throw new ApiError(400, { param, message });
  };
  if (!wanted.prompt.trim()) refuse("prompt", "Say what to draw.");
  for (const name of ["n", "sparsity", ...NUMBERS])
    if ($(name).validity.badInput) refuse(name, "This must be a number.");
  if (!/^-?\d*$/.test(wanted.seed)) refuse("seed", "A seed is a whole number.");
  if (Number(wanted.seed) > Number.MAX_SAFE_INTEGER)
    refuse("seed", `This page takes seeds up to ${Number.MAX_SAFE_INTEGER}.`);
  if (!Number.isInteger(wanted.n) || wanted.n < 1 || wanted.n > MOST)
    refuse("n", `Ask for 1 to ${MOST} pictures.`);
  if (wanted.compare && wanted.policy === "dense")
    refuse("policy", "Choose a sparse policy to compare with dense.");
  return wanted;
}

/** The body of a request for one picture of `wanted` with `seed`. */
export function requestBody(wanted, seed, dense = false) {
  const body = { prompt: wanted.prompt, model: wanted.model, size: wanted.size };
  if (wanted.negative_prompt.trim()) body.negative_prompt = wanted.negative_prompt;
  if (seed !== null) body.seed = seed;
  for (const name of NUMBERS)
    if (wanted[name] !== null && wanted[name] !== model.sampling[name]) body[name] = wanted[name];
  return { ...body, ...policyBody(dense ? { policy: "dense" } : wanted) };
}

/** The part of a request that names the policy. */
export function policyBody({ policy, sparsity, policy_options: options }) {
  const body = { policy };
  if (sparsity) body.sparsity = sparsity;
  if (options && Object.keys(options).length) body.policy_options = options;
  return body;
}

/** The request as a line for a shell. */
export function asCurl(wanted) {
  const seed = /^\d+$/.test(wanted.seed) ? Number(wanted.seed) : null;
  const body = requestBody(wanted, seed);
  if (wanted.n > 1) body.n = wanted.n;
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const url = new URL("v1/images/generations", location.href);
  return `curl ${url} \\\n  -H 'Content-Type: application/json' \\\n  -d '${text}'`;
}
