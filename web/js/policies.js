/** The attention policy: its name, its sparsity, and a field for each of its options. */

import { $, el } from "./dom.js";

const PREFERRED = ["stencil", "window"];
const START_SPARSITY = 0.8;

let known = [];
let defaults = { policy: "dense", sparsity: 0, policy_options: {} };

/** Fill the choice from GET /v1/bishop/policies; `changed` hears of every change. */
export function offerPolicies(catalog, changed) {
  known = catalog.data;
  defaults = catalog.default;
  const able = known.filter((policy) => !policy.unavailable);
  const unable = known.filter((policy) => policy.unavailable);
  $("policy").replaceChildren(...able.map(choice));
  if (unable.length) {
    const group = el("optgroup", { label: "Not on this server", disabled: true });
    group.append(...unable.map(choice));
    $("policy").append(group);
  }
  $("policy").addEventListener("change", () => {
    describe();
    startSparsity();
    changed();
  });
  choosePolicy(startChoice(able));
}

const choice = (policy) => el("option", { value: policy.name }, policy.name);

/** What the server does by itself, unless that is dense: then a sparse one is worth a look. */
function startChoice(able) {
  if (defaults.policy !== "dense") return defaults;
  const name = PREFERRED.find((wanted) => able.some((policy) => policy.name === wanted));
  return name ? { policy: name, sparsity: START_SPARSITY, policy_options: {} } : defaults;
}

export function choosePolicy({ policy, sparsity, policy_options: options }) {
  $("policy").value = policy;
  describe();
  if (current()?.takes_sparsity) setSparsity(sparsity ?? 0);
  for (const [name, value] of Object.entries(options ?? {})) {
    const input = $(`option-${name}`);
    if (!input) continue;
    if (input.type === "checkbox") input.checked = value;
    else input.value = value;
  }
  $("policy-fold").open = Object.keys(options ?? {}).length > 0;
}

/** {policy, sparsity, policy_options} as a request has them; options left alone are not sent. */
export function chosenPolicy() {
  const policy = current();
  const chosen = { policy: $("policy").value, sparsity: 0, policy_options: {} };
  if (policy?.takes_sparsity) chosen.sparsity = Number($("sparsity").value);
  for (const option of policy?.options ?? []) {
    const value = valueOf(option, $(`option-${option.name}`));
    if (value !== null) chosen.policy_options[option.name] = value;
  }
  return chosen;
}

const current = () => known.find((policy) => policy.name === $("policy").value);

function setSparsity(value) {
  $("sparsity").value = value;
  $("sparsity-range").value = value;
}

function startSparsity() {
  if (!current()?.takes_sparsity) return;
  const given = defaults.policy === $("policy").value ? defaults.sparsity : START_SPARSITY;
  if (!Number($("sparsity").value)) setSparsity(given);
}

function describe() {
  const policy = current();
  if (!policy) return;
  for (const id of ["sparsity", "sparsity-range"]) $(id).disabled = !policy.takes_sparsity;
  $("policy-text").textContent = firstParagraph(policy.text);
  $("policy-name").textContent = policy.name;
  $("policy-fold").hidden = !policy.options.length;
  $("policy-fold").open = policy.options.some((option) => option.required);
  $("policy-options").replaceChildren(...policy.options.map(optionField));
}

const firstParagraph = (text) => text.split("\n\n")[0].replaceAll("`", "").replace(/\s+/g, " ");

function optionField(option) {
  const id = `option-${option.name}`;
  const label = el("label", { htmlFor: id }, option.name, option.required ? " (needed)" : "");
  const input = inputFor(option, id);
  input.dataset.param = `policy_options.${option.name}`;
  if (!option.text) return el("div", { className: "field" }, label, input);
  input.setAttribute("aria-describedby", `${id}-hint`);
  const hint = el("p", { className: "hint", id: `${id}-hint` }, option.text.replaceAll("`", ""));
  return el("div", { className: "field" }, label, input, hint);
}

function inputFor(option, id) {
  if (option.choices) return fileChoice(option, id);
  if (option.types.join() === "bool")
    return el("input", { id, type: "checkbox", checked: option.default === true });
  const inputMode = { int: "numeric", float: "decimal" }[option.types.join()] ?? "text";
  return el("input", { id, inputMode, placeholder: placeholder(option) });
}

function fileChoice(option, id) {
  const none = option.choices.length ? "none" : "this server offers none";
  const choices = option.choices.map((name) => el("option", { value: name }, name));
  return el("select", { id }, el("option", { value: "" }, none), ...choices);
}

function placeholder(option) {
  return option.default === null ? (option.required ? "" : "worked out") : String(option.default);
}

/** The value to send, or null for "as it is by default". */
function valueOf(option, input) {
  if (input.type === "checkbox") return input.checked === option.default ? null : input.checked;
  const text = input.value.trim();
  if (!text) return null;
  const number = Number(text);
  const counts = option.types.some((type) => type === "int" || type === "float");
  return counts && Number.isFinite(number) ? number : text;
}
