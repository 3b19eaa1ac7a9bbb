"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const element = (tag, text, className) => { const node = document.createElement(tag); if (text !== undefined) node.textContent = text; if (className) node.className = className; return node; };
const format = (value) => value === null || value === undefined ? "–" : value === "Infinity" ? "∞" : value === "-Infinity" ? "−∞" : typeof value !== "number" ? String(value) : value === 0 ? "0" : (Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3) ? value.toExponential(2) : Number.isInteger(value) ? String(value) : value.toPrecision(3);
const spelled = (token) => token === null || token === undefined ? "·" : JSON.stringify(token).slice(1, -1);
const mixed = (from, to, share) => from.map((part, index) => Math.round(part + (to[index] - part) * share));
const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const sequential = (share) => { const place = Math.max(0, Math.min(share, 0.9999)) * (stops.length - 1), index = Math.floor(place); return mixed(stops[index], stops[index + 1], place - index); };
const diverging = (share) => share < 0.5 ? mixed([33, 102, 172], [247, 247, 247], Math.max(0, share) * 2) : mixed([247, 247, 247], [178, 88, 6], Math.min(1, share) * 2 - 1);
const css = (colour) => "rgb(" + colour.join(",") + ")";
const gradient = (paint) => "linear-gradient(90deg," + [0, .1, .2, .3, .4, .5, .6, .7, .8, .9, 1].map((share) => css(paint(share))).join(",") + ")";
const strength = (head) => data.columns.length ? head[data.columns[0].name] ?? -1 : 0;
const all = data.heads.label.map((label, place) => {
  const head = { label };
  for (const [name, values] of Object.entries(data.heads)) head[name] = values.texts ? values.texts[values.codes[place]] : values[place];
  return head;
});
const heads = new Map(all.map((head) => [head.label, head]));
const lines = data.rows.map((name) => ({ name, labels: [] }));
for (const head of all) lines[head.row].labels.push(head.label);
const resolved = data.resolved === null ? null : new Set(data.resolved);
let chosen = all.length ? all.reduce((best, head) => strength(head) > strength(best) ? head : best).label : null;
let order = { name: data.columns.length ? data.columns[0].name : "label", down: true };

async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const buttons = new Map();
function mark() {  // the chosen head in picture and table, without drawing either anew
  for (const [label, button] of buttons) { button.parentNode.classList.toggle("chosen", label === chosen); button.tabIndex = label === chosen ? 0 : -1; }
  for (const row of document.querySelectorAll("#heads tbody tr")) row.classList.toggle("chosen", row.dataset.label === chosen);
}

function drawMap() {
  const column = data.columns.find((entry) => entry.name === byId("column").value);
  if (!column) return;
  const known = all.map((head) => head[column.name]).filter((value) => value !== null);
  const largest = known.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1, signed = column.signed;
  const low = signed ? -largest : 0, high = largest;
  const paint = signed ? diverging : sequential;
  const shaded = resolved !== null && column.name === "routing_pressure";
  byId("meaning").textContent = column.meaning;
  byId("hatching").textContent = shaded ? "Hatched: not told apart from the median head on the half of the sequences that picks, all heads at once (95 %)." : "";
  const table = byId("map"); table.replaceChildren();
  const top = element("thead"), row = element("tr"); row.append(element("th"));
  for (let head = 0; head < lines.reduce((most, row) => Math.max(most, row.labels.length), 0); head++) row.append(element("th", String(head)));
  top.append(row); table.append(top);
  const body = element("tbody");
  buttons.clear();
  for (const group of lines) {
    const line = element("tr"); line.append(element("th", group.name));
    for (const label of group.labels) {
      const head = heads.get(label), cell = element("td"), button = element("button");
      const value = head[column.name];
      if (value !== null) cell.style.background = css(paint((value - low) / (high - low)));
      if (label === chosen) cell.classList.add("chosen");
      if (shaded && !resolved.has(label)) cell.classList.add("unresolved");
      buttons.set(label, button);
      button.title = label + ": " + format(value) + (head.status === null ? "" : " (" + head.status + ")");
      button.setAttribute("aria-label", button.title);
      button.tabIndex = label === chosen ? 0 : -1;
      button.dataset.label = label;
      button.addEventListener("click", () => choose(label));
      cell.append(button); line.append(cell);
    }
    body.append(line);
  }
  table.append(body);
  byId("low").textContent = format(low); byId("high").textContent = format(high) + " " + column.unit;
  byId("bar").style.background = gradient(paint);
}
byId("map").addEventListener("keydown", (event) => {
  const label = event.target.dataset ? event.target.dataset.label : undefined;
  if (!label) return;
  if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(label); focusHead(label); return; }
  const line = heads.get(label).row, place = lines[line].labels.indexOf(label);
  const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  if (!moves[event.key]) return;
  event.preventDefault();
  const next = lines[line + moves[event.key][0]]?.labels[place + moves[event.key][1]];
  if (next) focusHead(next);
});
const focusHead = (label) => { if (buttons.has(label)) buttons.get(label).focus(); };

