// The list of calls: a line each, which opens to show what the call went through.

import { badge, el, reconcile } from "./dom.js";
import * as format from "./format.js";
import { sketch, tree } from "./tree.js";

const OUTCOMES = { ok: "ok", error: "bad", refused: "off", cancelled: "none" };

function cell(label, text, options = {}) {
  return el("span", { class: options.class ?? null, title: options.title ?? null, "data-label": label }, el("span", { class: "unseen", text: `${label} ` }), text);
}

function summary(call) {
  const retried = call.attempts > 1 || call.fallbacks > 0 || call.hedges > 0;
  const kind = call.outcome === "ok" && retried ? "warn" : OUTCOMES[call.outcome] ?? "none";
  const word = call.outcome === "ok" && retried ? "recovered" : call.outcome;
  const all = call.input_tokens === null && call.output_tokens === null ? null : (call.input_tokens ?? 0) + (call.output_tokens ?? 0);
  return el("summary", {},
    badge(kind, word),
    cell("ended", format.time(call.ended), { class: "time" }),
    cell("tenant", call.tenant ?? "–", { class: "clip tenant", title: call.tenant }),
    cell("model", call.model ?? "–", { class: "clip model", title: call.model }),
    cell("target", call.target ?? "–", { class: "clip target", title: call.target }),
    sketch(call),
    cell("took", format.duration(call.took), { class: "num took" }),
    cell("tries", format.count(call.attempts), { class: "num tries" }),
    cell("tokens", format.tokens(all), { class: "num tokens" }),
    cell("cost", format.usd(call.cost_usd), { class: "num cost" }));
}

function make(call) {
  const details = el("details", {}, summary(call));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(tree(call));
  });
  return el("li", {}, details);
}

export class Calls {
  #list;

  constructor(list) {
    this.#list = list;
    list.addEventListener("keydown", (event) => this.#key(event));
  }

  // A call that is open, or has the focus, stays until it is closed, though others have come since.
  show(calls) {
    const kept = (item) => item.firstElementChild.open || item.contains(document.activeElement);
    reconcile(this.#list, calls, (call) => call.id, make, () => {}, kept);
  }

  #key(event) {
    const line = event.target.closest("summary");
    if (line === null || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const item = line.closest("li");
    const details = line.parentElement;
    const there = {
      ArrowDown: () => item.nextElementSibling,
      ArrowUp: () => item.previousElementSibling,
      Home: () => this.#list.firstElementChild,
      End: () => this.#list.lastElementChild,
    }[event.key];
    if (there !== undefined) there()?.querySelector("summary").focus();
    else if (event.key === "ArrowRight") details.open = true;
    else if (event.key === "ArrowLeft") details.open = false;
    else return;
    event.preventDefault();
  }
}
