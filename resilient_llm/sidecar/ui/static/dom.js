// Elements, made and changed without a word of markup: whatever a name holds, it stays a name.

// Characters that have no shape, or turn the order of others around, are spelled out: two names that differ look it.
function visible(text) {
  return String(text).replace(/(?!\n)[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);
}

export function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") made.textContent = visible(value);
    else if (value !== null && value !== undefined) made.setAttribute(name, name === "title" ? visible(value) : value);
  }
  made.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : visible(child))));
  return made;
}

export function svg(tag, options = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(options)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// What is as it was is left alone, so that nothing is laid out, or read out, again.
export function setText(node, text) {
  const shown = visible(text);
  if (node.textContent !== shown) node.textContent = shown;
}

export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Each state has a shape of its own, for those to whom colours say little.
const SHAPES = {
  ok: ["circle", { cx: 6, cy: 6, r: 5 }, "M3.4 6.2 5.3 8 8.7 4.3"],
  warn: ["path", { d: "M6 .8 11.6 11H.4Z" }, "M6 4.4v3M6 9.1v.1"],
  bad: ["path", { d: "M3.6.8h4.8l2.8 2.8v4.8l-2.8 2.8H3.6L.8 8.4V3.6Z" }, "M4 4l4 4M8 4 4 8"],
  half: ["path", { d: "M6 1a5 5 0 0 1 0 10Z" }, "M6 1a5 5 0 0 0 0 10"],
  off: ["rect", { x: 1, y: 1, width: 10, height: 10, rx: 1.5 }, "M4.4 3.6v4.8M7.6 3.6v4.8"],
  none: ["path", { d: "" }, "M2.5 6h7"],
  route: ["path", { d: "" }, "M1.5 6h8M6.8 3 9.8 6l-3 3"],
  wait: ["path", { d: "" }, "M6 1.2a4.8 4.8 0 1 0 .01 0M6 3.4V6l2 1.4"],
};

export function icon(kind) {
  const [shape, options, line] = SHAPES[kind];
  return svg(
    "svg",
    { viewBox: "0 0 12 12", class: `icon ${kind}`, "aria-hidden": "true", focusable: "false" },
    svg(shape, { ...options, class: "shape" }),
    svg("path", { d: line, class: "line" }),
  );
}

export function badge(kind, text) {
  return el("span", { class: `badge ${kind}` }, icon(kind), el("span", { text }));
}

// Make the children of `parent` those of `rows`, in order, keeping and not moving what was there before where it can
// be: what has the focus must not lose it. `kept` says of one that is not among `rows` any more whether it stays.
export function reconcile(parent, rows, key, make, fill, kept = () => false) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = new Set(rows.map(key));
  for (const [name, child] of known) if (!wanted.has(name) && !kept(child)) child.remove();
  let at = parent.firstElementChild;
  for (const row of rows) {
    const name = key(row);
    let child = known.get(name);
    if (child === undefined) {
      child = make(row);
      child.dataset.key = name;
    } else {
      // Past what is only kept: new rows go before it, those that were after it stay there.
      while (at !== null && at !== child && !wanted.has(at.dataset.key)) at = at.nextElementSibling;
    }
    fill(child, row);
    if (at === child) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
}
