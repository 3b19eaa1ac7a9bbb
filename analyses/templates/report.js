"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const element = (tag, text, className) => { const node = document.createElement(tag); if (text !== undefined) node.textContent = text; if (className) node.className = className; return node; };
const format = (value) => value === null || value === undefined ? "–" : typeof value !== "number" ? String(value) : value === 0 ? "0" : (Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3) ? value.toExponential(2) : Number.isInteger(value) ? String(value) : value.toPrecision(3);
const spelled = (token) => token === null || token === undefined ? "·" : JSON.stringify(token).slice(1, -1);
const mixed = (from, to, share) => from.map((part, index) => Math.round(part + (to[index] - part) * share));
const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const sequential = (share) => { const place = Math.max(0, Math.min(share, 0.9999)) * (stops.length - 1), index = Math.floor(place); return mixed(stops[index], stops[index + 1], place - index); };
const diverging = (share) => share < 0.5 ? mixed([33, 102, 172], [247, 247, 247], Math.max(0, share) * 2) : mixed([247, 247, 247], [178, 88, 6], Math.min(1, share) * 2 - 1);
const css = (colour) => "rgb(" + colour.join(",") + ")";
const gradient = (paint) => "linear-gradient(90deg," + [0, .1, .2, .3, .4, .5, .6, .7, .8, .9, 1].map((share) => css(paint(share))).join(",") + ")";
const strength = (head) => data.columns.length ? head[data.columns[0].name] ?? -1 : 0;
const heads = new Map(data.heads.map((head) => [head.label, head]));
let chosen = data.heads.length ? data.heads.reduce((best, head) => strength(head) > strength(best) ? head : best).label : null;
let order = { name: data.columns.length ? data.columns[0].name : "label", down: true };