function drawTable() {
  const names = ["label", ...all.some((head) => head.kind !== null) ? ["kind"] : [], ...data.columns.map((column) => column.name), "status"];
  const line = document.querySelector("#heads thead tr"); line.replaceChildren();
  for (const name of names) {
    const cell = element("th"), button = element("button", name);
    cell.setAttribute("aria-sort", order.name === name ? (order.down ? "descending" : "ascending") : "none");
    button.tabIndex = 0; button.setAttribute("role", "button");
    const sort = () => { order = { name, down: order.name === name ? !order.down : true }; drawTable(); };
    button.addEventListener("click", sort);
    button.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
    cell.append(button); line.append(cell);
  }
  const wanted = byId("filter").value.trim().toLowerCase();
  const rows = all.filter((head) => !wanted || [head.label, head.kind, head.module, head.status].join(" ").toLowerCase().includes(wanted));
  rows.sort((one, other) => { const a = one[order.name], b = other[order.name]; if (a === null) return 1; if (b === null) return -1; const way = typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b; return order.down ? -way : way; });
  const most = 2000;
  byId("count").textContent = rows.length + " of " + all.length + " heads" + (rows.length > most ? ", the first " + most + " shown" : "");
  const body = document.querySelector("#heads tbody"); body.replaceChildren();
  for (const head of rows.slice(0, most)) {
    const row = element("tr", undefined, head.label === chosen ? "chosen" : "");
    row.tabIndex = 0; row.dataset.label = head.label;
    for (const name of names) {
      const low = head[name + "_low"], high = head[name + "_high"];
      const cell = element("td", format(head[name]), typeof head[name] === "string" ? "text" : "");
      if (low !== undefined && low !== null && high !== null) cell.append(element("span", " [" + format(low) + ", " + format(high) + "]", "soft"));
      row.append(cell);
    }
    row.addEventListener("click", () => choose(head.label));
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(head.label); });
    body.append(row);
  }
}

function drawEdges() {
  const head = heads.get(chosen);
  byId("head-title").textContent = chosen ? "Head " + chosen : "A head";
  const here = head && data.edges[chosen], known = Object.keys(data.edges).length > 0;
  const note = here ? "the " + data.shown + " strongest pairs of each direction " + byId("head-note").dataset.pairs : known ? "its pairs are in the files" : "this run kept no maps and no pairs";
  byId("head-note").textContent = head ? head.module + " · " + note : "";
  byId("map-part").hidden = !Object.keys(data.maps).length;
  byId("pair-part").hidden = !known;
  for (const direction of ["routed", "anti_routed"]) {
    const table = byId(direction); table.replaceChildren();
    const top = element("thead"), line = element("tr");
    ["query", "key", "attention", "advantage", "∂L/∂s", "worth"].forEach((name, place) => { const cell = element("th", name, place < 2 ? "text" : ""); if (name === "worth") cell.title = "change of the loss to first order when the edge is removed and the row renormalised"; line.append(cell); });
    top.append(line); table.append(top);
    const body = element("tbody");
    for (const edge of (data.edges[chosen] || {})[direction] || []) {
      const row = element("tr");
      for (const side of [0, 1]) { const cell = element("td", undefined, "text"); const word = element("span", spelled(edge[side]), "token"); word.title = word.textContent; cell.append(word, element("span", " " + edge[side + 2], "soft")); row.append(cell); }
      for (const value of edge.slice(4)) row.append(element("td", format(value)));
      body.append(row);
    }
    table.append(body);
  }
  const words = byId("words"); words.replaceChildren();
  const own = data.vocabulary[chosen];
  for (const [direction, title] of [["promoted", "Its values are pushed to promote"], ["suppressed", "and to suppress"]]) {
    if (!own || !own[direction]) continue;
    words.append(element("h3", title));
    const line = element("p");
    for (const [token, value, chance] of own[direction]) { const chip = element("span", spelled(token), "token chip" + (chance > 0.05 ? " weak" : "")); chip.title = format(value) + " per unit step; a random direction moves some token as far with p ≤ " + format(chance); line.append(chip, " "); }
    words.append(line);
  }
  if (own) words.append(element("p", "Pale: no farther than random directions of the same norm move some token (95 %).", "soft"));
}

