// The models with their badges, the sentences, and the table of all rows.
function badge(text, kind) {
  return make("span", { class: `badge ${kind}`, textContent: text });
}

function resizedBadge(rows) {
  const rules = [...new Set(rows.filter((row) => row.resized !== "nothing").map((row) => row.resized))];
  if (!rules.length) return badge("nothing resized", "good");
  const most = Math.max(...rows.map((row) => row.resized_params));
  return badge(most ? `${rules.join(", ")}: ${number(most)} values` : `nothing resized; read by ${rules.join(", ")}`, most ? "changed" : "good");
}

function startModels() {
  const head = ["model", "policy", "at new sizes", "weights", "top-1 % when trained", ...DATA.protocols.map((protocol) => `retention, worst (${protocol})`)];
  const lines = DATA.curves.map((curve) => {
    const rows = curve.rows.map((at) => DATA.rows[at]);
    const same = rows.every((row) => row.unchanged);
    const home = rows.find((row) => row.img_size === row.train_size);
    const worst = DATA.protocols.map((protocol) => {
      const own = rows.filter((row) => row.protocol === protocol && row.retention !== null);
      const least = own.reduce((low, row) => (low && low.retention <= row.retention ? low : row), null);
      return make("td", { class: "number", textContent: least ? `${number(least.retention)} at ${least.img_size}` : "" });
    });
    return make("tr", {},
      make("td", { textContent: curve.label }), make("td", { textContent: curve.policy }), make("td", {}, resizedBadge(rows)),
      make("td", {}, same ? badge("state dict unchanged", "good") : badge("STATE DICT CHANGED", "bad")),
      make("td", { class: "number", textContent: home ? `${number(home.top1)} at ${home.img_size}` : "" }), ...worst);
  });
  const titles = make("tr", {}, ...head.map((name) => make("th", { scope: "col", textContent: name })));
  $("badges").replaceChildren(make("thead", {}, titles), make("tbody", {}, ...lines));
  $("verdicts").replaceChildren(...DATA.verdicts.map((text) => make("li", { textContent: text })));
  $("sentences").open = DATA.verdicts.length <= 6;
}

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
  if (key === "resized") return make("td", {}, badge(value === "nothing" ? "nothing resized" : value, row.resized_params ? "changed" : "good"));
  if (key === "unchanged") return make("td", {}, badge(value ? "unchanged" : "CHANGED", value ? "good" : "bad"));
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
    const keys = shownColumns().map(({ key }) => key);
    save(`${DATA.title}_rows.csv`, [keys, ...shownRows().map((row) => keys.map((key) => row[key]))]);
  });
  drawTable();
  const common = DATA.common.map(([key, about, value]) => make("tr", {}, make("th", { scope: "row", textContent: key }), make("td", { textContent: value }), make("td", { textContent: about })));
  $("common").replaceChildren(make("tbody", {}, ...common));
  $("about").replaceChildren(...DATA.about.flatMap(([key, text]) => [make("dt", { textContent: key }), make("dd", { textContent: text })]));
}
