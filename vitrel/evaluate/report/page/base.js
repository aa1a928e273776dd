// Shared by all sections: the data, colours, formatting of numbers, figures with downloads.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SIZES = new Set(DATA.sizes.map((size) => size.name));
const OKABE_ITO = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
const redraws = []; // functions to call when the colours or the width change

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => make("option", { value, textContent: text })));
  if (entries.some(([value]) => String(value) === String(chosen))) select.value = chosen;
}

// Plotly interprets some HTML tags in texts.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function number(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "boolean") return value ? "yes" : "NO";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function sizeOf(name) {
  const [h, w] = name.split("x").map(Number);
  return { h, w };
}

const side = (name) => Math.sqrt(sizeOf(name).h * sizeOf(name).w);
const shape = (name) => ((size) => (size.h === size.w ? "square" : size.w > size.h ? "wide" : "tall"))(sizeOf(name));
const unresized = (row) => row.resized_params === 0;
const withUnit = ({ name, unit }) => (unit ? `${name} (${unit})` : name);
const word = (name) => DATA.words[name] || name; // the name of a class in words
const trainSizes = [...new Set(DATA.rows.map((row) => row.train_size))];

function dark() {
  return document.documentElement.dataset.theme === "dark";
}

function colours() {
  const css = getComputedStyle(document.documentElement);
  const take = (name) => css.getPropertyValue(name).trim();
  return { paper: take("--paper"), ink: take("--ink"), soft: take("--soft"), line: take("--line") };
}

function diverging() {
  const middle = dark() ? "#16181b" : "#ffffff";
  return dark()
    ? [[0, "#9ad7ff"], [0.25, "#2f8fc9"], [0.5, middle], [0.75, "#d5752e"], [1, "#ffd29a"]]
    : [[0, "#00395c"], [0.25, "#4a9fd0"], [0.5, middle], [0.75, "#e58a4e"], [1, "#7a2f00"]];
}

function layout(more = {}) {
  const at = colours();
  const axis = { gridcolor: at.line, linecolor: at.soft, zeroline: false, ticks: "outside", tickcolor: at.soft, fixedrange: true };
  const base = {
    paper_bgcolor: at.paper, plot_bgcolor: at.paper, showlegend: false, dragmode: false, hovermode: "closest",
    font: { family: "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif", size: 12, color: at.ink },
    hoverlabel: { align: "left", bgcolor: at.paper, bordercolor: at.soft, font: { color: at.ink } },
    margin: { l: 58, r: 12, t: 12, b: 46 },
  };
  const { xaxis = {}, yaxis = {}, ...rest } = more;
  return { ...base, ...rest, xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis } };
}

// A figure with a caption and downloads as CSV and PNG, which are off while nothing is drawn; csv() returns [header, ...lines],
// title(text) sets the caption.
function figure(parent, id, csv, more = {}) {
  const caption = make("b"), plot = make("div", { class: "plot", id, role: "img", ...more });
  const name = () => `${DATA.title} ${caption.textContent || id}`.replace(/[^\p{L}\p{N}.+-]+/gu, "_");
  const download = (kind) => ({ type: "button", disabled: true, textContent: kind, "aria-label": `${kind} of ${id.replace(/-/g, " ")}` });
  const asCsv = make("button", download("CSV")), asPng = make("button", download("PNG"));
  asCsv.addEventListener("click", () => save(`${name()}.csv`, csv()));
  asPng.addEventListener("click", () => Plotly.downloadImage(onPaper(plot, caption.textContent), { format: "png", scale: 3, filename: name() }));
  const whole = make("figure", { class: "figure" }, make("figcaption", {}, caption, asCsv, asPng), plot);
  parent.append(whole);
  const title = (text) => {
    caption.textContent = text;
    if (!more["aria-label"]) plot.setAttribute("aria-label", text);
  };
  return { whole, caption, plot, title };
}

// The figure for download as PNG: with its title, and a legend of the coloured curves.
function onPaper(plot, title) {
  const seen = new Set(), grey = colours().line;
  const data = plot.data.map((trace) => {
    const named = trace.type === "scatter" && trace.name && trace.line?.color !== grey && !seen.has(trace.name);
    if (named) seen.add(trace.name);
    return { ...trace, showlegend: Boolean(named) };
  });
  const { width, height } = plot.getBoundingClientRect(), below = seen.size ? 30 + 19 * seen.size : 0, margin = plot.layout.margin;
  const how = {
    ...plot.layout, width, height: height + 34 + below, margin: { ...margin, t: margin.t + 34, b: margin.b + below }, showlegend: seen.size > 0,
    title: { text: plain(title), x: 0.01, xanchor: "left", y: 1, yref: "container", yanchor: "top", pad: { t: 10 }, font: { size: 13 } },
    legend: { x: 0, xanchor: "left", y: 0, yref: "container", yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
  };
  return { data, layout: how };
}

// As `guarded` of vitrel/files.py: puts ' before text that a spreadsheet would run as a formula, but not before numbers.
function csvText(lines) {
  const cell = (value) => {
    let text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value);
    if (/^'*[=+\-@\t\r\n]/.test(text) && Number.isNaN(Number(text))) text = `'${text}`;
    return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  return lines.map((line) => line.map(cell).join(",")).join("\n") + "\n";
}

function save(name, lines) {
  const link = make("a", { href: URL.createObjectURL(new Blob([csvText(lines)], { type: "text/csv" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// The width is set here instead of by plotly's autosize, because printing needs another width.
function draw(plot, traces, how) {
  for (const button of plot.closest("figure").querySelectorAll("figcaption button")) button.disabled = !traces.length;
  return Plotly.react(plot, traces, { ...how, width: plot.clientWidth || 600 }, { displayModeBar: false });
}

// 1, 2 and 5 times powers of ten from the smallest to the largest value.
function logTicks(values) {
  const low = Math.min(...values), high = Math.max(...values), tickvals = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) tickvals.push(...[1, 2, 5].map((digit) => digit * 10 ** power));
  return { tickvals, ticktext: tickvals.map(number) };
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

function hide(id) {
  $(id).hidden = true;
}

// The head of a table; columns from index `numbers` on are right-aligned.
const heads = (names, numbers = Infinity) => make("thead", {}, make("tr", {}, ...names.map((name, i) => make("th", { scope: "col", class: i < numbers ? "" : "number", textContent: name }))));

// A class's readable name, with its name in the data as the tooltip.
const classText = (name, kind = "") => make("span", { class: kind, textContent: word(name), ...(word(name) === name ? {} : { title: name }) });
