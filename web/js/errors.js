/** Refusals next to the field they name. */

import { $, el, say } from "./dom.js";

export function clearErrors() {
  document.querySelectorAll(".field-error").forEach((node) => node.remove());
  for (const input of document.querySelectorAll("[aria-invalid]")) {
    input.removeAttribute("aria-invalid");
    describe(input, null);
  }
  $("form-error").hidden = true;
}

/** Show `error` at its field and go there; above the form if no field here is named. */
export function showError(error) {
  if (error.status === 401) askForKey();
  const input = fieldOf(error);
  const text = plain(error);
  if (input) atField(input, text);
  else Object.assign($("form-error"), { textContent: text, hidden: false });
  say("See the message in the form.");
}

function fieldOf(error) {
  const names = [optionIn(error), error.param, error.status === 401 && "api_key"];
  const found = names.filter(Boolean).map(byParam).filter(Boolean);
  return found[0] ?? null;
}

const byParam = (name) => document.querySelector(`#form [data-param="${CSS.escape(name)}"]`);

/** A policy's complaint names its option in the text: "option 'sink' must be ...". */
function optionIn({ param, message }) {
  if (param !== "policy") return null;
  const name = /option '(\w+)'/.exec(message) ?? /^(\w+)(?: \(\w+\))? must/.exec(message);
  return name && (name[1] === "sparsity" ? "sparsity" : `policy_options.${name[1]}`);
}

/** "n: input should be ..." next to the field n need not say its name again. */
function plain({ message, param }) {
  const bare = param && message.startsWith(`${param}: `) ? message.slice(param.length + 2) : message;
  const text = bare.replace(/^[Ii]nput should/, "must").replaceAll("'", "“").trim();
  return quoted(text[0].toUpperCase() + text.slice(1));
}

const quoted = (text) => text.replace(/“([^“]*)“/g, "“$1”");

function atField(input, text) {
  const id = `${input.id}-error`;
  input.closest(".field").append(el("p", { className: "field-error", id }, text));
  input.setAttribute("aria-invalid", "true");
  describe(input, id);
  for (let fold = input.closest("details"); fold; fold = fold.parentElement.closest("details"))
    fold.open = true;
  input.focus();
}

function describe(input, error) {
  const ids = (input.getAttribute("aria-describedby") ?? "").split(" ");
  const kept = ids.filter((id) => id && !id.endsWith("-error"));
  input.setAttribute("aria-describedby", [...kept, error].filter(Boolean).join(" "));
}

function askForKey() {
  $("key-field").hidden = false;
}