let cells = null, cursor = null;
async function drawHead() {
  const label = chosen, one = data.maps[label], canvas = byId("canvas"), pen = canvas.getContext("2d");
  cells = null; cursor = null;
  if (!one) { pen.clearRect(0, 0, canvas.width, canvas.height); byId("hover").textContent = "This head's map is in the files."; return; }
  const bytes = await inflated(one.data);
  if (label !== chosen) return;
  const [rows, columns] = one.cells, count = rows * columns;
  const attention = new Float32Array(count), score = new Float32Array(count), signed = new Int8Array(bytes.buffer, count, count);
  for (let place = 0; place < count; place++) {
    attention[place] = one.tops[0] * (bytes[place] / 255) ** 2;
    score[place] = Math.sign(signed[place]) * one.tops[1] * (signed[place] / 127) ** 2;
  }
  cells = { label, rows, columns, attention, score, length: one.length };
  paint();
  const edges = data.points[label];
  if (byId("overlay").checked && edges) overlay(edges, label);
}
const shownValue = (place) => {
  const kind = byId("kind").value;
  if (kind === "attention") return cells.attention[place];
  if (kind === "gradient") return cells.score[place];
  return cells.attention[place] > 0 ? -cells.score[place] / cells.attention[place] : null;
};
function paint() {
  if (!cells) return;
  const canvas = byId("canvas"), pen = canvas.getContext("2d"), { rows, columns } = cells, signed = byId("kind").value !== "attention";
  const values = Array.from({ length: rows * columns }, (_, place) => shownValue(place));
  const sorted = values.filter((value) => value !== null && value !== 0).map(Math.abs).sort((a, b) => a - b);
  // advantage is a ratio: a cell that is hardly attended to would set the scale
  const top = (byId("kind").value === "advantage" ? sorted[Math.floor(0.98 * (sorted.length - 1))] : sorted[sorted.length - 1]) || 1;
  const image = new ImageData(columns, rows), tint = signed ? diverging : sequential;
  values.forEach((value, place) => {
    const hidden = value === null || cells.attention[place] === 0;
    const colour = hidden ? [0, 0, 0] : tint(signed ? 0.5 + value / (2 * top) : Math.sqrt(value / top));
    image.data.set([...colour, hidden ? 0 : 255], 4 * place);
  });
  canvas.width = columns; canvas.height = rows;
  pen.putImageData(image, 0, 0);
  byId("canvas-low").textContent = format(signed ? -top : 0);
  byId("canvas-high").textContent = format(top) + (signed ? " loss" : " (square-root scale)");
  byId("canvas-bar").style.background = gradient(tint);
}
async function pairs(edges) {  // [query, key, score as an 8-bit number] of every one
  const bytes = await inflated(edges.data), view = new DataView(bytes.buffer), { count, wide } = edges, size = wide ? 4 : 2;
  const read = (place) => wide ? view.getUint32(size * place, true) : view.getUint16(size * place, true);
  const scores = new Int8Array(bytes.buffer, (2 * size + 1) * count, count), found = [];
  let query = 0;
  for (let place = 0; place < count; place++) { query += read(place); found.push([query, read(count + place), scores[place]]); }
  return found;
}
async function overlay(edges, label) {
  const found = await pairs(edges);
  if (!cells || label !== chosen) return;
  const canvas = byId("canvas"), pen = canvas.getContext("2d"), [queries, keys] = cells.length;
  for (const [query, key, score] of found) {
    pen.fillStyle = score < 0 ? "rgba(230,120,0,.9)" : "rgba(0,140,255,.9)";
    pen.fillRect(Math.floor(key * canvas.width / keys), Math.floor(query * canvas.height / queries), 1, 1);
  }
}
function span(cell, count, total) {
  const from = Math.floor(cell * total / count), to = Math.max(from, Math.ceil((cell + 1) * total / count) - 1);
  const words = data.tokens.slice(from, Math.min(to + 1, from + 6)).map(spelled).join("");
  return (from === to ? String(from) : from + "–" + to) + (words ? " " + words + (to - from > 5 ? "…" : "") : "");
}
function describe(row, column) {
  if (!cells || row < 0 || column < 0 || row >= cells.rows || column >= cells.columns) return;
  cursor = [row, column];
  const place = row * cells.columns + column, [queries, keys] = cells.length;
  const advantage = cells.attention[place] > 0 ? -cells.score[place] / cells.attention[place] : null;
  const note = byId("hover"); note.replaceChildren();
  note.append("query ", element("span", span(row, cells.rows, queries), "token"), " → key ", element("span", span(column, cells.columns, keys), "token"),
    ": α " + format(cells.attention[place]) + ", A " + format(advantage) + ", ∂L/∂s " + format(cells.score[place]));
}
byId("canvas").addEventListener("mousemove", (event) => {
  if (!cells) return;
  const box = byId("canvas").getBoundingClientRect();
  describe(Math.floor((event.clientY - box.top) / box.height * cells.rows), Math.floor((event.clientX - box.left) / box.width * cells.columns));
});
byId("canvas").addEventListener("keydown", (event) => {
  const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  if (!moves[event.key] || !cells) return;
  event.preventDefault();
  const [row, column] = cursor || [0, 0];
  describe(row + moves[event.key][0], column + moves[event.key][1]);
});