async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function drawMap() {
  const column = data.columns.find((entry) => entry.name === byId("column").value);
  if (!column) return;
  const known = data.heads.map((head) => head[column.name]).filter((value) => value !== null);
  const largest = known.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1, signed = column.signed;
  const low = signed ? -largest : 0, high = largest;
  const paint = signed ? diverging : sequential;
  const shaded = data.resolved !== null && column.name === "routing_pressure";
  byId("meaning").textContent = column.meaning;
  byId("hatching").textContent = shaded ? "Hatched: not told apart from the median head on the half of the sequences that picks, all heads at once (95 %)." : "";
  const table = byId("map"); table.replaceChildren();
  const top = element("thead"), row = element("tr"); row.append(element("th"));
  for (let head = 0; head < data.width; head++) row.append(element("th", String(head)));
  top.append(row); table.append(top);
  const body = element("tbody");
  for (const group of data.rows) {
    const line = element("tr"); line.append(element("th", group.name));
    for (const label of group.labels) {
      const head = heads.get(label), cell = element("td"), button = element("button");
      const value = head[column.name];
      if (value !== null) cell.style.background = css(paint((value - low) / (high - low)));
      if (label === chosen) cell.classList.add("chosen");
      if (shaded && !data.resolved.includes(label)) cell.classList.add("unresolved");
      button.title = label + ": " + format(value) + " (" + head.status + ")";
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
  const line = data.rows.findIndex((row) => row.labels.includes(label)), place = data.rows[line].labels.indexOf(label);
  const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  if (!moves[event.key]) return;
  event.preventDefault();
  const next = data.rows[line + moves[event.key][0]]?.labels[place + moves[event.key][1]];
  if (next) focusHead(next);
});
const focusHead = (label) => { for (const button of document.querySelectorAll("#map button")) if (button.dataset.label === label) button.focus(); };

function drawTable() {
  const names = ["label", "kind", ...data.columns.map((column) => column.name), "status"];
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
  const rows = data.heads.filter((head) => !wanted || [head.label, head.kind, head.module, head.status].join(" ").toLowerCase().includes(wanted));
  rows.sort((one, other) => { const a = one[order.name], b = other[order.name]; if (a === null) return 1; if (b === null) return -1; const way = typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b; return order.down ? -way : way; });
  const most = 2000;
  byId("count").textContent = rows.length + " of " + data.heads.length + " heads" + (rows.length > most ? ", the first " + most + " shown" : "");
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
  byId("head-note").textContent = head ? head.module + " · the " + data.shown + " strongest pairs of each direction over all windows; the files hold more" : "";
  for (const direction of ["routed", "anti_routed"]) {
    const table = byId(direction); table.replaceChildren();
    const top = element("thead"), line = element("tr");
    ["query", "key", "attention", "advantage", "∂L/∂s"].forEach((name, place) => line.append(element("th", name, place < 2 ? "text" : "")));
    top.append(line); table.append(top);
    const body = element("tbody");
    for (const edge of (data.edges[chosen] || {})[direction] || []) {
      const row = element("tr");
      for (const side of [0, 1]) { const cell = element("td", undefined, "text"); cell.append(element("span", spelled(edge[side]), "token"), element("span", " " + edge[side + 2], "soft")); row.append(cell); }
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
  const label = chosen, one = data.maps.heads[label], canvas = byId("canvas"), pen = canvas.getContext("2d");
  cells = null; cursor = null;
  if (!one) { pen.clearRect(0, 0, canvas.width, canvas.height); byId("hover").textContent = "This head has no map."; return; }
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
async function overlay(edges, label) {
  const bytes = await inflated(edges.data), count = edges.count;
  if (!cells || label !== chosen) return;
  const view = new DataView(bytes.buffer), canvas = byId("canvas"), pen = canvas.getContext("2d");
  const [queries, keys] = cells.length;
  let query = 0;
  for (let place = 0; place < count; place++) {
    query = (query + view.getUint16(2 * place, true)) & 65535;
    const key = view.getUint16(2 * (count + place), true), score = new Int8Array(bytes.buffer, 5 * count, count)[place];
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

function drawCourse() {
  if (!data.history.steps || data.history.steps.length < 2) return;
  byId("course-section").hidden = false;
  const name = byId("column").value, own = data.history.heads[chosen] || {}, values = own[name] || [];
  const known = values.filter((value) => value !== null);
  const low = Math.min(...known), high = Math.max(...known), steps = data.history.steps, box = byId("course");
  box.replaceChildren();
  const picture = byId("course-picture").cloneNode(false);
  const line = document.createElementNS(picture.namespaceURI, "polyline");
  for (const name of ["id", "hidden", "width", "height"]) picture.removeAttribute(name);
  picture.setAttribute("viewBox", "0 0 1000 240"); picture.setAttribute("preserveAspectRatio", "none"); picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", name + " of " + chosen + " over training");
  const points = steps.map((step, place) => values[place] === null || values[place] === undefined ? null : [10 + 980 * (step - steps[0]) / (steps[steps.length - 1] - steps[0]), 230 - 220 * (high > low ? (values[place] - low) / (high - low) : 0.5)]).filter((point) => point);
  line.setAttribute("points", points.map((point) => point.join(",")).join(" "));
  line.setAttribute("fill", "none"); line.setAttribute("stroke", "currentColor"); line.setAttribute("stroke-width", "2"); line.setAttribute("vector-effect", "non-scaling-stroke");
  picture.append(line); box.append(picture);
  byId("course-note").textContent = name + " of " + chosen + ", steps " + steps[0] + " to " + steps[steps.length - 1] + "; " + format(low) + " to " + format(high);
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

function choose(label) { chosen = label; drawMap(); drawTable(); drawEdges(); drawHead(); drawCourse(); }
byId("column").addEventListener("change", () => { drawMap(); drawCourse(); });
byId("filter").addEventListener("input", drawTable);
byId("kind").addEventListener("change", drawHead);
byId("overlay").addEventListener("change", drawHead);
byId("cloud-of").addEventListener("change", drawCloud);
byId("cloud-axes").addEventListener("change", drawCloud);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCloud);
drawMap(); drawTable(); drawEdges(); drawHead(); drawCourse(); drawCloud();
