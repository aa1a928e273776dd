// The advice, the sizes of every model, top-1 by size, and the table of all rows.
function badge(text, kind) {
  return make("span", { class: `badge ${kind}`, textContent: text });
}

// What is resampled, in words; resampling alone is no warning.
function resizedText(rows) {
  const rules = [...new Set(rows.filter((row) => row.resized !== "nothing").map((row) => row.resized))];
  if (!rules.length) return "nothing resampled";
  const most = Math.max(...rows.map((row) => row.resized_params));
  return most ? `resampled: ${rules.join(", ")}` : `nothing resampled (${rules.join(", ")})`;
}

// A row's top-1 in the table by size; the highest of its size is bold, a row with a warning is marked.
function accuracyCell(row, best, size) {
  const trained = trainSizes.includes(size) ? " trained" : "";
  if (!row) return make("td", { class: `number${trained}`, textContent: "–" });
  const [low, high] = row.intervals.top1, text = `${row.top1.toFixed(1)} ±${((high - low) / 2).toFixed(1)}`;
  const cell = make("td", { class: `number${row.top1 === best ? " best" : ""}${trained}`, textContent: text, title: `95 %: ${number(low)} to ${number(high)}, ${resizedText([row])}${row.change ? `; to the training size ${row.change} points` : ""}` });
  if (row.warning) cell.append(make("span", { class: "warn", textContent: " !", title: row.warning }));
  if (row.verdict) cell.append(make("span", { class: "verdict", textContent: row.verdict }));
  return cell;
}

function bySizeTable(protocol) {
  const curves = DATA.curves.map((curve) => ({ curve, rows: curve.rows.map((at) => DATA.rows[at]).filter((row) => row.protocol === protocol) })).filter(({ rows }) => rows.length);
  const sizes = DATA.sizes.map(({ name }) => name).filter((size) => curves.some(({ rows }) => rows.some((row) => row.img_size === size)));
  const at = (rows, size) => rows.find((row) => row.img_size === size);
  const best = new Map(sizes.map((size) => [size, Math.max(...curves.map(({ rows }) => (curves.length > 1 ? at(rows, size)?.top1 : null) ?? -1))]));
  const head = make("tr", {}, make("th", { scope: "col", textContent: "model" }), ...sizes.map((size) => make("th", { scope: "col", class: trainSizes.includes(size) ? "number trained" : "number", textContent: `${size}${trainSizes.includes(size) ? " (trained)" : ""}` })), make("th", { scope: "col", textContent: "at other sizes" }));
  const lines = curves.map(({ curve, rows }) => make("tr", {}, make("td", { textContent: curve.name }), ...sizes.map((size) => accuracyCell(at(rows, size), best.get(size), size)),
    make("td", {}, badge(resizedText(rows), "neutral"), ...(rows.every((row) => row.unchanged) ? [] : [" ", badge("state dict changed", rows.some((row) => !row.unchanged && row.warning) ? "warn" : "neutral")]))));
  const title = `Top-1 in percent by image size (px), ${protocol} protocol, ${DATA.data}`;
  const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines));
  return [make("h3", { textContent: title }), make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": title }, table)];
}

// Every size under the policy that it is judged by: difference to the training size, verdict, cost, what is resampled.
function sizesTable() {
  const titles = ["model", "protocol", "size", "policy", "top-1 % (95 %)", "to the training size, points", "verdict", "images/s", "peak MiB", "resampled"];
  const lines = DATA.by_size.map((at) => {
    const row = DATA.rows[at];
    const [low, high] = row.intervals.top1, top1 = `${row.top1.toFixed(1)} (${low.toFixed(1)} to ${high.toFixed(1)})`;
    const cells = [row.label, row.protocol, row.img_size, row.policy, top1, row.change, row.judged, number(row.infer_samples_per_sec), number(row.peak_memory_mb), row.resampled];
    return make("tr", { class: row.img_size === row.train_size ? "trained" : "" }, ...cells.map((textContent, i) => make("td", { class: i === 7 || i === 8 ? "number" : "", textContent })));
  });
  $("sizes").replaceChildren(heads(titles), make("tbody", {}, ...lines));
}