// a picture of lines [{steps, values, own, name}] with its ends written beside it; on a log scale what is not positive is left out
function drawn(all, title, log) {
  const scaled = (value) => log ? Math.log(value) : value, fits = (value) => value !== null && value !== undefined && (!log || value > 0);
  const known = all.flatMap((line) => line.values.filter(fits)), steps = all.flatMap((line) => line.steps);
  const low = known.reduce((least, value) => Math.min(least, value), Infinity), high = known.reduce((most, value) => Math.max(most, value), -Infinity);
  const first = steps.reduce((least, step) => Math.min(least, step), Infinity), last = steps.reduce((most, step) => Math.max(most, step), -Infinity);
  const box = element("figure", undefined, "lines"), picture = byId("course-picture").cloneNode(false);
  for (const name of ["id", "hidden", "width", "height"]) picture.removeAttribute(name);
  picture.setAttribute("viewBox", "0 0 1000 240"); picture.setAttribute("preserveAspectRatio", "none"); picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", title);
  const across = (step) => last > first ? 10 + 980 * (step - first) / (last - first) : 500;
  const up = (value) => 230 - 220 * (high > low ? (scaled(value) - scaled(low)) / (scaled(high) - scaled(low)) : 0.5);
  for (const line of all) {
    const shape = document.createElementNS(picture.namespaceURI, line.own ? "polyline" : "path");
    const points = line.values.map((value, place) => fits(value) ? [across(line.steps[place]).toFixed(1), up(value).toFixed(1)] : null).filter((point) => point);
    if (!points.length) continue;
    const text = points.map((point) => point.join(",")).join(line.own ? " " : " L");
    shape.setAttribute(line.own ? "points" : "d", line.own ? text : "M" + text);
    shape.setAttribute("class", line.own ? "own" : "other"); shape.setAttribute("vector-effect", "non-scaling-stroke");
    if (line.name) { const name = document.createElementNS(picture.namespaceURI, "title"); name.textContent = line.name; shape.append(name); }
    picture.append(shape);
  }
  const named = (value) => known.length ? format(value) : "–";
  box.append(element("figcaption", title + (log ? ", log scale" : "")), element("span", named(high), "soft high"), picture, element("span", named(low), "soft low"), element("span", "step " + first, "soft first-step"), element("span", String(last), "soft last-step"));
  return { box, low, high };
}
const MOST = 60;  // other heads' courses behind the chosen one's
function drawCourse() {
  const { steps } = data.history;
  if (!steps || steps.length < 2) return;
  byId("course-section").hidden = false;
  byId("course-controls").hidden = false;
  const name = byId("column").value, own = (data.history.heads[chosen] || {})[name];
  const others = Object.entries(data.history.heads).filter(([label, values]) => label !== chosen && values[name]).slice(0, MOST);
  const shown = others.map(([label, values]) => ({ steps, values: values[name], name: label }));
  if (own) shown.push({ steps, values: own, own: true, name: chosen });
  const { box } = drawn(shown, name + " of " + chosen, byId("course-log").checked);
  byId("course").replaceChildren(box);
  const behind = others.length ? "; behind it " + (others.length === all.length - 1 ? "all" : others.length) + " other heads" : "";
  const values = (own || []).filter((value) => value !== null);
  byId("course-note").textContent = own && values.length ? name + " of " + chosen + ", steps " + steps[0] + " to " + steps[steps.length - 1] + ": " + format(values[0]) + " to " + format(values[values.length - 1]) + behind + ". One run: no interval." : "The course of " + chosen + " is not known, or is in the files.";
}
function drawCurves() {
  if (!data.curves.length) return;
  byId("course-section").hidden = false;
  for (const { name, lines } of data.curves) byId("curves").append(drawn(lines.map((line) => ({ ...line, own: true, name: line.run })), name, false).box);
}

