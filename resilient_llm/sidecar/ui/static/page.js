// The page: what it looks for, and where what it is told is shown.

import { Calls } from "./calls.js";
import { el, setText } from "./dom.js";
import * as format from "./format.js";
import { Stream } from "./stream.js";
import { standing, Table, TARGETS, TENANTS } from "./tables.js";

const at = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.search);
const FILTERS = ["target", "tenant", "call"];
const SPOKEN = 5000;
const LASTING = 10000;
const BROKEN = new Set(["open", "isolated"]);

let state = null;
let paused = false;
let link = "connecting";

// What it looks for is kept in the address, so that it can be sent to somebody, and outlives a reload.
function query() {
  const wanted = new URLSearchParams();
  for (const name of [...FILTERS, "targets_by", "tenants_by", "notable"]) if (asked.get(name)) wanted.set(name, asked.get(name));
  return wanted;
}

function look(name, value) {
  if (value) asked.set(name, value);
  else asked.delete(name);
  const shown = query().toString();
  history.replaceState(null, "", shown ? `?${shown}` : location.pathname);
  if (paused) pause(false);
  else stream.open();
}

const tables = {
  targets: new Table(at("targets-table"), TARGETS, (order) => look("targets_by", order === "name" ? "" : order)),
  tenants: new Table(at("tenants-table"), TENANTS, (order) => look("tenants_by", order === "name" ? "" : order)),
};
const calls = new Calls(at("calls-list"));

for (const name of FILTERS) {
  const box = at(`filter-${name}`);
  box.value = asked.get(name) ?? "";
  let later;
  box.addEventListener("input", () => {
    clearTimeout(later);
    later = setTimeout(() => look(name, box.value.trim()), 250);
  });
}
at("only-notable").checked = asked.has("notable");
at("only-notable").addEventListener("change", (event) => look("notable", event.target.checked ? "1" : ""));

const TOTALS = [
  ["Requests / s", (totals) => format.rate(totals.per_second)],
  ["In flight", (totals) => format.count(totals.in_flight)],
  ["Queued", (totals) => format.count(totals.queued), (totals) => (totals.queued > 0 ? "warn" : "")],
  ["Refused", (totals) => format.count(totals.refused), (totals) => (totals.refused > 0 ? "bad" : "")],
  ["Errors", (totals) => format.count(totals.errors), (totals) => (totals.errors > 0 ? "bad" : "")],
  ["Requests", (totals) => format.count(totals.requests)],
  ["Tokens", (totals) => format.tokens(totals.input_tokens + totals.output_tokens)],
  ["Spend", (totals) => format.usd(totals.cost_usd)],
];
const tiles = TOTALS.map(([label]) => {
  const value = el("dd", { text: "–" });
  at("totals").append(el("div", {}, el("dt", { text: label }), value));
  return value;
});

function count(name, noun) {
  const [shown, found, all] = [state[name].length, state[`${name}_found`], state[`${name}_all`]];
  const word = all === 1 ? noun : `${noun}s`;
  setText(at(`${name}-count`), found < all ? `${format.count(shown)} of ${format.count(found)} found, ${format.count(all)} ${word}` : shown < all ? `${format.count(shown)} of ${format.count(all)} ${word}` : `${format.count(all)} ${word}`);
  const empty = at(`${name}-empty`);
  empty.hidden = shown > 0;
  setText(empty, all > 0 ? `No ${noun} matches.` : `No ${noun} yet.`);
}

function notices() {
  const reload = at("reload-error");
  reload.hidden = state.reload_error === null;
  setText(reload, `The last reload failed, and the configuration before it is still in use. ${state.reload_error ?? ""}`);
  const troubles = at("troubles");
  // One that is back in a moment would make the page jump, and is seen in the table.
  const lasting = state.troubles.filter((one) => !(one.cooling_down > 0 && one.cooling_down < LASTING) || BROKEN.has(one.circuit));
  troubles.hidden = lasting.length === 0;
  const names = lasting.map((one) => `${one.name} (${standing({ ...one, healthy: false })[1]})`);
  const more = names.length > 6 ? ` and ${names.length - 6} more` : "";
  setText(troubles, `${names.length} of ${format.count(state.targets_all)} targets ${names.length === 1 ? "takes" : "take"} no calls: ${names.slice(0, 6).join(", ")}${more}`);
}

// Circuits that opened or closed are told to those who do not see the page, once in a while and not each number.
let circuits = null;
let spoken = 0;
function announce() {
  const now = new Map(state.troubles.filter((one) => one.circuit !== "closed" && one.circuit !== null).map((one) => [one.name, one.circuit]));
  if (circuits !== null && Date.now() - spoken < SPOKEN) return;
  const said = [];
  if (circuits !== null) {
    for (const [name, circuit] of now) if (circuits.get(name) !== circuit) said.push(`${name}: circuit ${circuit.replace("_", " ")}`);
    for (const name of circuits.keys()) if (!now.has(name)) said.push(`${name}: takes calls again`);
  }
  circuits = now;
  if (said.length === 0) return;
  spoken = Date.now();
  setText(at("changes"), said.slice(0, 4).join("; "));
}

function show() {
  TOTALS.forEach(([, value, tone], index) => {
    setText(tiles[index], value(state.totals));
    tiles[index].className = tone?.(state.totals) ?? "";
  });
  tables.targets.show(state.targets, asked.get("targets_by") ?? "name");
  const nobody = state.open ? "(everybody)" : "(unknown key)";
  tables.tenants.show(state.tenants.map((row) => ({ ...row, nobody })), asked.get("tenants_by") ?? "name");
  calls.show(state.calls);
  count("targets", "target");
  count("tenants", "tenant");
  count("calls", "call");
  notices();
  announce();
  const workers = state.workers > 1 ? `, ${state.workers} workers` : "";
  setText(at("about"), `${state.version}${workers}, up ${format.duration((state.at - state.started) * 1000)}`);
}

const LINKS = {
  connecting: "Connecting",
  live: "Live",
  draining: "Stopping: requests under way are ended",
  paused: "Paused",
  lost: "Reconnecting",
  full: "Too many viewers; trying again",
};

function tell() {
  const shown = paused ? "paused" : link === "live" && state?.draining ? "draining" : link;
  at("link").dataset.state = shown;
  document.body.dataset.link = shown;
  if (shown !== "over") setText(at("link-text"), LINKS[shown]);
  else if (at("link-text").querySelector("a") === null)
    at("link-text").replaceChildren("The session is over. ", el("a", { href: "/admin/ui/login", text: "Sign in again" }));
}

const stream = new Stream({
  query,
  onState(told) {
    if (paused) return;
    state = told;
    tell();
    show();
  },
  onLink(now, session) {
    link = now;
    if (session !== undefined) at("leave").hidden = session.ends_in === null;
    tell();
  },
});

function pause(wanted) {
  paused = wanted;
  setText(at("pause"), paused ? "Resume" : "Pause");
  if (paused) stream.close();
  else {
    link = "connecting";
    stream.open();
  }
  tell();
}
at("pause").addEventListener("click", () => pause(!paused));

stream.open();
