// The two tables: what stands in each column, and in which order rows come.

import { badge, el, reconcile, setAttribute, setText, svg } from "./dom.js";
import * as format from "./format.js";

// `share` from 0 to 1, of a track as wide as its column.
export function bar(share) {
  const filled = svg("rect", { width: "0", height: "100%", class: "fill" });
  const drawn = svg("svg", { class: "bar", "aria-hidden": "true", focusable: "false" }, svg("rect", { width: "100%", height: "100%", class: "track" }), filled);
  drawn.show = (value) => setAttribute(filled, "width", `${Math.min(100, Math.max(0, value * 100)).toFixed(1)}%`);
  drawn.show(share);
  return drawn;
}

const CIRCUITS = { closed: ["ok", "closed"], half_open: ["half", "half open"], open: ["bad", "open"], isolated: ["off", "isolated"] };

// How a target is, in a word and a shape.
export function standing(target) {
  const [kind, word] = CIRCUITS[target.circuit] ?? ["none", target.attempts === 0 ? "not asked yet" : "no circuit"];
  if (kind === "ok" || kind === "none") {
    if (target.cooling_down > 0) return ["warn", `cooling ${format.duration(target.cooling_down)}`];
    if (!target.healthy) return ["warn", "no credential"];
  }
  return [kind, word];
}

function text(value, tone = () => "") {
  return (cell, row) => {
    setText(cell, value(row));
    setAttribute(cell, "class", `num ${tone(row)}`.trim());
  };
}

// Counts that should be none stand out when they are some.
const bad = (name) => [text((row) => format.count(row[name]), (row) => (row[name] > 0 ? "bad" : "quiet"))];

export const TARGETS = [
  { label: "Target", order: "name", fill: (cell, row) => {
    if (cell.firstChild === null) cell.append(el("span", { class: "name" }), el("span", { class: "sub" }));
    setText(cell.firstChild, row.name);
    const models = row.models.filter((model) => model !== "any").join(", ");
    setText(cell.lastChild, models);
    setAttribute(cell.lastChild, "title", models || null);
  } },
  { label: "Circuit", order: "circuit", fill: (cell, row) => {
    const [kind, word] = standing(row);
    if (cell.dataset.shown === `${kind} ${word}`) return;
    cell.dataset.shown = `${kind} ${word}`;
    cell.replaceChildren(badge(kind, word));
  } },
  { label: "In flight / limit", order: "busiest", num: true, fill: (cell, row) => {
    if (cell.firstChild === null) cell.append(el("span"), bar(0));
    setText(cell.firstChild, row.limit === null ? format.count(row.in_flight) : `${format.count(row.in_flight)} / ${format.count(row.limit)}`);
    cell.lastChild.show(row.limit ? row.in_flight / row.limit : 0);
    setAttribute(cell.lastChild, "visibility", row.limit === null ? "hidden" : "visible");
  } },
  { label: "Share", order: "share", num: true, fill: (cell, row) => {
    if (cell.firstChild === null) cell.append(el("span"), bar(0));
    setText(cell.firstChild, format.percent(row.share));
    cell.lastChild.show(row.share ?? 0);
  } },
  { label: "Success", order: "success", num: true, fill: text((row) => format.ratio(row.success_ratio), (row) => (row.success_ratio < 0.95 ? "bad" : "")) },
  { label: "First token", num: true, fill: text((row) => format.duration(row.first_token)) },
  { label: "p50", num: true, fill: text((row) => format.duration(row.p50)) },
  { label: "p95", order: "latency", num: true, fill: text((row) => format.duration(row.p95)) },
  { label: "Weight", order: "weight", num: true, fill: text(
    (row) => (Math.abs(row.effective_weight - row.weight) < 0.005 ? format.weight(row.weight) : `${format.weight(row.effective_weight)} of ${format.weight(row.weight)}`),
    (row) => (row.effective_weight < 0.75 * row.weight ? "warn" : "")) },
  { label: "Attempts", num: true, fill: text((row) => format.count(row.attempts)) },
];

export const TENANTS = [
  { label: "Tenant", order: "name", fill: (cell, row) => {
    setText(cell, row.name ?? row.nobody);
    setAttribute(cell, "class", row.name === null ? "name quiet" : "name");
  } },
  { label: "In flight", order: "busiest", num: true, fill: text((row) => format.count(row.in_flight)) },
  { label: "Queued", order: "queued", num: true, fill: text((row) => format.count(row.queued), (row) => (row.queued > 0 ? "warn" : "quiet")) },
  { label: "Per second", num: true, fill: text((row) => format.rate(row.per_second)) },
  { label: "Requests", order: "requests", num: true, fill: text((row) => format.count(row.requests)) },
  { label: "Refused", order: "refused", num: true, fill: bad("refused")[0] },
  { label: "Errors", order: "errors", num: true, fill: bad("errors")[0] },
  { label: "Tokens", order: "tokens", num: true, fill: text((row) => format.tokens(row.input_tokens + row.output_tokens)) },
  { label: "Spend", order: "spend", num: true, fill: text((row) => format.usd(row.cost_usd)) },
];

// Headings are buttons where rows can be had in that order; `chosen` gives the order there is, `choose` takes another.
export class Table {
  #columns;
  #body;
  #heads = [];

  constructor(table, columns, choose) {
    this.#columns = columns;
    this.#body = table.tBodies[0];
    const heads = columns.map((column) => {
      const head = el("th", { scope: "col", role: "columnheader", class: column.num ? "num" : null });
      if (column.order === undefined) head.textContent = column.label;
      else {
        const button = el("button", { type: "button", text: column.label });
        button.addEventListener("click", () => choose(column.order));
        head.append(button);
      }
      this.#heads.push(head);
      return head;
    });
    table.tHead.append(el("tr", { role: "row" }, ...heads));
  }

  show(rows, order) {
    this.#columns.forEach((column, index) => {
      if (column.order === undefined) return;
      const sorted = column.order !== order ? null : order === "name" ? "ascending" : "descending";
      setAttribute(this.#heads[index], "aria-sort", sorted);
    });
    reconcile(this.#body, rows, (row) => `:${row.name}`, () => this.#row(), (tr, row) => {
      this.#columns.forEach((column, index) => column.fill(tr.cells[index], row));
    });
  }

  #row() {
    return el("tr", { role: "row" }, ...this.#columns.map((column, index) =>
      index === 0
        ? el("th", { scope: "row", role: "rowheader", class: "name" })
        : el("td", { role: "cell", "data-label": column.label, class: column.num ? "num" : null })));
  }
}