let plotted = null;
async function drawCloud() {
  const names = Object.keys(data.manifold);
  if (!names.length) return;
  byId("manifold-section").hidden = false;
  const select = byId("cloud-of");
  if (!select.options.length) for (const name of names) select.append(new Option(name, name));
  if (!plotted) {
    const source = new TextDecoder().decode(await inflated(byId("plotly").textContent));
    const script = document.createElement("script"); script.textContent = source; document.head.append(script);
    plotted = window.Plotly;
  }
  const cloud = data.manifold[select.value], style = getComputedStyle(document.body), ink = style.color;
  const [across, up] = byId("cloud-axes").value.split(", ").map(Number), axes = cloud.axes;
  const text = axes[0].map((_, place) => (cloud.names ? spelled(cloud.names[place]).replace(/&/g, "&amp;").replace(/</g, "&lt;") : "point " + place) + (cloud.entropy ? "<br>" + format(cloud.entropy[place]) + " bits" : ""));
  const trace = { x: axes[across - 1] || [], y: axes[up - 1] || [], text, mode: "markers", type: "scatter", hovertemplate: "%{text}<extra></extra>",
    marker: { size: 5, opacity: .8, color: cloud.entropy || undefined, colorscale: "Viridis", showscale: Boolean(cloud.entropy), colorbar: { title: { text: "bits" } } } };
  const axis = (number) => ({ title: { text: "axis " + number + " (value units)" }, gridcolor: "rgba(128,128,128,.3)", zerolinecolor: "rgba(128,128,128,.5)" });
  const layout = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink }, margin: { l: 60, r: 10, t: 10, b: 45 }, xaxis: axis(across), yaxis: axis(up) };
  await plotted.react(byId("cloud"), [trace], layout, { displaylogo: false, responsive: true });
}

function choose(label) { chosen = label; mark(); drawEdges(); drawHead(); drawCourse(); }
byId("column").addEventListener("change", () => { drawMap(); drawCourse(); });
byId("filter").addEventListener("input", drawTable);
byId("kind").addEventListener("change", drawHead);
byId("course-log").addEventListener("change", drawCourse);
byId("overlay").addEventListener("change", drawHead);
byId("cloud-of").addEventListener("change", drawCloud);
byId("cloud-axes").addEventListener("change", drawCloud);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCloud);
drawMap(); drawTable(); drawEdges(); drawHead(); drawCourse(); drawCurves(); drawCloud();
