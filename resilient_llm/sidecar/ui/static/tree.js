// What a call went through, as lines with a bar each, like the spans of its trace.

import { el, icon, svg } from "./dom.js";
import * as format from "./format.js";

const OUTCOMES = { success: "ok", retryable: "warn", fatal: "bad", timeout: "bad", cancelled: "none" };
const WORDS = { success: "success", retryable: "failed, may be retried", fatal: "failed for good", timeout: "timed out", cancelled: "cancelled" };
const said = (word) => String(word).replaceAll("_", " ");

// For each kind: its shape, what it is called, and what there is to say of it.
const KINDS = {
  attempt: (facts) => [
    OUTCOMES[facts.outcome] ?? "none",
    `attempt ${facts.number}  ${facts.target}`,
    [
      facts.reason === "initial" ? null : facts.reason,
      facts.model,
      WORDS[facts.outcome] ?? facts.outcome,
      facts.status === null ? null : `status ${facts.status}`,
      facts.error !== null && facts.error !== String(facts.status) && facts.outcome !== facts.error ? facts.error : null,
      facts.retry_after === null ? null : `asks to wait ${format.duration(facts.retry_after)}`,
      facts.possibly_billed ? "possibly billed" : null,
    ],
  ],
  route: (facts) => [
    facts.selected === null ? "warn" : "route",
    facts.selected === null ? "route  to none" : `route  to ${facts.selected}`,
    [
      facts.selected === null ? null : `by ${said(facts.reason)}`,
      said(facts.strategy),
      facts.from === null ? null : `after ${facts.from}`,
      facts.candidates.length > 1 ? `scores ${facts.candidates.map((name, at) => `${name} ${facts.scores[at] === null ? "?" : Number(facts.scores[at].toPrecision(3))}`).join(", ")}` : null,
      facts.rejected.length > 0 ? `passed over ${facts.rejected.map((one) => said(one).replace(/:([^:]*)$/, " ($1)")).join(", ")}` : null,
    ],
  ],
  backoff: (facts) => ["wait", "backoff", [`planned ${format.duration(facts.planned)}`, `by ${said(facts.source)}`, `before attempt ${facts.next_attempt}`]],
  wait: (facts) => ["wait", `wait  ${facts.limiter}`, [facts.outcome, facts.depth > 0 ? `${facts.depth} in the queue` : null, `for ${facts.unit}`]],
  step: (facts) => ["none", said(facts.name), []],
  rejected: (facts) => ["bad", `refused  ${facts.limiter ?? ""}`, [said(facts.reason), facts.dry_run ? "dry run: let through" : null]],
  retry_suppressed: (facts) => ["warn", "no retry", [said(facts.reason)]],
  circuit: (facts) => [facts.to === "closed" ? "ok" : facts.to === "half_open" ? "half" : "bad", `circuit  ${facts.name}`, [`${said(facts.from)} → ${said(facts.to)}`, said(facts.reason)]],
  event: (facts) => ["none", said(facts.name), Object.entries(facts.about).map(([name, value]) => `${name} = ${Array.isArray(value) ? value.join(", ") : value}`)],
};

function end(call) {
  return Math.max(call.took, ...call.steps.map((step) => step.at + step.took), 0.001);
}

const left = (at, whole) => `${Math.min(99.5, (at / whole) * 100).toFixed(2)}%`;
const width = (took, whole) => `${Math.max(0.5, (took / whole) * 100).toFixed(2)}%`;

function span(step, whole, options = {}) {
  return svg("rect", { x: left(step.at, whole), width: width(step.took, whole), class: `span ${step.kind} ${step.facts.outcome ?? ""}`, ...options });
}

// The same in small, for the line of a call.
export function sketch(call) {
  const whole = end(call);
  const drawn = svg("svg", { class: "sketch", "aria-hidden": "true", focusable: "false" }, svg("rect", { width: "100%", height: "2", y: "7", class: "track" }));
  for (const step of call.steps) {
    if (step.kind === "attempt") drawn.append(span(step, whole, { y: "2", height: "12" }));
    else if (step.kind === "wait" || step.kind === "backoff") drawn.append(span(step, whole, { y: "5", height: "6" }));
  }
  return drawn;
}

function line(step, whole) {
  const [kind, label, facts] = (KINDS[step.kind] ?? (() => ["none", step.kind, []]))(step.facts);
  const instant = !["attempt", "backoff", "wait", "step"].includes(step.kind);
  return el("li", { class: step.kind },
    el("span", { class: "what" }, icon(kind), el("span", { class: "label", text: label })),
    el("span", { class: "facts", text: facts.filter((fact) => fact !== null).join(" · ") }),
    svg("svg", { class: "lane", "aria-hidden": "true", focusable: "false" },
      svg("rect", { width: "100%", height: "100%", class: "track" }),
      instant
        ? svg("rect", { x: left(step.at, whole), width: "2", height: "100%", class: "mark" })
        : span(step, whole, { y: "0", height: "100%" })),
    el("span", { class: "num when" }, el("span", { class: "at", text: step.at < 0.05 ? "+0 ms" : `+${format.duration(step.at)}` }), instant ? null : el("span", { text: format.duration(step.took) })));
}

const NOT_KNOWN = "–";

export function tree(call) {
  const whole = end(call);
  const facts = [
    ["Request", call.request_id],
    ["Asked", `${call.method} ${call.path}`],
    ["Ended", format.moment(call.ended)],
    ["Status", call.status ?? NOT_KNOWN],
    ["Error", call.error],
    ["First content", call.first_content === null ? null : format.duration(call.first_content)],
    ["Waited", call.waited > 0 ? format.duration(call.waited) : null],
    ["Tokens", call.input_tokens === null ? null : `${format.tokens(call.input_tokens)} in, ${format.tokens(call.output_tokens)} out`],
    ["Cost", format.usd(call.cost_usd)],
  ];
  const shown = el("div", { class: "tree" },
    el("dl", {}, ...facts.filter(([, value]) => value !== null).map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: String(value) })))));
  if (call.steps.length === 0) {
    shown.append(el("p", { class: "empty", text: call.outcome === "refused" ? "It was refused before any policy saw it." : "No call was made of it." }));
    return shown;
  }
  const lines = el("ol", { class: "steps", "aria-label": "What it went through" }, ...call.steps.map((step) => line(step, whole)));
  shown.append(lines);
  if (call.left_out > 0) shown.append(el("p", { class: "empty", text: `${call.left_out} more steps are not kept.` }));
  return shown;
}