function startAdvice() {
  $("basis").textContent = DATA.basis;
  $("advice-list").replaceChildren(...DATA.advice.map(({ label, sentences }) => make("li", {}, make("b", { textContent: `${label}: ` }), sentences.join(" "))));
  sizesTable();
  $("by-size").replaceChildren(...DATA.protocols.flatMap(bySizeTable));
  const same = DATA.rows.every((row) => row.unchanged) ? " The state dict of every model is bit-identical before and after every row." : "";
  const bold = DATA.curves.length > 1 ? "Bold: the highest top-1 at a size. " : "", mark = DATA.rows.some((row) => row.warning) ? " !: a warning, listed below." : "";
  $("by-size-note").textContent = `${bold}± is half the 95 % interval of one model; intervals of two models may overlap although one is shown to be better. Shaded: training size.${mark}${same}`;
  const warnings = new Map();
  for (const row of DATA.rows.filter((one) => one.warning)) {
    const name = `${curveName(row)} (${row.protocol})`;
    warnings.set(name, [...(warnings.get(name) || []), row]);
  }
  $("warnings").replaceChildren(...[...warnings].map(([name, rows]) => make("li", {}, make("span", { class: "warn", textContent: "! " }), `${name}: ${rows.map((row) => `at ${row.img_size} ${row.warning}`).join("; ")}.`)));
}

const curveName = (row) => (row.policy === "none" ? row.label : `${row.label}, ${row.policy}`);

let sortKey = null, sortDown = false;

const shownColumns = () => DATA.columns.filter((column) => column.main || $("all-columns").checked);

function compare(key, a, b) {
  const [x, y] = key === "img_size" ? [side(a[key]), side(b[key])] : [a[key], b[key]];
  if (x === null || y === null) return (x === null) - (y === null);
  const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
  return sortDown ? -order : order;
}

function shownRows() {
  const words = $("row-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const kept = DATA.rows.filter((row) => {
    const text = DATA.columns.map(({ key }) => String(row[key])).join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  return sortKey === null ? kept : kept.sort((a, b) => compare(sortKey, a, b));
}

function cell(row, key) {
  const value = row[key];
  if (key === "unchanged") return make("td", {}, badge(value ? "unchanged" : "changed", !value && row.warning ? "warn" : "neutral"));
  return make("td", { class: typeof value === "number" ? "number" : "", textContent: number(value) });
}

function drawTable() {
  const columns = shownColumns(), rows = shownRows();
  const titles = columns.map(({ key, name, about }) => {
    const sorted = key === sortKey;
    const button = make("button", { type: "button", title: about, textContent: `${name}${sorted ? (sortDown ? " ▼" : " ▲") : ""}` });
    button.dataset.key = key;
    button.addEventListener("click", () => {
      sortDown = sorted && !sortDown;
      sortKey = key;
      drawTable();
      document.querySelector(`#table button[data-key="${key}"]`).focus();
    });
    return make("th", { scope: "col", "aria-sort": sorted ? (sortDown ? "descending" : "ascending") : "none" }, button);
  });
  const body = rows.map((row) => make("tr", {}, ...columns.map(({ key }) => cell(row, key))));
  $("table").replaceChildren(make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...body));
  $("row-count").textContent = `${rows.length} of ${DATA.rows.length} rows, means over seeds`;
}

function startRows() {
  $("row-filter").addEventListener("input", drawTable);
  $("all-columns").addEventListener("change", drawTable);
  $("rows-csv").addEventListener("click", () => {
    const columns = shownColumns(), keys = columns.map(({ key }) => key);
    save(`${DATA.title}_rows.csv`, [columns.map(({ key, name }) => (name.endsWith(" %") ? `${key} (%)` : key)), ...shownRows().map((row) => keys.map((key) => row[key]))]);
  });
  drawTable();
  const common = DATA.common.map(([key, about, value]) => make("tr", {}, make("th", { scope: "row", textContent: key }), make("td", { textContent: value }), make("td", { textContent: about })));
  $("common").replaceChildren(make("tbody", {}, ...common));
  $("about").replaceChildren(...DATA.about.flatMap(([key, text]) => [make("dt", { textContent: key }), make("dd", { textContent: text })]));
}
